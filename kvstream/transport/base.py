"""The transport contract: what a connection between two workers promises, whatever carries it.

A connection carries data one way: the side that dialed is the *source*, the side that listened the
*destination*; control messages go both ways. A transport moves bytes between *slots* (fixed-size staging
buffers that belong to one connection) and knows nothing of streams, layers or pools: the runtime gathers KV
blocks into a slot on the source and scatters them out of a slot on the destination, so that the memory of the
user's pool is not in the hands of an asynchronous operation. The one exception is `borrow`, which may be one: its
future says when the memory is the caller's again.

Life of a slot (the source keeps the account of which of its slots are free):

    source:       view = write_view(slot); gather into view; generation = await publish(slot, nbytes)
                  (the runtime tells the peer: slot, generation, nbytes)
    destination:  view = await take(slot, generation, nbytes); scatter from view; check(slot, generation)
                  (the runtime confirms, the source may reuse the slot)

or, where the connection `lends`, without a copy on the source:

    source:       generation = lend(slot, runs of its own memory), which it may `recall`
    destination:  lent = await take(slot, generation, nbytes); await borrow(lent, runs of its own memory);
                  check(slot, generation)

`tests/contract/transport_suite.py` is this text as tests; every transport and every lane passes it.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "LANES",
    "MAX_MESSAGE",
    "MIN_LENT_RUN",
    "ByteView",
    "Connection",
    "DeviceOffer",
    "DeviceStaging",
    "Lane",
    "Lent",
    "ListenAddress",
    "Slab",
    "StagingBudget",
    "Transport",
]

Lane = Literal["shared", "get", "put", "local"]
"""How bytes move: `shared` slots of one host, `get` by the destination, `put` by the source, `local` in one process."""

LANES: tuple[Lane, ...] = ("shared", "get", "put")
"""The lanes of the UCX transport, in the order in which `auto` prefers them."""

MAX_MESSAGE = 8192
"""Largest control message in bytes."""

ByteView = npt.NDArray[np.uint8]


MIN_LENT_RUN = 64
"""Shortest run of bytes that is lent: below it the list of addresses outweighs the bytes."""


class Slab(NamedTuple):
    """Memory that may be lent: `nbytes` at `address`, alive for as long as `owner` is; `gpu`: it is a GPU's."""

    address: int
    nbytes: int
    owner: object
    gpu: bool = False

    @classmethod
    def of(cls, memory: ByteView) -> Slab:
        """The memory of an array."""
        return cls(int(memory.ctypes.data), memory.nbytes, memory)


@dataclass(frozen=True, slots=True)
class Lent:
    """Bytes that a source has not gathered, but lends where they are: runs of `run_bytes` at `addresses` (uint64, shape
    (n,)) in its memory. Only for connections that can read the peer (`Connection.lends`)."""

    addresses: npt.NDArray[np.uint64]
    run_bytes: int

    @property
    def nbytes(self) -> int:
        return len(self.addresses) * self.run_bytes


@dataclass(frozen=True, slots=True)
class DeviceStaging:
    """Staging on a GPU, as a transport has to know it. The first bytes of the slab are `sample`, by which a peer finds
    out that it can read it; within `current()` its device is the calling thread's current one."""

    slab: Slab
    sample: bytes
    current: Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class DeviceOffer:
    """A source's offer to lend out of staging on its GPU, as its peer sees it: what it takes to receive that, and what
    has to be found where the sample is. `why` says why this connection can't carry it, or ""."""

    slots: int
    slot_bytes: int
    sample: bytes
    why: str


class ListenAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a transport listens, as published in the registry.

    `host_id` is equal for two processes exactly when they share one host's network and shared memory (boot id and
    network namespace). `scope` is the interface that was asked for: "loopback", or the address listened on.
    `get_port` is the listener for connections whose lane is `get` (0: none), see the UCX transport. `device`: there is
    staging on a GPU behind it, for which `get` may be the best lane.
    """

    transport: str
    host: str
    port: int
    host_id: str
    scope: str = "loopback"
    get_port: int = 0
    device: bool = False


class StagingBudget:
    """The process's cap on staging memory, in bytes; connections take their slots out of it and give them back.

    Memory of a connection whose fence has not been reached stays taken (`quarantined`), so a frozen peer can't
    make the process grow: beyond the cap new connections are refused.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.quarantined = 0

    def take(self, nbytes: int) -> bool:
        """Take `nbytes`; False (and nothing taken) when that would pass the limit."""
        if self.used + nbytes > self.limit:
            return False
        self.used += nbytes
        return True

    def give_back(self, nbytes: int) -> None:
        """Return bytes taken before. Returning more than is taken is a bug and raises ValueError."""
        if nbytes > self.used:
            raise ValueError(f"staging budget: giving back {nbytes} of {self.used} bytes taken")
        self.used -= nbytes


