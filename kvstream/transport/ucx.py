"""The transport over UCX: control messages as active messages, bytes by the lanes `shared`, `get` and `put`.

Owns which lane a connection gets, the slots' memory, and the fence that must be reached before that memory is used for
anything else. It must never free, unmap or hand back staging memory while an operation on it has no final status, never
let a peer write into memory whose writing this side can't end alone, and never `get` over TCP (a receiver that closes
would abort the source's process).

There are two UCP workers. One speaks TCP only: there a force-close really ends the peer's puts. The other may use
everything (CMA, CUDA IPC, RDMA) and serves connections whose lane is `get`; it has a listener of its own
(`ListenAddress.get_port`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from kvstream.errors import (
    Cancelled,
    ConfigError,
    Corrupted,
    KVStreamError,
    PeerLost,
    ProtocolError,
    Recalled,
    Refused,
    Unreachable,
)
from kvstream.log import get_logger
from kvstream.transport import _ucp
from kvstream.transport._host import Interface, PeerMemory, has_rdma, host_id, read_process, resolve_interface
from kvstream.transport._loans import MAX_KEY_BYTES, MAX_KEYS_BYTES, Exports, KeyedSlab, Loan, Reads, Shelf, plan
from kvstream.transport._mailbox import Mailbox
from kvstream.transport._probe import LaneReport, probe_lanes
from kvstream.transport._puts import WITHDRAWN, Puts
from kvstream.transport._slots import HEADER, NONCE_BYTES, MemoryFile, Slots, allocate, area_bytes, map_peer
from kvstream.transport._warmup import converse
from kvstream.transport._worker import Endpoint, Region, UcpWorker
from kvstream.transport.base import (
    LANES,
    MAX_MESSAGE,
    MIN_LENT_RUN,
    ByteView,
    Connection,
    DeviceOffer,
    DeviceStaging,
    Lane,
    Lent,
    ListenAddress,
    Slab,
    StagingBudget,
    Transport,
)

__all__ = ["LaneReport", "UcxConnection", "UcxTransport", "probe_lanes"]

_BACKLOG = 4096
"""Control messages that may be unsent, and received but undelivered, on one connection."""

PUT_WINDOW = 4 << 20
"""Bytes of puts that are handed to UCX at a time on one connection."""

_WARM_UP_SECONDS = 1.0
"""Bound on what a worker may take to connect to itself at its start. It takes 20 ms, or 80 ms where `get` matters."""

_MAX_OFFER = 2048
_MAX_WHY = 256
_MAX_SLOTS = 4096
_MAX_SLOT_BYTES = 1 << 30

_TABLE_BYTES = 4096
"""How much of a slot is read at first where a loan is expected: most tables fit, and bytes on the way cost little."""

_MAX_SHELVES = 1 << 16
"""Sets of slabs, with their remote keys unpacked, that a peer may lend out of on one connection: one for each layer,
where layers are registered by themselves."""

# Transports by which UCX reads another process's memory without that process: on one host, and between hosts.
_HOST_READS = frozenset({"cma", "knem", "xpmem"})
_GPU_READS = frozenset({"cuda_ipc"})
_NETWORK_READS = ("rc", "dc")

_ORDERED = platform.machine() in ("x86_64", "AMD64")
"""A recall is a store before the user's stores, and the check a load after the copy's loads. x86 keeps that order by
itself; elsewhere it would take barriers that Python does not have, and nothing is lent."""

_GPU_OPTIONS = {"CUDA_IPC_ENABLE_GET_ZCOPY": "y"}
"""By itself UCX gets over CUDA IPC only where every NVLink of the first GPU is up. Where there is none, one GPU can be
shared by two processes all the same, and others may reach each other over PCIe; the sample says whether it works."""

_MAX_LOAN = 1 << 40
"""Bytes that may be lent by one slot, before the slot's size and the length of a run say better."""

_T = TypeVar("_T")
_Count = Annotated[int, msgspec.Meta(ge=1, le=_MAX_SLOTS)]
_Size = Annotated[int, msgspec.Meta(ge=1, le=_MAX_SLOT_BYTES)]
_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Key = Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
_Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]

_log = get_logger("transport")


class _Device(msgspec.Struct, frozen=True, array_like=True):
    """The source's staging on its GPU: how much of it each slot lends at most, and a sample of it."""

    slot_bytes: _Size
    address: _Word
    rkey: _Key
    sample: Annotated[bytes, msgspec.Meta(min_length=16, max_length=256)]
    gpu: bool


class _Offer(msgspec.Struct, frozen=True, array_like=True, tag="ucx-offer"):
    """The source's staging: where another process of the host finds it, and how UCX reaches it (`get`); and whether the
    source can lend on `get`."""

    lanes: tuple[Lane, ...]
    slots: _Count
    slot_bytes: _Size
    nonce: _Nonce
    host_id: Annotated[str, msgspec.Meta(max_length=256)]
    pid: _Word
    fd: _Word
    address: _Word
    rkey: _Key
    lends: bool = False
    device: _Device | None = None


class _Answer(msgspec.Struct, frozen=True, array_like=True, tag="ucx-answer"):
    """The lane, and for `put` where the destination's staging is."""

    lane: Lane
    nonce: _Nonce
    address: _Word = 0
    rkey: _Key = b""
    lends: bool = False
    device: bool = False
    no_device: Annotated[str, msgspec.Meta(max_length=_MAX_WHY)] = ""


# Made here: what a decoder takes, msgspec finds out once, in a millisecond that the first peer would wait for.
_offers = msgspec.msgpack.Decoder(_Offer)
_answers = msgspec.msgpack.Decoder(_Answer)


