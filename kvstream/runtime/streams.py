"""The streams of one runtime: where scheduler, pool, connections and the user's sessions meet.

It performs the scheduler's commands (gathers into slots, scatters out of them, tells the sessions) and turns the users'
calls into the scheduler's events. The bytes are moved by copies.py; here is who may hear of what. Blocks are the user's
again the instant that the user is told of the stream's end, and never before.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from threading import get_ident
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvstream.config import RuntimeConfig
from kvstream.errors import Cancelled, ConfigError, KVStreamError, ProtocolError, Refused, UnknownStream
from kvstream.log import get_logger
from kvstream.memory import KVPool
from kvstream.runtime.checks import whole
from kvstream.runtime.copies import Copies
from kvstream.runtime.holds import Holds
from kvstream.runtime.links import Links
from kvstream.runtime.peers import Peers
from kvstream.runtime.sessions import BlockIds, Offer, ReceiveStream, SendStream
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Declined,
    Ended,
    Fetched,
    Move,
    Offered,
    Rerouted,
    Route,
    Stage,
    Stalled,
    Withdrawn,
)
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.driver import Driver
from kvstream.transport.base import Connection, Slab
from kvstream.wire import Frame

__all__ = ["Observer", "OfferHandler", "Streams"]

OfferHandler = Callable[[Offer], Awaitable[None]]


class Observer(Protocol):
    """Hears of what happens to streams. Called on the loop; must not block, nor change anything here."""

    def taken(self, session: SendStream | ReceiveStream, command: Accepted) -> None: ...
    def ended(self, session: SendStream | ReceiveStream, command: Ended) -> None: ...
    def stalled(self, command: Stalled) -> None: ...


class Streams:
    """Created on the running loop. `links` is set by the runtime before the first stream."""

    links: Links

    def __init__(
        self, pool: KVPool, config: RuntimeConfig, clock: Callable[[], float], jitter: Callable[[], float]
    ) -> None:
        self.pool = pool
        self.clock = clock
        self.config = config
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._log = get_logger("streams")
        layout = pool.layout
        self.core = Scheduler(
            config,
            layers=layout.layers,
            block_tokens=layout.block_tokens,
            block_bytes=layout.block_bytes,
            jitter=jitter,
        )
        self.driver = Driver(self.core, self, self._loop)
        self.peers = Peers()
        self._sessions: dict[int, SendStream | ReceiveStream] = {}
        self._written = np.zeros(pool.blocks, bool)
        """Blocks that a live inbound stream may write: two streams never share one."""
        self._handler: OfferHandler | None = None
        self._offer_tasks: dict[int, asyncio.Task[None]] = {}
        self._route_tasks: dict[int, asyncio.Task[Sequence[str]]] = {}
        """By stream: its policy is being asked."""
        self._on_load_changed: Callable[[], None] | None = None
        self._pumped = asyncio.Event()
        self.observer: Observer | None = None
        self._copies = Copies(self)
        self.holds = Holds(self)

    # ------------------------------------------------------------------ the users' calls

    @property
    def is_here(self) -> bool:
        """Whether this is the thread of the runtime's loop."""
        return get_ident() == self._thread

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
        return ids if len(ids) == needed else ids[:needed]

    def open_send(
        self,
        session: SendStream,
        candidates: Sequence[str],
        *,
        deadline: float,
        priority: int,
        share: str,
        metadata: bytes,
        retry: bool,
        routable: bool,
    ) -> None:
        session.key = self.core.send(
            self.driver.now(),
            session.stream,
            tokens=session.tokens,
            held=len(session.ids),
            candidates=candidates,
            deadline=deadline,
            priority=priority,
            share=share,
            metadata=metadata,
            retry=retry,
            copy=session.copy,
            fetch=session.fetch,
            routable=routable,
        )
        self._sessions[session.key] = session
        # Not at once: a send wakes the peer, which may cost this thread its core.
        self.driver.pump_soon()

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

    def open_fetch(
        self,
        session: ReceiveStream,
        first_token: int,
        sources: Sequence[str],
        *,
        exact: bool,
        token: bytes,
        deadline: float,
        priority: int,
        share: str,
    ) -> None:
        self._claim(session, first_token)
        try:
            session.key = self.core.fetch(
                self.driver.now(),
                session.stream,
                tokens=session.tokens,
                exact=exact,
                sources=sources,
                token=token,
                deadline=deadline,
                first_token=first_token,
                priority=priority,
                share=share,
            )
        except KVStreamError:
            self._unclaim(session)
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
        self.core.fail_waiting(self.driver.now(), names, error)
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

    def reroute(self, stream: str, candidates: Sequence[str]) -> None:
        self.core.reroute(self.driver.now(), stream, candidates)
        self.driver.pump()

    def extend(self, key: int, blocks: int) -> None:
        self.core.extend(key, blocks)

    def finish(self, key: int, payload: bytes) -> None:
        self.core.finish(self.driver.now(), key, payload)
        self.driver.pump()

    def cancel(self, key: int, reason: str) -> None:
        self.core.cancel(self.driver.now(), key, reason)
        self.driver.pump()

    @property
    def live(self) -> int:
        """Streams whose users have not been told of their end."""
        return len(self._sessions)

    def cancel_named(self, name: str, reason: str) -> int:
        """Cancel the streams of this id, of either direction; how many. Raises UnknownStream."""
        self.check_here("cancel")
        sessions = [session for session in self._sessions.values() if session.stream == name]
        if not sessions:
            raise UnknownStream("stream", f"{name!r} is not live on this worker; it may have ended")
        for session in sessions:
            session.cancel(reason)
        return len(sessions)

    def refuse_new(self, error: Refused | None) -> None:
        """Take no new streams, and refuse the offers that wait, with this error; None: take them again."""
        self.check_here("drain")
        self.core.drain(error)
        self.driver.pump()
        self._pumped.set()

    def end_all(self, sent: KVStreamError, received: KVStreamError) -> int:
        """End every live stream, those that are sent with one error and those that are received with the other; how
        many."""
        keys = list(self._sessions.items())
        for key, session in keys:
            self.core.fail(self.driver.now(), key, sent if isinstance(session, SendStream) else received)
        self.driver.pump()
        return len(keys)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Wait for something that follows from the streams' state. Bound it with asyncio.timeout."""
        while not reached():
            self._pumped.clear()
            await self._pumped.wait()

    def fail(self, key: int, error: KVStreamError) -> None:
        self.core.fail(self.driver.now(), key, error)
        self.driver.pump()

    def call_threadsafe(self, call: Callable[[], None]) -> None:
        """Run `call` on the loop, from any thread. A closed loop has ended every stream: nothing is left to do."""
        try:
            if get_ident() == self._thread:
                self._loop.call_soon(call)  # without the system call that wakes a waiting loop
            else:
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
        tasks: list[asyncio.Task[Any]] = [*self._offer_tasks.values(), *self._route_tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            _, left = await asyncio.wait(tasks, timeout=wait)
            for task in left:
                self._log.warning("the user's code does not end, although it was cancelled", task=task.get_name())
        await self.holds.close(wait)
        try:
            async with asyncio.timeout(wait):
                while not self.core.idle or not self._copies.idle:
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

    def chunk_blocks(self, connection: Connection) -> tuple[int, int]:
        return self._copies.chunk_blocks(connection)

    @property
    def slabs(self) -> list[Slab]:
        return self._copies.slabs

    def stage(self, command: Stage) -> None:
        self._copies.stage(command)

    def move(self, command: Move) -> None:
        self._copies.move(command)

    def notify(
        self,
        command: Offered | Withdrawn | Fetched | Accepted | Rerouted | Route | Arrived | Ended | Stalled | Declined,
    ) -> None:
        if isinstance(command, Offered):
            self._offered(command)
        elif isinstance(command, Fetched):
            self.holds.serve(command)
        elif isinstance(command, Stalled):
            self._stalled(command)
        elif isinstance(command, Declined):
            self.peers.failed(command.peer, command.error, self.driver.now())
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
            if isinstance(session, SendStream):
                self.peers.took(command.peer)
            if self.observer is not None:
                self.observer.taken(session, command)
            self._load_changed()
        elif isinstance(command, Rerouted | Route):
            if isinstance(session, SendStream):
                self._lost(session, command)
        elif isinstance(command, Arrived):
            if isinstance(session, ReceiveStream):
                session.on_arrived(command.layer)
        elif not self._copies.put_off(command):
            self.end(command)

    def session(self, key: int) -> SendStream | ReceiveStream | None:
        """The stream of that key, until its user has been told of its end."""
        return self._sessions.get(key)

    def end(self, command: Ended) -> None:
        """Tell the user of a stream that it has ended: from here on its blocks are the user's."""
        session = self._sessions.pop(command.stream)
        if (routing := self._route_tasks.get(command.stream)) is not None:
            routing.cancel()
        if isinstance(session, ReceiveStream):
            self._unclaim(session)
        else:
            # Before the user hears of the end and may overwrite the blocks.
            for (connection, slot), generation in session.lent.items():
                connection.recall(slot, generation)
            session.lent.clear()
            for connection, slot in session.publishing:
                connection.withdraw(slot)
            session.keep(command)
        session.on_ended(command)
        if self.observer is not None:
            self.observer.ended(session, command)
        self._load_changed()
        self._pumped.set()
        if command.error is not None:
            self._log.info("stream ended", stream=session.stream, code=command.error.code, why=str(command.error))

    def pumped(self) -> None:
        self._pumped.set()

    # ------------------------------------------------------------------ helpers

    def _stalled(self, command: Stalled) -> None:
        if self.observer is not None:
            self.observer.stalled(command)
        what = "confirmations of what we announced" if command.outgoing else "bytes that we read"
        self._log.warning(
            "credit stall",
            peer=command.peer,
            waits_for=what,
            seconds=round(command.seconds, 3),
            chunks=command.chunks,
            streams=command.streams,
            example=command.example,
        )

    def _load_changed(self) -> None:
        if self._on_load_changed is not None:
            self._on_load_changed()

    def _lost(self, session: SendStream, command: Rerouted | Route) -> None:
        """A stream has lost its destination, or its policy is to be asked for another."""
        if isinstance(command, Rerouted):
            session.on_rerouted(command)
            for connection, slot in session.publishing:
                connection.withdraw(slot)
            self._log.warning(
                "resumed" if command.resumed else "rerouted",
                stream=session.stream,
                peer=command.peer,
                epoch=command.epoch,
                code=command.error.code,
                why=str(command.error),
            )
            return
        if (before := self._route_tasks.get(session.key)) is not None:
            before.cancel()
        task = self._loop.create_task(session.route_again(command.exclude), name=f"route {session.stream}")
        self._route_tasks[session.key] = task
        task.add_done_callback(lambda done: self._routed(session, done))

    def _routed(self, session: SendStream, task: asyncio.Task[Sequence[str]]) -> None:
        if self._route_tasks.get(session.key) is task:
            del self._route_tasks[session.key]
        if task.cancelled():
            return
        error = task.exception()
        found: Sequence[str] = task.result() if error is None else ()
        if error is not None and not isinstance(error, KVStreamError):
            self._log.error("routing policy failed", stream=session.stream, exc_info=error)
        self.core.routed(self.driver.now(), session.key, found)
        self.driver.pump()

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
        held = self.holds.held_block(ids)
        if held is not None:
            raise ConfigError("blocks", f"block {held[0]} is held for stream {held[1]!r} until that hold is over")
        self._written[ids] = True
        session.claimed = ids

    def arriving(self, stream: str) -> ReceiveStream | None:
        """The stream of that name that is on its way here, if there is one and its source has been found."""
        session = self._sessions.get(self.core.arriving(stream))
        return session if isinstance(session, ReceiveStream) else None

    def written(self, ids: BlockIds) -> int | None:
        """The first of these blocks that a live inbound stream writes; None when there is none."""
        taken = np.flatnonzero(self._written[ids])
        return int(ids[taken[0]]) if taken.size else None

    def _unclaim(self, session: ReceiveStream) -> None:
        self._written[session.claimed] = False


async def _call(handler: OfferHandler, offer: Offer) -> None:
    await handler(offer)
