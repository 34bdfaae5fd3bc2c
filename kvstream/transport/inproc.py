"""The transport contract in one process, without a network: for simulation, examples and tests of what is above.

Owns the links between transports of one `InprocNetwork` and the hooks that break or freeze them. It must never use a
clock, a thread or a socket, and never call the user but from the loop, so that a run is repeatable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import numpy as np

from kvstream.errors import ConfigError, PeerLost, ProtocolError, Recalled, Refused
from kvstream.transport._mailbox import Mailbox
from kvstream.transport.base import (
    MAX_MESSAGE,
    ByteView,
    Connection,
    Lane,
    Lent,
    ListenAddress,
    StagingBudget,
    Transport,
)

__all__ = ["InprocConnection", "InprocNetwork", "InprocTransport"]

_BACKLOG = 4096


class _Offer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="inproc-offer"):
    link: int
    slots: int
    slot_bytes: int


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="inproc-answer"):
    link: int


class _Staging:
    """The source's slots and what is published in each (0: nothing that may be read)."""

    __slots__ = ("generations", "memory")

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.memory: ByteView = np.zeros((slots, slot_bytes), np.uint8)
        self.generations = [0] * slots


class _Link:
    """What the two ends of one connection share."""

    __slots__ = ("destination", "frozen", "number", "source", "staging")

    def __init__(self, number: int, source: InprocConnection, destination: InprocConnection) -> None:
        self.number = number
        self.source = source
        self.destination = destination
        self.frozen = False
        self.staging: _Staging | None = None


class InprocNetwork:
    """Connects transports by port number, and lets a test break or freeze what it connected."""

    def __init__(self) -> None:
        self._listeners: dict[int, InprocTransport] = {}
        self._links: dict[int, _Link] = {}
        self._next_port = 1
        self._next_link = 1

    @property
    def connections(self) -> tuple[InprocConnection, ...]:
        """The source ends of all connections that are not lost, in the order in which they were dialed."""
        return tuple(link.source for link in self._links.values())

    def break_link(self, connection: InprocConnection) -> None:
        """Lose the connection on both ends, with whatever was under way on it."""
        link = connection.link
        for end in (link.source, link.destination):
            end.end(PeerLost(f"link to {end.peer_address} broke"), discard=True)

    def freeze(self, connection: InprocConnection) -> None:
        """Silence: messages and takes hang, nobody is told. `thaw` lets them go on; a loss ends them as ever."""
        connection.link.frozen = True

    def thaw(self, connection: InprocConnection) -> None:
        """End a `freeze`."""
        link = connection.link
        link.frozen = False
        link.source.flush()
        link.destination.flush()

    # -- for the transports

    def listen(self, transport: InprocTransport, port: int) -> int:
        if port == 0:
            while self._next_port in self._listeners:
                self._next_port += 1
            port = self._next_port
            self._next_port += 1
        if port in self._listeners:
            raise ConfigError("port", f"{port} is taken on this in-process network; choose another, or 0")
        self._listeners[port] = transport
        return port

    def unlisten(self, transport: InprocTransport, port: int) -> None:
        if self._listeners.get(port) is transport:
            del self._listeners[port]

    def connect(self, dialer: InprocTransport, port: int) -> InprocConnection:
        listener = self._listeners.get(port)
        if listener is None:
            raise PeerLost(f"inproc:{port}: nobody listens there")
        loop = asyncio.get_running_loop()
        source = InprocConnection(dialer, loop, dialed=True, peer_address=f"inproc:{port}")
        destination = InprocConnection(listener, loop, dialed=False, peer_address=f"inproc:{dialer.port}")
        link = _Link(self._next_link, source, destination)
        self._next_link += 1
        self._links[link.number] = link
        source.link = destination.link = link
        dialer.adopt(source)
        listener.adopt(destination)
        loop.call_soon(listener.announce, destination)
        return source

    def forget(self, link: _Link) -> None:
        self._links.pop(link.number, None)


