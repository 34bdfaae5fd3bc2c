"""The transport contract between simulated processes: the lanes `shared`, `get` and `put`, with what makes them hard.

Owns connections, their staging memory and every byte under way. Aborting stops callbacks, not bytes: a write that was
under way lands later, also when a new connection is up, until the receiver's fence; a read goes on until its final
status. Copies happen in two halves, so that what changes meanwhile is torn. It must never be kinder than UCX: messages
are lost with their connection, losses are told late, and to the two ends at different times.
"""

from __future__ import annotations

import asyncio
import ctypes
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstream.errors import Cancelled, ConfigError, Corrupted, KVStreamError, PeerLost, ProtocolError, Recalled, Refused
from kvstream.sim.loop import Process
from kvstream.sim.network import Channel, Network, Node
from kvstream.sim.rng import derive
from kvstream.transport._mailbox import Mailbox
from kvstream.transport.base import (
    LANES,
    MAX_MESSAGE,
    MIN_LENT_RUN,
    ByteView,
    Connection,
    Lane,
    Lent,
    ListenAddress,
    StagingBudget,
    Transport,
)

__all__ = ["Guard", "SimConnection", "SimTransport", "Switchboard", "Tap"]

_BACKLOG = 4096
_HUNG = 0.05
"""Seconds after which a runtime may close a connection for a read that does not end: the least `end_wait` there is."""
_T = TypeVar("_T")
_Future = asyncio.Future[int] | asyncio.Future[ByteView | Lent] | asyncio.Future[None]

Tap = Callable[[Node, Node, bytes, bool], None]
"""Called for each control message: from, to, what, and whether it has arrived (else it has just been sent)."""

Guard = Callable[[str, Lent, str, Lent], None]
"""Called before borrowed bytes are copied: the source's process, what is lent, the destination's process, where to."""


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sim-offer"):
    link: int
    lanes: tuple[Lane, ...]
    slots: int
    slot_bytes: int
    host: str
    reads: bool


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sim-answer"):
    link: int
    lane: Lane
    lends: bool


@dataclass(frozen=True, slots=True)
class _Loan(Lent):
    """What a read of a slot on the lane `get` has found to be lent by it."""

    slot: int


class _Staging:
    """Slots, what each holds (generation; 0: nothing), and the loans that some of them stand for."""

    __slots__ = ("generations", "loans", "memory")

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.memory: ByteView = np.zeros((slots, slot_bytes), np.uint8)
        self.generations = [0] * slots
        self.loans: list[Lent | None] = [None] * slots

    def retire(self) -> None:
        self.generations = [0] * len(self.generations)


class Switchboard:
    """Who listens where, every connection there is, and the ways to break them."""

    def __init__(self, network: Network, seed: int, *, guard: Guard | None = None) -> None:
        self.network = network
        self.seed = seed
        self.guard = guard
        self.tap: Tap | None = None
        self.hung_reads: list[tuple[float, frozenset[str]]] = []
        """When a connection was closed, and between whom, on which a read of what was lent did not end in time."""
        self.links: dict[int, _Link] = {}
        """Connections of which at least one end is not fenced."""
        self._listeners: dict[tuple[str, int], SimTransport] = {}
        self._next_port = 1
        self._count = 0

    def listen(self, transport: SimTransport, port: int) -> int:
        host = transport.node.host
        while port == 0:
            if (host, self._next_port) not in self._listeners:
                port = self._next_port
            self._next_port += 1
        if (host, port) in self._listeners:
            raise ConfigError("port", f"{port} is taken on simulated host {host}; choose another, or 0")
        self._listeners[host, port] = transport
        return port

    def unlisten(self, transport: SimTransport) -> None:
        key = (transport.node.host, transport.port)
        if self._listeners.get(key) is transport:
            del self._listeners[key]

    def find(self, address: ListenAddress) -> SimTransport | None:
        return self._listeners.get((address.host, address.port))

    def connect(self, dialer: SimTransport, listener: SimTransport) -> _Link:
        self._count += 1
        link = self.links[self._count] = _Link(self._count, dialer, listener, self.seed)
        return link

    def break_link(self, number: int) -> None:
        """Lose a connection in the network, with all that is under way on it. Each end is told at a time of its own."""
        link = self.links.get(number)
        if link is None:
            return
        for end in link.ends:
            end.channel.cut()
            delay = link.rng.choice((0.0, link.rng.uniform(0, 0.01), link.rng.uniform(0, 1.0)))
            self.network.after(delay, partial(_break, end))

    def kill(self, node: Node) -> None:
        """The process is gone: nobody listens there, and its peers are told by the kernel, if that can reach them."""
        for key in [key for key, transport in self._listeners.items() if transport.node is node]:
            del self._listeners[key]
        for link in list(self.links.values()):
            for end in link.ends:
                if end.node is node:
                    end.channel.cut_short()
                    end.channel.put(partial(_break, end.peer), extra=link.rng.uniform(0.003, 0.008))


