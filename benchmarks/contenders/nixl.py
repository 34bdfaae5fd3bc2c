"""NIXL over its UCX backend: one WRITE of a list of descriptors, one a block, as vLLM's connector uses it.

Its faster way is taken: descriptors as NumPy arrays, memory registered once, polling for the end. The peer reads
nothing: what is measured ends when the writer knows that all is written.
"""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np

from benchmarks.contenders import Rounds, cpu_seconds, require, run_pair

__all__ = ["agent", "measure", "register"]

TCP_ONLY = "tcp,self"
"""UCX_TLS, as between two hosts without RDMA."""


def measure(
    block_bytes: int, total: int, rounds: int, *, prepared: bool = False, transports: str | None = None
) -> Rounds:
    """Move `total` bytes in shuffled blocks. `prepared`: descriptor lists are prepared once, not per round.
    `transports`: UCX_TLS of both processes."""
    require("nixl_cu12")
    return run_pair(_source, _destination, block_bytes, total, rounds, prepared, transports, timeout=120)


def agent(name: str, transports: str | None = None) -> Any:
    """An agent on the UCX backend; the first in a process decides on the transports. ImportError without NIXL."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    if transports is not None:
        os.environ["UCX_TLS"] = transports
    from nixl_cu12._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


def register(owner: Any, buffer: np.ndarray) -> None:
    """Register all of the buffer with an agent."""
    owner.register_memory([(buffer.ctypes.data, buffer.nbytes, 0, "")], "DRAM")


def _destination(
    pipe: Connection, block_bytes: int, total: int, rounds: int, _prepared: bool, transports: str | None
) -> None:
    me = agent("destination", transports)
    buffer = np.zeros((total // block_bytes, block_bytes), np.uint8)
    register(me, buffer)
    pipe.send((me.get_agent_metadata(), buffer.ctypes.data))
    pipe.recv()
    cpu = cpu_seconds()
    pipe.send("go")
    pipe.recv()
    pipe.send((cpu_seconds() - cpu, int(buffer.min())))
    pipe.recv()


def _source(
    pipe: Connection,
    block_bytes: int,
    total: int,
    rounds: int,
    prepared: bool,
    transports: str | None,
    results: Connection,
) -> None:
    me = agent("source", transports)
    count = total // block_bytes
    buffer = np.full((count, block_bytes), 7, np.uint8)
    register(me, buffer)
    metadata, address = pipe.recv()
    peer = me.add_remote_agent(metadata)
    rng = np.random.default_rng(0)
    lists = []
    for base in (buffer.ctypes.data, address):
        descriptors = np.zeros((count, 3), np.uint64)
        descriptors[:, 0] = base + rng.permutation(count).astype(np.uint64) * np.uint64(block_bytes)
        descriptors[:, 1] = block_bytes
        lists.append(descriptors)
    every = np.arange(count, dtype=np.int32)
    sides: list[Any] = []
    if prepared:
        sides = [
            me.prep_xfer_dlist("NIXL_INIT_AGENT", lists[0], "DRAM"),
            me.prep_xfer_dlist(peer, lists[1], "DRAM"),
        ]

    def one() -> float:
        start = time.perf_counter()
        if prepared:
            handle = me.make_prepped_xfer("WRITE", sides[0], every, sides[1], every, b"done")
        else:
            local, remote = (me.get_xfer_descs(side, "DRAM") for side in lists)
            handle = me.initialize_xfer("WRITE", local, remote, peer, b"done")
        state = me.transfer(handle)
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            state = me.check_xfer_state(handle)
        took = time.perf_counter() - start
        me.release_xfer_handle(handle)
        return took

    first = one()
    pipe.send("warm")
    pipe.recv()
    cpu = cpu_seconds()
    seconds = [one() for _ in range(rounds)]
    used = cpu_seconds() - cpu
    pipe.send("end")
    theirs, least = pipe.recv()
    if least != 7:
        raise RuntimeError("the bytes are not there")
    results.send(msgspec.to_builtins(Rounds(seconds, (used + theirs) / rounds, setup=first)))