class UcxConnection(Connection):
    """One end of a connection. Made by UcxTransport."""

    def __init__(self, owner: UcxTransport, endpoint: Endpoint, *, dialed: bool, reads: bool) -> None:
        self.dialed = dialed
        self.peer_address = endpoint.peer_address
        self.lane: Lane | None = None
        self.slots = 0
        self.slot_bytes = 0
        self.lost = False
        self._owner = owner
        self._loop = endpoint.worker.loop
        self._endpoint = endpoint
        self._reads = reads  # on the worker that may use every transport
        self._puts = Puts(endpoint, owner.put_window)
        self._mailbox = Mailbox(self._loop, _BACKLOG)
        self._unsent = 0
        self._carriers = ""
        # Staging: own memory (source: what is offered; destination: where get and put land), and the peer's, mapped.
        self._offered: _Offer | None = None
        self._file: MemoryFile | None = None
        self._own: Slots | None = None
        self._seen: Slots | None = None
        self._peer_memory: PeerMemory | None = None
        self._region: Region | None = None
        self._taken = 0
        self._remote_address = 0
        self._remote_rkey = 0
        self._generation = 0
        self._moving: set[int] = set()
        self._shelves: dict[bytes, Shelf] = {}
        self._unpacked: dict[bytes, int] = {}
        self._expects_loan = True
        self._pending: set[asyncio.Future[int] | asyncio.Future[ByteView | Lent]] = set()
        self._fencing: asyncio.Task[None] | None = None
        self._quarantined = False
        self._device_slot_bytes = 0
        self._device: bool | None = None
        self._no_device = ""
        self._released = False
        self._when_fenced: list[Callable[[], None]] = []
        endpoint.on_message = self._received
        endpoint.on_failure = self._failed

    def describe(self) -> str:
        if not self._carriers or not self.lost:
            found = dict.fromkeys(f"{name}/{device}" for name, device in self._endpoint.transports() if device)
            self._carriers = "+".join(found) or self._carriers
        lane = "no lane yet" if self.lane is None else "shared memory" if self.lane == "shared" else self.lane
        if self.lends_device:
            lane += " between GPUs"
        elif self.lends:
            lane += " and direct reads"
        return f"{lane}, {self._carriers or 'not connected'}"

    # -- control messages

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[Exception], None]) -> None:
        self._mailbox.start(on_message, on_lost)

    def send(self, message: bytes) -> None:
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"control message of {len(message)} bytes; at most {MAX_MESSAGE}")
        if self.lost:
            return
        if self._unsent >= _BACKLOG:
            self._lose(PeerLost(f"{self.peer_address} does not read: {_BACKLOG} messages are unsent"), discard=False)
            return
        self._unsent += 1
        self._endpoint.send(bytes(message), self._sent)

    def _sent(self, status: int) -> None:
        self._unsent -= 1
        if status != _ucp.OK:
            self._failed(self._owner.words(status))

    def _received(self, message: bytes | None) -> None:
        if message is None:
            self._lose(ProtocolError(f"{self.peer_address} sent more than {MAX_MESSAGE} bytes at once"), discard=False)
        elif not self._mailbox.put(message):
            self._lose(ProtocolError(f"{self.peer_address} sent {_BACKLOG} messages that nobody took"), discard=False)

    def _failed(self, reason: str) -> None:
        self._lose(PeerLost(f"{self.peer_address}: {reason}"), discard=False)

    def _lose(self, error: KVStreamError, *, discard: bool) -> None:
        if not self._mailbox.lose(error, discard=discard):
            return
        self.describe()  # the endpoint can tell only while it is open
        self.lost = True
        if self.dialed and self._own is not None:
            # What is lent ends with the connection, at once: its memory is the user's again when this is told.
            self._own.retire()
        self._endpoint.close()
        pending, self._pending = self._pending, set()
        for future in pending:
            _fail_quietly(future, PeerLost(str(error)))

    def _check_open(self) -> None:
        if self._mailbox.error is not None:
            raise PeerLost(str(self._mailbox.error))

    # -- lane negotiation

    def _carried_lanes(self) -> dict[Lane, str]:
        """For each lane: why it can't run over this endpoint, or ""."""
        names = {name for name, device in self._endpoint.transports() if device}
        tcp_only = names <= {"tcp"}
        reads = self._reads and (bool(names & _HOST_READS) or any(name.startswith(_NETWORK_READS) for name in names))
        return {
            "shared": "",
            "get": "" if reads else f"UCX uses {'+'.join(sorted(names)) or 'nothing'} here, which can't read the peer",
            "put": "" if tcp_only else "this connection can write directly, and such writes can't be fenced",
        }

    def offer_lanes(self, allowed: tuple[Lane, ...], slots: int, slot_bytes: int) -> bytes:
        if not self.dialed or self._offered is not None:
            raise RuntimeError("offer_lanes belongs to the source, once per connection")
        if not (1 <= slots <= _MAX_SLOTS and 1 <= slot_bytes <= _MAX_SLOT_BYTES):
            raise ValueError(f"{slots} slots of {slot_bytes} bytes; at most {_MAX_SLOTS} of {_MAX_SLOT_BYTES}")
        self._check_open()
        reasons = self._carried_lanes()
        lanes: tuple[Lane, ...] = tuple(lane for lane in LANES if lane in allowed and not reasons[lane])
        if not lanes:
            raise _no_lane(self.peer_address, {lane: reasons.get(lane, "unknown here") for lane in allowed})
        self._take_budget(area_bytes(slots, slot_bytes))
        try:
            file = self._file = MemoryFile(area_bytes(slots, slot_bytes))
        except OSError as error:
            self._return_budget()
            raise ConfigError(
                "staging", f"no shared memory of {area_bytes(slots, slot_bytes)} bytes: {error}"
            ) from error
        nonce = self._owner.entropy(NONCE_BYTES)
        own = self._own = Slots(file.memory, slots, slot_bytes, nonce)
        own.stamp(0, 0)
        rkey = b""
        if "get" in lanes:
            self._region = self._endpoint.worker.register(Slab.of(file.memory))
            rkey = self._region.rkey
        lends = "get" in lanes and _ORDERED and slot_bytes > MAX_KEYS_BYTES and self._owner.exports() is not None
        device = self._describe_device() if lends and self._device_slot_bytes else None
        self._offered = _Offer(
            lanes, slots, slot_bytes, nonce, self._owner.host_id, os.getpid(), file.fd, own.address, rkey, lends, device
        )
        encoded = msgspec.msgpack.encode(self._offered)
        if device is not None and len(encoded) > _MAX_OFFER:
            _log.info("no room to offer the memory of the GPU", peer=self.peer_address, nbytes=len(encoded))
            self._offered = msgspec.structs.replace(self._offered, device=None)
            encoded = msgspec.msgpack.encode(self._offered)
        if self._device_slot_bytes and self._offered.device is None:
            self._no_device = self._why_not_offered(lanes, lends)
        return encoded

    def _why_not_offered(self, lanes: tuple[Lane, ...], lends: bool) -> str:
        if not self._reads:
            return "the peer is on another host, or has no staging on a GPU"
        if "get" not in lanes:
            return self._carried_lanes()["get"] or "lane get is not allowed"
        return "the staging could not be registered" if lends else "slots this small can't lend (slot_bytes)"

    def _describe_device(self) -> _Device | None:
        staging, exports = self._owner.device, self._owner.exports()
        if staging is None or exports is None:
            return None
        slab = staging.slab
        return _Device(self._device_slot_bytes, slab.address, exports.key(slab), staging.sample, slab.gpu)

    def accept_lane(self, offer: bytes, allowed: tuple[Lane, ...], *, borrows: bool = True) -> bytes:
        if self.dialed or self.lane is not None:
            raise RuntimeError("accept_lane belongs to the destination, once per connection")
        described = _decode(offer, _offers, self.peer_address)
        self._check_open()
        carried = self._carried_lanes()
        tries: dict[Lane, Callable[[_Offer], _Answer]] = {
            "shared": self._accept_shared,
            "get": self._accept_get,
            "put": self._accept_put,
        }
        reasons: dict[Lane, str] = {}
        for lane in ("get", *LANES) if self._device else LANES:
            if lane not in allowed:
                reasons[lane] = "not allowed here"
            elif lane not in described.lanes:
                reasons[lane] = "not offered by the peer"
            elif carried[lane]:
                reasons[lane] = carried[lane]
            else:
                try:
                    answer = tries[lane](described)
                    if self._device and lane == "get":
                        answer = msgspec.structs.replace(answer, device=answer.lends)
                    elif not borrows:
                        answer = self._without_loans(answer)
                    if not answer.device:
                        why = self._no_device or (reasons.get("get", "")[:_MAX_WHY] if self._device else "")
                        answer = msgspec.structs.replace(answer, no_device=why)
                except _LaneImpossible as impossible:
                    reasons[lane] = str(impossible)
                    continue
                self._set_lane(answer, described)
                return msgspec.msgpack.encode(answer)
        raise _no_lane(self.peer_address, reasons)

    def _without_loans(self, answer: _Answer) -> _Answer:
        if self._peer_memory is not None:
            self._peer_memory.close()
            self._peer_memory = None
        return msgspec.structs.replace(answer, lends=False)

    def _accept_shared(self, offer: _Offer) -> _Answer:
        if offer.host_id != self._owner.host_id:
            raise _LaneImpossible("the peer is on another host")
        try:
            memory = map_peer(offer.pid, offer.fd, area_bytes(offer.slots, offer.slot_bytes))
        except (OSError, ValueError) as error:
            raise _LaneImpossible(
                f"the peer's memory can't be opened ({error}); it takes the same user and one PID namespace"
            ) from error
        seen = Slots(memory, offer.slots, offer.slot_bytes, offer.nonce)
        if not seen.holds(0, 0):
            raise _LaneImpossible("what is there is not the peer's memory; is it in another PID namespace?")
        self._seen = seen
        self._peer_memory = self._open_peer(offer)
        return _Answer("shared", offer.nonce, lends=self._peer_memory is not None)

    def _open_peer(self, offer: _Offer) -> PeerMemory | None:
        """The peer's memory for reads by address, if this process has the right to it."""
        if not _ORDERED or not hasattr(os, "pidfd_open"):
            return None
        try:
            memory = PeerMemory(offer.pid)
        except OSError:
            return None
        found = np.zeros(NONCE_BYTES, np.uint8)
        try:
            remote = np.array([offer.address], np.uint64)
            memory.read(remote, NONCE_BYTES, np.array([found.ctypes.data], np.uint64), NONCE_BYTES)
        except OSError as error:
            _log.info("no direct reads; CMA takes ptrace rights", peer=self.peer_address, why=str(error))
        else:
            if found.tobytes() == offer.nonce:
                return memory
        memory.close()
        return None

    def _accept_get(self, offer: _Offer) -> _Answer:
        if offer.host_id == self._owner.host_id:
            # UCX finds out about missing rights only with its first read, which costs the connection.
            try:
                found = read_process(offer.pid, offer.address, NONCE_BYTES)
            except OSError as error:
                raise _LaneImpossible(
                    f"the peer's memory can't be read ({error}); CMA takes ptrace rights: the same user, and in "
                    "containers CAP_SYS_PTRACE or kernel.yama.ptrace_scope=0"
                ) from error
            if found != offer.nonce:
                raise _LaneImpossible("what CMA reads is not the peer's memory; is it in another PID namespace?")
        nbytes = area_bytes(offer.slots, offer.slot_bytes)
        self._take_budget(nbytes)
        try:
            self._remote_rkey = self._endpoint.unpack_rkey(offer.rkey)
            self._own_slots(offer)
        except KVStreamError:
            self._return_budget()
            raise
        self._remote_address = offer.address
        return _Answer("get", offer.nonce, lends=offer.lends and _ORDERED and offer.slot_bytes > MAX_KEYS_BYTES)

    def _accept_put(self, offer: _Offer) -> _Answer:
        self._take_budget(area_bytes(offer.slots, offer.slot_bytes))
        try:
            region = self._own_slots(offer, writable=True)
        except KVStreamError:
            self._return_budget()
            raise
        self._seen = self._own
        return _Answer("put", offer.nonce, region.address, region.rkey)

    def _own_slots(self, offer: _Offer, *, writable: bool = False) -> Region:
        memory = allocate(area_bytes(offer.slots, offer.slot_bytes))
        region = self._region = self._endpoint.worker.register(Slab.of(memory), writable=writable)
        self._own = Slots(memory, offer.slots, offer.slot_bytes, offer.nonce)
        return region

    def open_lane(self, answer: bytes) -> None:
        if self._offered is None or self.lane is not None:
            raise RuntimeError("open_lane belongs to the source, once per connection, after offer_lanes")
        decoded = _decode(answer, _answers, self.peer_address)
        self._check_open()
        if decoded.nonce != self._offered.nonce or decoded.lane not in self._offered.lanes:
            raise ProtocolError(f"{self.peer_address}: its lane answer is not one to our offer")
        if decoded.lends and decoded.lane == "get" and not self._offered.lends:
            raise ProtocolError(f"{self.peer_address}: its lane answer takes up loans that were not offered")
        if decoded.device and not (decoded.lends and decoded.lane == "get" and self._offered.device is not None):
            raise ProtocolError(f"{self.peer_address}: its lane answer takes up memory of a GPU that was not offered")
        if decoded.lane == "put":
            if not decoded.rkey or not decoded.address:
                raise ProtocolError(f"{self.peer_address}: its lane answer does not say where to put")
            self._remote_rkey = self._endpoint.unpack_rkey(decoded.rkey)
            self._remote_address = decoded.address
        self._set_lane(decoded, self._offered)

    def _set_lane(self, answer: _Answer, offer: _Offer) -> None:
        lane = self.lane = answer.lane
        self.slots = offer.slots
        self.slot_bytes = offer.slot_bytes
        self.lends = answer.lends and lane in ("shared", "get")
        self.lends_device = answer.device
        self.no_device = answer.no_device or self._no_device
        if self.lends:
            self.lent_runs = (offer.slot_bytes - (MAX_KEYS_BYTES if lane == "get" else 0)) // 8
        _log.debug("lane opened", peer=self.peer_address, lane=lane, dialed=self.dialed, carriers=self.describe())

    def _take_budget(self, nbytes: int) -> None:
        budget = self._owner.budget
        if not budget.take(nbytes):
            left = budget.limit - budget.used
            raise Refused(f"staging memory: {nbytes} bytes wanted, {left} of {budget.limit} left (staging_limit)")
        self._taken = nbytes

    def _return_budget(self) -> None:
        taken, self._taken = self._taken, 0
        self._owner.budget.give_back(taken)

    # -- memory of GPUs

    def offer_device(self, slot_bytes: int) -> None:
        if self._owner.device is not None:
            self._device_slot_bytes = slot_bytes

    def device_offered(self, offer: bytes) -> DeviceOffer | None:
        described = _decode(offer, _offers, self.peer_address)
        device = described.device
        if device is None:
            return None
        return DeviceOffer(described.slots, device.slot_bytes, device.sample, self._why_no_device(described, device))

    def _why_no_device(self, offer: _Offer, device: _Device) -> str:
        if offer.host_id != self._owner.host_id:
            return "the peer is on another host"
        if self._owner.device is None:
            return "there is no staging on a GPU here"
        if not (_ORDERED and offer.lends and offer.slot_bytes > MAX_KEYS_BYTES):
            return "this connection can't lend"
        reason = self._carried_lanes()["get"]
        if reason:
            return reason
        names = {name for name, device in self._endpoint.transports() if device}
        if not names & (_GPU_READS if device.gpu else _HOST_READS):
            return f"UCX uses {'+'.join(sorted(names))} here, which can't read the memory of the peer's GPU"
        return ""

    def try_device(self, offer: bytes, address: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        device = _decode(offer, _offers, self.peer_address).device
        if device is None:
            raise RuntimeError("the source has offered no memory of a GPU")

        def ended(status: int) -> None:
            if status == _ucp.OK:
                future.set_result(None)
            else:
                _fail_quietly(future, PeerLost(f"{self.peer_address}: {self._owner.words(status)}"))

        if self.lost:
            _fail_quietly(future, PeerLost(f"{self.peer_address}: the connection is closed"))
            return future
        try:
            key = self._unpack(device.rkey)
            # What can't be read directly UCX has the peer's processor copy into messages, sooner or later.
            status = self._endpoint.map_remote(key, device.address) if device.gpu else _ucp.OK
            if status != _ucp.OK:
                raise PeerLost(f"{self.peer_address}: its GPU's memory can't be mapped: {self._owner.words(status)}")
            self._endpoint.get_all([(address, len(device.sample), device.address, key)], ended)
        except KVStreamError as error:
            _fail_quietly(future, error)
        return future

    def settle_device(self, why: str) -> None:
        self._device = not why
        self._no_device = why[:_MAX_WHY]

    def when_fenced(self, call: Callable[[], None]) -> None:
        if self._released:
            call()
        else:
            self._when_fenced.append(call)

    # -- bytes, source side

    def write_view(self, slot: int) -> ByteView:
        own = self._own_slot(slot)
        own.clear(slot)
        return own.data(slot, self.slot_bytes)

    def publish(self, slot: int, nbytes: int) -> asyncio.Future[int]:
        future: asyncio.Future[int] = self._loop.create_future()
        if self._mailbox.error is not None:
            _fail_quietly(future, PeerLost(str(self._mailbox.error)))
            return future
        own = self._own_slot(slot)
        if not 0 <= nbytes <= self.slot_bytes:
            raise ValueError(f"publish of {nbytes} bytes from a slot of {self.slot_bytes}")
        self._generation += 1
        generation = self._generation
        own.stamp(slot, generation)
        if self.lane != "put":
            future.set_result(generation)
            return future
        self._pending.add(future)
        self._moving.add(slot)

        def ended(status: int) -> None:
            self._moving.discard(slot)
            self._pending.discard(future)
            if status == _ucp.OK:
                _resolve(future, generation)
            elif status == WITHDRAWN:
                _fail_quietly(future, Cancelled(f"{self.peer_address}: slot {slot} was withdrawn"))
            else:
                reason = self._owner.words(status)
                _fail_quietly(future, PeerLost(f"{self.peer_address}: {reason}"))
                self._failed(reason)

        offset = own.offset(slot)
        # Header and bytes in one transfer, the header first: who still reads the old content sees it change in time.
        self._puts.put(
            slot, own.address + offset, HEADER + nbytes, self._remote_address + offset, self._remote_rkey, ended
        )
        return future

    def withdraw(self, slot: int) -> None:
        self._puts.withdraw(slot)

    def lend(self, slot: int, lent: Lent) -> int:
        own = self._own_slot(slot)
        addresses = lent.addresses.view(np.uint8)
        if not self.lends or lent.run_bytes < MIN_LENT_RUN or len(lent.addresses) > self.lent_runs:
            runs = f"{len(lent.addresses)} runs of {lent.run_bytes} bytes"
            raise ValueError(f"lending {runs} by a slot of {self.slot_bytes} (lends: {self.lends})")
        keys = addresses[:0]
        if self.lane == "get":
            exports = self._owner.exports()
            if exports is None:
                raise PeerLost("the transport is closed")
            keys = exports.keys(lent)
        own.clear(slot)
        table = own.data(slot, keys.nbytes + addresses.nbytes)
        table[: keys.nbytes] = keys
        table[keys.nbytes :] = addresses
        self._generation += 1
        own.stamp(slot, self._generation, lent.run_bytes, keys.nbytes)
        return self._generation

    def recall(self, slot: int, generation: int) -> None:
        if self._own is not None and self._own.holds(slot, generation):
            self._own.clear(slot)

    def _own_slot(self, slot: int) -> Slots:
        self._check_open()
        if not self.dialed or self.lane is None or self._own is None:
            raise RuntimeError("slots are written by the source, after open_lane")
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} of {self.slots}")
        if slot in self._moving:
            raise RuntimeError(f"slot {slot} is still being sent; only its publish, or the fence, ends that")
        return self._own

    # -- bytes, destination side

    def borrow(self, lent: Lent, local: Lent) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self._loop.create_future()
        longer, shorter = max(lent.run_bytes, local.run_bytes), min(lent.run_bytes, local.run_bytes)
        if lent.nbytes != local.nbytes or longer % shorter:
            theirs, ours = (f"{len(runs.addresses)} runs of {runs.run_bytes} bytes" for runs in (lent, local))
            future.set_exception(Corrupted(f"{self.peer_address}: {theirs} are lent, {ours} are wanted"))
        elif isinstance(lent, Loan):
            self._read_loan(future, lent, local)
        else:
            try:
                self._copy_loan(lent, local)
            except KVStreamError as error:
                _fail_quietly(future, error)
            else:
                future.set_result(None)
        return future

    def _copy_loan(self, lent: Lent, local: Lent) -> None:
        memory = self._peer_memory
        try:
            if memory is None:
                raise OSError(0, "the connection is closed")
            memory.read(lent.addresses, lent.run_bytes, local.addresses, local.run_bytes)
        except OSError as error:
            if error.errno == errno.ESRCH or (memory is not None and not memory.alive):
                # Seen before UCX has seen it.
                self._failed("the process has ended")
                raise PeerLost(f"{self.peer_address}: the process has ended") from error
            raise Corrupted(f"{self.peer_address}: what it lent can't be read: {error}") from error

    def take(self, slot: int, generation: int, nbytes: int) -> asyncio.Future[ByteView | Lent]:
        future: asyncio.Future[ByteView | Lent] = self._loop.create_future()
        if self._mailbox.error is not None:
            _fail_quietly(future, PeerLost(str(self._mailbox.error)))
        elif self.dialed or not 0 <= slot < self.slots:
            future.set_exception(ProtocolError(f"{self.peer_address}: slot {slot} of {self.slots}"))
        elif not 0 <= nbytes <= (_MAX_LOAN if self.lends else self.slot_bytes):
            future.set_exception(self._out_of_range(slot, nbytes))
        elif self.lane == "get":
            self._get(future, slot, generation, nbytes)
        else:
            self._finish_take(future, self._seen, slot, generation, nbytes)
        return future

    def _get(self, future: asyncio.Future[ByteView | Lent], slot: int, generation: int, nbytes: int) -> None:
        own = self._own
        if own is None or slot in self._moving:
            future.set_exception(self._read_already(slot))
            return
        offset = own.offset(slot)
        local, remote = own.address + offset, self._remote_address + offset
        # Only the header tells whether the bytes or a table follow it. A source does as it did the last time.
        first = min(self.slot_bytes, _TABLE_BYTES if self.lends and self._expects_loan else nbytes)
        self._pending.add(future)
        self._moving.add(slot)

        def got_first(status: int) -> None:
            if status != _ucp.OK or self.lost or not own.holds(slot, generation):
                ended(status)
                return
            run = own.lent_run(slot)
            self._expects_loan = run > 0
            needed = own.lent_keys(slot) + 8 * (nbytes // run) if run and self.lends else nbytes
            if needed <= first:
                # A table of known slabs needs no second look at the header now: borrow takes one.
                if run and self.lends and own.data(slot, own.lent_keys(slot)).tobytes() in self._shelves:
                    ended(status)
                else:
                    got_all(status)
            elif needed > self.slot_bytes:
                ended(status)
            else:
                begin = HEADER + first
                self._endpoint.get(local + begin, needed - first, remote + begin, self._remote_rkey, got_all)

        def got_all(status: int) -> None:
            # Only a header read after the bytes says that they were still the announced ones.
            if status != _ucp.OK or self.lost:
                ended(status)
            else:
                self._endpoint.get(local, HEADER, remote, self._remote_rkey, ended)

        def ended(status: int) -> None:
            self._moving.discard(slot)
            self._pending.discard(future)
            if status != _ucp.OK:
                reason = self._owner.words(status)
                _fail_quietly(future, PeerLost(f"{self.peer_address}: {reason}"))
                self._failed(reason)
            elif not future.done():
                self._finish_take(future, own, slot, generation, nbytes)

        self._endpoint.get(local, HEADER + first, remote, self._remote_rkey, got_first)

    def _read_loan(self, future: asyncio.Future[None], loan: Loan, local: Lent) -> None:
        """Gets from the source's runs into ours, then the slot's header for `check`. The future is not one of those
        that a loss ends at once: until the last operation has its final status our memory may be written."""
        own, slot = self._own, loan.slot
        if own is None or self.lost:
            _fail_quietly(future, PeerLost(f"{self.peer_address}: the connection is closed"))
            return
        if slot in self._moving:
            future.set_exception(self._read_already(slot))
            return
        self._moving.add(slot)
        offset = own.offset(slot)

        def got_bytes(status: int) -> None:
            if status != _ucp.OK or self.lost:
                ended(status)
            else:
                remote = self._remote_address + offset
                self._endpoint.get(own.address + offset, HEADER, remote, self._remote_rkey, ended)

        def ended(status: int) -> None:
            self._moving.discard(slot)
            if status == _ucp.OK and not self.lost:
                if not future.done():
                    future.set_result(None)
                return
            reason = self._owner.words(status) if status != _ucp.OK else "the connection was lost"
            _fail_quietly(future, PeerLost(f"{self.peer_address}: {reason}"))
            self._failed(reason)

        Reads(self._endpoint, plan(loan, local), got_bytes).post()

    def _shelf(self, keys: bytes) -> Shelf:
        shelf = self._shelves.get(keys)
        if shelf is None:
            if len(self._shelves) == _MAX_SHELVES:
                raise ProtocolError(f"{self.peer_address} lends out of more than {_MAX_SHELVES} sets of slabs")
            shelf = self._shelves[keys] = Shelf(keys, self._unpack)
        return shelf

    def _unpack(self, packed: bytes) -> int:
        key = self._unpacked.get(packed)
        if key is None:
            try:
                key = self._unpacked[packed] = self._endpoint.unpack_rkey(packed)
            except PeerLost as error:
                raise ProtocolError(str(error)) from error
        return key

    def _read_already(self, slot: int) -> ProtocolError:
        return ProtocolError(f"{self.peer_address}: slot {slot} was announced while it is read")

    def _out_of_range(self, slot: int, nbytes: int) -> ProtocolError:
        return ProtocolError(f"{self.peer_address}: slot {slot} with {nbytes} bytes is out of range")

    def _finish_take(
        self, future: asyncio.Future[ByteView | Lent], source: Slots | None, slot: int, generation: int, nbytes: int
    ) -> None:
        """The header and what it speaks of are within reach: a view of the bytes, or what is lent."""
        if source is None or generation <= 0 or not source.holds(slot, generation):
            # A source that closes takes everything back at once, and its peer may see that before it sees the loss.
            what = f"{self.peer_address}: slot {slot} does not hold generation {generation} (any more)"
            future.set_exception(Recalled(what))
        elif self.lends and (run := source.lent_run(slot)):
            try:
                future.set_result(self._loan(source, slot, nbytes, run))
            except KVStreamError as error:
                future.set_exception(error)
        elif nbytes > self.slot_bytes:
            future.set_exception(self._out_of_range(slot, nbytes))
        else:
            view = source.data(slot, nbytes)
            view.flags.writeable = False
            future.set_result(view)

    def _loan(self, source: Slots, slot: int, nbytes: int, run: int) -> Lent:
        count, keys = nbytes // run, source.lent_keys(slot)
        size = keys + 8 * count
        if run < MIN_LENT_RUN or count * run != nbytes or size > self.slot_bytes or keys % 8:
            raise ProtocolError(f"{self.peer_address}: {nbytes} bytes lent in runs of {run}, with {keys} bytes of keys")
        table = source.data(slot, size)
        # A copy: the slot is the peer's memory, or is read into again.
        addresses = table[keys:].view(np.uint64).copy()
        return (
            self._shelf(table[:keys].tobytes()).loan(addresses, run, slot)
            if self.lane == "get"
            else Lent(addresses, run)
        )

    def check(self, slot: int, generation: int) -> bool:
        source = self._own if self.lane == "get" else self._seen
        return source is not None and 0 <= slot < self.slots and generation > 0 and source.holds(slot, generation)

    # -- end

    def close(self) -> None:
        self._lose(PeerLost(f"connection to {self.peer_address} was closed here"), discard=True)

    @property
    def quarantined(self) -> int:
        return self._taken if self._quarantined else 0

    async def fence(self) -> None:
        fencing = self.abandon()
        # wait() leaves the task alone when this call is cancelled or its time is up.
        await asyncio.wait((fencing,), timeout=self._owner.fence_timeout)
        if not fencing.done():
            if not self._quarantined:
                self._quarantined = True
                self._owner.budget.quarantined += self._taken
                _log.warning("fence not reached, staging quarantined", peer=self.peer_address, nbytes=self._taken)
            return
        fencing.result()

    def abandon(self) -> asyncio.Task[None]:
        """Close, and reach the fence in the background."""
        self.close()
        if self._fencing is None:
            self._fencing = self._loop.create_task(self._reach_fence(), name=f"fence {self.peer_address}")
        return self._fencing

    async def _reach_fence(self) -> None:
        await self._endpoint.when_settled()
        # UCX takes an endpoint's socket apart in the step after its close.
        await self._endpoint.worker.turn()
        self._release()

    def _release(self) -> None:
        if self._quarantined:
            self._quarantined = False
            self._owner.budget.quarantined -= self._taken
        if self.dialed and self._own is not None:
            self._own.retire()
        if self._region is not None:
            self._region.unregister()
            self._region = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._peer_memory is not None:
            self._peer_memory.close()
            self._peer_memory = None
        self._own = None
        self._seen = None
        self._return_budget()
        self._owner.drop(self)
        self._released = True
        waiting, self._when_fenced = self._when_fenced, []
        for call in waiting:
            call()


class UcxTransport(Transport):
    """Listener and dialer over UCX.

    `interface`: None for loopback only, an interface's name, one of the host's IPv4 addresses, or "all".
    `lanes`: those the runtime will ever allow. `port`, `get_port`: 0 takes any. `options`: UCX's, without prefix, added
    to both workers' contexts. `put_window`: see RuntimeConfig. `host_id`, `entropy` (random bytes) and `fence_timeout`
    (seconds after which memory that is not fenced counts as quarantined) are for tests.
    """

    name = "ucx"

    def __init__(
        self,
        interface: str | None = None,
        *,
        budget: StagingBudget,
        lanes: tuple[Lane, ...] = LANES,
        port: int = 0,
        get_port: int = 0,
        options: Mapping[str, str] | None = None,
        host_id: str | None = None,
        entropy: Callable[[int], bytes] = os.urandom,
        fence_timeout: float = 2.0,
        put_window: int = PUT_WINDOW,
    ) -> None:
        self.budget = budget
        self.put_window = put_window
        self.entropy = entropy
        self.fence_timeout = fence_timeout
        self.host_id = host_id or ""
        self._interface_name = interface
        self._lanes = lanes
        self._port = port
        self._get_port = get_port
        self._options = dict(options or {})
        self._ucp: _ucp.Ucp | None = None
        self._interface: Interface | None = None
        self._tcp: UcpWorker | None = None
        self._reader: UcpWorker | None = None
        self._on_connection: Callable[[Connection], None] | None = None
        self._connections: dict[UcxConnection, None] = {}
        self.device: DeviceStaging | None = None
        self._slabs: list[Slab] = []
        self._registered: list[Region] = []
        self._exports: Exports | None = None
        self._has_rdma = False
        self._warming: asyncio.Task[None] | None = None
        self._closed = False

    async def start(self, on_connection: Callable[[Connection], None]) -> ListenAddress:
        if self._closed or self._on_connection is not None:
            raise RuntimeError("a transport starts once")
        self._on_connection = on_connection
        # Importing ucxx takes most of a second, the rest reads files.
        interface = await asyncio.to_thread(self._prepare)
        if self._closed:
            raise PeerLost("this transport was closed while it started")
        self._tcp = self._open_worker(self._tcp_options())
        self._tcp.listen(interface.bind, self._port)
        get_port = 0
        if "get" in self._lanes:
            reader = self._open_reader()
            reader.listen(interface.bind, self._get_port)
            get_port = reader.port
        # While nobody has been told where to dial. A start that is cancelled leaves it to run to its (near) end:
        # UCX can crash where a worker goes while a connection to it comes about.
        warm_up = self._warm_up(self._tcp, self._reader, interface.host)
        self._warming = asyncio.create_task(warm_up, name="warm-up of UCX")
        await asyncio.wait((self._warming,))
        self._warming.result()
        if self._closed:
            raise PeerLost("this transport was closed while it started")
        self._tcp.on_endpoint = self._accept_plain
        if self._reader is not None:
            self._reader.on_endpoint = self._accept_reads
        return ListenAddress(
            transport=self.name,
            host=interface.host,
            port=self._tcp.port,
            host_id=self.host_id,
            scope=interface.scope,
            get_port=get_port,
            device=self.device is not None and get_port != 0,
        )

    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        if self._closed:
            raise PeerLost("this transport is closed")
        tcp, interface = self._tcp, self._interface
        if tcp is None or interface is None:
            raise RuntimeError("the transport is not started")
        if address.transport != self.name:
            raise ConfigError("transport", f"the peer speaks {address.transport!r}, this worker {self.name!r}")
        # Each side's UCX has the devices of its own interface only, on one host as well.
        inside = address.host_id == self.host_id and interface.scope in ("loopback", "all")
        if address.scope == "loopback" and not inside:
            raise ConfigError(
                "data_interface",
                f"{address.host}:{address.port} listens on loopback only; start it with --data-interface",
            )
        if interface.scope == "loopback" and address.scope != "loopback":
            raise ConfigError(
                "data_interface",
                f"this worker uses loopback only and can't reach {address.host}; start it with --data-interface",
            )
        try:
            ipaddress.IPv4Address(address.host)
        except ValueError as error:
            raise PeerLost(f"{address.host!r} can't be dialed: it is no IPv4 address") from error
        reads = self._first_lane(address, lanes) == "get"
        worker = self._open_reader() if reads else tcp
        endpoint = worker.connect(address.host, address.get_port if reads else address.port)
        connection = UcxConnection(self, endpoint, dialed=True, reads=reads)
        self._connections[connection] = None
        answered: asyncio.Future[int] = worker.loop.create_future()
        endpoint.flush(lambda status: _resolve(answered, status))
        try:
            status = await answered
        except asyncio.CancelledError:
            connection.abandon()
            raise
        if status != _ucp.OK or connection.lost:
            connection.abandon()
            kind = Unreachable if status == _ucp.UNREACHABLE else PeerLost
            raise kind(f"{endpoint.peer_address} can't be reached: {self.words(status)}")
        return connection

    def expose(self, slabs: Sequence[Slab]) -> None:
        self._slabs.extend(slabs)

    def attach_device(self, staging: DeviceStaging) -> bool:
        if self._on_connection is not None or self.device is not None:
            raise RuntimeError("a transport is given the staging of one device, before it starts")
        if "get" not in self._lanes:
            return False
        self.device = staging
        self.expose([staging.slab])
        return True

    async def aclose(self) -> None:
        self._closed = True
        if self._warming is not None:
            await asyncio.wait((self._warming,))
        for worker in (self._tcp, self._reader):
            if worker is not None:
                worker.on_endpoint = None
        await asyncio.gather(*(connection.fence() for connection in self._connections))
        for worker in (self._tcp, self._reader):
            if worker is not None:
                worker.close()
        for region in self._registered:
            region.unregister()
        self._registered.clear()
        self._slabs.clear()
        self._exports = None
        # Without the workers nothing is in flight: also what could not be fenced is free now.
        await asyncio.gather(*(connection.abandon() for connection in self._connections))

    # -- for its connections

    def words(self, status: int) -> str:
        return self._ucp.error(status) if self._ucp is not None else str(status)

    def drop(self, connection: UcxConnection) -> None:
        self._connections.pop(connection, None)

    def exports(self) -> Exports | None:
        """What can be lent on the lane `get`, registered with the worker that reads by now; None when there is
        nothing, or it can't be registered."""
        if len(self._registered) < len(self._slabs) and not self._closed:
            reader = self._open_reader()
            try:
                for slab in self._slabs[len(self._registered) :]:
                    self._registered.append(reader.register(slab))
            except ConfigError as error:
                # RDMA pins what is registered, and there is a limit to that. Without it bytes go by way of slots.
                # All or nothing: a source cuts its chunks as if it could lend any of them.
                _log.warning("memory can't be registered, so it is not lent", why=str(error))
                for region in self._registered:
                    region.unregister()
                self._registered.clear()
                self._slabs.clear()
            regions = zip(self._slabs, self._registered, strict=True)
            slabs = [KeyedSlab(slab.address, slab.nbytes, region.rkey) for slab, region in regions]
            self._exports = Exports(slabs) if slabs else None
        return self._exports

    # -- inside

    def _prepare(self) -> Interface:
        interface = self._interface = resolve_interface(self._interface_name)
        self.host_id = self.host_id or host_id()
        self._has_rdma = has_rdma()
        self._ucp = _ucp.load()
        return interface

    async def _warm_up(self, tcp: UcpWorker, reader: UcpWorker | None, host: str) -> None:
        """Have UCX choose its protocols now, not while the first peer waits for it (see _warmup)."""
        try:
            async with asyncio.timeout(_WARM_UP_SECONDS):
                await converse(tcp, tcp, host)
                # Elsewhere peers come over the other worker only where they are not allowed anything better.
                peers = self._has_rdma or self.device is not None or "shared" not in self._lanes
                if reader is not None and peers:
                    await self._warm_up_reader(reader, host)
                if "shared" in self._lanes:
                    _rehearse_read()
        except (KVStreamError, TimeoutError) as error:
            _log.info("the first connections will be slow: UCX was not warmed up", why=str(error) or "no time left")

    async def _warm_up_reader(self, reader: UcpWorker, host: str) -> None:
        # What UCX chooses here differs between a worker's connection to itself and one to a peer, and between the
        # sides. The stand-in for a peer has no use for good protocols, and without choosing any it is ready at once.
        peer = self._open_worker({"PROTO_ENABLE": "n"})
        try:
            peer.listen(host, 0)
            await converse(reader, peer, host)
            await converse(peer, reader, host)
        finally:
            peer.close()

    def _first_lane(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Lane:
        same_host = address.host_id == self.host_id
        devices = same_host and address.device and self.device is not None
        for lane in ("get", *LANES) if devices else LANES:
            usable = {
                "shared": same_host,
                # Without RDMA there is nothing that reads over a network.
                "get": address.get_port != 0 and (same_host or self._has_rdma),
                "put": True,
            }
            if lane in lanes and usable[lane]:
                return lane
        return "put"

    def _open_reader(self) -> UcpWorker:
        if self._reader is None:
            device = self.device
            self._reader = self._open_worker(
                {},
                around=device.current if device is not None else nullcontext,
                gpu_options=_GPU_OPTIONS if device is not None and device.slab.gpu else {},
            )
        return self._reader

    def _tcp_options(self) -> dict[str, str]:
        """Options of the worker that speaks TCP only."""
        options = {"TLS": "tcp"}
        if self._interface is not None and len(self._interface.devices) == 1:
            # There is no second device to look for: connections come about in fewer steps.
            options["CM_USE_ALL_DEVICES"] = "n"
        return options

    def _open_worker(
        self,
        options: Mapping[str, str],
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        gpu_options: Mapping[str, str] | None = None,
    ) -> UcpWorker:
        if self._ucp is None or self._interface is None:
            raise RuntimeError("the transport is not started")
        # UCX's own thread, which sees to its sockets, and the loop share a lock. A spinlock costs the loop the time
        # slices of others (10 ms per connection on a busy machine) whenever that thread is put to sleep holding it.
        fixed = {"RNDV_THRESH": "inf", "USE_MT_MUTEX": "y", **options}
        if self._interface.devices:
            # Not only the listener: each TCP device of UCX listens on its own address.
            fixed["NET_DEVICES"] = ",".join(self._interface.devices)
            # Which of them has the default route would be asked of the kernel a hundred times a connection.
            fixed["TCP_PREFER_DEFAULT"] = "n"
        return UcpWorker(
            self._ucp,
            asyncio.get_running_loop(),
            {**fixed, **self._options},
            around=around,
            gpu_options=gpu_options,
        )

    def _accept_plain(self, endpoint: Endpoint) -> None:
        self._accept(endpoint, reads=False)

    def _accept_reads(self, endpoint: Endpoint) -> None:
        self._accept(endpoint, reads=True)

    def _accept(self, endpoint: Endpoint, *, reads: bool) -> None:
        connection = UcxConnection(self, endpoint, dialed=False, reads=reads)
        self._connections[connection] = None
        endpoint.worker.loop.call_soon(self._announce, connection)

    def _announce(self, connection: UcxConnection) -> None:
        if self._closed or self._on_connection is None:
            return  # aclose fences it
        self._on_connection(connection)


class _LaneImpossible(Exception):
    """Why one lane does not work on one connection."""


def _no_lane(peer: str, reasons: Mapping[Lane, str]) -> ConfigError:
    return ConfigError(
        "lanes", f"none works with {peer}: " + "; ".join(f"{lane}: {why}" for lane, why in reasons.items())
    )


def _decode(raw: bytes, decoder: msgspec.msgpack.Decoder[_T], peer: str) -> _T:
    try:
        return decoder.decode(raw)
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"{peer}: lane negotiation is not understood: {error}") from error


def _rehearse_read() -> None:
    """Read of this process's own memory what is read of a peer's when a shared lane is opened: the first time takes
    half a millisecond longer."""
    if not hasattr(os, "pidfd_open"):
        return
    source, target = np.zeros((2, NONCE_BYTES), np.uint8)
    addresses = [np.array([array.ctypes.data], np.uint64) for array in (source, target)]
    # Whether it is allowed is found out for each peer.
    with suppress(OSError), closing(PeerMemory(os.getpid())) as memory:
        memory.read(addresses[0], NONCE_BYTES, addresses[1], NONCE_BYTES)


def _resolve(future: asyncio.Future[int], value: int) -> None:
    if not future.done():
        future.set_result(value)


def _fail_quietly(future: asyncio.Future[Any], error: KVStreamError) -> None:
    """Fail a future by a loss. The loss is told by on_lost: that nobody awaits the future is no second event."""
    if not future.done():
        future.set_exception(error)
        future.exception()
