"""What stands for a layer's computation in a prefill worker: a wait, NumPy, or Python that keeps the GIL to itself.

Each computes for a given time rather than a given amount: what is measured is what follows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

__all__ = ["KINDS", "thread_compute"]

KINDS = ("awaited", "numpy", "python")


def thread_compute(kind: str) -> Callable[[float], None]:
    """A function that keeps its thread for that many seconds, in the way of this kind."""
    return {"awaited": time.sleep, "numpy": _numpy(), "python": _python}[kind]


def _numpy() -> Callable[[float], None]:
    left = np.ones((192, 192), np.float32)
    out = np.empty_like(left)

    def compute(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            np.matmul(left, left, out=out)

    return compute


def _python(seconds: float) -> None:
    end = time.monotonic() + seconds
    number = 1
    while time.monotonic() < end:
        for _ in range(50):
            number = number * 31 % 65521