class Connection(ABC):
    """One connection between two workers. All methods are called on the event loop's thread.

    Control messages arrive whole, once, in order, until the connection is lost. `on_lost` fires exactly once, with
    a PeerLost (or ProtocolError) that says why, also after a local `close` or `fence`; no message is delivered
    after it. An operation (`publish`, `take`) that can't complete ends with PeerLost; none is left pending by a loss.
    """

    dialed: bool
    """True on the source (the side that dialed)."""
    peer_address: str
    """The other side, for messages and logs."""
    lane: Lane | None
    """Set by accept_lane (destination) or open_lane (source); None before."""
    slots: int
    """Number of slots of the lane; 0 before the lane is set."""
    slot_bytes: int
    """Size of a slot."""
    lost: bool
    lends: bool = False
    """Whether the destination can read the source's memory by address, proven when the lane was agreed on: then the
    source may `lend` runs of bytes in place of gathering them into a slot. Set with the lane."""
    lent_runs: int = 0
    """The most runs that one slot can lend; 0 where `lends` is False. Set with the lane."""
    lends_device: bool = False
    """Whether what is lent may be, and is expected to be, memory of the source's GPU that goes to one of the
    destination's: proven by a sample before the lane was agreed on. It then `lends`. Set with the lane."""
    no_device: str = ""
    """Why it is not so although the source offered it. Set with the lane."""

    @property
    def quarantined(self) -> int:
        """Bytes of staging memory that the connection keeps although it is lost, since its fence was not reached in
        time: a peer may still touch them. 0 before that, and once it is reached."""
        return 0

    @abstractmethod
    def describe(self) -> str:
        """What carries the bytes of this connection, for logs and `doctor`: "tcp/lo", for example."""

    # -- control messages

    @abstractmethod
    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[Exception], None]) -> None:
        """Begin delivery. Messages that came before are kept (bounded) and delivered from the loop, not from within."""

    @abstractmethod
    def send(self, message: bytes) -> None:
        """Queue a control message (at most MAX_MESSAGE bytes, else ValueError). Never blocks, never waits behind bulk.

        A message to a lost connection is dropped: `on_lost` has told, or will tell. When more than a bounded
        number of messages is unsent the connection is lost (the peer does not read).
        """

    # -- lane negotiation: offer_lanes -> (Hello) -> accept_lane -> (Welcome) -> open_lane

    @abstractmethod
    def offer_lanes(self, allowed: tuple[Lane, ...], slots: int, slot_bytes: int) -> bytes:
        """Source: set up own staging and describe it, for the peer's accept_lane. Opaque, at most 2048 bytes.

        Raises Refused when the staging budget is exhausted, ConfigError when no allowed lane can work here.
        """

    @abstractmethod
    def accept_lane(self, offer: bytes, allowed: tuple[Lane, ...], *, borrows: bool = True) -> bytes:
        """Destination: pick the first lane, in preference order, that both sides allow and that is *proven* to work
        here (shared memory really opened and recognised, for example); without `borrows` the peer may not lend, since
        this side has no runs of host memory to read it into. Sets lane, slots and slot_bytes, and returns
        the opaque answer for open_lane. Raises ConfigError naming why each lane was not possible, Refused when the
        staging budget is exhausted, ProtocolError for garbage."""

    @abstractmethod
    def open_lane(self, answer: bytes) -> None:
        """Source: apply the peer's choice. Sets lane, slots and slot_bytes. Raises ProtocolError for garbage."""

    # -- memory of GPUs: offer_device, offer_lanes -> (Hello) -> device_offered, try_device, settle_device, accept_lane

    def offer_device(self, slot_bytes: int) -> None:
        """Source, before `offer_lanes`: offer to lend out of the transport's device staging, by way of each slot up to
        `slot_bytes` of it. A transport that can't does nothing."""
        return

    def device_offered(self, offer: bytes) -> DeviceOffer | None:
        """Destination, before `accept_lane`: whether the source has offered that. Raises ProtocolError for garbage."""
        return None

    def try_device(self, offer: bytes, address: int) -> asyncio.Future[None]:
        """Destination: read the sample that the source offers to `address` in memory of the own GPU. Until the future
        is done that may be written, as with `borrow`. Ends with KVStreamError when it can't be read."""
        raise RuntimeError(f"this transport does not read the memory of GPUs: {len(offer)} bytes, {address:#x}")

    def settle_device(self, why: str) -> None:
        """Destination, before `accept_lane`: the sample was found to be right (`why` is empty), and so the lane should
        be the one that it came by; or it was not."""
        return

    def when_fenced(self, call: Callable[[], None]) -> None:
        """Call `call` once no byte can move under this connection any more and each of its operations has its final
        status, however late; at once, if it is so. It must not raise."""
        raise RuntimeError(f"this transport does not read the memory of GPUs: {call}")

    # -- bytes, source side

    @abstractmethod
    def write_view(self, slot: int) -> ByteView:
        """Source: the slot's memory, `slot_bytes` long, to gather into. Invalidates what was published in it before:
        a destination still reading the old content finds out in `check`. Raises PeerLost on a lost connection."""

    @abstractmethod
    def publish(self, slot: int, nbytes: int) -> asyncio.Future[int]:
        """Source: make the slot's first `nbytes` readable by the peer and return the slot's new generation.

        Resolves when a notification sent afterwards can't overtake the bytes (put: written and flushed). Already
        done on return where nothing has to be awaited. Cancelling the future does not stop bytes; only fence does.
        """

    def withdraw(self, slot: int) -> None:
        """Source: nobody will take what is being published in this slot. What is not under way need not go; its
        publish ends as it would, or with Cancelled, when the slot is no longer used."""
        return

    def lend(self, slot: int, lent: Lent) -> int:
        """Source, where `lends`: publish runs of its own memory by way of a slot; the generation. At most `lent_runs`
        of them, on the lane `get` within memory that was exposed (`Transport.expose`), else ValueError. The memory has
        to stay as it is until the slot is confirmed or recalled."""
        raise RuntimeError(f"this connection does not lend: {self.lane}, slot {slot}, {lent.nbytes} bytes")

    def recall(self, slot: int, generation: int) -> None:
        """Source: take back what was lent under this generation, if the slot still stands for it. When this returns the
        memory may change: a destination that is reading, or has read, without having been through `check` finds out
        there that its bytes are not to be believed."""
        if self.lends:
            raise RuntimeError(f"a connection that lends has to be able to recall: slot {slot}, {generation}")

    # -- bytes, destination side

    def borrow(self, lent: Lent, local: Lent) -> asyncio.Future[None]:
        """Destination, where `lends`: copy what `take` returned as Lent to runs of the own memory (as many bytes in
        all). Already done on return where the copy is made inline (shared).

        Until the future is done the memory may be written, whatever becomes of the connection: `close` does not end
        that, nor does cancelling the future, which must not be done. It is done when every operation has its final
        status, of which the fence is the bound. Ends with Corrupted when the bytes can't be read, PeerLost when the
        connection or the source's process has ended. What was borrowed counts only after `check`.
        """
        raise RuntimeError(f"this connection does not lend: {lent.nbytes} bytes to {local.nbytes}")

    @abstractmethod
    def take(self, slot: int, generation: int, nbytes: int) -> asyncio.Future[ByteView | Lent]:
        """Destination: bring the bytes within reach and return them as a read-only view, valid until the slot is
        confirmed; or as Lent, for `borrow`. Slot and nbytes come from the peer: out of range ends with ProtocolError, a
        generation that does not match what is there (any more) with Recalled."""

    @abstractmethod
    def check(self, slot: int, generation: int) -> bool:
        """Destination: after the scatter, whether the slot held that generation all the time. False: the bytes
        that were scattered are not to be believed."""

    # -- end

    @abstractmethod
    def close(self) -> None:
        """Lose the connection from this side, at once and without waiting. Idempotent.

        Messages that came in but were not delivered are dropped, messages queued just before may be lost. Bytes may
        still move: only `fence`, which has to follow, ends that.
        """

    @abstractmethod
    async def fence(self) -> None:
        """Close, and return only when no byte can move under this connection any more, in either direction, and every
        operation of this side has its final result. Then the staging memory goes back to the budget.
        Idempotent; bounded; a cancelled fence can be awaited again, and completes in the background regardless."""


