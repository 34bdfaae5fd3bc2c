"""How bytes get out of a runtime's pool and into it: gathers, loans, reads and scatters, one chunk at a time.

It performs the scheduler's Stage and Move and reports to the scheduler. Blocks are touched for a stream that is live at
that moment only. On the CPU they are written synchronously, with one exception: a connection may read what is lent
straight into the blocks, by operations that outlast a call; and a GPU copies in its own time. So a stream's user is
never told of its end before everything on its way into its blocks has its final status (`put_off`); what is on its way
out of them at the end is thrown away by who reads it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from kvstream.errors import Cancelled, Corrupted, KVStreamError, PeerLost, ProtocolError, Recalled
from kvstream.memory import BlockPlan, StagingLease
from kvstream.memory.arrays import Staged
from kvstream.memory.completion import Completion
from kvstream.runtime.sessions import ReceiveStream, SendStream
from kvstream.scheduler.commands import Ended, Move, Stage
from kvstream.transport.base import MIN_LENT_RUN, ByteView, Connection, Lent, Slab

if TYPE_CHECKING:
    from kvstream.runtime.streams import Streams

__all__ = ["Copies"]

_MAX_PLANS = 256
"""Plans that a stream keeps: of 2 MiB at least each, so that more would be a table too long to gain by them."""


@dataclass(slots=True)
class _Writing:
    """What is on its way into the blocks of one inbound stream."""

    link: int
    reads: int = 0
    """Operations of a connection."""
    scatters: int = 0
    """Copies that a GPU has been given."""
    end: Ended | None = None
    """The stream's end, of which its user is told when there are none."""
    limit: asyncio.TimerHandle | None = None


@dataclass(slots=True)
class _Landing:
    """A chunk that a GPU scatters, layer by layer. `data` is what it reads until the last is done: host memory, or
    staging of the device under `lease`."""

    command: Move
    data: ByteView | Staged
    lease: StagingLease | None
    left: int
    error: KVStreamError | None = None


