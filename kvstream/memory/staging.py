"""`StagingSlab`: a bounded piece of GPU memory, cut into the staging slots of connections.

Owns which bytes of the slab are whose. It must never hand out bytes that anybody may still touch: a lease ends when its
connection's fence is reached *and* the last copy on the device that uses it is over, whichever comes later.
"""

from __future__ import annotations

from kvstream.memory.arrays import Staged

__all__ = ["StagingLease", "StagingSlab"]

_ALIGN = 512
"""Of every slot, in bytes: that of a cudaMalloc, so that kernels and copies are at their best."""


class StagingSlab:
    """Made by `KVPool.staging`. `sample` are its first bytes, which are never leased: a peer reads them to find out
    whether it can. `is_gpu` says what the driver calls the memory."""

    def __init__(self, memory: Staged, sample: bytes, *, is_gpu: bool) -> None:
        self.memory = memory
        self.sample = sample
        self.is_gpu = is_gpu
        self.used = 0
        """Bytes that are leased."""
        self._free = [(_aligned(len(sample)), memory.nbytes)]
        """(start, end) of each stretch, ascending, none touching another."""

    @property
    def limit(self) -> int:
        """Bytes in all."""
        return self.memory.nbytes

    def lease(self, slots: int, slot_bytes: int) -> StagingLease | None:
        """`slots` slots of `slot_bytes` each; None where the slab has no such stretch left."""
        stride = _aligned(slot_bytes)
        size = slots * stride
        for n, (start, end) in enumerate(self._free):
            if end - start >= size:
                self._free[n : n + 1] = [(start + size, end)] if end - start > size else []
                self.used += size
                return StagingLease(self, start, slots, slot_bytes, stride)
        return None

    def give_back(self, start: int, size: int) -> None:
        """For its leases."""
        self.used -= size
        stretches: list[tuple[int, int]] = []
        for low, high in sorted([*self._free, (start, start + size)]):
            if stretches and stretches[-1][1] == low:
                stretches[-1] = stretches[-1][0], high
            else:
                stretches.append((low, high))
        self._free = stretches


class StagingLease:
    """One connection's slots in a slab."""

    __slots__ = ("_copies", "_ended", "_slab", "_start", "_stride", "slot_bytes", "slots")

    def __init__(self, slab: StagingSlab, start: int, slots: int, slot_bytes: int, stride: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        self._slab = slab
        self._start = start
        self._stride = stride
        self._copies = 0
        self._ended = False

    @property
    def nbytes(self) -> int:
        """What it takes of the slab."""
        return self.slots * self._stride

    def slot(self, slot: int, nbytes: int) -> Staged:
        """The first bytes of a slot. Raises ValueError out of range: what a peer says has been checked before."""
        if not (0 <= slot < self.slots and 0 < nbytes <= self.slot_bytes):
            raise ValueError(f"{nbytes} bytes of slot {slot}: there are {self.slots} of {self.slot_bytes} bytes")
        return self._slab.memory.part(self._start + slot * self._stride, nbytes)

    def begin(self) -> None:
        """A copy on the device begins to use a slot."""
        self._copies += 1

    def over(self) -> None:
        """Such a copy is over."""
        self._copies -= 1
        self._settle()

    def end(self) -> None:
        """No peer, and no operation of the transport, touches the slots any more. Idempotent."""
        self._ended = True
        self._settle()

    def _settle(self) -> None:
        if self._ended and self._copies == 0 and self._stride:
            self._slab.give_back(self._start, self.nbytes)
            self._stride = 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN
