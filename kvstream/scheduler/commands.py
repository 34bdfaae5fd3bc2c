"""What the scheduler core asks its surroundings to do. Plain data: whoever performs a command reports back by calling
the event method that the command's docstring names."""

from __future__ import annotations

from dataclasses import dataclass

from kvstream.errors import KVStreamError
from kvstream.wire import Frame

__all__ = [
    "Accepted",
    "Arrived",
    "Command",
    "Declined",
    "Dial",
    "Drop",
    "Ended",
    "Fetched",
    "Move",
    "Offered",
    "Rerouted",
    "Route",
    "Stage",
    "Stalled",
    "Transmit",
    "Withdrawn",
]


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to a peer and shake hands; then `link_up` or `link_failed`."""

    peer: str


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send a frame on a link, after those before it."""

    link: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Drop:
    """Close a link, for this reason; then `link_lost`."""

    link: int
    error: KVStreamError


@dataclass(frozen=True, slots=True)
class Stage:
    """Source: gather blocks [first, first+count) of the stream's table, in `layers` layers from `layer` on, into
    `slot`, layer after layer, and publish them. Report `staging` when it is begun; then `staged` or `stage_failed`.
    `order` sorts the work of all streams: smallest first. If the stream has ended in the meantime its memory must not
    be read, but the reports are due all the same: they give the slot back."""

    link: int
    stream: int
    epoch: int
    chunk: int
    layer: int
    first: int
    count: int
    slot: int
    order: tuple[float, int, int]
    layers: int = 1


@dataclass(frozen=True, slots=True)
class Move:
    """Destination: bring the chunk's bytes into the blocks [first, first+count) of the stream's table, in `layers`
    layers from `layer` on. Report `moving` when it is begun; then `moved` or `move_failed`. If the stream has ended in
    the meantime its memory must not be touched, but the reports are due all the same, also when the link is lost: not
    before nothing is on its way into the blocks any more. `num` is the stream's number on
    its link."""

    link: int
    stream: int
    epoch: int
    chunk: int
    layer: int
    first: int
    count: int
    slot: int
    generation: int
    checksum: int
    order: tuple[float, int, int]
    layers: int = 1
    num: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """Destination: nobody waits for this stream; ask the handler. `offer` is the key for `accept` and `refuse`."""

    offer: int
    peer: str
    stream: str
    epoch: int
    tokens: int
    priority: int
    deadline: float | None
    metadata: bytes
    share: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Destination: an offer handed out by Offered can't be answered any more, and it wasn't this side that answered."""

    offer: int
    error: KVStreamError


@dataclass(frozen=True, slots=True)
class Fetched:
    """Holder: `peer` asks for what is held of a stream, `tokens` of it (0: all). Answer by `send` with this `token` to
    that peer, or by `refuse_fetch`. `deadline` is what is left, in seconds."""

    link: int
    num: int
    peer: str
    stream: str
    token: bytes
    tokens: int
    deadline: float | None
    priority: int
    share: str


@dataclass(frozen=True, slots=True)
class Accepted:
    """A stream has been agreed on. Source: `peer` took it, and parts of `resent` layers that it is sent had been
    announced before, to another. Destination: `peer` sends it, so many `tokens`."""

    stream: int
    peer: str
    link: int
    epoch: int
    tokens: int = 0
    resent: int = 0
    resumed: bool = False
    """It is the one that had the stream before, which goes on where it was."""


@dataclass(frozen=True, slots=True)
class Rerouted:
    """Source: a stream that `peer` had accepted under `epoch` is there no more, for this reason, and goes on: the next
    Accepted says where. `resumed`: there, by a new connection."""

    stream: int
    epoch: int
    peer: str
    error: KVStreamError
    resumed: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """Source: ask the stream's policy for further destinations, other than `exclude`; then `routed`, also when there
    are none."""

    stream: int
    exclude: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Declined:
    """Source: `peer` did not take a stream, could not be reached, or was lost with it."""

    peer: str
    error: KVStreamError


@dataclass(frozen=True, slots=True)
class Arrived:
    """Destination: every byte of this layer that was asked for is in place."""

    stream: int
    layer: int


@dataclass(frozen=True, slots=True)
class Ended:
    """A stream's one terminal state on this side. `error` None means done; `provisional` that the destination has
    everything but did not hear the source's last word; `ready` (source) that every layer had been reported ready.
    `in_doubt` (source): earlier destinations that may have finished the stream although it went elsewhere from them."""

    stream: int
    error: KVStreamError | None
    payload: bytes
    epoch: int
    peer: str | None
    provisional: bool
    ready: bool = False
    in_doubt: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Stalled:
    """A peer has owed confirmations (`outgoing`), or reads from it have been under way, for so many seconds without any
    progress. `chunks` are concerned, and `streams` share the link, `example` among them."""

    peer: str
    outgoing: bool
    seconds: float
    chunks: int
    streams: int
    example: str


Command = (
    Dial
    | Transmit
    | Drop
    | Stage
    | Move
    | Offered
    | Withdrawn
    | Fetched
    | Accepted
    | Rerouted
    | Route
    | Arrived
    | Ended
    | Stalled
    | Declined
)
