"""What the scheduler core tells about itself: its streams, who waits for whom and how long, and its connections.

Plain frozen data, made when asked for; nothing here is kept.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = ["Direction", "PeerState", "StreamState", "WaitsFor"]

Direction = Literal["send", "receive"]

WaitsFor = Literal[
    "connection", "answer", "retry", "route", "engine", "slot", "turn", "confirmation", "offer", "chunk", "bytes", "end"
]
"""What a stream waits for at present.

Source: `connection` to the peer; the peer's `answer` to the offer; the time to `retry` after a refusal; a `route`
elsewhere, when its destination is lost; its `engine`, by way of layer_ready or done; a `slot`, which the peer's
confirmations free; its `turn` in this process; the peer's `confirmation` of all that is announced, or its word on the
`end`. Destination: an `offer`; the source's next `chunk`; its `turn` in this process; `bytes` that are being read; the
source's answer to the `end`.
"""


class StreamState(msgspec.Struct, frozen=True, kw_only=True):
    """A live stream. `waited` is the time in seconds since it last made a step: was offered or accepted, had a layer
    reported ready, or a chunk gathered, announced, confirmed or put in place."""

    stream: str
    direction: Direction
    peer: str
    epoch: int
    share_class: str
    waits_for: WaitsFor
    waited: float
    chunks_announced: int
    chunks_confirmed: int
    layers: int
    """Source: layers that are ready to their last token. Destination: layers that are in place."""
    slots: int
    """Source: slots held. Destination: chunks announced and not in place."""


class PeerState(msgspec.Struct, frozen=True, kw_only=True):
    """A connection. `stalled` is for how long, in seconds, the peer owes confirmations (send) or reads from it are
    under way (receive) without any progress; counted in beats, so that time in which this process did not run is not
    counted. `silent`: for how long nothing was heard of it while something was expected."""

    peer: str
    direction: Direction
    streams: int
    slots: int
    slots_used: int
    """Send: slots that are not free. Receive: chunks announced and not in place."""
    moves: int
    """Receive: chunks that are being read."""
    offers: int
    """Receive: offers of the peer that wait for an answer."""
    waiting: bool
    """Send: streams with something ready wait for a slot. Receive: chunks wait because `peer_moves` are being read."""
    stalled: float
    silent: float
