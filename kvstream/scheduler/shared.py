"""What both halves of the scheduler core work on: configuration, links, timers, counters, and the commands to give.

It owns the few steps that source and destination have in common (to say something on a link, to give a link up, to
end a stream, to judge a frame that comes late). It decides nothing else about streams.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import ConfigError, KVStreamError, ProtocolError, Refused
from kvstream.scheduler.commands import Command, Drop, Ended, Transmit
from kvstream.scheduler.links import Link
from kvstream.scheduler.timers import Timer, Timers

__all__ = ["Counters", "Shared", "about", "text_of"]

_MESSAGE_LIMIT = 1000


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    stale_frames: int = 0
    """Frames of streams or epochs that had already ended here, and repeated ones; they are ignored."""
    protocol_errors: int = 0
    offers_refused: int = 0
    stalls: int = 0
    """Times that a peer made no progress for config.stall_warning."""
    reroutes: int = 0
    """Times that a stream was taken away from a destination that had accepted it, to go elsewhere."""
    resumes: int = 0
    """Times that a stream went on with the destination that it had, after the loss of their connection."""
    ended: dict[str, int] = field(default_factory=dict[str, int])
    """Streams by the code of their end, both directions."""


class Shared:
    def __init__(
        self, config: RuntimeConfig, layers: int, block_tokens: int, block_bytes: int, jitter: Callable[[], float]
    ) -> None:
        self.config = config
        self.jitter = jitter
        self.layers = layers
        self.block_tokens = block_tokens
        self._short_blocks = config.short_bytes // block_bytes
        self.commands: deque[Command] = deque()
        self.timers = Timers()
        self.links: dict[int, Link] = {}
        self.counters = Counters()
        self.closed: KVStreamError | None = None
        self.draining: Refused | None = None
        """What new streams are told while what is live may finish."""
        self._count = 0

    def next_id(self) -> int:
        """Ids, and the age of streams: unique and ascending, never 0."""
        self._count += 1
        return self._count

    def due(self, now: float, expires: float, priority: int) -> float:
        """What a stream that begins now is ordered by: the earliest goes first. Its deadline; but nobody is put off
        for longer than `patience`, and priority is a head start, so that whoever waits long enough comes first."""
        config = self.config
        return min(expires, now + config.patience) - priority * config.priority_step

    def is_short(self, blocks: int) -> bool:
        """Whether a stream that moves so many blocks, all layers counted, is a short one."""
        return blocks <= self._short_blocks

    def check_open(self) -> None:
        if self.closed is not None:
            raise type(self.closed)(str(self.closed))
        if self.draining is not None:
            raise Refused(str(self.draining), self.draining.retry_after)

    def transmit(self, link: Link, frame: wire.Frame) -> None:
        """Say something on a link; nothing is said after its Drop."""
        if not link.dropping:
            link.spoke = True
            self.commands.append(Transmit(link.id, frame))

    def answer(self, link: Link, frame: wire.End) -> None:
        """Answer an End, unless it is itself an answer."""
        if not frame.answer:
            self.transmit(link, wire.End(frame.num, frame.epoch, frame.code, answer=True))

    def drop(self, link: Link, error: KVStreamError) -> None:
        if not link.dropping:
            link.dropping = True
            self.commands.append(Drop(link.id, error))

    def watch(self, now: float, link: Link) -> None:
        """Something on the link waits for the peer from now on: speak, and listen to its silence."""
        if not link.beating:
            link.beating = True
            link.silent = 0
            self.timers.cancel(Timer.IDLE, link.id)
            self.timers.arm(now + self.config.beat_interval, Timer.BEAT, link.id)

    def late(self, link: Link, num: int) -> None:
        """A frame for a stream that is not live here: late if its number has been used, else nonsense."""
        if not 0 < num <= link.last_num:
            raise ProtocolError(f"a frame of stream number {num}, which was never offered on this connection")
        self.counters.stale_frames += 1

    def ended(self, command: Ended) -> None:
        code = command.error.code if command.error is not None else "done"
        self.counters.ended[code] = self.counters.ended.get(code, 0) + 1
        self.commands.append(command)


def text_of(error: KVStreamError) -> str:
    """An error's text as it fits into a frame."""
    return str(error)[:_MESSAGE_LIMIT].encode(errors="replace").decode()


def about(error: KVStreamError, name: str) -> KVStreamError:
    """The same error as one stream's own: errors carry per-stream fields, so streams must not share an object."""
    text = str(error)
    if isinstance(error, ConfigError):
        mine: KVStreamError = type(error)(error.field, text.removeprefix(f"{error.field}: "))
    elif isinstance(error, Refused):
        mine = Refused(text, error.retry_after)
    else:
        prefix = f"stream {name}: "
        mine = type(error)(text if text.startswith(prefix) else prefix + text)
    mine.__cause__ = error.__cause__
    return mine
