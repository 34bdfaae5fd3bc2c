"""A stream on its source: which blocks of which layer are ready, staged, announced and confirmed, in this epoch.

Pure bookkeeping without I/O, clock or other streams; core.py decides when to act on it. Watermarks survive an epoch,
so that a new destination gets everything that is ready at once; all else is per epoch.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstream.errors import ConfigError, KVStreamError, ProtocolError
from kvstream.scheduler.fairness import Group, Order
from kvstream.scheduler.stats import WaitsFor
from kvstream.wire import Ready

if TYPE_CHECKING:
    from kvstream.scheduler.links import Link

__all__ = ["Outbound", "Phase", "Piece", "SourceTurn", "first_block"]


def first_block(first_token: int, tokens: int, block_tokens: int) -> int:
    """The block from which on a stream has to move, when its tokens before `first_token` are there already."""
    return math.ceil(tokens / block_tokens) if first_token >= tokens else first_token // block_tokens


class Phase(enum.Enum):
    """Where a source's stream stands with its present destination."""

    CONNECTING = "connecting"
    OFFERED = "offered"
    STREAMING = "streaming"
    PAUSING = "pausing"
    """Every candidate has refused for now; it will be offered again."""
    ROUTING = "routing"
    """Its destination is lost, and its policy is asked for another."""
    FINISHING = "finishing"
    """End "done" is sent: from here on the destination may have finished."""
    ENDED = "ended"


@dataclass(slots=True)
class Piece:
    """Blocks [first, stop) of `layers` layers from `layer` on, ready and not yet staged."""

    layer: int
    first: int
    stop: int
    layers: int = 1


@dataclass(slots=True)
class SourceTurn:
    """A stream's wait for a slot, in one epoch."""

    stream: Outbound
    link: Link

    @property
    def link_id(self) -> int:
        return self.link.id

    @property
    def group(self) -> Group:
        return self.stream.group

    @property
    def order(self) -> Order:
        return self.stream.due, self.stream.age, self.stream.chunks

    def alive(self) -> bool:
        return self.stream.turn is self

    def open(self) -> bool:
        return bool(self.link.free)


