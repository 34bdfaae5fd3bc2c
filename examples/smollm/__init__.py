"""SmolLM2-135M in NumPy or CuPy, with a kvstream pool as its paged KV memory: a real engine, small enough to read.

This module holds only what must run before NumPy is imported, so it imports nothing heavy and must stay so.
Start reading at `loading` (which model), `engine` (what a worker calls) and `model` (the arithmetic).
"""

from __future__ import annotations

import os
import sys

__all__ = ["blas_environment", "set_blas_threads"]

_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")


def blas_environment(n: int) -> dict[str, str]:
    """Environment variables that give the BLAS of a process started with them `n` threads. ValueError if n < 1.

    BLAS libraries read their thread count once, when they are loaded. Left alone each worker process takes every
    core, and its threads spin for one another: where two processes share the cores, one thread each prefills ten
    times as fast as two each. So: never more BLAS threads on a host, all processes together, than free cores.
    """
    if n < 1:
        raise ValueError(f"n: BLAS needs at least 1 thread, not {n}")
    return dict.fromkeys(_VARIABLES, str(n))


def set_blas_threads(n: int) -> None:
    """Give this process's BLAS `n` threads: call it first in the entry point. Children started later inherit it.

    Raises RuntimeError if NumPy is loaded already, when the setting would be ignored in silence; a process whose
    imports can't be held back is started with `blas_environment` instead.
    """
    variables = blas_environment(n)
    if "numpy" in sys.modules:
        raise RuntimeError("set_blas_threads must be called before numpy is imported: BLAS has read its settings")
    os.environ.update(variables)
