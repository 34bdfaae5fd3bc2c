"""Block ids: validated block tables, and the exact account of which blocks of a pool are free.

Every operation is checked before it changes anything, so a refused call leaves no trace. It never touches KV memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from kvstream.errors import ConfigError, Refused

__all__ = ["MAX_BLOCKS", "BlockAllocator", "BlockIds", "block_table"]

MAX_BLOCKS: Final = 2**31 - 1
"""A block id takes 4 bytes on the wire."""

_SHORT: Final = 64

BlockIds = Sequence[int] | npt.NDArray[np.integer[Any]]


def block_table(ids: BlockIds, blocks: int, field: str) -> npt.NDArray[np.intp]:
    """Validate a block table against a pool of `blocks` blocks.

    Returns a read-only copy, shape (n,), in the order given. Raises ConfigError naming `field` and the first id at
    fault where `ids` is not a flat sequence of ints in [0, blocks) without duplicates. An empty table passes.
    """
    if _is_short_and_sound(ids, blocks):
        short = np.array(ids, np.intp)
        short.setflags(write=False)
        return short
    table = _as_int64(ids, field)
    bad = np.flatnonzero((table < 0) | (table >= blocks))
    if bad.size:
        raise ConfigError(field, f"block {table[bad[0]]} is outside the pool, whose blocks are 0 to {blocks - 1}")
    # A sort would cost the same for every pool, but 20 times as much for a long table.
    seen = np.zeros(blocks, np.bool_)
    seen[table] = True
    if np.count_nonzero(seen) != table.size:
        repeated = np.flatnonzero(np.bincount(table) > 1)
        raise ConfigError(field, f"block {repeated[0]} appears twice; a block can be listed only once")
    # True and False pass for 1 and 0 above. Without duplicates at most two entries need the question.
    for position in np.flatnonzero(table <= 1):
        if isinstance(ids[int(position)], (bool, np.bool_)):
            raise ConfigError(field, f"entry {position} is {ids[int(position)]!r}; block ids are ints")
    result = table.astype(np.intp)
    result.setflags(write=False)
    return result


def _is_short_and_sound(ids: BlockIds, blocks: int) -> bool:
    """Whether this is a short list without fault, found out without NumPy, whose calls cost more than a look at each of
    a few ids. False says nothing of the table."""
    if type(ids) is not list or not 0 < len(cast("list[object]", ids)) <= _SHORT:
        return False
    table = cast("list[int]", ids)
    return set(map(type, table)) == {int} and min(table) >= 0 and max(table) < blocks and len(set(table)) == len(table)


def _as_int64(ids: BlockIds, field: str) -> npt.NDArray[np.int64]:
    """Any flat run of ints as int64. May share memory with `ids`."""
    if isinstance(ids, np.ndarray):
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            raise ConfigError(field, f"must be one-dimensional with ints, not {ids.dtype} of shape {ids.shape}")
        if ids.dtype == np.uint64 and ids.size and int(ids.max()) >= 2**63:
            raise ConfigError(field, f"block {ids.max()} is outside any pool")
        return ids.astype(np.int64, copy=False)
    # The annotation binds nobody: engines hand over whatever their block manager keeps.
    if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(field, f"must be a sequence of ints or an int array, not {type(ids).__name__}")
    try:
        # Unlike np.asarray this rounds no float, and it is faster.
        return np.frombuffer(array("q", ids), np.int64)
    except (TypeError, OverflowError) as error:
        raise ConfigError(field, f"block ids are ints ({error})") from error


class BlockAllocator:
    """Which of `blocks` blocks are free. Not thread-safe: one loop owns it.

    `acquire` hands out the lowest free ids, ascending. So the same calls always give the same blocks, a table is
    often one run of neighbours, which a pool copies in one piece, and the upper end of a large pool stays untouched
    until it is needed.
    """

    __slots__ = ("_free", "_free_count")

    def __init__(self, blocks: int) -> None:
        """All of `blocks` blocks, ids 0 to blocks - 1, start free. Raises ConfigError."""
        if type(blocks) is not int or not 1 <= blocks <= MAX_BLOCKS:
            raise ConfigError("blocks", f"must be an int from 1 to {MAX_BLOCKS}, not {blocks!r}")
        self._free = np.ones(blocks, np.bool_)
        self._free_count = blocks

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self._free.size

    @property
    def free(self) -> int:
        """Blocks that `acquire` could hand out now."""
        return self._free_count

    def acquire(self, n: int) -> list[int]:
        """Take the `n` lowest free blocks, ascending.

        Raises Refused where fewer than `n` are free and ConfigError where `n` is not a count; neither takes any.
        """
        if type(n) is not int or n < 0:
            raise ConfigError("n", f"must be a count of blocks, not {n!r}")
        if n > self._free_count:
            raise Refused(f"no free blocks: {n} wanted, {self._free_count} of {self.blocks} free")
        taken = np.flatnonzero(self._free)[:n]
        self._free[taken] = False
        self._free_count -= n
        return taken.tolist()

    def release(self, ids: BlockIds) -> None:
        """Give blocks back, in any order.

        Raises ConfigError where an id is foreign, listed twice or already free; then none of them is released.
        """
        table = block_table(ids, self.blocks, "blocks")
        already = np.flatnonzero(self._free[table])
        if already.size:
            raise ConfigError("blocks", f"block {table[already[0]]} is not held, so it can't be released")
        self._free[table] = True
        self._free_count += table.size

    def __repr__(self) -> str:
        return f"BlockAllocator({self._free_count} of {self.blocks} free)"
