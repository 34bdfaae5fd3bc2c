"""The memory of a connection's slots, and the stamp that tells a reader whether a slot holds what it was told.

Owns the layout: each slot is a 64-byte header (nonce of the connection, generation of the content) with its bytes
right behind, so that header and bytes travel in one operation. A slot may also stand for memory that is lent: then its
bytes are the remote keys of that memory, if the lane needs any, and the addresses of the runs; the header says how long
a run is. It must never unmap memory somebody still looks at: memory goes when the last array on it does.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import stat

import numpy as np
import numpy.typing as npt

from kvstream.transport.base import ByteView

__all__ = ["HEADER", "NONCE_BYTES", "MemoryFile", "Slots", "allocate", "area_bytes", "map_peer"]

HEADER = 64
NONCE_BYTES = 16
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _stride(slot_bytes: int) -> int:
    return HEADER + (slot_bytes + 63) // 64 * 64


def area_bytes(slots: int, slot_bytes: int) -> int:
    """Bytes of memory that so many slots take."""
    return slots * _stride(slot_bytes)


class Slots:
    """`slots` slots of `slot_bytes` in `memory` (at least `area_bytes` long; may be read-only: then only `data` of
    it, `holds`, `lent_run` and `lent_keys` make sense). The header words of a slot are (nonce, nonce, generation, bytes
    of a lent run or 0, bytes of the remote keys before the addresses); generation 0 is no content.
    """

    __slots__ = ("_headers", "_nonce", "_rows", "address", "memory", "slot_bytes", "stride")

    def __init__(self, memory: ByteView, slots: int, slot_bytes: int, nonce: bytes) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.stride = _stride(slot_bytes)
        self.address = int(memory.ctypes.data)
        self._rows: ByteView = memory[: slots * self.stride].reshape(slots, self.stride)
        self._headers: npt.NDArray[np.uint64] = self._rows[:, :40].view(np.uint64)
        self._nonce: list[int] = np.frombuffer(nonce, np.uint64).tolist()

    def data(self, slot: int, nbytes: int) -> ByteView:
        return self._rows[slot, HEADER : HEADER + nbytes]

    def offset(self, slot: int) -> int:
        """Where the slot's header begins, in bytes from the start of the memory."""
        return slot * self.stride

    def stamp(self, slot: int, generation: int, lent_run: int = 0, lent_keys: int = 0) -> None:
        """Say what the slot holds. The generation goes last: a reader that sees it sees the rest."""
        header = self._headers[slot]
        header[:2] = self._nonce
        header[3] = lent_run
        header[4] = lent_keys
        header[2] = generation

    def lent_run(self, slot: int) -> int:
        """Bytes of each run whose addresses the slot holds; 0: it holds the bytes themselves."""
        return int(self._headers[slot, 3])

    def lent_keys(self, slot: int) -> int:
        """Bytes of the remote keys that come before the addresses."""
        return int(self._headers[slot, 4])

    def clear(self, slot: int) -> None:
        self._headers[slot, 2] = 0

    def retire(self) -> None:
        """No reader will recognise any of it any more."""
        self._headers[:] = 0

    def holds(self, slot: int, generation: int) -> bool:
        return self._headers[slot, :3].tolist() == [*self._nonce, generation]


def allocate(nbytes: int) -> ByteView:
    """Zeroed private memory whose pages come with their first use."""
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


class MemoryFile:
    """Anonymous shared memory of this process: others map it through /proc/<pid>/fd/<fd> while it is open."""

    def __init__(self, nbytes: int) -> None:
        self.fd = os.memfd_create("kvstream-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, nbytes)
            # A reader maps it: a file that shrank under it would be a SIGBUS over there.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.memory: ByteView = np.frombuffer(mmap.mmap(self.fd, nbytes), np.uint8)
        except OSError:
            os.close(self.fd)
            raise

    def close(self) -> None:
        """Nobody can map it from now on; what is mapped stays until its last array goes."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def map_peer(pid: int, fd: int, nbytes: int) -> ByteView:
    """Map another process's MemoryFile, read-only. Raises OSError when it can't be reached, ValueError when what is
    there is no sealed memory file of that size."""
    # Whatever the number stands for over there (a pipe, a device): opening it must neither block nor act.
    found = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode) or status.st_size < nbytes:
            raise ValueError(f"descriptor {fd} of process {pid} is not {nbytes} bytes of shared memory")
        try:
            seals = fcntl.fcntl(found, fcntl.F_GET_SEALS)
        except OSError:
            seals = 0
        if seals & _SEALS != _SEALS:
            raise ValueError(f"descriptor {fd} of process {pid} is not a sealed memory file")
        return np.frombuffer(mmap.mmap(found, nbytes, mmap.MAP_SHARED, mmap.PROT_READ), np.uint8)
    finally:
        os.close(found)
