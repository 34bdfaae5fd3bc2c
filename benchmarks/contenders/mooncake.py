"""Mooncake's transfer engine over TCP, which is what it has on one host: writes of a batch of blocks.

One call takes at most a thousand and some blocks before it fails, hence the batches. It may be slow on small blocks:
after some seconds no further round is begun.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from benchmarks.contenders import Rounds, cpu_seconds, require, run_pair

__all__ = ["measure"]

_HOST = "127.0.0.1"
_BATCH = 1024
_SECONDS = 5.0


def measure(block_bytes: int, total: int, rounds: int) -> Rounds:
    """Move `total` bytes in shuffled blocks, in up to `rounds` rounds; see contenders.Rounds."""
    require("mooncake")
    return run_pair(_source, _destination, block_bytes, total, rounds, timeout=60)


def _engine() -> Any:
    # It logs each of its steps on stderr, whatever it is told by its settings.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    from mooncake.engine import TransferEngine  # type: ignore[import-not-found]

    engine = TransferEngine()
    if engine.initialize(_HOST, "P2PHANDSHAKE", "tcp", "") != 0:
        raise RuntimeError("the transfer engine did not start")
    return engine


def _register(engine: Any, buffer: np.ndarray) -> None:
    if engine.register_memory(buffer.ctypes.data, buffer.nbytes) != 0:
        raise RuntimeError("the memory could not be registered")


def _destination(pipe: Connection, block_bytes: int, total: int, _rounds: int) -> None:
    engine = _engine()
    buffer = np.ones((total // block_bytes, block_bytes), np.uint8)
    _register(engine, buffer)
    pipe.send((f"{_HOST}:{engine.get_rpc_port()}", buffer.ctypes.data))
    pipe.recv()
    cpu = cpu_seconds()
    pipe.send("go")
    pipe.recv()
    pipe.send((cpu_seconds() - cpu, bool((buffer == 7).all())))
    pipe.recv()


def _source(pipe: Connection, block_bytes: int, total: int, rounds: int, results: Connection) -> None:
    engine = _engine()
    count = total // block_bytes
    buffer = np.full((count, block_bytes), 7, np.uint8)
    _register(engine, buffer)
    name, address = pipe.recv()
    rng = np.random.default_rng(0)
    local, remote = ((base + rng.permutation(count) * block_bytes).tolist() for base in (buffer.ctypes.data, address))
    batches = [
        (local[start : start + _BATCH], remote[start : start + _BATCH], [block_bytes] * min(_BATCH, count - start))
        for start in range(0, count, _BATCH)
    ]

    def one() -> float:
        start = time.perf_counter()
        for here, there, sizes in batches:
            status = engine.batch_transfer_sync_write(name, here, there, sizes)
            if status != 0:
                raise RuntimeError(f"a write of {len(sizes)} blocks failed ({status})")
        return time.perf_counter() - start

    first = one()
    pipe.send("warm")
    pipe.recv()
    cpu = cpu_seconds()
    seconds = [one()]
    while len(seconds) < rounds and sum(seconds) < _SECONDS:
        seconds.append(one())
    used = cpu_seconds() - cpu
    pipe.send("end")
    theirs, arrived = pipe.recv()
    if not arrived:
        raise RuntimeError("the bytes are not there")
    results.send(msgspec.to_builtins(Rounds(seconds, (used + theirs) / len(seconds), setup=first)))