@dataclass(slots=True)
class Outbound:
    """`blocks` counts KV blocks of the whole prompt, `held` those of them whose ids the caller has given so far."""

    key: int
    name: str
    tokens: int
    blocks: int
    held: int
    layers: int
    block_tokens: int
    candidates: list[str]
    expires: float
    due: float
    """What it is ordered by, within its group."""
    group: Group
    priority: int
    metadata: bytes
    age: int
    fetch: bytes = b""
    """The token of the fetch that it answers."""
    copy: bool = False
    """Whether it is a copy of what is held, of which several may be on their way at a time."""
    retry: bool = False
    """Whether those that refuse for now are asked again."""
    again: list[str] = field(init=False)
    """Those that did since the last pause."""
    pause: float = 0.0
    """The least time after which one of them advised to ask again."""
    pauses: int = 0
    counted: str | None = None
    """The peer among whose streams this one is counted."""
    routable: bool = False
    """Whether a policy can be asked for further candidates."""
    asking: bool = False
    """Whether it is being asked."""
    named: list[str] = field(init=False)
    """All that were candidates so far."""
    tried: list[str] = field(init=False)
    """Those that have been offered the stream since one last accepted it."""
    failed: list[str] = field(init=False)
    """Those that were lost or could not be had: they are not asked again."""
    reroutes: int = 0
    """How often it was taken away from a destination that had accepted it."""
    doubts: list[str] = field(init=False)
    """Destinations that it left when they may have finished it."""
    why: KVStreamError | None = None
    """Why it left the last one."""
    incarnation: str = ""
    """Of the destination that has accepted it."""
    resumes: int = 0
    """The epoch that is to go on by a new connection to the destination that had it; 0: none is."""
    was_finishing: bool = False
    """With `resumes`: it was FINISHING in that epoch."""
    resume_until: float = 0.0
    phase: Phase = Phase.CONNECTING
    epoch: int = 0
    peer: str | None = None
    link: Link | None = None
    num: int = 0
    first_block: int = 0
    watermark: list[int] = field(init=False)
    reached: list[int] = field(init=False)
    """By layer: up to which block it has been announced, in any epoch."""
    pending: deque[Piece] = field(init=False)
    turn: SourceTurn | None = None
    """Its place among those who wait for a slot."""
    chunks: int = 0
    announced: int = 0
    confirmed: int = 0
    staged: dict[int, Ready] = field(init=False)
    in_flight: deque[tuple[int, int]] = field(init=False)
    payload: bytes | None = None
    stepped: float = 0.0
    """When it last made a step."""

    def __post_init__(self) -> None:
        self.again, self.tried, self.failed, self.doubts = [], [], [], []
        self.watermark = [0] * self.layers
        self.pending = deque()
        self.staged = {}
        self.in_flight = deque()
        self.reached = [0] * self.layers
        self.named = list(self.candidates)

    def advance(self, layer: int, start: int, stop: int) -> None:
        """Tokens [start, stop) of a layer are computed. Ranges come in order and may repeat what was said before.

        Raises ConfigError naming the field for a layer or tokens out of range, a gap, or tokens beyond the blocks held.
        """
        if not 0 <= layer < self.layers:
            raise ConfigError("layer", f"{layer} is out of range; the layout has layers 0 to {self.layers - 1}")
        if not 0 <= start < stop <= self.tokens:
            raise ConfigError("tokens", f"({start}, {stop}) is not a range within the stream's {self.tokens} tokens")
        done = self.watermark[layer]
        if start > done:
            raise ConfigError("tokens", f"({start}, {stop}) leaves a gap in layer {layer} after token {done}")
        if stop <= done:
            return
        if math.ceil(stop / self.block_tokens) > self.held:
            raise ConfigError(
                "tokens",
                f"up to {stop} need {math.ceil(stop / self.block_tokens)} blocks, the stream has {self.held};"
                " call extend() with the further blocks first",
            )
        before = self._whole_blocks(done)
        self.watermark[layer] = stop
        after = self._whole_blocks(stop)
        if self.phase is Phase.STREAMING:
            self._add(layer, before, after)

    def _whole_blocks(self, tokens: int) -> int:
        """Blocks that will not change any more once that many tokens are computed."""
        return self.blocks if tokens == self.tokens else tokens // self.block_tokens

    def _add(self, layer: int, first: int, stop: int) -> None:
        first = max(first, self.first_block)
        if first < stop:
            self.pending.append(Piece(layer, first, stop))

    @property
    def missing_layers(self) -> list[int]:
        """Layers that are not ready to their last token."""
        return [layer for layer, done in enumerate(self.watermark) if done < self.tokens]

    @property
    def all_ready(self) -> bool:
        return all(done == self.tokens for done in self.watermark)

    def offer_to(self, peer: str) -> None:
        """Begin a new epoch with a destination; what the last one held of our slots is the core's business."""
        self.epoch += 1
        self.peer = peer
        self.tried.append(peer)
        self.leave(Phase.CONNECTING)

    def leave(self, phase: Phase) -> None:
        """Have done with the present destination."""
        self.phase = phase
        self.link = None
        self.num = 0
        self.turn = None
        self.pending.clear()
        self.staged.clear()
        self.in_flight.clear()
        self.chunks = self.announced = self.confirmed = 0

    @property
    def accepted_by(self) -> str | None:
        """The destination that has it, or had it until the connection was lost and may go on with it."""
        return self.peer if self.resumes or self.phase in (Phase.STREAMING, Phase.FINISHING) else None

    @property
    def maybe_done(self) -> bool:
        """Whether that destination may have finished it."""
        return self.was_finishing if self.resumes else self.phase is Phase.FINISHING

    @property
    def others(self) -> list[str]:
        """Who may take it if its destination is lost: also those that refused before."""
        return [peer for peer in self.named if peer not in self.failed and peer != self.peer]

    def lost(self, peer: str, *, doubt: bool, failed: bool) -> None:
        """The destination that had accepted it is out. All others are candidates again; it is one, the last, only if it
        has not `failed`."""
        self.reroutes += 1
        if doubt:
            self.doubts.append(peer)
        self.candidates = self.others
        if failed:
            self.failed.append(peer)
        else:
            self.candidates.append(peer)
        self.again = []
        self.tried = []
        self.resumes = 0

    def come_back(self, why: KVStreamError, until: float) -> None:
        """The connection to the destination is lost: begin a new epoch with the same."""
        assert self.peer is not None
        if not self.resumes:
            self.was_finishing = self.phase is Phase.FINISHING
            self.resumes, self.why, self.resume_until = self.epoch, why, until
        self.offer_to(self.peer)

    def resumed(self, have: list[int]) -> int:
        """The destination goes on: what it does not have becomes pending. Returns of how many layers something that had
        been announced before is announced again. Raises ProtocolError for what it can't have."""
        valid = len(have) == self.layers and all(
            self.first_block <= n <= max(self.first_block, reached)
            for n, reached in zip(have, self.reached, strict=True)
        )
        if not valid:
            raise ProtocolError(f"stream {self.name}: resumed with {have} blocks; {self.reached} were announced")
        self.phase = Phase.STREAMING
        self.tried = []
        self.resumes = 0
        self.reroutes += 1
        for layer, done in enumerate(self.watermark):
            first, stop = have[layer], self._whole_blocks(done)
            if first < stop:
                self.pending.append(Piece(layer, first, stop))
        return sum(n < reached for n, reached in zip(have, self.reached, strict=True))

    def refused(self, peer: str, retry_after: float) -> None:
        """A candidate said no for now."""
        self.pause = min(self.pause, retry_after) if self.again else retry_after
        self.again.append(peer)

    def accepted(self, first_token: int) -> int:
        """The destination took the offer: everything that is ready becomes pending, layer by layer. Returns of how many
        layers something had been announced before that is announced again."""
        self.phase = Phase.STREAMING
        self.tried = []
        self.first_block = first_block(first_token, self.tokens, self.block_tokens)
        for layer, done in enumerate(self.watermark):
            self._add(layer, 0, self._whole_blocks(done))
        return sum(reached > self.first_block for reached in self.reached)

    def cut(self, limit: int, group: int) -> tuple[int, Piece]:
        """Number the next chunk: at most `limit` blocks off the front of what is pending. Layers that are ready for the
        same blocks go together, up to `group` blocks in all."""
        piece = self.pending[0]
        stop = min(piece.stop, piece.first + limit)
        chunk = Piece(piece.layer, piece.first, stop)
        if stop == piece.stop:
            self.pending.popleft()
            count = stop - chunk.first
            while self.pending and (chunk.layers + 1) * count <= min(limit, group):
                then = self.pending[0]
                if (then.layer, then.first, then.stop) != (chunk.layer + chunk.layers, chunk.first, stop):
                    break
                self.pending.popleft()
                chunk.layers += 1
        else:
            piece.first = stop
        number = self.chunks
        self.chunks += 1
        return number, chunk

    def announce(self) -> list[Ready]:
        """The staged chunks that may be announced now, in chunk order: staging may complete in any."""
        frames: list[Ready] = []
        while (frame := self.staged.pop(self.announced, None)) is not None:
            self.in_flight.append((frame.chunk, frame.slot))
            self.announced += 1
            for layer in range(frame.layer, frame.layer + frame.layers):
                self.reached[layer] = max(self.reached[layer], frame.first + frame.count)
            frames.append(frame)
        return frames

    def confirm(self, chunks: int) -> list[int]:
        """The first `chunks` chunks are in place: the slots that are free again."""
        self.confirmed = max(self.confirmed, chunks)
        slots: list[int] = []
        while self.in_flight and self.in_flight[0][0] < chunks:
            slots.append(self.in_flight.popleft()[1])
        return slots

    @property
    def waits_for(self) -> WaitsFor:
        match self.phase:
            case Phase.CONNECTING:
                return "connection"
            case Phase.OFFERED:
                return "answer"
            case Phase.PAUSING:
                return "retry"
            case Phase.ROUTING:
                return "route"
            case Phase.STREAMING | Phase.ENDED:
                pass
            case Phase.FINISHING:
                return "confirmation" if self.confirmed < self.announced else "end"
        link = self.link
        if self.pending and link is not None:
            return "turn" if link.free and self.turn is not None else "slot"
        if self.announced < self.chunks:
            return "turn"
        if self.confirmed < self.announced and self.all_ready:
            return "confirmation"
        return "engine"

    @property
    def holding(self) -> int:
        """How many slots the stream holds in this epoch."""
        return self.chunks - self.confirmed

    @property
    def drained(self) -> bool:
        """Everything that will ever be sent has been announced."""
        return self.all_ready and not self.pending and self.announced == self.chunks
