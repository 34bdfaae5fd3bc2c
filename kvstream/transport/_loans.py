"""Lending over one-sided gets: what a slot says about memory that is lent, and the gets that read it.

Owns the table of a loan (the remote keys of the registered slabs it lies in, then the address of each run), the plan by
which runs over there become runs over here in as few operations as possible, and how many of them are under way. It
must never read outside of the slabs that a table names, and never report the end of a read before each of its
operations has its final status.

Host memory or a device's: a table says slab, key and addresses, and that is all a get needs.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvstream.errors import ProtocolError
from kvstream.transport import _ucp
from kvstream.transport._worker import Endpoint
from kvstream.transport.base import ByteView, Lent

__all__ = ["MAX_KEYS_BYTES", "MAX_KEY_BYTES", "Exports", "Get", "KeyedSlab", "Loan", "Reads", "parse", "plan"]

Addresses = npt.NDArray[np.uint64]

MAX_KEY_BYTES = 1024
"""Longest packed remote key."""

_MAX_SLABS = 4
_KEY = struct.Struct("<QQQ")
"""Before each packed key: the slab's address, its bytes, the bytes of the key."""

MAX_KEYS_BYTES = _MAX_SLABS * (_KEY.size + MAX_KEY_BYTES)
"""The most that the keys of one loan take: a chunk is of one layer, so K and V make two slabs."""

_IN_FLIGHT = 64
"""Gets of one loan that are under way, and posted in one turn of the loop: 64 take 0.3 ms to post."""


class KeyedSlab(NamedTuple):
    """A registered slab with its packed remote key."""

    address: int
    nbytes: int
    rkey: bytes


class Exports:
    """The slabs that this process has registered, as tables of loans name them. They must not overlap."""

    def __init__(self, slabs: Sequence[KeyedSlab]) -> None:
        slabs = sorted(slabs)
        self._starts = np.array([slab.address for slab in slabs], np.uint64)
        self._ends = np.array([slab.address + slab.nbytes for slab in slabs], np.uint64)
        self._entries = [
            _KEY.pack(slab.address, slab.nbytes, len(slab.rkey)) + slab.rkey + bytes(-len(slab.rkey) % 8)
            for slab in slabs
        ]

    def keys(self, lent: Lent) -> ByteView:
        """The keys of a table for these runs. Raises ValueError where a run is in no slab, or they are in too many."""
        index = _slab_of(self._starts, self._ends, lent.addresses, lent.run_bytes)
        if index is None:
            raise ValueError(f"lending {len(lent.addresses)} runs that are not all within memory that was exposed")
        named: list[int] = np.unique(index).tolist()
        if len(named) > _MAX_SLABS:
            raise ValueError(f"lending out of {len(named)} slabs at once; at most {_MAX_SLABS}")
        return np.frombuffer(b"".join(self._entries[i] for i in named), np.uint8)


@dataclass(frozen=True, slots=True)
class Loan(Lent):
    """What a destination has learned of a slot that lends: for each run also the unpacked key, shape (n,)."""

    slot: int
    keys: Addresses


def parse(table: ByteView, keys_bytes: int, run_bytes: int, slot: int, unpack: Callable[[bytes], int]) -> Loan:
    """A table as its source wrote it, `keys_bytes` of keys first. `unpack` turns a packed key into one for gets.

    Raises ProtocolError when it is garbage or names runs outside of its slabs; what `unpack` raises passes through.
    """
    slabs = sorted(_entries(table[:keys_bytes].tobytes()))
    addresses = table[keys_bytes:].view(np.uint64).copy()
    starts = np.array([slab.address for slab in slabs], np.uint64)
    ends = np.array([slab.address + slab.nbytes for slab in slabs], np.uint64)
    index = _slab_of(starts, ends, addresses, run_bytes)
    if index is None:
        raise ProtocolError(f"slot {slot} lends {len(addresses)} runs that are not all within the memory it names")
    keys = np.array([unpack(slab.rkey) for slab in slabs], np.uint64)
    return Loan(addresses, run_bytes, slot, keys[index])


