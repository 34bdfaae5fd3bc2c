"""How the blocks of a layer are cut into units for the GPU: the plan of a launch, and its arithmetic in NumPy.

`Plan` is what gather_scatter.cu reads; `Plan.addresses` computes in NumPy what the kernel computes per thread, so that
its arithmetic is tested where there is no GPU. Nothing here touches the memory that it describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Final

import numpy as np
import numpy.typing as npt

from kvstream.errors import ConfigError
from kvstream.memory.arrays import Ids, Region, grid_of

__all__ = ["MAX_AXES", "UNITS", "Plan", "source"]

UNITS: Final = (1, 2, 4, 8, 16)
"""Sizes of a unit in bytes, for each of which there is a kernel."""

MAX_AXES: Final = 8
"""Strided axes that a block may have, after merging what can be merged."""

_THREADS: Final = 256
_MAX_TILES: Final = 65535  # CUDA's bound on grid.y
_WARP: Final = 32


@dataclass(frozen=True, slots=True)
class Plan:
    """One layer's blocks as units. `words` (parts, 5 + 2 * MAX_AXES) is the kernel's array of struct Part."""

    unit: int
    """Bytes of a unit."""
    units: int
    """Units of a block."""
    words: npt.NDArray[np.int64]

    @staticmethod
    def over(parts: Sequence[Region]) -> Plan:
        """The plan of a layer whose blocks are the entries of `parts`, side by side. Raises ConfigError."""
        grids = [grid_of(part, widest=UNITS[-1]) for part in parts]
        unit = math.gcd(*(found.unit for found in grids), *(part.block_bytes for part in parts))
        words = np.zeros((len(parts), 5 + 2 * MAX_AXES), np.int64)
        end = 0
        for row, part, found in zip(words, parts, grids, strict=True):
            counts = [*found.shape[1:-1], found.shape[-1] * found.unit // unit]
            strides = [*found.strides[1:-1], unit]
            if len(counts) > MAX_AXES:
                raise ConfigError("arrays", f"a block has {len(counts)} strided axes, a GPU pool takes {MAX_AXES}")
            begin, end = end, end + part.block_bytes // unit
            row[:5] = part.address, part.strides[0], begin, end, len(counts)
            row[5 : 5 + len(counts)] = counts
            row[5 + MAX_AXES : 5 + MAX_AXES + len(strides)] = strides
        return Plan(unit, end, words)

    def launch(self, blocks: int) -> tuple[tuple[int, int], tuple[int]]:
        """Grid and thread block for that many KV blocks."""
        threads = min(_THREADS, -(-self.units // _WARP) * _WARP)
        return (blocks, min(_MAX_TILES, -(-self.units // threads))), (threads,)

    def addresses(self, ids: Ids) -> npt.NDArray[np.int64]:
        """Where the units of the blocks `ids` (n,) are, in wire order, shape (n, units): the kernel's arithmetic."""
        found = np.empty((len(ids), self.units), np.int64)
        for row in self.words:
            base, step, begin, end, axes, *shape = map(int, row)
            rest = np.arange(end - begin)
            offset = np.zeros(end - begin, np.int64)
            for axis in reversed(range(axes)):
                count, stride = shape[axis], shape[MAX_AXES + axis]
                offset += rest % count * stride
                rest //= count
            found[:, begin:end] = base + ids[:, None] * step + offset
        return found


def source() -> str:
    """The kernels' CUDA C++: `gather_N` and `scatter_N` for each N of UNITS."""
    return resources.files("kvstream.memory").joinpath("gather_scatter.cu").read_text(encoding="utf-8")
