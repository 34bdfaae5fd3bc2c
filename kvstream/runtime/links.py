"""The connections of one runtime: dialing, the handshake on both sides, frames in and out, the fence of what is lost.

A connection becomes a link of the scheduler only after the handshake: protocol version, the peer's incarnation and its
proof, the layout's fingerprint, the lane. After it, frames go to the scheduler unseen. Every connection that ends, for
whatever reason, is fenced here, in a task that `close` waits for.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.discovery.records import DataAddress, WorkerRecord
from kvstream.errors import (
    ConfigError,
    Fenced,
    KVStreamError,
    LayoutMismatch,
    PeerLost,
    ProtocolError,
    Refused,
    UnknownWorker,
    Unreachable,
    from_code,
)
from kvstream.layout import KVLayout, describe_mismatch
from kvstream.log import get_logger
from kvstream.runtime.devices import Devices
from kvstream.runtime.identity import Identity
from kvstream.runtime.reports import DevicePath, Quarantine
from kvstream.runtime.seams import Seams
from kvstream.scheduler.driver import Driver
from kvstream.transport.base import Connection, Lane, ListenAddress, Transport

__all__ = ["Directory", "Links"]

_NONCE = 16


class Directory(Protocol):
    """Where the records of other workers are found: the registry."""

    def lookup(self, worker: str) -> WorkerRecord | None: ...
    async def wait_for(self, worker: str, timeout: float) -> WorkerRecord: ...


@dataclass(slots=True)
class _Link:
    id: int
    connection: Connection
    peer: str
    incarnation: str = ""
    version: int = wire.VERSION
    up: bool = False
    closed: bool = False
    sent: int = 0
    received: int = 0
    inbox: asyncio.Queue[wire.Frame] = field(default_factory=lambda: asyncio.Queue(maxsize=4))
    """Frames of the handshake; a peer that sends more before it is over breaks the protocol."""


class Links:
    """Created on the running loop; `driver` is the pump of the scheduler that gets the links."""

    def __init__(
        self,
        identity: Identity,
        transport: Transport,
        directory: Directory,
        driver: Driver,
        config: RuntimeConfig,
        seams: Seams,
        lanes: tuple[Lane, ...],
        on_mismatch: Callable[[Sequence[str], KVStreamError], None],
        chunk_blocks: Callable[[Connection], tuple[int, int]],
        borrows: bool,
        devices: Devices,
    ) -> None:
        self.address: ListenAddress | None = None
        """Where this runtime listens; set once it does."""
        self._on_mismatch = on_mismatch
        self._chunk_blocks = chunk_blocks
        self._borrows = borrows
        self.devices = devices
        self._identity = identity
        self._transport = transport
        self._directory = directory
        self._driver = driver
        self._config = config
        self._seams = seams
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._log = get_logger("links", worker=identity.worker)
        self._links: dict[int, _Link] = {}
        self._count = 0
        self._closing = False
        # Not sets: the order in which they are cancelled must be the same in every run.
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._fences: dict[asyncio.Task[None], None] = {}
        self._unfenced: dict[str, list[Connection]] = {}
        """Broken connections by peer whose staging memory is still not given back."""
        block_bytes = identity.layout.block_bytes
        self._slot_bytes = max(config.slot_bytes, block_bytes)
        self.frames_refused = 0

    # ------------------------------------------------------------------ used by Streams

    def connection(self, link_id: int) -> Connection | None:
        """The connection of a link that is up, else None."""
        link = self._links.get(link_id)
        return link.connection if link is not None and link.up else None

    def dial(self, peer: str) -> None:
        """Connect to a worker; the scheduler hears link_up or link_failed, whatever happens."""
        task = self._spawn(self._tasks, self._dial(peer), f"dial {peer}")
        task.add_done_callback(lambda done: self._dialed(peer, done))

    def transmit(self, link_id: int, frames: list[wire.Frame]) -> None:
        """Send frames on a link; dropped when it is gone, of which the scheduler hears anyway."""
        link = self._links.get(link_id)
        if link is not None and not link.closed:
            self._send(link, frames)

    def drop(self, link_id: int, error: KVStreamError) -> None:
        """Give a link up: the scheduler hears link_lost at once, the fence follows in the background."""
        link = self._links.get(link_id)
        if link is not None:
            self._close(link, error)

    def quarantined(self) -> list[Quarantine]:
        """The peers whose broken connections keep staging memory, in the order in which they broke."""
        found: list[Quarantine] = []
        for peer, connections in list(self._unfenced.items()):
            kept = [connection for connection in connections if connection.quarantined]
            if kept:
                self._unfenced[peer] = kept
                found.append(Quarantine(peer=peer, bytes=sum(connection.quarantined for connection in kept)))
            else:
                del self._unfenced[peer]
        return found

    def device_paths(self) -> list[DevicePath]:
        """Of the connections that are up and whose source has offered to lend memory of its GPU."""
        up = [link for link in self._links.values() if link.up]
        return [path for link in up if (path := self.devices.path(link.connection, link.peer)) is not None]

    def replaced(self, peer: str, incarnation: str) -> None:
        """The registry knows `peer` as this incarnation: end the connections with any other."""
        for link in list(self._links.values()):
            if link.peer == peer and link.up and link.incarnation != incarnation:
                self._close(link, PeerLost(f"{peer} was replaced by a newer incarnation"))
        self._driver.core.replaced(self._driver.now(), peer, incarnation)
        self._driver.pump()

    def left(self, peer: str) -> None:
        """The registry knows `peer` no more: whoever lost it need not wait for it. Connections that hold stay."""
        self._driver.core.replaced(self._driver.now(), peer, None)
        self._driver.pump()

    def accepted(self, connection: Connection) -> None:
        """A peer has dialed us."""
        link = self._add(connection, connection.peer_address)
        if self._closing:
            self._close(link, PeerLost("the runtime is closing"))
        else:
            task = self._spawn(self._tasks, self._welcome(link), f"handshake with {link.peer}")
            task.add_done_callback(lambda done: self._welcomed(link, done))

    async def close(self) -> None:
        """Close every connection and wait for their fences."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))
        for link in list(self._links.values()):
            self._close(link, PeerLost("the runtime is closing"))
        self._driver.pump()
        if self._fences:
            await asyncio.wait(list(self._fences), timeout=self._config.close_wait)

    # ------------------------------------------------------------------ source: dial and shake hands

    async def _dial(self, peer: str) -> None:
        now = self._driver.now
        silent = False
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                link, slots = await self._connect(peer)
        except TimeoutError:
            silent = True
            error: KVStreamError = PeerLost(f"{peer} did not answer within {self._config.connect_timeout} s")
        except KVStreamError as failure:
            silent = isinstance(failure, Unreachable)
            error = failure
        else:
            one, several = self._chunk_blocks(link.connection)
            self._driver.core.link_up(
                now(),
                link.id,
                peer,
                outgoing=True,
                slots=slots,
                slot_blocks=one,
                group_blocks=several,
                version=link.version,
                incarnation=link.incarnation,
            )
            self._driver.pump()
            return
        self._failed(peer, error, silent=silent)

    def _dialed(self, peer: str, task: asyncio.Task[None]) -> None:
        """A bug in dialing, or a missing right, must not leave streams waiting for their deadline."""
        if not task.cancelled() and (error := task.exception()) is not None:
            failure = KVStreamError(f"connecting to {peer} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._failed(peer, failure)

    def _failed(self, peer: str, error: KVStreamError, *, silent: bool = False) -> None:
        self._log.info("no connection", peer=peer, code=error.code, why=str(error))
        self._driver.core.link_failed(self._driver.now(), peer, error, silent=silent)
        self._driver.pump()

    async def _connect(self, peer: str) -> tuple[_Link, int]:
        record = self._directory.lookup(peer)
        if record is None:
            raise UnknownWorker("to", f"no worker {peer!r} is registered")
        self._check_quarantine(peer)
        connection = await self._dial_transport(record)
        link = self._add(connection, peer)
        try:
            await self._introduce(link, record)
            if link.closed:
                raise PeerLost(f"{peer} was lost during the handshake")
            link.incarnation = record.incarnation
            link.up = True
        finally:
            if not link.up:
                self._close(link, PeerLost("the handshake was given up"))
        self._log.info("connected", peer=peer, lane=connection.lane)
        return link, connection.slots

    async def _dial_transport(self, record: WorkerRecord) -> Connection:
        address = _listens_at(record.address)
        mine = self.address
        if mine is not None and address.scope == "loopback" and address.host_id != mine.host_id:
            raise ConfigError(
                "to",
                f"{record.name} listens on loopback only; start it with --data-interface (data_interface= of Runtime)",
            )
        try:
            return await self._transport.dial(address, self._lanes)
        except KVStreamError as error:
            text = str(error)
            if isinstance(error, PeerLost) and record.id not in text:
                raise type(error)(f"{record.id}: {text}") from error
            raise

    async def _introduce(self, link: _Link, record: WorkerRecord) -> None:
        mine, connection = self._identity, link.connection
        challenge = await _heard(link)
        if not isinstance(challenge, wire.Challenge):
            raise ProtocolError(f"{record.id} opened with a {type(challenge).__name__} frame")
        self.devices.offer(connection, self._config.slots)
        # Whatever versions the challenge names, the Hello goes out: a peer that speaks none of ours rejects it, and
        # learns from it which streams will not come.
        nonce = self._seams.token(_NONCE)
        shard = mine.shard
        hello = wire.Hello(
            wire.VERSION,
            wire.MIN_VERSION,
            mine.worker,
            mine.incarnation,
            record.id,
            record.incarnation,
            nonce,
            wire.proof(mine.key, "hello", challenge.nonce, mine.worker, mine.incarnation, record.incarnation),
            mine.layout.fingerprint(),
            msgspec.json.encode(mine.layout).decode(),
            (shard.tp_rank, shard.tp_size, shard.pp_rank, shard.pp_size),
            list(self._lanes),
            connection.offer_lanes(self._lanes, self._config.slots, self._slot_bytes),
            _few(self._driver.core.connecting(record.id)),
        )
        self._send(link, [hello])
        answer = await _heard(link)
        if not isinstance(answer, wire.Welcome):
            raise ProtocolError(f"{record.id} answered the handshake with a {type(answer).__name__} frame")
        link.version = wire.negotiate(answer.version, answer.version)
        expected = wire.proof(record.key, "welcome", nonce, record.id, record.incarnation, mine.incarnation)
        if answer.incarnation != record.incarnation or not hmac.compare_digest(answer.proof, expected):
            raise Fenced(f"who answers at {connection.peer_address} is not the registered {record.id}")
        connection.open_lane(answer.lane_answer)
        self.devices.opened(connection)

    # ------------------------------------------------------------------ destination: challenge and check

    async def _welcome(self, link: _Link) -> None:
        try:
            async with asyncio.timeout(self._config.connect_timeout):
                await self._examine(link)
        except TimeoutError:
            self._close(link, PeerLost("no handshake in time"))
        except KVStreamError as error:
            if not link.closed:
                self._reject(link, error)
        except asyncio.CancelledError:
            self._close(link, PeerLost("the runtime is closing"))
            raise

    def _welcomed(self, link: _Link, task: asyncio.Task[None]) -> None:
        """A bug, or a resource that ran out, must not leave the dialer waiting for its time-out."""
        if not task.cancelled() and (error := task.exception()) is not None and not link.closed:
            self._reject(link, KVStreamError(f"the handshake failed here: {type(error).__name__}: {error}"))

    async def _examine(self, link: _Link) -> None:
        mine, connection = self._identity, link.connection
        nonce = self._seams.token(_NONCE)
        self._send(link, [wire.Challenge(wire.VERSION, wire.MIN_VERSION, nonce)])
        hello = await link.inbox.get()
        if isinstance(hello, wire.Reject):
            raise from_code(hello.code, f"the peer gave up: {hello.message}")
        if not isinstance(hello, wire.Hello):
            raise ProtocolError(f"a {type(hello).__name__} frame in place of a Hello")
        if hello.target != mine.worker or hello.target_incarnation != mine.incarnation:
            raise Fenced(
                f"{hello.target} incarnation {hello.target_incarnation[:8]} is not here any more: this is {mine.worker}"
                f" incarnation {mine.incarnation[:8]}; look it up again"
            )
        record = await self._registered(hello)
        expected = wire.proof(record.key, "hello", nonce, hello.worker, hello.incarnation, mine.incarnation)
        if not hmac.compare_digest(hello.proof, expected):
            raise Fenced(f"the proof of {hello.worker} incarnation {hello.incarnation[:8]} is wrong")
        self._check_quarantine(hello.worker)
        try:
            version, answer = await self._agree(link, hello)
        except KVStreamError as error:
            # Whoever waits here for what can't come is told as well.
            self._on_mismatch(hello.streams, error)
            raise
        if link.closed:
            raise PeerLost(f"{hello.worker} was lost during the handshake")
        link.peer, link.incarnation, link.up = hello.worker, hello.incarnation, True
        self.replaced(link.peer, link.incarnation)
        proof = wire.proof(mine.key, "welcome", hello.nonce, mine.worker, mine.incarnation, hello.incarnation)
        lane = connection.lane or ""
        self._send(link, [wire.Welcome(version, mine.worker, mine.incarnation, proof, lane, answer)])
        self._log.info("accepted", peer=link.peer, lane=lane)
        self._driver.core.link_up(
            self._driver.now(),
            link.id,
            link.peer,
            outgoing=False,
            slots=connection.slots,
            slot_blocks=0,
            version=version,
            incarnation=link.incarnation,
        )
        self._driver.pump()

    def _check_quarantine(self, peer: str) -> None:
        """A peer that keeps breaking connections without letting go of them gets no further memory to hold on to."""
        limit = self._config.quarantine_limit
        held = sum(each.bytes for each in self.quarantined() if each.peer == peer)
        if held > limit:
            raise Refused(
                f"{peer}: its broken connections keep {held} bytes of staging memory that may still be touched; more"
                f" than {limit} (quarantine_limit): nothing new with it until they are given back",
                retry_after=self._config.stall_timeout,
            )

    async def _agree(self, link: _Link, hello: wire.Hello) -> tuple[int, bytes]:
        """The version, and the answer to the lane offer, of a peer that has proven who it is."""
        mine, connection = self._identity, link.connection
        version = wire.negotiate(hello.version, hello.min_version)
        if hello.fingerprint != mine.layout.fingerprint():
            raise LayoutMismatch(_mismatch(hello, mine))
        await self.devices.prove(connection, hello.lane_offer)
        answer = connection.accept_lane(hello.lane_offer, self._lanes, borrows=self._borrows)
        if connection.slot_bytes < mine.layout.block_bytes:
            raise ProtocolError(f"slots of {connection.slot_bytes} bytes for blocks of {mine.layout.block_bytes}")
        self.devices.opened(connection)
        return version, answer

    async def _registered(self, hello: wire.Hello) -> WorkerRecord:
        """The registry record of who says Hello; its news may be a moment behind the caller."""
        record = self._directory.lookup(hello.worker)
        if record is None:
            wait = self._config.connect_timeout / 2
            record = await self._directory.wait_for(hello.worker, wait)
        if record.incarnation != hello.incarnation:
            raise Fenced(
                f"{hello.worker} is registered as incarnation {record.incarnation[:8]}, not {hello.incarnation[:8]}"
            )
        return record

    def _reject(self, link: _Link, error: KVStreamError) -> None:
        self._log.warning("connection rejected", peer=link.peer, code=error.code, why=str(error))
        retry_after = error.retry_after if isinstance(error, Refused) else None
        self._send(link, [wire.Reject(error.code, str(error)[:1000], retry_after)])
        # The peer closes when it has read this; a peer that does not is closed here. Closing at once could overtake it.
        self._loop.call_later(self._config.connect_timeout, self._close, link, error)

    # ------------------------------------------------------------------ every connection

    def _add(self, connection: Connection, peer: str) -> _Link:
        self._count += 1
        link = _Link(self._count, connection, peer)
        self._links[link.id] = link
        connection.start(lambda message: self._on_message(link, message), lambda error: self._on_lost(link, error))
        return link

    def _send(self, link: _Link, frames: list[wire.Frame]) -> None:
        for message in wire.encode(link.sent, frames):
            link.sent += 1
            link.connection.send(message)

    def _on_message(self, link: _Link, message: bytes) -> None:
        if link.closed:
            return
        try:
            sequence, frames = wire.decode(message)
            if sequence != link.received:
                raise ProtocolError(f"message {sequence} where {link.received} was due")
            link.received += 1
            if not link.up:
                for frame in frames:
                    link.inbox.put_nowait(frame)
                return
        except (ProtocolError, asyncio.QueueFull) as error:
            self.frames_refused += 1
            why = error if isinstance(error, ProtocolError) else ProtocolError("frames before the handshake is over")
            self._log.warning("protocol error", peer=link.peer, why=str(why))
            self._close(link, why)
            self._driver.pump()
            return
        now = self._driver.now()
        for frame in frames:
            self._driver.core.frame(now, link.id, frame)
        self._driver.pump()

    def _on_lost(self, link: _Link, error: Exception) -> None:
        known = error if isinstance(error, KVStreamError) else PeerLost(str(error))
        if isinstance(known, PeerLost) and link.peer not in str(known):
            known = PeerLost(f"{link.peer}: {known}")
        self._close(link, known)
        self._driver.pump()

    def _close(self, link: _Link, error: KVStreamError) -> None:
        """The one end of a connection; idempotent."""
        if link.closed:
            return
        link.closed = True
        link.up = False
        del self._links[link.id]
        if not link.inbox.full():
            # Whoever waits for a handshake frame is told by a frame, as a peer would have done it, after what the peer
            # itself has said. (A full inbox holds more than a handshake takes.)
            link.inbox.put_nowait(wire.Reject(error.code, str(error)[:1000]))
        self._spawn(self._fences, self._fence(link), f"fence {link.peer}")
        self._driver.core.link_lost(self._driver.now(), link.id, error)

    async def _fence(self, link: _Link) -> None:
        await link.connection.fence()
        if link.connection.quarantined:
            self._unfenced.setdefault(link.peer, []).append(link.connection)

    def _spawn(
        self, group: dict[asyncio.Task[None], None], work: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        task = self._loop.create_task(work, name=name)
        group[task] = None
        task.add_done_callback(lambda done: self._over(group, done))
        return task

    def _over(self, group: dict[asyncio.Task[None], None], task: asyncio.Task[None]) -> None:
        group.pop(task, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug, not a peer's doing: those are KVStreamErrors and handled where they arise.
            self._loop.call_exception_handler({"message": f"kvstream: {task.get_name()} failed", "exception": error})


def _listens_at(address: DataAddress) -> ListenAddress:
    return ListenAddress(
        transport=address.transport,
        host=address.host,
        port=address.port,
        host_id=address.host_id,
        scope=address.scope,
        get_port=address.get_port,
        device=address.device,
    )


async def _heard(link: _Link) -> wire.Frame:
    """The destination's next frame of the handshake. Raises what it rejects us with, or why the connection ended."""
    frame = await link.inbox.get()
    if isinstance(frame, wire.Reject):
        raise from_code(frame.code, frame.message, retry_after=frame.retry_after)
    return frame


def _few(names: Sequence[str]) -> list[str]:
    """As many names as a Hello has room for; it is a courtesy, and must not cost the connection."""
    few: list[str] = []
    room = wire.MAX_NAMED_BYTES
    for name in names[: wire.MAX_NAMED]:
        room -= len(name.encode()) + 3
        if room < 0:
            break
        few.append(name)
    return few


def _mismatch(hello: wire.Hello, mine: Identity) -> str:
    try:
        theirs = msgspec.json.decode(hello.layout, type=KVLayout)
        difference = describe_mismatch(theirs, mine.layout)
    except (msgspec.DecodeError, KVStreamError):
        difference = "its description can't be read"
    return f"layout: {hello.worker} differs from {mine.worker}: {difference}; both need the same KVLayout"
