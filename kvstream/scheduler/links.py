"""State of one link (an established connection to a peer) as the scheduler core sees it: its free slots, the streams
on it by number, streams that ended here but not yet there, and the order in which ready streams get slots."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass, field

from kvstream.scheduler.inbound import Inbound
from kvstream.scheduler.offers import PendingOffer
from kvstream.scheduler.outbound import Outbound
from kvstream.wire import End

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
    free: list[int] = field(default_factory=list[int])
    outbound: dict[int, Outbound] = field(default_factory=dict[int, Outbound])
    inbound: dict[int, Inbound] = field(default_factory=dict[int, Inbound])
    offers: dict[int, PendingOffer] = field(default_factory=dict[int, PendingOffer])
    ending: dict[int, Ending] = field(default_factory=dict[int, Ending])
    """In the order in which they began."""
    last_num: int = 0
    moving: int = 0
    beating: bool = False
    beats: int = 0
    silent: int = 0
    """Beats since the peer was heard."""
    spoke: bool = False
    """Whether something was sent since the last beat."""
    dropping: bool = False
    waiting: list[tuple[float, int, int]] = field(default_factory=list[tuple[float, int, int]])
    uncut: bool = True
    """Whether no Stage waits for its turn. One at a time: what becomes ready before it is begun can join the next."""

    def __post_init__(self) -> None:
        self.free = list(range(self.slots - 1, -1, -1)) if self.outgoing else []

    @property
    def live(self) -> bool:
        """Whether anything on this link waits for the peer, or the peer for us."""
        return bool(self.outbound or self.inbound or self.offers or self.ending)

    @property
    def oldest_ending(self) -> Ending | None:
        return next(iter(self.ending.values()), None)

    def enqueue(self, stream: Outbound) -> None:
        """Queue a stream that has blocks ready for its turn at a slot; once, however often it is called."""
        if stream.link is self and stream.pending and not stream.queued:
            stream.queued = True
            heapq.heappush(self.waiting, (stream.urgency, stream.age, stream.num))

    def next_waiting(self) -> Outbound | None:
        """Take the most urgent stream (earliest deadline, then age) that still has something to stage."""
        while self.waiting:
            _, _, num = heapq.heappop(self.waiting)
            stream = self.outbound.get(num)
            if stream is not None:
                stream.queued = False
                if stream.pending:
                    return stream
        return None

    def release(self, slots: Iterable[int]) -> None:
        """Slots that neither side uses any more."""
        self.free.extend(slots)