class Transport(ABC):
    """A listener plus a dialer. One per runtime."""

    name: str
    budget: StagingBudget

    @abstractmethod
    async def start(self, on_connection: Callable[[Connection], None]) -> ListenAddress:
        """Listen. `on_connection` gets each accepted connection (destination side), from the loop.
        Raises ConfigError when the interface or the library is missing, naming the remedy."""

    @abstractmethod
    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        """Connect to a peer's listener; returns when the peer's listener has answered or raises PeerLost.
        `lanes` are those the caller will allow (it decides which of the peer's ports is dialed).
        Raises ConfigError when `address` listens on loopback only and is on another host. Cancellation leaves
        nothing behind. The caller sets the deadline (asyncio.timeout)."""

    def expose(self, slabs: Sequence[Slab]) -> None:  # noqa: B027 - not every transport registers memory
        """Memory out of which connections may `lend`, in addition to what was exposed before. It is registered as a
        whole, once, when the first connection needs that, and stays so until `aclose`: its address range must not be
        given to anything else meanwhile. Without it a lane that needs registered memory does not lend."""

    def attach_device(self, staging: DeviceStaging) -> bool:
        """Before `start`: use this staging on a GPU, which is exposed by that. False where the transport has no use for
        it."""
        return False

    @abstractmethod
    async def aclose(self) -> None:
        """Stop listening, fence every connection, release everything. Idempotent."""
