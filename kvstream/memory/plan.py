"""`BlockPlan`: a part of a block table, checked once and prepared for all layers that move by it.

A stream's table is the same for each of its layers, so what follows from it alone is found once. It must never be made
of ids that have not been checked against the pool: it is taken at its word.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvstream.memory.arrays import Spans

__all__ = ["BlockPlan", "TableIds"]


class BlockPlan:
    """Made by `KVPool.plan`, for that pool. `ids` (n,) are valid block ids."""

    __slots__ = ("_mean", "_offsets", "_spans", "ids", "pool")

    def __init__(self, pool: object, ids: npt.NDArray[np.intp]) -> None:
        self.pool = pool
        self.ids = ids
        self._spans: Spans | None = None
        self._offsets: npt.NDArray[np.uint64] | None = None
        self._mean = 0.0

    def __len__(self) -> int:
        return len(self.ids)

    def addresses(self, spans: Spans) -> npt.NDArray[np.uint64]:
        """Where the blocks' runs are in one layer, as `Spans.addresses` has them."""
        return (self._prepared(spans) + spans.bases).ravel()

    def mean_run(self, spans: Spans) -> float:
        """See `Spans.mean_run`."""
        self._prepared(spans)
        return self._mean

    def _prepared(self, spans: Spans) -> npt.NDArray[np.uint64]:
        """The runs' offsets from the layer's bases: the same in every layer whose blocks are laid out alike."""
        before = self._spans
        if self._offsets is None or before is None or not spans.alike(before):
            self._spans = spans
            self._offsets = spans.offsets(self.ids)
            self._mean = spans.mean_run(self.ids)
        return self._offsets


TableIds = npt.NDArray[np.integer[Any]] | BlockPlan
"""Block ids, or a plan of them."""
