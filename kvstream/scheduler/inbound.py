"""A stream on its destination: which chunks came, which are in place, which layers are whole.

Pure bookkeeping without I/O, clock or other streams. It accepts only what continues what it has: blocks of a layer in
ascending order without gap or overlap, chunks by number; anything else is a ProtocolError.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstream.errors import KVStreamError, ProtocolError, Recalled
from kvstream.scheduler.fairness import Group, Order
from kvstream.scheduler.stats import WaitsFor
from kvstream.wire import End, Ready

if TYPE_CHECKING:
    from kvstream.scheduler.links import Link

__all__ = ["DestinationTurn", "Fetching", "Inbound", "Phase"]


class Phase(enum.Enum):
    """Where a destination's stream stands."""

    WAITING = "waiting"
    """receive() was called; no source has offered the stream yet."""
    STREAMING = "streaming"
    SUSPENDED = "suspended"
    """Its connection is lost. It keeps what it has, for a bounded time in which its source may come back."""
    DECIDED = "decided"
    """End "done" is sent: this side counts the stream as done and waits, bounded, for the source's answer."""
    ENDED = "ended"


@dataclass(slots=True)
class DestinationTurn:
    """An announced chunk's wait for its Move. `limit`: how many may be under way on the link."""

    stream: Inbound
    link: Link
    frame: Ready
    limit: int

    @property
    def link_id(self) -> int:
        return self.link.id

    @property
    def group(self) -> Group:
        return self.stream.group

    @property
    def order(self) -> Order:
        return self.stream.due, self.stream.age, self.frame.chunk

    def alive(self) -> bool:
        return self.stream.phase is Phase.STREAMING and self.stream.epoch == self.frame.epoch

    def open(self) -> bool:
        return self.link.reading < self.limit


@dataclass(slots=True)
class Fetching:
    """That a stream is asked for: of `peer` at present, and of `sources` after it. Only an offer of that peer that
    repeats `token` answers it. `exact`: whether it has to be as many tokens as the stream says, not just up to that."""

    stream: Inbound
    token: bytes
    sources: list[str]
    exact: bool
    first_token: int
    priority: int
    share: str
    peer: str = ""
    link: Link | None = None
    num: int = 0
    """Its number on that link, once it is asked there."""

    def answered(self) -> None:
        """The peer has nothing to answer any more."""
        if self.link is not None:
            self.link.fetches.pop(self.num, None)
            self.link = None


@dataclass(slots=True)
class Inbound:
    key: int
    name: str
    tokens: int
    blocks: int
    first_block: int
    layers: int
    expires: float
    age: int
    due: float = 0.0
    """What it is ordered by, within its group; both are set once there is an offer."""
    group: Group = ("", False)
    phase: Phase = Phase.WAITING
    epoch: int = 0
    peer: str | None = None
    incarnation: str = ""
    """Of the source."""
    copy: int = 0
    """Which of the copies that the source sends under this name; 0: none of them, the stream itself."""
    link: Link | None = None
    num: int = 0
    lost: KVStreamError | None = None
    """Why its connection was lost, while it is suspended."""
    adrift: int = 0
    """Moves of connections that it has no more, which may still write into its blocks."""
    chunks: int = 0
    moving: dict[int, Ready] = field(default_factory=dict[int, Ready])
    """Chunks that are announced and not in place."""
    reading: int = 0
    """How many of them have a Move under way."""
    in_place: set[int] = field(default_factory=set[int])
    confirmed: int = 0
    """The first so many chunks are in place."""
    told: int = 0
    """What of that the source has heard."""
    expected: list[int] = field(default_factory=list[int])
    missing: list[int] = field(default_factory=list[int])
    arrived: int = 0
    stepped: float = 0.0
    """When it last made a step."""
    source_end: End | None = None
    recalled: Recalled | None = None
    """Set while the source's End is awaited that explains why something lent was taken back."""
    fetching: Fetching | None = None
    """Where the stream is asked for; None when it is announced by its source, or has been found."""

    def __post_init__(self) -> None:
        self.cut_to(self.tokens, self.blocks, self.first_block)

    def cut_to(self, tokens: int, blocks: int, first_block: int) -> None:
        """So much of it will move. Before anything of it is announced."""
        self.tokens, self.blocks, self.first_block = tokens, blocks, first_block
        self.expected = [self.first_block] * self.layers
        self.missing = [self.blocks - self.first_block] * self.layers

    def ready(self, frame: Ready) -> None:
        """Take note of an announced chunk. Raises ProtocolError when it does not continue what came before."""
        if self.phase is Phase.SUSPENDED:
            raise ProtocolError(f"stream {self.name}: a chunk before it was resumed")
        if self.source_end is not None:
            raise ProtocolError(f"stream {self.name}: a chunk after the source said that it was done")
        if frame.chunk != self.chunks:
            raise ProtocolError(f"stream {self.name}: chunk {frame.chunk} where {self.chunks} was due")
        layers = range(frame.layer, frame.layer + frame.layers)
        if layers.stop > self.layers:
            raise ProtocolError(f"stream {self.name}: layer {frame.layer}+{frame.layers} of {self.layers}")
        for layer in layers:
            if frame.first != self.expected[layer] or not 0 < frame.count <= self.blocks - frame.first:
                raise ProtocolError(
                    f"stream {self.name}: blocks {frame.first}+{frame.count} of layer {layer} where"
                    f" {self.expected[layer]} to {self.blocks} were due"
                )
        for layer in layers:
            self.expected[layer] += frame.count
        self.chunks += 1
        self.moving[frame.chunk] = frame

    def moved(self, chunk: int) -> list[int]:
        """A chunk is in place. Returns the layers that it made whole."""
        frame = self.moving.pop(chunk)
        self.reading -= 1
        self.in_place.add(chunk)
        while self.confirmed in self.in_place:
            self.in_place.remove(self.confirmed)
            self.confirmed += 1
        whole: list[int] = []
        for layer in range(frame.layer, frame.layer + frame.layers):
            self.missing[layer] -= frame.count
            if self.missing[layer] == 0:
                whole.append(layer)
        self.arrived += len(whole)
        return whole

    def suspend(self, why: KVStreamError) -> None:
        """The connection is lost: what is not in place will have to be announced again, in the next epoch."""
        self.phase = Phase.SUSPENDED
        self.lost = why
        self.adrift += self.reading
        self.link = None
        for frame in self.moving.values():
            for layer in range(frame.layer, frame.layer + frame.layers):
                self.expected[layer] = min(self.expected[layer], frame.first)
        # Of a layer that is not whole, blocks behind a gap count as missing again.
        self.missing = [self.blocks - first for first in self.expected]
        self.moving.clear()
        self.in_place.clear()
        self.chunks = self.reading = self.confirmed = self.told = 0
        self.source_end = self.recalled = None

    @property
    def waits_for(self) -> WaitsFor:
        if self.phase is Phase.WAITING:
            return "offer"
        if self.phase is Phase.SUSPENDED:
            return "bytes" if self.adrift else "connection"
        if self.phase is not Phase.STREAMING or self.recalled is not None:
            return "end"
        if self.reading:
            return "bytes"
        return "turn" if self.moving else "chunk"

    @property
    def whole(self) -> bool:
        """Every layer is in place."""
        return self.arrived == self.layers

    @property
    def valid_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer, missing in enumerate(self.missing) if missing == 0)