class Copies:
    """The data path of one runtime's streams."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pool = streams.pool
        self._config = streams.config
        self._loop = asyncio.get_running_loop()
        self._writing: dict[int, _Writing] = {}
        """By stream."""
        lendable = not streams.config.checksums and streams.pool.shareable
        self._run_bytes = streams.pool.run_bytes if lendable else 0
        """Bytes of the runs that may be lent: none with checksums, for which the source has to touch every byte."""
        self._block_runs = streams.pool.layout.block_bytes // streams.pool.run_bytes if streams.pool.run_bytes else 0

    @property
    def idle(self) -> bool:
        """Nothing is on its way into blocks."""
        return not self._writing

    @property
    def slabs(self) -> list[Slab]:
        """What has to be exposed so that blocks can be lent on every lane; none where none would be."""
        # On a GPU short runs may be neighbours: who reads them there into one piece of staging can join them.
        if self._run_bytes < (MIN_LENT_RUN if self._pool.is_device else self._config.get_lend_bytes):
            return []
        return [Slab(address, nbytes, self._pool) for address, nbytes in self._pool.slabs]

    def put_off(self, command: Ended) -> bool:
        """Whether the user of a stream can't be told of its end yet. `Streams.end` is called as soon as it can."""
        writing = self._writing.get(command.stream)
        if writing is None:
            return False
        writing.end = command
        if writing.reads:
            # Only the final status of a read gives the blocks back: if need be, by closing the connection.
            writing.limit = self._loop.call_later(self._config.end_wait, self._cut_off, writing.link)
        return True

    def _cut_off(self, link: int) -> None:
        self._streams.links.drop(
            link, PeerLost("reads into the blocks of a stream that has ended did not come to their end")
        )
        self._streams.driver.pump()

    def chunk_blocks(self, connection: Connection) -> tuple[int, int]:
        """How many blocks of one layer make a chunk on this connection, as its source; and how many of several."""
        size = connection.slot_bytes
        lease = self._streams.links.devices.lease(connection)
        if lease is not None:
            size = lease.slot_bytes
        elif self._lends(connection):
            size = min(max(size, self._config.lend_chunk), connection.lent_runs * self._run_bytes)
        block = self._pool.layout.block_bytes
        # On a GPU each layer is a launch of its own.
        group = 0 if self._pool.is_device else min(self._config.group_bytes, connection.slot_bytes) // block
        return max(1, size // block), group

    def _plan(self, session: SendStream | ReceiveStream, command: Stage | Move) -> BlockPlan:
        """A chunk's blocks. Each layer is cut alike, mostly, so few plans serve them all."""
        span = command.first, command.count
        plan = session.plans.get(span)
        if plan is None:
            if len(session.plans) == _MAX_PLANS:
                session.plans.clear()
            ids = session.ids[command.first : command.first + command.count]
            plan = session.plans[span] = self._pool.plan(ids)
        return plan

    # ------------------------------------------------------------------ source

    def stage(self, command: Stage) -> None:
        session = self._streams.session(command.stream)
        connection = self._streams.links.connection(command.link)
        if not isinstance(session, SendStream) or connection is None:
            self._stage_failed(command, Cancelled("the stream has ended"))
            return
        ids = self._plan(session, command)
        try:
            if self._pays(connection, command, ids) and self._lend(session, connection, command, ids):
                return
            if self._gather_staged(session, connection, command, ids):
                return
            view = connection.write_view(command.slot)
            if self._pool.is_device:
                self._gather(session, connection, command, ids, view)
                return
            size = 0
            for layer in _layers(command):
                size += self._pool.pack(layer, ids, view[size:])
        except KVStreamError as error:
            self._stage_failed(command, error)
            return
        self._publish(session, connection, command, view[:size])

    def _stage_failed(self, command: Stage, error: KVStreamError) -> None:
        self._streams.core.stage_failed(self._streams.driver.now(), command, error)
        self._streams.driver.pump()

    def _gather(
        self, session: SendStream, connection: Connection, command: Stage, ids: BlockPlan, view: ByteView
    ) -> None:
        self._pool.pin(view)
        data = view[: len(ids) * self._pool.layout.block_bytes]
        copy = self._pool.pack_async(command.layer, ids, data)
        copy.add_done_callback(lambda copy: self._gathered(session, connection, command, data, copy))

    def _gathered(
        self, session: SendStream, connection: Connection, command: Stage, data: ByteView | Lent, copy: Completion
    ) -> None:
        error = copy.error()
        live = (
            self._streams.session(command.stream) is session
            and self._streams.links.connection(command.link) is connection
        )
        if error is None and not live:
            # What was read may have been somebody else's blocks by then.
            error = Cancelled("the stream has ended")
        if error is not None:
            self._stage_failed(command, error)
        elif isinstance(data, Lent):
            self._lent(session, command, data, connection.lend(command.slot, data))
        else:
            self._publish(session, connection, command, data)

    def _gather_staged(self, session: SendStream, connection: Connection, command: Stage, ids: BlockPlan) -> bool:
        """Gather into staging on the device, and lend that, if the connection has such and the chunk can be lent."""
        lease = self._streams.links.devices.lease(connection)
        nbytes = len(ids) * self._pool.layout.block_bytes
        if lease is None or command.layers > 1 or nbytes < MIN_LENT_RUN:
            return False
        # Who still reads what was lent by this slot before must not believe it: that is overwritten from here on.
        connection.write_view(command.slot)
        staged = lease.slot(command.slot, nbytes)
        copy = self._pool.pack_staged(command.layer, ids, staged)
        lease.begin()

        def gathered(copy: Completion) -> None:
            lease.over()
            lent = Lent(np.array([staged.address], np.uint64), nbytes)
            self._gathered(session, connection, command, lent, copy)

        copy.add_done_callback(gathered)
        return True

    def _publish(self, session: SendStream, connection: Connection, command: Stage, data: ByteView) -> None:
        session.moved_bytes += data.size
        checksum = _checksum(data) if self._config.checksums else 0
        future = connection.publish(command.slot, data.size)
        if future.done():
            self._published(command, checksum, future)
            return
        slot = connection, command.slot
        session.publishing[slot] = None

        def published(done: asyncio.Future[int]) -> None:
            session.publishing.pop(slot, None)
            self._published(command, checksum, done)

        future.add_done_callback(published)

    def _published(self, command: Stage, checksum: int, future: asyncio.Future[int]) -> None:
        error = _failure(future)
        if error is not None:
            self._stage_failed(command, error)
            return
        self._streams.core.staged(self._streams.driver.now(), command, future.result(), checksum)
        self._streams.driver.pump()

    def _lends(self, connection: Connection) -> bool:
        """Whether all blocks are lent on this connection: the peer can read them, and they are large enough. Of a GPU
        it is for each chunk to say."""
        if self._pool.is_device:
            return False
        least = self._config.get_lend_bytes if connection.lane == "get" else self._config.lend_bytes
        return connection.lends and self._run_bytes >= least and connection.lent_runs >= self._block_runs

    def _pays(self, connection: Connection, command: Stage, ids: BlockPlan) -> bool:
        """Whether to lend this chunk: also small blocks, where the table has them in long stretches of memory. Joining
        these is up to who reads; on `get` each run is an operation, unless it is a neighbour on both sides."""
        if self._pool.is_device:
            return (
                connection.lends_device
                and self._run_bytes >= MIN_LENT_RUN
                and len(ids) * self._block_runs <= connection.lent_runs
                and self._pool.mean_run(command.layer, ids) >= self._config.device_lend_bytes
            )
        if connection.lane == "get":
            # Layers may be registered each by itself, and a loan names few slabs.
            return command.layers == 1 and self._lends(connection)
        if self._lends(connection):
            return True
        runs = command.layers * len(ids) * self._block_runs
        return (
            connection.lends
            and self._run_bytes >= MIN_LENT_RUN
            and runs <= connection.lent_runs
            and self._pool.mean_run(command.layer, ids) >= self._config.lend_bytes
        )

    def _lend(self, session: SendStream, connection: Connection, command: Stage, ids: BlockPlan) -> bool:
        """Let the peer read the blocks where they are, if that can be."""
        lent = self._runs(command, ids)
        if lent is None:
            return False
        generation = connection.lend(command.slot, lent)
        session.lent[connection, command.slot] = generation
        self._lent(session, command, lent, generation)
        return True

    def _lent(self, session: SendStream, command: Stage, lent: Lent, generation: int) -> None:
        session.moved_bytes += lent.nbytes
        self._streams.core.staged(self._streams.driver.now(), command, generation)
        self._streams.driver.pump()

    def _runs(self, command: Stage | Move, ids: BlockPlan) -> Lent | None:
        """Where a chunk's blocks are, layer after layer, if they are runs of equal length in host memory."""
        found = [self._pool.addresses(layer, ids) for layer in _layers(command)]
        if len(found) == 1:
            return Lent(*found[0]) if found[0] is not None else None
        runs = [each for each in found if each is not None]
        if len(runs) < len(found) or any(run != runs[0][1] for _, run in runs):
            return None
        return Lent(np.concatenate([addresses for addresses, _ in runs]), runs[0][1])

    # ------------------------------------------------------------------ destination

    def move(self, command: Move) -> None:
        connection = self._streams.links.connection(command.link)
        if connection is None:
            self._moved(command, PeerLost("the connection was lost before the chunk was read"))
            return
        size = command.layers * command.count * self._pool.layout.block_bytes
        future = connection.take(command.slot, command.generation, size)
        if future.done():
            self._taken(command, future)
        else:
            future.add_done_callback(lambda done: self._taken(command, done))

    def _taken(self, command: Move, future: asyncio.Future[ByteView | Lent]) -> None:
        error = _failure(future)
        live = self._live(command)
        if error is not None or live is None:
            self._moved(command, error)
            return
        taken = future.result()
        if isinstance(taken, Lent):
            self._borrow(*live, command, taken)
        elif command.checksum and _checksum(taken) != command.checksum:
            what = f"layer {command.layer}: the checksum of blocks {command.first} on does not match"
            self._moved(command, Corrupted(what))
        else:
            self._land(*live, command, taken)

    def _moved(self, command: Move, error: KVStreamError | None) -> None:
        now = self._streams.driver.now()
        if error is None:
            self._streams.core.moved(now, command)
        else:
            self._streams.core.move_failed(now, command, error)
        self._streams.driver.pump()

    def _live(self, command: Move) -> tuple[ReceiveStream, Connection] | None:
        """The stream of a chunk and its connection; None when it has ended meanwhile and its blocks are not ours."""
        session = self._streams.session(command.stream)
        connection = self._streams.links.connection(command.link)
        if connection is None or not isinstance(session, ReceiveStream):
            return None
        writing = self._writing.get(command.stream)
        return None if writing is not None and writing.end is not None else (session, connection)

    def _land(self, session: ReceiveStream, connection: Connection, command: Move, data: ByteView) -> None:
        """Bring a chunk's bytes, which are in host memory here, into the stream's blocks."""
        ids = self._plan(session, command)
        size = data.nbytes // command.layers
        if self._pool.is_device:
            self._scatter(session, command, ids, data)
            return
        try:
            for n, layer in enumerate(_layers(command)):
                self._pool.unpack(layer, ids, data[n * size : (n + 1) * size])
        except KVStreamError as error:
            self._moved(command, error)
        else:
            self._moved(command, self._count(session, connection, command, data.nbytes))

    def _count(
        self, session: ReceiveStream, connection: Connection, command: Move, nbytes: int
    ) -> KVStreamError | None:
        """The bytes are in the blocks: whether they count."""
        if not connection.check(command.slot, command.generation):
            return Recalled(f"the source took slot {command.slot} back while it was being read")
        session.moved_bytes += nbytes
        return None

    def _borrow(self, session: ReceiveStream, connection: Connection, command: Move, lent: Lent) -> None:
        """Have what is lent read into the stream's blocks, or into a buffer where these are in pieces or on a GPU."""
        if self._pool.is_device:
            self._borrow_staged(connection, command, lent)
            return
        ids = self._plan(session, command)
        buffer, local = None, self._runs(command, ids)
        if local is None:
            buffer = np.empty(lent.nbytes, np.uint8)
            local = Lent(np.array([buffer.ctypes.data], np.uint64), buffer.nbytes)
        future = connection.borrow(lent, local)
        if future.done():
            self._borrowed(command, future, lent.nbytes, buffer)
            return
        if buffer is None:
            self._writing.setdefault(command.stream, _Writing(command.link)).reads += 1

        def read(future: asyncio.Future[None]) -> None:
            self._borrowed(command, future, lent.nbytes, buffer)
            if buffer is None:
                self._writing[command.stream].reads -= 1
                self._written(command.stream)

        future.add_done_callback(read)

    def _borrowed(self, command: Move, future: asyncio.Future[None], nbytes: int, buffer: ByteView | None) -> None:
        error = _failure(future)
        live = self._live(command)
        if error is not None or live is None:
            self._moved(command, error)
        elif buffer is not None:
            self._land(*live, command, buffer)
        else:
            self._moved(command, self._count(*live, command, nbytes))

    def _borrow_staged(self, connection: Connection, command: Move, lent: Lent) -> None:
        """Have what is lent read into staging on the device, and scatter it from there."""
        lease = self._streams.links.devices.lease(connection)
        if lease is None or lent.nbytes > lease.slot_bytes:
            room = lease.slot_bytes if lease is not None else 0
            what = f"slot {command.slot} lends {lent.nbytes} bytes, for which there is staging of {room}"
            self._moved(command, ProtocolError(f"{connection.peer_address}: {what}"))
            return
        staged = lease.slot(command.slot, lent.nbytes)
        future = connection.borrow(lent, Lent(np.array([staged.address], np.uint64), staged.nbytes))

        def read(future: asyncio.Future[None]) -> None:
            error = _failure(future)
            live = self._live(command)
            if error is not None or live is None:
                self._moved(command, error)
            else:
                session = live[0]
                self._scatter(session, command, self._plan(session, command), staged, lease)

        if future.done():
            read(future)
        else:
            future.add_done_callback(read)

    def _scatter(
        self,
        session: ReceiveStream,
        command: Move,
        ids: BlockPlan,
        data: ByteView | Staged,
        lease: StagingLease | None = None,
    ) -> None:
        """`_land` on a GPU: begun here, and over with the last layer's completion."""
        landing = _Landing(command, data, lease, command.layers)
        size = data.nbytes // command.layers
        writing = self._writing.setdefault(command.stream, _Writing(command.link))
        writing.scatters += 1  # this call, so that nothing that completes at once ends the stream in the middle
        try:
            if not isinstance(data, Staged):
                self._pool.pin(data)
            for n, layer in enumerate(_layers(command)):
                if isinstance(data, Staged):
                    part = data.part(n * size, size)
                    copy = self._pool.unpack_staged(layer, ids, part, after=session.idle_after)
                else:
                    part = data[n * size : (n + 1) * size]
                    copy = self._pool.unpack_async(layer, ids, part, after=session.idle_after)
                writing.scatters += 1
                if lease is not None:
                    lease.begin()
                copy.add_done_callback(self._scattered(landing, session, layer))
        except KVStreamError as error:
            self._moved(command, landing.error or error)
            landing.left = 0
        writing.scatters -= 1
        self._written(command.stream)

    def _scattered(self, landing: _Landing, session: ReceiveStream, layer: int) -> Callable[[Completion], None]:
        command = landing.command

        def scattered(copy: Completion) -> None:
            error = copy.error()
            landing.error = landing.error or error
            if landing.lease is not None:
                landing.lease.over()
            if error is None:
                session.layer_events[layer] = copy.event
            landing.left -= 1
            if landing.left == 0:
                live = self._live(command)
                failure = landing.error
                if failure is None and live is not None:
                    failure = self._count(*live, command, landing.data.nbytes)
                self._moved(command, failure)
            self._writing[command.stream].scatters -= 1
            self._written(command.stream)

        return scattered

    def _written(self, stream: int) -> None:
        """Something on its way into the stream's blocks is there: after the last of it its user may hear of its end."""
        writing = self._writing[stream]
        if writing.reads == 0 and writing.limit is not None:
            writing.limit.cancel()
            writing.limit = None
        if writing.reads or writing.scatters:
            return
        del self._writing[stream]
        if writing.end is not None:
            self._streams.end(writing.end)


def _layers(command: Stage | Move) -> range:
    return range(command.layer, command.layer + command.layers)


def _checksum(data: ByteView) -> int:
    """XXH3 (64 bits), cut to what the wire carries; never 0, which means none there."""
    return (xxhash.xxh3_64_intdigest(data.data) & (2**63 - 1)) or 1


def _failure(future: asyncio.Future[Any]) -> KVStreamError | None:
    """What went wrong with a transport's operation, as an error of ours. Anything else is a bug and surfaces."""
    if future.cancelled():
        return Cancelled("the operation was cancelled")
    error = future.exception()
    if error is None or isinstance(error, KVStreamError):
        return error
    raise error
