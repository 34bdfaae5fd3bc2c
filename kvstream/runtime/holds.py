"""KV that is held for others: which streams this worker can send a copy of, until when, and the copies on their way.

It owns the table of holds and the pushes of what they hold. It never lets go of a block while a push still reads it:
a hold that has ended lends to nobody new, and its blocks are its user's again when the last push has ended, which its
own end fences. It copies nothing and writes into no block.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kvstream.errors import ConfigError, KVStreamError, Missed, Refused
from kvstream.log import get_logger
from kvstream.runtime.checks import seconds
from kvstream.runtime.reports import HoldState, StreamReport
from kvstream.runtime.sessions import BlockIds, SendStream
from kvstream.scheduler.commands import Ended, Fetched

if TYPE_CHECKING:
    from kvstream.runtime.streams import Streams

__all__ = ["Hold", "HoldEnd", "Holds"]

HoldEnd = Literal["expired", "released", "evicted", "replaced"]
"""Why a stream is not held any more."""

_ENDED: dict[HoldEnd, str] = {
    "expired": "expired",
    "released": "been released",
    "evicted": "been evicted to make room",
    "replaced": "been replaced by a newer one, which is gone as well",
}

_REMEMBERED = 4096
"""Streams of which it is remembered how their hold ended, to tell those who come too late."""


class Hold:
    """A stream's KV, lendable to other workers: they may `fetch` it, and it can be pushed to them.

    It ends when its time is over, unless it is pinned at that time, or by `release`. Its blocks must not change before
    it is `over`: a push that has begun goes on to its own end. All methods are for the loop's thread.
    """

    def __init__(
        self,
        holds: Holds,
        stream: str,
        ids: BlockIds,
        tokens: int,
        *,
        ttl: float,
        payload: bytes,
        metadata: bytes,
        on_release: Callable[[Hold], None] | None,
    ) -> None:
        self._holds = holds
        self._stream = stream
        self.ids = ids
        self._tokens = tokens
        self._on_release = on_release
        self.payload = payload
        """Encoded, as is the metadata: what a destination gets with the stream."""
        self.metadata = metadata
        self.expires = holds.now() + ttl
        self.timer: asyncio.TimerHandle | None = None
        """Runs while its time does."""
        self.pins = 0
        """Users that keep it from expiring."""
        self.reads = 0
        """Copies that are on their way."""
        self.served = 0
        """Copies that were sent whole."""
        self._ended: HoldEnd | None = None
        self._released = False
        self._over = asyncio.Event()

    @property
    def stream(self) -> str:
        """The stream's id."""
        return self._stream

    @property
    def tokens(self) -> int:
        """How many tokens are held, from the first on."""
        return self._tokens

    @property
    def ended(self) -> bool:
        """Whether it is lent to nobody any more."""
        return self._ended is not None

    @property
    def over(self) -> bool:
        """Whether it has ended and nothing reads its blocks: they are the user's."""
        return self._over.is_set()

    def release(self, why: HoldEnd = "released") -> None:
        """End it; who asks for the stream later hears why. Raises ConfigError when it has been called before, or while
        the hold is pinned, unless the stream is "replaced"; once its time was over by itself, nothing is left to do.
        """
        self._holds.check_here("release")
        if self._released:
            raise ConfigError("hold", f"{self._stream!r} has been released already; release it once")
        if self.pins and why != "replaced":
            raise ConfigError("hold", f"{self._stream!r} is pinned by {self.pins}; unpin it as often as it was pinned")
        self._released = True
        self._holds.end(self, why)

    def pin(self) -> None:
        """Keep it from expiring until `unpin`; pins are counted. Raises ConfigError when it has ended."""
        self._holds.check_here("pin")
        self._check_live("pin")
        self.pins += 1

    def unpin(self) -> None:
        """Take one pin away; with the last one a hold whose time is over ends. ConfigError when there is none."""
        self._holds.check_here("unpin")
        if not self.pins:
            raise ConfigError("hold", f"{self._stream!r} is not pinned; unpin it as often as it was pinned")
        self.pins -= 1
        if not self.pins and self.timer is None:
            self._holds.end(self, "expired")

    def extend(self, ttl: float) -> None:
        """Let it end so many seconds from now. Raises ConfigError when it has ended."""
        self._holds.check_here("extend")
        ttl = seconds("ttl", ttl)
        self._check_live("extend")
        self._holds.arm(self, ttl)

    async def released(self) -> None:
        """Wait until it is `over`. The wait is bounded by the hold's time and the deadlines of the pushes, if it is not
        pinned; cancelling it changes nothing."""
        await self._over.wait()

    def _check_live(self, what: str) -> None:
        if self._ended is not None:
            raise ConfigError("hold", f"{what}: {self._stream!r} is not held any more; it has {_ENDED[self._ended]}")

    # -- for Holds

    def end(self, how: HoldEnd) -> None:
        self._ended = how

    def settle(self) -> bool:
        """Whether it is over now, and was not before. Its user is told."""
        if self._ended is None or self.reads or self._over.is_set():
            return False
        self._over.set()
        return True

    def tell(self) -> None:
        if self._on_release is not None:
            self._on_release(self)