def _entries(raw: bytes) -> list[KeyedSlab]:
    slabs: list[KeyedSlab] = []
    at = 0
    while at < len(raw):
        if len(slabs) == _MAX_SLABS or len(raw) - at < _KEY.size:
            raise ProtocolError(f"a loan with {len(raw)} bytes of remote keys, which can't be read from byte {at} on")
        address, nbytes, length = _KEY.unpack_from(raw, at)
        at += _KEY.size
        if not 0 < length <= min(MAX_KEY_BYTES, len(raw) - at) or address + nbytes >= 1 << 64:
            raise ProtocolError(f"a loan with a remote key of {length} bytes for {nbytes} bytes at {address:#x}")
        slabs.append(KeyedSlab(address, nbytes, raw[at : at + length]))
        at += length + -length % 8
    return slabs


def _slab_of(starts: Addresses, ends: Addresses, runs: Addresses, run_bytes: int) -> npt.NDArray[np.intp] | None:
    """Which slab each run lies in; None when one lies in none."""
    index = np.searchsorted(starts, runs, side="right") - 1
    if not len(starts) or (len(index) and index.min() < 0):
        return None
    # Not by the run's end, which could be beyond 2**64.
    left = ends[index] - np.minimum(runs, ends[index])
    return index if bool((left >= run_bytes).all()) else None


class Get(NamedTuple):
    """One operation: `nbytes` from `remote`, under `key`, to `local`."""

    local: int
    nbytes: int
    remote: int
    key: int


def plan(loan: Loan, local: Lent) -> list[Get]:
    """The gets that bring a loan to runs of the own memory, of as many bytes in all; one run's length divides the
    other's. What is adjacent on both sides is one get."""
    run = min(loan.run_bytes, local.run_bytes)
    remote, keys = _cut(loan.addresses, loan.run_bytes, run), np.repeat(loan.keys, loan.run_bytes // run)
    mine = _cut(local.addresses, local.run_bytes, run)
    # In the order of the remote memory: in wire order K and V take turns, and no two neighbours would be adjacent.
    order = np.argsort(remote, kind="stable")
    remote, mine, keys = remote[order], mine[order], keys[order]
    if not len(remote):
        return []
    step = np.uint64(run)
    apart = (remote[1:] - remote[:-1] != step) | (mine[1:] - mine[:-1] != step) | (keys[1:] != keys[:-1])
    first = np.concatenate(([0], np.flatnonzero(apart) + 1))
    sizes = np.diff(np.append(first, len(remote))) * run
    columns = mine[first].tolist(), sizes.tolist(), remote[first].tolist(), keys[first].tolist()
    return [Get(*get) for get in zip(*columns, strict=True)]


def _cut(addresses: Addresses, run: int, shorter: int) -> Addresses:
    """The same bytes as shorter runs, of a length that divides the present one."""
    if run == shorter:
        return addresses
    return (addresses[:, None] + np.arange(0, run, shorter, dtype=np.uint64)).ravel()


class Reads:
    """Gets on one endpoint, a bounded number at a time. `done` is called once with the first status that was not OK,
    or OK, when all have their final status; when the endpoint closes, those that are not posted yet never are."""

    def __init__(self, endpoint: Endpoint, gets: Sequence[Get], done: Callable[[int], None]) -> None:
        self._endpoint = endpoint
        self._gets = gets
        self._done = done
        self._next = 0
        self._in_flight = 0
        self._status = _ucp.OK
        self._due = False
        self._posting = False

    def post(self) -> None:
        """Begin, and go on: at most once in a turn of the loop."""
        self._due = False
        self._posting = True
        stop = min(len(self._gets), self._next + _IN_FLIGHT - self._in_flight)
        while self._next < stop and self._status == _ucp.OK:
            if not self._endpoint.open:
                self._status = _ucp.CANCELED
                break
            local, nbytes, remote, key = self._gets[self._next]
            self._next += 1
            self._in_flight += 1
            self._endpoint.get(local, nbytes, remote, key, self._ended)
        self._posting = False
        self._continue()

    def _ended(self, status: int) -> None:
        self._in_flight -= 1
        if self._status == _ucp.OK:
            self._status = status
        if not self._posting:
            self._continue()

    def _continue(self) -> None:
        if self._status == _ucp.OK and self._next < len(self._gets):
            if not self._due and self._in_flight < _IN_FLIGHT:
                self._due = True
                self._endpoint.worker.loop.call_soon(self.post)
        elif not self._in_flight and not self._due:
            self._done(self._status)
