"""KV memory that knows what may be done to it: a pool that reports every access outside of a live stream's grant.

Owns the marks: which stream of the user each block belongs to now, what was left in blocks that belong to nobody, and
what bytes a stream's blocks must have. It never repairs what it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvstream.layout import KVLayout
from kvstream.memory import KVPool
from kvstream.memory.blocks import BlockIds
from kvstream.memory.plan import TableIds
from kvstream.transport.base import Lent

__all__ = ["Grant", "WatchedPool", "content"]

_LEFT = 0xC5
"""Written by the user into blocks that are given back: nobody else may touch them then."""


class Grant(Protocol):
    """The user's end of a stream: SendStream or ReceiveStream."""

    @property
    def ended(self) -> bool: ...


def content(layout: KVLayout, seed: int, blocks: int) -> npt.NDArray[np.uint8]:
    """The bytes of a prompt's KV cache, shape (layers, blocks, *layout.block_shape); each block has its own."""
    shape = (layout.layers, blocks, *layout.block_shape)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


class WatchedPool(KVPool):
    """`allocate` makes one; then set `report`, which hears what was done that must not be."""

    report: Callable[[str], None]
    readers: dict[int, Grant]
    """Blocks that an outgoing stream may read."""
    writers: dict[int, Grant]
    """Blocks that an incoming stream may write."""
    left: set[int]

    @classmethod
    def watched(cls, layout: KVLayout, *, blocks: int, report: Callable[[str], None]) -> WatchedPool:
        """A pool whose blocks belong to nobody."""
        pool = cls.allocate(layout, blocks=blocks)
        pool.report = report
        pool.readers = {}
        pool.writers = {}
        pool.left = set()
        return pool

    # -- what users do

    def hand_out(self, n: int, order: Callable[[list[int]], None]) -> list[int]:
        """`acquire`, in any order, of blocks that must be as they were left."""
        ids = self.acquire(n)
        order(ids)
        self.check_left(ids)
        self.left.difference_update(ids)
        return ids

    def take_back(self, ids: Sequence[int]) -> None:
        """`release`; the user writes over them at once."""
        for block in ids:
            self.readers.pop(block, None)
            self.writers.pop(block, None)
        for layer in range(self.layout.layers):
            self.layer(layer)[list(ids)] = _LEFT
        self.left.update(ids)
        self.release(list(ids))

    def check_left(self, ids: Sequence[int]) -> None:
        """Blocks that belong to nobody must be as they were left."""
        mine = [block for block in ids if block in self.left]
        for layer in range(self.layout.layers):
            if mine and (self.layer(layer)[mine] != _LEFT).any():
                self.report(f"blocks {mine} of layer {layer} were written after they had been given back")

    # -- what the runtime does

    def pack(self, layer: int, block_ids: TableIds, out: npt.NDArray[np.uint8]) -> int:
        self._check(self.readers, self.plan(block_ids).ids, "read")
        return super().pack(layer, block_ids, out)

    def unpack(self, layer: int, block_ids: TableIds, data: npt.NDArray[np.uint8]) -> None:
        self._check(self.writers, self.plan(block_ids).ids, "written")
        super().unpack(layer, block_ids, data)

    def _check(self, grants: dict[int, Grant], ids: BlockIds, what: str) -> None:
        for block in np.asarray(ids).tolist():
            grant = grants.get(block)
            if grant is None or grant.ended:
                state = "that no stream has" if grant is None else "whose stream has ended"
                self.report(f"block {block}, {state}, was {what}")

    def check_borrowed(self, local: Lent) -> None:
        """Bytes are about to be copied to these addresses."""
        for address in local.addresses.tolist():
            found = self._block_at(address, local.run_bytes)
            if found is None:
                self.report(f"{local.run_bytes} bytes were written outside of the pool")
            else:
                self._check(self.writers, [found], "written")

    def holds(self, lent: Lent) -> bool:
        """Whether what is lent lies in this pool."""
        return all(self._block_at(address, lent.run_bytes) is not None for address in lent.addresses.tolist())

    def _block_at(self, address: int, nbytes: int) -> int | None:
        base = int(self.layer(0).ctypes.data)
        size = self.layout.block_bytes
        offset = address - base
        if not 0 <= offset <= self.nbytes - nbytes or offset % size + nbytes > size:
            return None
        return offset // size % self.blocks