class _Push(SendStream):
    """A stream out of what is held. Its end, whatever it is, gives the hold back."""

    copy = True

    def __init__(
        self,
        streams: Streams,
        hold: Hold,
        ids: BlockIds,
        tokens: int,
        *,
        route: Callable[[], Awaitable[Sequence[str]]],
        deadline: float,
        priority: int,
        share: str,
        retry: bool = False,
        fetch: bytes = b"",
    ) -> None:
        super().__init__(
            streams,
            hold.stream,
            ids,
            tokens,
            route_again=None,
            choose=lambda: (),  # `route` looks at once as well, and no engine waits for these calls
            route=route,
            deadline=deadline,
            priority=priority,
            share=share,
            metadata=hold.metadata,
            retry=retry,
        )
        self.fetch = fetch
        self.hold: Hold | None = hold
        hold.reads += 1

    async def run(self) -> StreamReport:
        payload = self.hold.payload if self.hold is not None else b""
        try:
            async with self:
                for layer in range(self._streams.pool.layout.layers):
                    self.layer_ready(layer)
                return await self.done_encoded(payload)
        finally:
            if self.key == 0:
                self.give_back(sent=False)

    def on_ended(self, command: Ended) -> None:
        super().on_ended(command)
        self.give_back(sent=command.error is None)

    def give_back(self, *, sent: bool) -> None:
        """Nothing of this push reads the held blocks any more. Idempotent."""
        hold, self.hold = self.hold, None
        if hold is not None:
            self._streams.holds.read(hold, sent=sent)


