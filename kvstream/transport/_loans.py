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
from kvstream.transport.base import ByteView, Lent, Slab

__all__ = ["MAX_KEYS_BYTES", "MAX_KEY_BYTES", "Exports", "Get", "KeyedSlab", "Loan", "Reads", "Shelf", "plan"]

Addresses = npt.NDArray[np.uint64]

MAX_KEY_BYTES = 1024
"""Longest packed remote key."""

_MAX_SLABS = 4
_KEY = struct.Struct("<QQQ")
"""Before each packed key: the slab's address, its bytes, the bytes of the key."""

MAX_KEYS_BYTES = _MAX_SLABS * (_KEY.size + MAX_KEY_BYTES)
"""The most that the keys of one loan take: a chunk is of one layer, so K and V make two slabs."""

_BATCH = 64
"""Gets of one loan that are posted in one turn of the loop, and under way at a time."""


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
        self._keys = {slab.address: slab.rkey for slab in slabs}
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

    def key(self, slab: Slab) -> bytes:
        """The packed key of one of them. Raises KeyError where there is none."""
        return self._keys[slab.address]


@dataclass(frozen=True, slots=True)
class Loan(Lent):
    """What a destination has learned of a slot that lends: for each run also the unpacked key, shape (n,)."""

    slot: int
    keys: Addresses


class Shelf:
    """The slabs that the keys of a table name, with keys that are unpacked for one endpoint."""

    def __init__(self, keys: bytes, unpack: Callable[[bytes], int]) -> None:
        """`keys` as `Exports.keys` has made them; `unpack` turns a packed key into one for gets. Raises ProtocolError
        when they are garbage; what `unpack` raises passes through."""
        slabs = sorted(_entries(keys))
        self._starts = np.array([slab.address for slab in slabs], np.uint64)
        self._ends = np.array([slab.address + slab.nbytes for slab in slabs], np.uint64)
        self._keys = np.array([unpack(slab.rkey) for slab in slabs], np.uint64)

    def loan(self, addresses: Addresses, run_bytes: int, slot: int) -> Loan:
        """Raises ProtocolError when a run is not within the slabs."""
        index = _slab_of(self._starts, self._ends, addresses, run_bytes)
        if index is None:
            raise ProtocolError(f"slot {slot} lends {len(addresses)} runs that are not all within the memory it names")
        return Loan(addresses, run_bytes, slot, self._keys[index])


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
    """Gets on one endpoint, a batch in a turn of the loop. `done` is called once, when every one that was posted has
    its final status: with OK, or the first that was not. Once the endpoint has closed no more are posted."""

    def __init__(self, endpoint: Endpoint, gets: Sequence[Get], done: Callable[[int], None]) -> None:
        self._endpoint = endpoint
        self._gets = gets
        self._next = 0
        self._done = done

    def post(self) -> None:
        """Begin, and go on with the next batch."""
        if self._next >= len(self._gets):
            self._done(_ucp.OK)
        elif not self._endpoint.open:
            self._done(_ucp.CANCELED)
        else:
            batch = self._gets[self._next : self._next + _BATCH]
            self._next += len(batch)
            self._endpoint.get_all(batch, self._ended)

    def _ended(self, status: int) -> None:
        if status != _ucp.OK:
            self._done(status)
        elif self._next < len(self._gets):
            self._endpoint.worker.loop.call_soon(self.post)
        else:
            self._done(status)
