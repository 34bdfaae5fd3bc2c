"""State of one link (an established connection to a peer) as the scheduler core sees it: its slots, the streams on it
by number, streams that ended here but not yet there. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvstream.scheduler.inbound import Fetching, Inbound
from kvstream.scheduler.offers import PendingOffer
from kvstream.scheduler.outbound import Outbound
from kvstream.wire import VERSION, End

__all__ = ["Ending", "Link"]


@dataclass(slots=True)
class Ending:
    """A stream that has ended on this side while the peer may still use what it was given.

    Source: `slots` stay taken until the peer's End says that it reads no more (or the link is gone). Destination:
    `moving` reads are under way; only after the last one may the End in `last_word` tell the source so.
    """

    stream: int
    epoch: int
    since: int
    """The link's beat in which it began."""
    slots: list[int] = field(default_factory=list[int])
    moving: int = 0
    last_word: End | None = None


@dataclass(slots=True)
class Link:
    """`outgoing` links carry our data (we dialed), the others the peer's. Time on a link is counted in its own beats,
    so that time in which this process did not run is no silence of the peer's."""

    id: int
    peer: str
    outgoing: bool
    slots: int
    slot_blocks: int
    group_blocks: int
    stream_slots: int
    """Source: how many of the slots one stream may hold."""
    version: int = VERSION
    """Of the protocol, as both sides speak it."""
    incarnation: str = ""
    """Of the peer: only to the same may a stream come back."""
    free: list[int] = field(default_factory=list[int])
    outbound: dict[int, Outbound] = field(default_factory=dict[int, Outbound])
    inbound: dict[int, Inbound] = field(default_factory=dict[int, Inbound])
    offers: dict[int, PendingOffer] = field(default_factory=dict[int, PendingOffer])
    ending: dict[int, Ending] = field(default_factory=dict[int, Ending])
    """In the order in which they began."""
    fetches: dict[int, Fetching] = field(default_factory=dict[int, Fetching])
    """Outgoing: what the peer has been asked for and has not answered."""
    last_num: int = 0
    announced: int = 0
    """Destination: chunks announced to us that are neither in place nor given up."""
    reading: int = 0
    """Destination: those of them whose Move is under way."""
    beating: bool = False
    beats: int = 0
    silent: int = 0
    """Beats since the peer was heard."""
    spoke: bool = False
    """Whether something was sent since the last beat."""
    dropping: bool = False
    mute: bool = False
    """Whether it was given up for the peer's silence."""
    progress: int = 0
    """The beat in which a slot was last given back, or taken while all were free; a read was ended, or the first one
    begun."""
    warned: int = 0
    """After how many beats without progress a stall was last told; 0: not since the last progress."""
    discounted: bool = False
    """Destination: whether the peer's reads do not count for the process, since it has fallen silent."""

    def __post_init__(self) -> None:
        self.free = list(range(self.slots - 1, -1, -1)) if self.outgoing else []

    @property
    def live(self) -> bool:
        """Whether anything on this link waits for the peer, or the peer for us."""
        return bool(self.outbound or self.inbound or self.offers or self.ending or self.fetches)

    @property
    def owed(self) -> int:
        """Chunks of which the peer has to confirm, or to deliver, the next."""
        return self.slots - len(self.free) if self.outgoing else self.reading

    def progressed(self) -> None:
        self.progress = self.beats
        self.warned = 0

    @property
    def oldest_ending(self) -> Ending | None:
        return next(iter(self.ending.values()), None)