class Holds:
    """Created on the running loop."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._loop = asyncio.get_running_loop()
        self._log = get_logger("holds")
        self._table: dict[str, Hold] = {}
        """Those that are lendable, least recently used first."""
        self._leaving: dict[Hold, None] = {}
        """Those that have ended and are still being read."""
        self._ends: dict[str, HoldEnd] = {}
        """How the last hold of a stream ended, oldest first."""
        self._held = np.zeros(streams.pool.blocks, np.int32)
        """By block: in how many holds that are not over."""
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._table)

    def now(self) -> float:
        return self._loop.time()

    def check_here(self, what: str) -> None:
        self._streams.check_here(what)

    # ------------------------------------------------------------------ the table

    def hold(
        self,
        stream: str,
        ids: BlockIds,
        tokens: int,
        *,
        ttl: float,
        pinned: bool = False,
        payload: bytes = b"",
        metadata: bytes = b"",
        on_release: Callable[[Hold], None] | None = None,
    ) -> Hold:
        """Begin to hold a stream. Raises ConfigError when it is held already, or a live stream writes its blocks."""
        if self._closed:
            raise ConfigError("runtime", "has been closed; it holds nothing any more")
        if stream in self._table:
            raise ConfigError("stream", f"{stream!r} is held already; release that hold first")
        if len(self._table) >= self._streams.config.max_holds:
            raise Refused(f"{len(self._table)} streams are held already (max_holds)")
        written = self._streams.written(ids)
        if written is not None:
            raise ConfigError("blocks", f"block {written} is being written by a stream that is still live")
        hold = Hold(self, stream, ids, tokens, ttl=ttl, payload=payload, metadata=metadata, on_release=on_release)
        hold.pins = int(pinned)
        self._table[stream] = hold
        self._ends.pop(stream, None)
        self._held[ids] += 1
        self.arm(hold, ttl)
        return hold

    def replace(
        self, stream: str, ids: BlockIds, tokens: int, *, ttl: float, payload: bytes, metadata: bytes
    ) -> Hold | None:
        """What a send leaves to be held: an earlier hold of the stream gives way. None when nothing can be held."""
        before = self._table.get(stream)
        if before is not None:
            self.end(before, "replaced")
        try:
            return self.hold(stream, ids, tokens, ttl=ttl, payload=payload, metadata=metadata)
        except KVStreamError as error:
            self._log.warning("stream not held after its end", stream=stream, why=str(error))
            return None

    def find(self, stream: str) -> Hold:
        """The hold of a stream, which counts as used now. Raises Missed."""
        hold = self._table.pop(stream, None)
        if hold is None:
            how = self._ends.get(stream)
            why = "never was, as far as this worker knows" if how is None else f"its hold has {_ENDED[how]}"
            raise Missed(f"stream {stream!r} is not held here: {why}")
        self._table[stream] = hold
        return hold

    def get(self, stream: str) -> Hold | None:
        """The hold of a stream, if it is held. Does not count as use."""
        return self._table.get(stream)

    def all(self) -> tuple[Hold, ...]:
        """Every hold that lends, least recently used first."""
        return tuple(self._table.values())

    def held_block(self, ids: BlockIds) -> tuple[int, str] | None:
        """The first of these blocks that is held, and for which stream; None when none is."""
        if not self._table and not self._leaving:
            return None
        taken = np.flatnonzero(self._held[ids])
        if not taken.size:
            return None
        block = int(ids[taken[0]])
        names = (hold.stream for hold in (*self._table.values(), *self._leaving) if block in hold.ids)
        return block, next(names, "")

    def arm(self, hold: Hold, ttl: float) -> None:
        hold.expires = self.now() + ttl
        if hold.timer is not None:
            hold.timer.cancel()
        hold.timer = self._loop.call_at(hold.expires, self._time_is_over, hold)

    def _time_is_over(self, hold: Hold) -> None:
        hold.timer = None
        if not hold.pins:
            self.end(hold, "expired")

    def end(self, hold: Hold, how: HoldEnd) -> None:
        """Lend it to nobody any more. Idempotent."""
        if hold.ended:
            return
        hold.end(how)
        if hold.timer is not None:
            hold.timer.cancel()
            hold.timer = None
        del self._table[hold.stream]
        self._ends.pop(hold.stream, None)
        if len(self._ends) >= _REMEMBERED:
            del self._ends[next(iter(self._ends))]
        self._ends[hold.stream] = how
        self._leaving[hold] = None
        self._settle(hold)

    def read(self, hold: Hold, *, sent: bool) -> None:
        """A push of it has ended."""
        hold.reads -= 1
        hold.served += sent
        self._settle(hold)

    def _settle(self, hold: Hold) -> None:
        if hold.settle():
            del self._leaving[hold]
            self._held[hold.ids] -= 1
            hold.tell()

    def states(self) -> list[HoldState]:
        now, layout = self.now(), self._streams.pool.layout
        block = layout.layers * layout.block_bytes
        return [
            HoldState(
                stream=hold.stream,
                tokens=hold.tokens,
                bytes=len(hold.ids) * block,
                expires_in=max(0.0, hold.expires - now),
                pins=hold.pins,
                reads=hold.reads,
                served=hold.served,
                leaving=hold.ended,
            )
            for hold in (*self._table.values(), *self._leaving)
        ]

    # ------------------------------------------------------------------ copies

    async def push(
        self,
        stream: str,
        tokens: int,
        *,
        route: Callable[[int], Awaitable[Sequence[str]]],
        deadline: float,
        priority: int,
        share: str,
        retry: bool,
    ) -> StreamReport:
        """Send a copy of the first `tokens` (0: all) that are held to where `route` sends so many. Raises Missed, and
        what `SendStream.done` raises."""
        hold = self.find(stream)
        tokens, ids = self._part(hold, tokens)
        push = _Push(
            self._streams,
            hold,
            ids,
            tokens,
            route=lambda: route(tokens),
            deadline=deadline,
            priority=priority,
            share=share,
            retry=retry,
        )
        return await push.run()

    def serve(self, command: Fetched) -> None:
        """A peer has asked for what is held: send it, or say why not."""
        if len(self._tasks) >= self._streams.config.max_streams:
            self._refuse(command, Refused(f"{len(self._tasks)} fetches are being served already (max_streams)"))
            return
        if command.stream not in self._table:
            self._start(command, self._serve_later(command))
        elif (push := self._push_for(command)) is not None:
            task = self._start(command, self._serve(command, push))
            # A task that is cancelled before its first step runs nothing.
            task.add_done_callback(lambda _: push.give_back(sent=False) if push.key == 0 else None)

    def _push_for(self, command: Fetched) -> _Push | None:
        """The push that answers a fetch; None when it had to be refused."""

        async def asker() -> Sequence[str]:
            return [command.peer]

        try:
            hold = self.find(command.stream)
            tokens, ids = self._part(hold, command.tokens)
        except KVStreamError as error:
            self._refuse(command, error)
            return None
        return _Push(
            self._streams,
            hold,
            ids,
            tokens,
            route=asker,
            deadline=self._streams.config.deadline if command.deadline is None else command.deadline,
            priority=command.priority,
            share=command.share,
            fetch=command.token,
        )

    def _start(self, command: Fetched, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=f"fetch {command.stream} for {command.peer}")
        self._tasks[task] = None
        task.add_done_callback(self._done)
        return task

    async def _serve(self, command: Fetched, push: _Push) -> None:
        try:
            await push.run()
        except KVStreamError as error:
            if not push.peer:
                # The asker has had no offer that it took: it need not wait for its deadline.
                self._refuse(command, error)
                self._streams.driver.pump()

    async def _serve_later(self, command: Fetched) -> None:
        """Serve what may be on its way here: its source may have told the asker already that it is here.

        Whoever receives it waits for its end too. When that comes it gets its turn of the loop before this goes on, and
        holds the stream by then.
        """
        coming = self._streams.arriving(command.stream)
        began = self.now()
        wait = self._streams.config.deadline if command.deadline is None else command.deadline
        try:
            if coming is not None:
                async with asyncio.timeout(wait):
                    await coming.until_ended()
        except TimeoutError:
            # The asker's deadline is over as well.
            return
        await asyncio.sleep(0)
        left = max(wait - (self.now() - began), 0.0)
        push = self._push_for(replace(command, deadline=left))
        if push is None:
            self._streams.driver.pump()
        else:
            await self._serve(command, push)

    def _done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": f"kvstream: {task.get_name()} failed", "exception": error})

    def _refuse(self, command: Fetched, error: KVStreamError) -> None:
        self._log.info("fetch refused", stream=command.stream, peer=command.peer, code=error.code, why=str(error))
        self._streams.core.refuse_fetch(command.link, command.num, error)

    def _part(self, hold: Hold, tokens: int) -> tuple[int, BlockIds]:
        """How many tokens of a hold to send, and their blocks. A prefix of a prompt has the same KV as the whole."""
        if tokens > hold.tokens:
            raise Missed(f"stream {hold.stream!r} is held here with {hold.tokens} tokens, {tokens} were asked for")
        tokens = tokens or hold.tokens
        return tokens, hold.ids[: self._streams.pool.layout.blocks_for(tokens)]

    async def close(self, wait: float) -> None:
        """End every hold. Called when every stream has been ended: then nothing reads what is held."""
        self._closed = True
        for hold in list(self._table.values()):
            self.end(hold, "released")
        if self._tasks:
            _, left = await asyncio.wait(list(self._tasks), timeout=wait)
            for task in left:
                task.cancel()
            if left:
                await asyncio.wait(left)