def _break(end: SimConnection) -> None:
    end.end(PeerLost(f"{end.peer_address}: the connection was reset"), discard=False, tell=False)


class _Link:
    """The two ends of one connection."""

    __slots__ = ("destination", "number", "rng", "source")

    def __init__(self, number: int, dialer: SimTransport, listener: SimTransport, seed: int) -> None:
        self.number = number
        self.rng = derive(seed, "connection", dialer.node.name, listener.node.name, dialer.dials)
        self.source = SimConnection(self, dialer, listener, dialed=True)
        self.destination = SimConnection(self, listener, dialer, dialed=False)

    @property
    def ends(self) -> tuple[SimConnection, SimConnection]:
        return self.source, self.destination


class SimConnection(Connection):
    """One end of a simulated connection. Made by SimTransport."""

    def __init__(self, link: _Link, owner: SimTransport, other: SimTransport, *, dialed: bool) -> None:
        self.link = link
        self.dialed = dialed
        self.peer_address = f"{other.node.host}:{other.port}"
        self.lane: Lane | None = None
        self.slots = 0
        self.slot_bytes = 0
        self.lost = False
        self.fenced = False
        self.node = owner.node
        self._owner = owner
        self._network = owner.board.network
        self._rng = link.rng
        self._loop: Process = owner.node.process
        self._mailbox = Mailbox(self._loop, _BACKLOG)
        self.channel = Channel(self._network, owner.node, other.node, link.rng)
        self._outbox: list[bytes] = []
        self._flush_due = False
        self._offered: _Offer | None = None
        self.staging: _Staging | None = None
        self._taken = 0
        self._generation = 0
        self._pending: dict[_Future, None] = {}
        self._operations: dict[_Operation, None] = {}
        self._moving: dict[int, _Operation] = {}
        self._settled = asyncio.Event()
        self._fencing: asyncio.Task[None] | None = None
        self._at_leisure = link.rng.random() < 0.5
        """Reads of the peer's memory take time, and the loop turns meanwhile."""

    @property
    def peer(self) -> SimConnection:
        return self.link.destination if self.dialed else self.link.source

    def describe(self) -> str:
        return f"{self.lane or 'no lane yet'}, simulated"

    # -- control messages

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[Exception], None]) -> None:
        self._mailbox.start(on_message, on_lost)

    def send(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"control message of {len(message)} bytes; at most {MAX_MESSAGE}")
        if self.lost:
            return
        if len(self._outbox) + (len(self.channel) if self.channel.stuck else 0) >= _BACKLOG:
            self.end(PeerLost(f"{self.peer_address} does not read: {_BACKLOG} messages are unsent"), discard=False)
            return
        self._outbox.append(bytes(message))
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        outbox, self._outbox = self._outbox, []
        tap = self._owner.board.tap
        for message in outbox:
            self.channel.put(partial(self.peer.arrive, message))
            if tap is not None:
                tap(self.node, self.peer.node, message, False)

    def arrive(self, message: bytes) -> None:
        """For the network: a message is here."""
        if self.lost or not self._loop.alive:
            return
        self._network.observe("message", self.link.number, self.dialed, len(message), zlib.crc32(message))
        if self._owner.board.tap is not None:
            self._owner.board.tap(self.peer.node, self.node, message, True)
        if not self._mailbox.put(message):
            self.end(ProtocolError(f"{self.peer_address} sent {_BACKLOG} messages unread"), discard=False)

    # -- lanes

    def offer_lanes(self, allowed: tuple[Lane, ...], slots: int, slot_bytes: int) -> bytes:
        if not self.dialed or self._offered is not None:
            raise RuntimeError("offer_lanes belongs to the source, once per connection")
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes")
        lanes: tuple[Lane, ...] = tuple(lane for lane in LANES if lane in allowed)
        if not lanes:
            raise ConfigError("lanes", f"none of {LANES} is allowed; name at least one")
        self._check_open()
        self._take_budget(slots * slot_bytes)
        self.staging = _Staging(slots, slot_bytes)
        offer = self._offered = _Offer(
            self.link.number, lanes, slots, slot_bytes, self.node.host, self._owner.reads_memory
        )
        return msgspec.msgpack.encode(offer)

    def accept_lane(self, offer: bytes, allowed: tuple[Lane, ...], *, borrows: bool = True) -> bytes:
        if self.dialed or self.lane is not None:
            raise RuntimeError("accept_lane belongs to the destination, once per connection")
        described = _decode(offer, _Offer, self.peer_address)
        self._check_open()
        reasons: dict[Lane, str] = {}
        local = described.host == self.node.host
        reads = described.reads and self._owner.reads_memory
        for lane in LANES:
            if lane not in allowed:
                reasons[lane] = "not allowed here"
            elif lane not in described.lanes:
                reasons[lane] = "not offered by the peer"
            elif lane == "shared" and not local:
                reasons[lane] = "the peer is on another host"
            elif lane == "get" and not reads:
                reasons[lane] = "the peer's memory can't be read"
            else:
                if lane != "shared":
                    self._take_budget(described.slots * described.slot_bytes)
                    self.staging = _Staging(described.slots, described.slot_bytes)
                answer = _Answer(self.link.number, lane, borrows and lane != "put" and reads)
                self._set_lane(answer, described)
                return msgspec.msgpack.encode(answer)
        why = "; ".join(f"{lane}: {reason}" for lane, reason in reasons.items())
        raise ConfigError("lanes", f"no lane works to {self.peer_address}: {why}")

    def open_lane(self, answer: bytes) -> None:
        if self._offered is None or self.lane is not None:
            raise RuntimeError("open_lane belongs to the source, once per connection, after offer_lanes")
        decoded = _decode(answer, _Answer, self.peer_address)
        self._check_open()
        if decoded.link != self.link.number or decoded.lane not in self._offered.lanes:
            raise ProtocolError(f"{self.peer_address}: its lane answer is not one to our offer")
        self._set_lane(decoded, self._offered)

    def _set_lane(self, answer: _Answer, offer: _Offer) -> None:
        self.lane = answer.lane
        self.lends = answer.lends
        self.slots = offer.slots
        self.slot_bytes = offer.slot_bytes
        self.lent_runs = self.slot_bytes // 8 if self.lends else 0

    def _take_budget(self, nbytes: int) -> None:
        budget = self._owner.budget
        if not budget.take(nbytes):
            raise Refused(f"staging memory: {nbytes} bytes wanted, {budget.limit - budget.used} of {budget.limit} left")
        self._taken = nbytes

    def _check_open(self) -> None:
        if self._mailbox.error is not None:
            raise PeerLost(str(self._mailbox.error))

    # -- bytes, source side

    def write_view(self, slot: int) -> ByteView:
        staging = self._own_slot(slot)
        staging.generations[slot] = 0
        staging.loans[slot] = None
        return staging.memory[slot]

    def publish(self, slot: int, nbytes: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        if self._mailbox.error is not None:
            _fail_quietly(future, PeerLost(str(self._mailbox.error)))
            return future
        staging = self._own_slot(slot)
        if not 0 <= nbytes <= self.slot_bytes:
            raise ValueError(f"publish of {nbytes} bytes from a slot of {self.slot_bytes}")
        self._generation += 1
        staging.generations[slot] = self._generation
        self._network.observe("publish", self.link.number, slot, self._generation, nbytes)
        if self.lane == "put":
            self._pending[future] = None
            _Write(self, slot, self._generation, staging.memory[slot, :nbytes], future).start()
        else:
            future.set_result(self._generation)
        return future

    def withdraw(self, slot: int) -> None:
        operation = self._moving.get(slot)
        if isinstance(operation, _Write):
            operation.withdraw()

    def lend(self, slot: int, lent: Lent) -> int:
        staging = self._own_slot(slot)
        if not self.lends or lent.run_bytes < MIN_LENT_RUN or 8 * len(lent.addresses) > self.slot_bytes:
            raise ValueError(
                f"lending {len(lent.addresses)} runs of {lent.run_bytes} bytes by a slot of {self.slot_bytes} "
                f"(lends: {self.lends})"
            )
        self._generation += 1
        staging.generations[slot] = self._generation
        staging.loans[slot] = Lent(lent.addresses.copy(), lent.run_bytes)
        self._network.observe("lend", self.link.number, slot, self._generation, lent.nbytes)
        return self._generation

    def recall(self, slot: int, generation: int) -> None:
        if self.staging is not None and self.staging.generations[slot] == generation:
            self.staging.generations[slot] = 0

    def _own_slot(self, slot: int) -> _Staging:
        self._check_open()
        if not self.dialed or self.lane is None or self.staging is None:
            raise RuntimeError("slots are written by the source, after open_lane")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of {self.slots}")
        if slot in self._moving:
            raise RuntimeError(f"slot {slot} is still being sent; only its publish, or the fence, ends that")
        return self.staging

    # -- bytes, destination side

    def take(self, slot: int, generation: int, nbytes: int) -> asyncio.Future[ByteView | Lent]:
        future: asyncio.Future[ByteView | Lent] = self._loop.create_future()
        if self._mailbox.error is not None:
            _fail_quietly(future, PeerLost(str(self._mailbox.error)))
        elif self.dialed or not (0 <= slot < self.slots and nbytes >= 0):
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range"))
        elif self.lane == "shared":
            self._take_shared(future, slot, generation, nbytes)
        elif self.lane == "get":
            self._get(future, slot, generation, nbytes)
        elif nbytes > self.slot_bytes:
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range"))
        else:
            self.finish_take(future, slot, generation, nbytes)
        return future

    def _take_shared(self, future: asyncio.Future[ByteView | Lent], slot: int, generation: int, nbytes: int) -> None:
        theirs = self.peer.staging
        if theirs is None:
            future.set_exception(Recalled(_stale(self.peer_address, slot, generation)))
        elif (lent := theirs.loans[slot]) is not None:
            if generation <= 0 or theirs.generations[slot] != generation:
                future.set_exception(Recalled(_stale(self.peer_address, slot, generation)))
            elif lent.nbytes != nbytes:
                future.set_exception(ProtocolError(f"{self.peer_address}: {lent.nbytes} bytes lent, not {nbytes}"))
            elif self._at_leisure:
                self._later(future, lambda: Lent(lent.addresses.copy(), lent.run_bytes))
            else:
                future.set_result(Lent(lent.addresses.copy(), lent.run_bytes))
        elif nbytes > self.slot_bytes:
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range"))
        elif generation <= 0 or theirs.generations[slot] != generation:
            future.set_exception(Recalled(_stale(self.peer_address, slot, generation)))
        elif self._at_leisure:
            buffer, half = np.empty(nbytes, np.uint8), nbytes // 2
            buffer[:half] = theirs.memory[slot, :half]

            def rest() -> ByteView:
                buffer[half:] = theirs.memory[slot, half:nbytes]
                return _read_only(buffer)

            self._later(future, rest)
        else:
            future.set_result(_read_only(theirs.memory[slot, :nbytes]))

    def _later(self, future: asyncio.Future[ByteView | Lent], finish: Callable[[], ByteView | Lent]) -> None:
        """Finish a read of shared memory a little later, when this process gets to it."""
        self._pending[future] = None

        def end() -> None:
            self._pending.pop(future, None)
            if not future.done():
                future.set_result(finish())

        self._loop.call_later(self._rng.expovariate(1 / self._network.conditions.leisure), end)

    def _get(self, future: asyncio.Future[ByteView | Lent], slot: int, generation: int, nbytes: int) -> None:
        if self.staging is None or slot in self._moving:
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} was announced while it is read"))
            return
        self._pending[future] = None
        _Read(self, slot, generation, nbytes, future).start()

    def finish_take(self, future: asyncio.Future[ByteView | Lent], slot: int, generation: int, nbytes: int) -> None:
        staging = self.staging
        if staging is None or generation <= 0 or staging.generations[slot] != generation:
            future.set_exception(Recalled(_stale(self.peer_address, slot, generation)))
        elif (lent := staging.loans[slot]) is not None and lent.nbytes == nbytes:
            future.set_result(_Loan(lent.addresses, lent.run_bytes, slot))
        elif lent is not None or nbytes > self.slot_bytes:
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range"))
        else:
            future.set_result(_read_only(staging.memory[slot, :nbytes]))

    def borrow(self, lent: Lent, local: Lent) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        try:
            if lent.nbytes != local.nbytes or max(lent.run_bytes, local.run_bytes) % min(
                lent.run_bytes, local.run_bytes
            ):
                raise Corrupted(f"{self.peer_address}: {lent} is lent, {local} is wanted")
            if isinstance(lent, _Loan):
                self._begin_borrow(future, lent, local)
            else:
                self._borrow(lent, local)
                future.set_result(None)
        except KVStreamError as error:
            _fail_quietly(future, error)
        return future

    def _begin_borrow(self, future: asyncio.Future[None], loan: _Loan, local: Lent) -> None:
        """Not one of the futures that a loss ends at once: until its final status the memory may be written."""
        if self.lost or self.staging is None:
            raise PeerLost(f"{self.peer_address}: the connection is closed")
        if loan.slot in self._moving:
            raise ProtocolError(f"{self.peer_address}: slot {loan.slot} was announced while it is read")
        _Borrow(self, loan, local, future).start()

    def _borrow(self, lent: Lent, local: Lent) -> None:
        if self.fenced:
            raise Corrupted(f"{self.peer_address}: what it lent can't be read: the connection is closed")
        if not self.peer.node.process.alive:
            self.end(PeerLost(f"{self.peer_address}: the process has ended"), discard=False, tell=False)
            raise PeerLost(f"{self.peer_address}: the process has ended")
        self.copy_lent(lent, local)

    def copy_lent(self, lent: Lent, local: Lent) -> None:
        """Bytes move from the peer's memory into this process's, now."""
        if self._owner.board.guard is not None:
            self._owner.board.guard(self.peer.node.name, lent, self.node.name, local)
        _copy(lent, local)

    def check(self, slot: int, generation: int) -> bool:
        holder = self.peer.staging if self.lane == "shared" else self.staging
        return (
            holder is not None
            and not self.fenced
            and 0 <= slot < self.slots
            and generation > 0
            and holder.generations[slot] == generation
        )

    # -- operations under way; for _Write, _Read and _Borrow

    def note_hung(self, since: float) -> None:
        """The connection is closed while a read is under way that began then: perhaps for that reason."""
        board, now = self._owner.board, self._network.world.now
        if now - since >= _HUNG:
            board.hung_reads.append((now, frozenset((self.node.label, self.peer.node.label))))

    @property
    def operations(self) -> int:
        """How many have no final status yet."""
        return len(self._operations)

    def began(self, operation: _Operation, slot: int) -> None:
        self._operations[operation] = None
        self._moving[slot] = operation

    def over(self, operation: _Operation, slot: int, future: _Future) -> None:
        """The operation has its final status."""
        self._operations.pop(operation, None)
        if self._moving.get(slot) is operation:
            del self._moving[slot]
        self._pending.pop(future, None)
        self._settled.set()

    # -- end

    def close(self) -> None:
        self.end(PeerLost(f"connection to {self.peer_address} was closed here"), discard=True)

    def end(self, error: KVStreamError, *, discard: bool, tell: bool = True) -> None:
        """Lose this end; with `tell` the other one hears of it, after some or all of what was sent before."""
        if not self._loop.alive or not self._mailbox.lose(error, discard=discard):
            return
        self.lost = True
        self._network.observe("lost", self.link.number, self.dialed, error.code)
        self._outbox.clear()
        if self.dialed and self.staging is not None:
            # What is lent ends with the connection, at once: its memory is the user's again when this is told.
            for operation in list(self._operations):
                operation.snapshot()
            self.staging.retire()
        pending, self._pending = self._pending, {}
        for future in pending:
            _fail_quietly(future, PeerLost(str(error)))
        for operation in list(self._operations):
            operation.abort()
        if tell:
            if self._rng.random() < 0.5:
                self.channel.cut_short()
            self.channel.put(partial(self.peer.hung_up))

    def hung_up(self) -> None:
        """For the network: the other end has closed."""
        self.end(PeerLost(f"{self.peer_address} closed the connection"), discard=False, tell=False)

    async def fence(self) -> None:
        # wait() leaves the task alone when this call is cancelled.
        await asyncio.wait((self.abandon(),))

    def abandon(self) -> asyncio.Task[None]:
        """Close, and reach the fence in the background."""
        self.close()
        if self._fencing is None:
            self._fencing = self._loop.create_task(self._reach_fence(), name=f"fence {self.peer_address}")
        return self._fencing

    async def _reach_fence(self) -> None:
        while self._operations:
            self._settled.clear()
            await self._settled.wait()
        await asyncio.sleep(self._rng.expovariate(1 / 0.5e-3))
        self.fenced = True
        if self.staging is not None:
            self.staging.retire()
        self.staging = None
        taken, self._taken = self._taken, 0
        self._owner.budget.give_back(taken)
        self._owner.drop(self)
        if self.peer.fenced or not self.peer.node.process.alive:
            self._owner.board.links.pop(self.link.number, None)
        self._network.observe("fenced", self.link.number, self.dialed)


