"""The streams of one runtime: where scheduler, pool, connections and the user's sessions meet.

It performs the scheduler's commands (gathers into slots, scatters out of them, tells the sessions) and turns the users'
calls into the scheduler's events. Memory of the pool is read and written here only, synchronously, and only for a
stream that is live at that moment: that is why blocks are free the instant a stream has ended.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kvstream.config import RuntimeConfig
from kvstream.errors import Cancelled, ConfigError, Corrupted, KVStreamError, ProtocolError, Recalled, Refused
from kvstream.log import get_logger
from kvstream.memory import KVPool
from kvstream.runtime.checks import whole
from kvstream.runtime.links import Links
from kvstream.runtime.sessions import BlockIds, Offer, ReceiveStream, SendStream
from kvstream.scheduler.commands import Accepted, Arrived, Ended, Move, Offered, Stage, Withdrawn
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.driver import Driver
from kvstream.transport.base import ByteView, Connection, Lent
from kvstream.wire import Frame

__all__ = ["OfferHandler", "Streams"]

OfferHandler = Callable[[Offer], Awaitable[None]]


class Streams:
    """Created on the running loop. `links` is set by the runtime before the first stream."""

    links: Links

    def __init__(self, pool: KVPool, config: RuntimeConfig, clock: Callable[[], float]) -> None:
        self.pool = pool
        self.clock = clock
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._log = get_logger("streams")
        self.core = Scheduler(config, layers=pool.layout.layers, block_tokens=pool.layout.block_tokens)
        self.driver = Driver(self.core, self, self._loop)
        self._sessions: dict[int, SendStream | ReceiveStream] = {}
        self._written = np.zeros(pool.blocks, bool)
        """Blocks that a live inbound stream may write: two streams never share one."""
        self._lends = pool.run_bytes >= config.lend_bytes and not config.checksums
        self._handler: OfferHandler | None = None
        self._offer_tasks: dict[int, asyncio.Task[None]] = {}
        self._on_load_changed: Callable[[], None] | None = None
        self._pumped = asyncio.Event()

    # ------------------------------------------------------------------ the users' calls

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the runtime's loop."""
        return threading.get_ident() == self._thread

    def check_here(self, what: str) -> None:
        """Raise ConfigError unless this is the loop's thread: elsewhere the call would change the loop's state under
        its feet."""
        if not self.is_here:
            raise ConfigError(
                "thread",
                f"{what} belongs to the thread of the runtime's event loop; of a stream only layer_ready and wait_layer"
                " may be called from others",
            )

    def block_table(
        self, blocks: Sequence[int] | npt.NDArray[np.integer[Any]], tokens: int, *, growing: bool
    ) -> BlockIds:
        """Validate a block table for that many tokens and cut it to what they take. Raises ConfigError."""
        needed = self.pool.layout.blocks_for(tokens)
        if needed > self.pool.blocks:
            raise ConfigError("tokens", f"{tokens} take {needed} blocks, the pool has {self.pool.blocks}")
        if growing and isinstance(blocks, list | tuple | np.ndarray) and len(blocks) == 0:
            return np.empty(0, np.intp)
        ids = self.pool.check_blocks(blocks)
        if len(ids) < needed and not growing:
            raise ConfigError(
                "blocks",
                f"{tokens} tokens take {needed} blocks of {self.pool.layout.block_tokens} tokens, {len(ids)} given;"
                " give them all, or open the stream with growing=True and extend() it",
            )
        return ids[:needed]

    def open_send(
        self, session: SendStream, candidates: Sequence[str], *, deadline: float, priority: int, metadata: bytes
    ) -> None:
        session.key = self.core.send(
            self.driver.now(),
            session.stream,
            tokens=session.tokens,
            held=len(session.ids),
            candidates=candidates,
            deadline=deadline,
            priority=priority,
            metadata=metadata,
        )
        self._sessions[session.key] = session
        self.driver.pump()

    def open_receive(self, session: ReceiveStream, first_token: int, deadline: float) -> None:
        self._claim(session, first_token)
        try:
            session.key = self.core.receive(
                self.driver.now(), session.stream, tokens=session.tokens, deadline=deadline, first_token=first_token
            )
        except KVStreamError:
            self._unclaim(session)
            self.driver.pump()
            raise
        self._sessions[session.key] = session
        self.driver.pump()

    def accept_offer(
        self, offer: Offer, offer_id: int, blocks: Sequence[int] | npt.NDArray[np.integer[Any]], first_token: int
    ) -> ReceiveStream:
        self.check_here("accept")
        first_token = whole("first_token", first_token, 0, offer.tokens)
        ids = self.block_table(blocks, offer.tokens, growing=False)
        session = ReceiveStream(self, offer.stream, ids, offer.tokens, first_token, math.inf)
        self._claim(session, first_token)
        try:
            session.key = self.core.accept(self.driver.now(), offer_id, first_token=first_token)
        except KVStreamError:
            self._unclaim(session)
            raise
        self._sessions[session.key] = session
        self.driver.pump()
        return session

    def fail_waiting(self, names: Sequence[str], error: KVStreamError) -> None:
        """Their source has said that it can't connect to us: who waits for these streams need not wait on."""
        self.core.fail_waiting(names, error)
        self.driver.pump()

    def refuse_offer(self, offer_id: int, error: KVStreamError) -> None:
        self.core.refuse(offer_id, error)
        self.driver.pump()

    def layer_ready(self, key: int, layer: int, start: int, stop: int) -> None:
        try:
            self.core.layer_ready(self.driver.now(), key, layer, start, stop)
        except ConfigError as error:
            # The engine's call returned long ago; the stream's end is the one place left to say so.
            self.core.fail(self.driver.now(), key, error)
        self.driver.pump()

    def extend(self, key: int, blocks: int) -> None:
        self.core.extend(key, blocks)

    def finish(self, key: int, payload: bytes) -> None:
        self.core.finish(self.driver.now(), key, payload)
        self.driver.pump()

    def cancel(self, key: int, reason: str) -> None:
        self.core.cancel(self.driver.now(), key, reason)
        self.driver.pump()

    def fail(self, key: int, error: KVStreamError) -> None:
        self.core.fail(self.driver.now(), key, error)
        self.driver.pump()

    def call_threadsafe(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop, from any thread. A closed loop has ended every stream: nothing is left to do."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def set_handler(self, handler: OfferHandler | None) -> None:
        self._handler = handler
        self.core.set_handler(handler is not None)
        self.driver.pump()

    def drop_links(self, error: KVStreamError) -> None:
        """Close every connection."""
        self.core.drop_all(error)
        self.driver.pump()

    def on_load_changed(self, call: Callable[[], None]) -> None:
        self._on_load_changed = call

    async def close(self, wait: float) -> None:
        """End every stream, tell the peers, and wait, bounded, until they have answered."""
        self.core.shut(self.driver.now(), Cancelled("the runtime is closing"))
        self.driver.pump()
        tasks = list(self._offer_tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=wait)
            for task in left:
                self._log.warning("an on_offer handler does not end, although it was cancelled", task=task.get_name())
        try:
            async with asyncio.timeout(wait):
                while not self.core.idle:
                    self._pumped.clear()
                    await self._pumped.wait()
        except TimeoutError:
            self._log.info("closed with peers that did not answer")

    # ------------------------------------------------------------------ Effects: what the scheduler commands

    def transmit(self, link: int, frames: list[Frame]) -> None:
        self.links.transmit(link, frames)

    def dial(self, peer: str) -> None:
        self.links.dial(peer)

    def drop(self, link: int, error: KVStreamError) -> None:
        self.links.drop(link, error)

    def chunk_blocks(self, connection: Connection) -> int:
        """How many blocks of one layer make a chunk on this connection, as its source."""
        size = connection.slot_bytes
        if connection.lends and self._lends:
            size = max(size, min(self.config.lend_chunk, connection.slot_bytes // 8 * self.pool.run_bytes))
        return max(1, size // self.pool.layout.block_bytes)

    def stage(self, command: Stage) -> None:
        now = self.driver.now()
        session = self._sessions.get(command.stream)
        connection = self.links.connection(command.link)
        if session is None or connection is None:
            self.core.stage_failed(now, command, Cancelled("the stream has ended"))
            self.driver.pump()
            return
        ids = session.ids[command.first : command.first + command.count]
        try:
            if self._lend(session, connection, command, ids):
                return
            view = connection.write_view(command.slot)
            size = self.pool.pack(command.layer, ids, view)
        except KVStreamError as error:
            self.core.stage_failed(now, command, error)
            self.driver.pump()
            return
        session.moved_bytes += size
        checksum = _checksum(view[:size]) if self.config.checksums else 0
        future = connection.publish(command.slot, size)
        if future.done():
            self._published(command, checksum, future)
        else:
            future.add_done_callback(lambda done: self._published(command, checksum, done))

    def _lend(self, session: SendStream | ReceiveStream, connection: Connection, command: Stage, ids: BlockIds) -> bool:
        """Let the peer read the blocks where they are, if it can and they are large enough for that to pay."""
        if not connection.lends or not self._lends or not isinstance(session, SendStream):
            return False
        found = self.pool.addresses(command.layer, ids)
        if found is None:
            return False
        lent = Lent(*found)
        generation = connection.lend(command.slot, lent)
        session.lent[connection, command.slot] = generation
        session.moved_bytes += lent.nbytes
        self.core.staged(self.driver.now(), command, generation)
        self.driver.pump()
        return True

    def _published(self, command: Stage, checksum: int, future: asyncio.Future[int]) -> None:
        error = _failure(future)
        if error is not None:
            self.core.stage_failed(self.driver.now(), command, error)
        else:
            self.core.staged(self.driver.now(), command, future.result(), checksum)
        self.driver.pump()

    def move(self, command: Move) -> None:
        connection = self.links.connection(command.link)
        if connection is None:
            return
        size = command.count * self.pool.layout.block_bytes
        future = connection.take(command.slot, command.generation, size)
        if future.done():
            self._taken(command, future)
        else:
            future.add_done_callback(lambda done: self._taken(command, done))

    def _taken(self, command: Move, future: asyncio.Future[ByteView | Lent]) -> None:
        now = self.driver.now()
        error = _failure(future)
        if error is None:
            error = self._land(command, future.result())
        if error is None:
            self.core.moved(now, command)
        else:
            self.core.move_failed(now, command, error)
        self.driver.pump()

    def _land(self, command: Move, taken: ByteView | Lent) -> KVStreamError | None:
        """Bring a chunk into the stream's blocks, unless the stream has ended meanwhile."""
        session = self._sessions.get(command.stream)
        connection = self.links.connection(command.link)
        if session is None or connection is None:
            return None
        ids = session.ids[command.first : command.first + command.count]
        try:
            if isinstance(taken, Lent):
                self._borrow(connection, command.layer, ids, taken)
            elif command.checksum and _checksum(taken) != command.checksum:
                return Corrupted(f"layer {command.layer}: the checksum of blocks {command.first} on does not match")
            else:
                self.pool.unpack(command.layer, ids, taken)
        except KVStreamError as error:
            return error
        if not connection.check(command.slot, command.generation):
            return Recalled(f"the source took slot {command.slot} back while it was being read")
        session.moved_bytes += taken.nbytes
        return None

    def _borrow(self, connection: Connection, layer: int, ids: BlockIds, lent: Lent) -> None:
        found = self.pool.addresses(layer, ids)
        if found is not None:
            connection.borrow(lent, Lent(*found))
            return
        # Our own blocks are in pieces, or on a GPU: by way of a buffer.
        buffer = np.empty(lent.nbytes, np.uint8)
        connection.borrow(lent, Lent(np.array([buffer.ctypes.data], np.uint64), buffer.nbytes))
        self.pool.unpack(layer, ids, buffer)

    def notify(self, command: Offered | Withdrawn | Accepted | Arrived | Ended) -> None:
        if isinstance(command, Offered):
            self._offered(command)
        elif isinstance(command, Withdrawn):
            task = self._offer_tasks.get(command.offer)
            if task is not None:
                task.cancel()
        elif (session := self._sessions.get(command.stream)) is None:
            raise KVStreamError(f"internal: {type(command).__name__} for stream {command.stream}, which has no session")
        elif isinstance(command, Accepted):
            connection = self.links.connection(command.link)
            lane = connection.lane if connection is not None else None
            session.on_accepted(command, lane or "")
            self._load_changed()
        elif isinstance(command, Arrived):
            if isinstance(session, ReceiveStream):
                session.on_arrived(command.layer)
        else:
            del self._sessions[command.stream]
            if isinstance(session, ReceiveStream):
                self._unclaim(session)
            else:
                # Before the user hears of the end and may overwrite the blocks.
                for (connection, slot), generation in session.lent.items():
                    connection.recall(slot, generation)
                session.lent.clear()
            session.on_ended(command)
            self._load_changed()
            if command.error is not None:
                self._log.info("stream ended", stream=session.stream, code=command.error.code, why=str(command.error))

    def pumped(self) -> None:
        self._pumped.set()

    # ------------------------------------------------------------------ helpers

    def _load_changed(self) -> None:
        if self._on_load_changed is not None:
            self._on_load_changed()

    def _offered(self, command: Offered) -> None:
        assert self._handler is not None
        try:
            offer = Offer(self, command)
        except ProtocolError as error:
            self.core.refuse(command.offer, error)
            return
        task = self._loop.create_task(_call(self._handler, offer), name=f"offer {command.stream}")
        self._offer_tasks[command.offer] = task
        task.add_done_callback(lambda done: self._handled(command, offer, done))

    def _handled(self, command: Offered, offer: Offer, task: asyncio.Task[None]) -> None:
        del self._offer_tasks[command.offer]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._log.error("on_offer handler failed", stream=command.stream, exc_info=error)
            failure = Refused(f"the destination's offer handler failed: {type(error).__name__}")
            if offer.accepted is not None:
                # Whoever was to use the stream is not there: it must not end as done.
                self.fail(offer.accepted.key, failure)
            else:
                self.refuse_offer(command.offer, failure)

    def _claim(self, session: ReceiveStream, first_token: int) -> None:
        """Note which blocks the stream will write. Raises ConfigError when another live stream writes one of them."""
        ids = session.ids if first_token < session.tokens else session.ids[:0]
        ids = ids[first_token // self.pool.layout.block_tokens :]
        taken = self._written[ids]
        if taken.any():
            raise ConfigError("blocks", f"block {ids[taken][0]} is being written by another stream that is still live")
        self._written[ids] = True
        session.claimed = ids

    def _unclaim(self, session: ReceiveStream) -> None:
        self._written[session.claimed] = False


def _checksum(data: ByteView) -> int:
    """XXH3 (64 bits), cut to what the wire carries; never 0, which means none there."""
    return (xxhash.xxh3_64_intdigest(data.data) & (2**63 - 1)) or 1


async def _call(handler: OfferHandler, offer: Offer) -> None:
    await handler(offer)


def _failure(future: asyncio.Future[Any]) -> KVStreamError | None:
    """What went wrong with a transport's operation, as an error of ours. Anything else is a bug and surfaces."""
    if future.cancelled():
        return Cancelled("the operation was cancelled")
    error = future.exception()
    if error is None or isinstance(error, KVStreamError):
        return error
    raise error