class InprocConnection(Connection):
    """One end of a link. The lane is `local`: the destination reads the source's slots where they are."""

    link: _Link

    def __init__(
        self, owner: InprocTransport, loop: asyncio.AbstractEventLoop, *, dialed: bool, peer_address: str
    ) -> None:
        self.dialed = dialed
        self.peer_address = peer_address
        self.lane: Lane | None = None
        self.slots = 0
        self.slot_bytes = 0
        self.lost = False
        self._owner = owner
        self._loop = loop
        self._mailbox = Mailbox(loop, _BACKLOG)
        self._outbox: list[bytes] = []
        self._flush_scheduled = False
        self._taken = 0
        self._offered: _Offer | None = None
        self._generation = 0
        self._pending: dict[asyncio.Future[ByteView | Lent], tuple[int, int, int]] = {}

    def describe(self) -> str:
        return "in-process memory"

    # -- control messages

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[Exception], None]) -> None:
        self._mailbox.start(on_message, on_lost)

    def send(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"control message of {len(message)} bytes; at most {MAX_MESSAGE}")
        if self.lost:
            return
        if len(self._outbox) >= _BACKLOG:
            self.end(PeerLost(f"{self.peer_address} does not read: {_BACKLOG} messages are unsent"), discard=False)
            return
        self._outbox.append(bytes(message))
        self._schedule_flush()

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        """Hand over what is queued, and finish the takes that wait, unless the link is frozen."""
        self._flush_scheduled = False
        if self.lost or self.link.frozen:
            return
        outbox, self._outbox = self._outbox, []
        peer = self._peer
        for message in outbox:
            if not peer.receive(message):
                peer.end(ProtocolError(f"{peer.peer_address} sent {_BACKLOG} messages unread"), discard=False)
                return
        pending, self._pending = self._pending, {}
        for future, (slot, generation, nbytes) in pending.items():
            if not future.done():
                self._finish_take(future, slot, generation, nbytes)

    def receive(self, message: bytes) -> bool:
        return self._mailbox.put(message)

    # -- lanes

    def offer_lanes(self, allowed: tuple[Lane, ...], slots: int, slot_bytes: int) -> bytes:
        """See Connection. The one lane here stands in for every other, so any `allowed` that is not empty will do."""
        if not self.dialed or self._offered is not None:
            raise RuntimeError("offer_lanes belongs to the source, once per connection")
        if slots < 1 or slot_bytes < 1:
            raise ValueError(f"{slots} slots of {slot_bytes} bytes")
        if not allowed:
            raise ConfigError("lanes", "no lane is allowed; name at least one")
        if self._mailbox.error is not None:
            raise PeerLost(str(self._mailbox.error))
        if not self._owner.budget.take(slots * slot_bytes):
            raise Refused(_exhausted(self._owner.budget, slots * slot_bytes))
        self._taken = slots * slot_bytes
        self._offered = _Offer(self.link.number, slots, slot_bytes)
        self.link.staging = _Staging(slots, slot_bytes)
        return msgspec.msgpack.encode(self._offered)

    def accept_lane(self, offer: bytes, allowed: tuple[Lane, ...], *, borrows: bool = True) -> bytes:
        if self.dialed or self.lane is not None:
            raise RuntimeError("accept_lane belongs to the destination, once per connection")
        try:
            described = msgspec.msgpack.decode(offer, type=_Offer)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self.peer_address}: lane offer is not understood: {error}") from error
        staging = self.link.staging
        if self._mailbox.error is not None or (staging is None and self.link.source.lost):
            raise PeerLost(str(self._mailbox.error or f"{self.peer_address} closed"))
        if (
            staging is None
            or described.link != self.link.number
            or staging.memory.shape != (described.slots, described.slot_bytes)
        ):
            raise ProtocolError(f"{self.peer_address}: lane offer does not belong to this connection")
        if not allowed:
            raise ConfigError("lanes", "no lane is allowed; name at least one")
        self._set_lane(described)
        return msgspec.msgpack.encode(_Answer(self.link.number))

    def open_lane(self, answer: bytes) -> None:
        if self._offered is None or self.lane is not None:
            raise RuntimeError("open_lane belongs to the source, once per connection, after offer_lanes")
        try:
            decoded = msgspec.msgpack.decode(answer, type=_Answer)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"{self.peer_address}: lane answer is not understood: {error}") from error
        if decoded.link != self.link.number:
            raise ProtocolError(f"{self.peer_address}: lane answer does not belong to this connection")
        self._set_lane(self._offered)

    def _set_lane(self, offer: _Offer) -> None:
        self.lane = "local"
        self.slots = offer.slots
        self.slot_bytes = offer.slot_bytes

    # -- bytes

    def write_view(self, slot: int) -> ByteView:
        staging = self._own_staging(slot)
        staging.generations[slot] = 0
        return staging.memory[slot]

    def publish(self, slot: int, nbytes: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        if self._mailbox.error is not None:
            future.set_exception(PeerLost(str(self._mailbox.error)))
            return future
        staging = self._own_staging(slot)
        if not 0 <= nbytes <= self.slot_bytes:
            raise ValueError(f"publish of {nbytes} bytes from a slot of {self.slot_bytes}")
        self._generation += 1
        staging.generations[slot] = self._generation
        future.set_result(self._generation)
        return future

    def take(self, slot: int, generation: int, nbytes: int) -> asyncio.Future[ByteView | Lent]:
        future: asyncio.Future[ByteView | Lent] = self._loop.create_future()
        if self._mailbox.error is not None:
            future.set_exception(PeerLost(str(self._mailbox.error)))
        elif not (0 <= slot < self.slots and 0 <= nbytes <= self.slot_bytes):
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range"))
        else:
            # Never done on return: what is above must live with a take that is under way when the connection ends.
            self._pending[future] = (slot, generation, nbytes)
            self._schedule_flush()
        return future

    def _finish_take(self, future: asyncio.Future[ByteView | Lent], slot: int, generation: int, nbytes: int) -> None:
        staging = self.link.staging
        if staging is None:
            future.set_exception(PeerLost(f"{self.peer_address} closed"))
        elif generation == 0 or staging.generations[slot] != generation:
            future.set_exception(Recalled(_stale(self.peer_address, slot, generation)))
        else:
            view = staging.memory[slot, :nbytes]
            view.flags.writeable = False
            future.set_result(view)

    def check(self, slot: int, generation: int) -> bool:
        staging = self.link.staging
        return (
            staging is not None
            and 0 <= slot < self.slots
            and generation != 0
            and staging.generations[slot] == generation
        )

    def _own_staging(self, slot: int) -> _Staging:
        if self._mailbox.error is not None:
            raise PeerLost(str(self._mailbox.error))
        if not self.dialed or self.lane is None or self.link.staging is None:
            raise RuntimeError("slots are written by the source, after open_lane")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of {self.slots}")
        return self.link.staging

    # -- end

    def close(self) -> None:
        self.end(PeerLost(f"connection to {self.peer_address} was closed here"), discard=True)

    async def fence(self) -> None:
        self.close()
        if self._taken:
            # The destination keeps what it is reading: its views hold the memory, and `check` now says False.
            self.link.staging = None
            taken, self._taken = self._taken, 0
            self._owner.budget.give_back(taken)
        self._owner.drop(self)
        # One turn of the loop, so that on_lost has been called here as it is with a network.
        await asyncio.sleep(0)

    def end(self, error: Exception, *, discard: bool) -> None:
        """Lose this end, and the other one a turn of the loop later, when it has got what was sent before."""
        if self._mailbox.lose(error, discard=discard):
            self.lost = True
            self._outbox.clear()
            pending, self._pending = self._pending, {}
            for future in pending:
                if not future.done():
                    future.set_exception(PeerLost(str(error)))
            self._owner.network.forget(self.link)
            self._loop.call_soon(self._tell_peer)

    def _tell_peer(self) -> None:
        peer = self._peer
        peer.end(PeerLost(f"{peer.peer_address} closed the connection"), discard=False)

    @property
    def _peer(self) -> InprocConnection:
        return self.link.destination if self.dialed else self.link.source


class InprocTransport(Transport):
    """A listener and dialer on an InprocNetwork. `port` 0 takes the next free one; `host_id` names a pretended host."""

    name = "inproc"

    def __init__(
        self, network: InprocNetwork, *, budget: StagingBudget, host_id: str = "inproc", port: int = 0
    ) -> None:
        self.network = network
        self.budget = budget
        self.port = port
        self._host_id = host_id
        self._on_connection: Callable[[Connection], None] | None = None
        self._connections: dict[InprocConnection, None] = {}
        self._closed = False

    async def start(self, on_connection: Callable[[Connection], None]) -> ListenAddress:
        if self._closed or self._on_connection is not None:
            raise RuntimeError("a transport starts once")
        self.port = self.network.listen(self, self.port)
        self._on_connection = on_connection
        return ListenAddress(transport=self.name, host="inproc", port=self.port, host_id=self._host_id, scope="inproc")

    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        if self._closed:
            raise PeerLost("this transport is closed")
        if address.transport != self.name:
            raise ConfigError("transport", f"the peer speaks {address.transport!r}, this worker {self.name!r}")
        if address.scope == "loopback" and address.host_id != self._host_id:
            raise ConfigError(
                "data_interface",
                f"{address.host}:{address.port} listens on loopback only; start it with --data-interface",
            )
        await asyncio.sleep(0)
        if self._closed:
            raise PeerLost("this transport is closed")
        return self.network.connect(self, address.port)

    async def aclose(self) -> None:
        self._closed = True
        self.network.unlisten(self, self.port)
        for connection in tuple(self._connections):
            await connection.fence()

    # -- for the network and its connections

    def adopt(self, connection: InprocConnection) -> None:
        self._connections[connection] = None

    def drop(self, connection: InprocConnection) -> None:
        self._connections.pop(connection, None)

    def announce(self, connection: InprocConnection) -> None:
        if self._on_connection is not None and not self._closed:
            self._on_connection(connection)


def _stale(peer: str, slot: int, generation: int) -> str:
    return f"{peer}: slot {slot} does not hold generation {generation} (any more)"


def _exhausted(budget: StagingBudget, nbytes: int) -> str:
    return f"staging memory: {nbytes} bytes wanted, {budget.limit - budget.used} of {budget.limit} left"