class _Write:
    """A put into the peer's staging: header and first half, second half, then the answer that all was flushed."""

    def __init__(
        self, connection: SimConnection, slot: int, generation: int, data: ByteView, future: asyncio.Future[int]
    ) -> None:
        self._from = connection
        self._to = connection.peer
        self._slot = slot
        self._generation = generation
        self._data = data
        self._future = future
        self._network = connection.channel.network
        self._rng = connection.link.rng
        self._by_kernel = self._rng.random() < 0.5
        """The kernel has it all and sends it whatever becomes of the process; else the process has to run for it."""
        self._aborted = False
        self._begun = False
        self._withdrawn = False

    def start(self) -> None:
        self._from.began(self, self._slot)
        source, target = self._from.node, self._to.node
        first = self._network.latency(source, target, self._rng)
        whole = self._network.transfer(source, target, self._data.nbytes)
        self._network.after(first, partial(self._cross, self._head, whole))

    def snapshot(self) -> None:
        """The slot is about to be anybody's: what is still to land is in the hands of the kernel."""
        self._data = self._data.copy()

    def abort(self) -> None:
        """The connection is closed: the final status comes soon. The bytes, should they land, may come later."""
        if not self._aborted:
            self._aborted = True
            self._network.after(self._rng.uniform(0, 0.003), partial(self._from.over, self, self._slot, self._future))

    def withdraw(self) -> None:
        """Nobody will take it: what the kernel does not have yet need not go."""
        if self._by_kernel or self._aborted:
            return
        self._withdrawn = True
        if not self._begun:
            self._aborted = True
            self._from.over(self, self._slot, self._future)
            self._fail_withdrawn()

    def _fail_withdrawn(self) -> None:
        _fail_quietly(self._future, Cancelled(f"{self._from.peer_address}: slot {self._slot} was withdrawn"))

    def _cross(self, step: Callable[[float], None], value: float) -> None:
        go_on = partial(step, value)
        process = self._from.node.process
        ready = go_on if self._by_kernel else partial(process.call_soon, go_on)
        self._network.cross(self._from.node, self._to.node, ready)

    def _head(self, whole: float) -> None:
        if self._withdrawn and not self._begun:
            return
        self._begun = True
        self._land(slice(0, self._data.nbytes // 2), stamp=True)
        self._network.after(whole, partial(self._cross, self._tail, 0.0))

    def _tail(self, _: float) -> None:
        if not self._withdrawn:
            self._land(slice(self._data.nbytes // 2, self._data.nbytes), stamp=False)
        delay = self._network.latency(self._to.node, self._from.node, self._rng)
        self._network.after(delay, partial(self._network.cross, self._to.node, self._from.node, self._answer))

    def _land(self, part: slice, *, stamp: bool) -> None:
        staging = self._to.staging
        if self._to.fenced or staging is None or not self._to.node.process.alive:
            return
        if stamp:
            staging.generations[self._slot] = self._generation
        staging.memory[self._slot, part] = self._data[part]
        self._network.observe("landed", self._from.link.number, self._slot, self._generation, stamp, self._to.lost)

    def _answer(self) -> None:
        self._from.node.process.call_soon(self._flushed)

    def _flushed(self) -> None:
        if self._aborted:
            return
        self._from.over(self, self._slot, self._future)
        if self._withdrawn:
            self._fail_withdrawn()
        elif not self._future.done():
            self._future.set_result(self._generation)


class _Read:
    """A get out of the peer's staging: header and first half, second half, the header once more."""

    def __init__(
        self,
        connection: SimConnection,
        slot: int,
        generation: int,
        nbytes: int,
        future: asyncio.Future[ByteView | Lent],
    ) -> None:
        self._to = connection
        self._from = connection.peer
        self._slot = slot
        self._generation = generation
        self._nbytes = nbytes
        self._future = future
        self._network = connection.channel.network
        self._rng = connection.link.rng
        self._aborted = False

    def start(self) -> None:
        self._to.began(self, self._slot)
        delay = 2 * self._network.latency(self._to.node, self._from.node, self._rng)
        delay += self._rng.expovariate(1 / self._network.conditions.leisure)
        self._network.after(delay, partial(self._cross, self._head))

    def snapshot(self) -> None:
        """What is read is the peer's memory, not ours."""

    def abort(self) -> None:
        """The connection is closed: bytes may come in until the final status, which comes soon."""
        if not self._aborted:
            self._aborted = True
            self._network.after(self._rng.uniform(0, 0.003), partial(self._to.over, self, self._slot, self._future))

    def _cross(self, step: Callable[[], None]) -> None:
        self._network.cross(self._from.node, self._to.node, step)

    def _head(self) -> None:
        if self._copy(slice(0, self._nbytes // 2)):
            delay = self._network.transfer(self._from.node, self._to.node, self._nbytes)
            self._network.after(delay, partial(self._cross, self._tail))

    def _tail(self) -> None:
        if self._copy(slice(self._nbytes // 2, self._nbytes)):
            self._to.node.process.call_soon(self._got)

    def _copy(self, part: slice) -> bool:
        """One half; False when the operation is over."""
        own, theirs = self._to.staging, self._from.staging
        if own is None:
            return False
        if theirs is None or not self._from.node.process.alive:
            self._to.end(PeerLost(f"{self._to.peer_address}: the read failed"), discard=False, tell=False)
            return False
        size = own.memory.shape[1]
        part = slice(min(part.start, size), min(part.stop, size))
        own.memory[self._slot, part] = theirs.memory[self._slot, part]
        own.generations[self._slot] = theirs.generations[self._slot]
        own.loans[self._slot] = theirs.loans[self._slot]
        return True

    def _got(self) -> None:
        if self._aborted:
            return
        self._to.over(self, self._slot, self._future)
        if not self._future.done():
            self._to.finish_take(self._future, self._slot, self._generation, self._nbytes)


class _Borrow:
    """Gets out of the peer's own memory into ours: half of the runs, the other half, then the slot's header."""

    def __init__(self, connection: SimConnection, loan: _Loan, local: Lent, future: asyncio.Future[None]) -> None:
        self._to = connection
        self._from = connection.peer
        self._slot = loan.slot
        self._future = future
        self._network = connection.channel.network
        self._rng = connection.link.rng
        run = min(loan.run_bytes, local.run_bytes)
        theirs, ours = _cut(loan, run), _cut(local, run)
        middle = len(theirs) // 2
        self._halves = [
            (Lent(theirs[part], run), Lent(ours[part], run)) for part in (slice(0, middle), slice(middle, None))
        ]
        self._over = False
        self._aborted = False
        self._since = self._network.world.now

    def start(self) -> None:
        self._to.began(self, self._slot)
        delay = 2 * self._network.latency(self._to.node, self._from.node, self._rng)
        delay += self._rng.expovariate(1 / self._network.conditions.leisure)
        self._network.after(delay, partial(self._cross, self._head))

    def snapshot(self) -> None:
        """What is read is the peer's memory, not ours."""

    def abort(self) -> None:
        """The connection is closed: bytes may come in until the final status, which comes soon."""
        if not self._aborted:
            self._aborted = True
            self._to.note_hung(self._since)
            self._network.after(self._rng.uniform(0, 0.003), self._to_process(self._ended))

    def _to_process(self, call: Callable[[], None]) -> Callable[[], object]:
        return partial(self._to.node.process.call_soon, call)

    def _cross(self, step: Callable[[], None]) -> None:
        self._network.cross(self._from.node, self._to.node, step)

    def _head(self) -> None:
        if self._copy(0):
            delay = self._network.transfer(self._from.node, self._to.node, 2 * self._halves[1][0].nbytes)
            self._network.after(delay, partial(self._cross, self._tail))

    def _tail(self) -> None:
        if self._copy(1):
            delay = 2 * self._network.latency(self._to.node, self._from.node, self._rng)
            self._network.after(delay, partial(self._cross, self._header))

    def _copy(self, half: int) -> bool:
        """One half; False when the operation is over."""
        if self._over or not self._to.node.process.alive:
            return False
        if not self._from.node.process.alive:
            self._to.end(PeerLost(f"{self._to.peer_address}: the read failed"), discard=False, tell=False)
            return False
        self._to.copy_lent(*self._halves[half])
        return True

    def _header(self) -> None:
        own, theirs = self._to.staging, self._from.staging
        if own is not None:
            own.generations[self._slot] = theirs.generations[self._slot] if theirs is not None else 0
        self._to_process(self._ended)()

    def _ended(self) -> None:
        """The final status."""
        if self._over:
            return
        self._over = True
        self._to.over(self, self._slot, self._future)
        if self._aborted:
            _fail_quietly(self._future, PeerLost(f"{self._to.peer_address}: the connection was lost"))
        else:
            self._future.set_result(None)


_Operation = _Write | _Read | _Borrow


class _Dial:
    """One attempt to connect, on its way there and back."""

    def __init__(self, dialer: SimTransport, address: ListenAddress, future: asyncio.Future[SimConnection]) -> None:
        self._dialer = dialer
        self._address = address
        self._future = future
        self._network = dialer.board.network
        self._rng = derive(dialer.board.seed, "dial", dialer.node.name, dialer.dials)

    def start(self) -> None:
        listener = self._dialer.board.find(self._address)
        if listener is None:
            self._network.after(2 * self._network.conditions.latency, partial(self._answer, self._refused))
            return
        node = listener.node
        delay = self._network.latency(self._dialer.node, node, self._rng)
        self._network.after(delay, partial(self._network.cross, self._dialer.node, node, self._knock))

    def _knock(self) -> None:
        listener = self._dialer.board.find(self._address)
        if listener is None:
            self._answer(self._refused)
        else:
            # A stopped process answers when it goes on.
            listener.node.process.call_soon(self._accepted, listener)

    def _accepted(self, listener: SimTransport) -> None:
        link = listener.accept(self._dialer)
        outcome = self._refused if link is None else partial(self._connected, link)
        delay = self._network.latency(listener.node, self._dialer.node, self._rng)
        back = partial(self._answer, outcome)
        self._network.after(delay, partial(self._network.cross, listener.node, self._dialer.node, back))

    def _answer(self, outcome: Callable[[], None]) -> None:
        self._dialer.node.process.call_soon(outcome)

    def _refused(self) -> None:
        if not self._future.done():
            where = f"{self._address.host}:{self._address.port}"
            self._future.set_exception(PeerLost(f"{where}: nobody listens there"))

    def _connected(self, link: _Link) -> None:
        if self._future.done():
            link.source.abandon()
        elif link.source.lost:
            link.source.abandon()
            self._future.set_exception(PeerLost(f"{link.source.peer_address}: lost while it was dialed"))
        else:
            self._future.set_result(link.source)


class SimTransport(Transport):
    """Listener and dialer of one simulated process. `reads_memory`: whether it has the right to read its peers'."""

    name = "sim"

    def __init__(
        self, board: Switchboard, node: Node, *, budget: StagingBudget, port: int = 0, reads_memory: bool = True
    ) -> None:
        self.board = board
        self.node = node
        self.budget = budget
        self.port = port
        self.reads_memory = reads_memory
        self.dials = 0
        self._on_connection: Callable[[Connection], None] | None = None
        self._connections: dict[SimConnection, None] = {}
        self._closed = False

    async def start(self, on_connection: Callable[[Connection], None]) -> ListenAddress:
        if self._closed or self._on_connection is not None:
            raise RuntimeError("a transport starts once")
        self.port = self.board.listen(self, self.port)
        self._on_connection = on_connection
        host = self.node.host
        return ListenAddress(transport=self.name, host=host, port=self.port, host_id=host, scope=host)

    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        if self._closed:
            raise PeerLost("this transport is closed")
        if address.transport != self.name:
            raise ConfigError("transport", f"the peer speaks {address.transport!r}, this worker {self.name!r}")
        if address.scope == "loopback" and address.host_id != self.node.host:
            raise ConfigError(
                "data_interface",
                f"{address.host}:{address.port} listens on loopback only; start it with --data-interface",
            )
        self.dials += 1
        future: asyncio.Future[SimConnection] = self.node.process.create_future()
        _Dial(self, address, future).start()
        try:
            connection = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                future.result().abandon()
            raise
        if self._closed:
            connection.abandon()
            raise PeerLost("this transport is closed")
        return connection

    def accept(self, dialer: SimTransport) -> _Link | None:
        """For the network, in this process: a peer has dialed."""
        if self._on_connection is None or self._closed:
            return None
        link = self.board.connect(dialer, self)
        self._connections[link.destination] = None
        dialer.adopt(link.source)
        self._on_connection(link.destination)
        return link

    @property
    def unfenced(self) -> int:
        """Connections that are lost and have not reached their fence."""
        return sum(connection.lost for connection in self._connections)

    def adopt(self, connection: SimConnection) -> None:
        """A connection of ours to look after until its fence."""
        self._connections[connection] = None

    def drop(self, connection: SimConnection) -> None:
        """It is fenced."""
        self._connections.pop(connection, None)

    async def aclose(self) -> None:
        self._closed = True
        self.board.unlisten(self)
        fences = [connection.abandon() for connection in list(self._connections)]
        if fences:
            await asyncio.wait(fences)


def _decode(data: bytes, kind: type[_T], peer: str) -> _T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"{peer}: what it says about lanes is not understood: {error}") from error


def _copy(lent: Lent, local: Lent) -> None:
    """Copy runs to runs, all of them in this very process."""
    piece = min(lent.run_bytes, local.run_bytes)
    sources, targets = _cut(lent, piece).tolist(), _cut(local, piece).tolist()
    for target, source in zip(targets, sources, strict=True):
        ctypes.memmove(target, source, piece)


def _cut(runs: Lent, piece: int) -> npt.NDArray[np.uint64]:
    """Where the pieces of that many bytes begin."""
    return (runs.addresses[:, None] + np.arange(0, runs.run_bytes, piece, dtype=np.uint64)).ravel()


def _read_only(view: ByteView) -> ByteView:
    view = view[:]
    view.flags.writeable = False
    return view


def _fail_quietly(future: _Future, error: KVStreamError) -> None:
    """Fail a future that perhaps nobody will look at."""
    if not future.done():
        future.set_exception(error)
        future.exception()


def _stale(peer: str, slot: int, generation: int) -> str:
    return f"{peer}: slot {slot} does not hold generation {generation} (any more)"
