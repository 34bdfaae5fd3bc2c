"""Two runtimes in two processes, without a broker between them: streams from one's pool into the other's.

Owns what the two say to each other over a pipe: their registry records, and which stream comes next. Each process has a
broker of its own in memory, in which the other one's record is entered by hand. It must never wait without a bound.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer, Registry
from kvstream.discovery.records import WorkerRecord

__all__ = ["Measured", "Transfer", "receive_streams", "serve_streams"]

SECONDS = 20.0
"""Bound on every wait for the other process."""

Ids = npt.NDArray[np.intp]


class Transfer(msgspec.Struct, frozen=True):
    """What is streamed: `blocks` KV blocks of `block_bytes` in each of `layers` layers, between pools on `device`."""

    device: str
    layers: int
    blocks: int
    block_bytes: int
    config: RuntimeConfig

    @property
    def nbytes(self) -> int:
        return self.layers * self.blocks * self.block_bytes

    @property
    def layout(self) -> KVLayout:
        return KVLayout(
            layers=self.layers, kv_heads=1, head_dim=128, block_tokens=self.block_bytes // 256, dtype="uint8"
        )

    def pool(self) -> KVPool:
        """Raises ConfigError where there is no such device, or no room on it."""
        return KVPool.allocate(self.layout, blocks=self.blocks, device=self.device)

    def table(self, seed: int) -> Ids:
        """All blocks, shuffled."""
        return np.random.default_rng(seed).permutation(self.blocks)

    def content(self, layer: int) -> npt.NDArray[np.uint8]:
        """Of the source, in the order of its table."""
        return np.random.default_rng([3, layer]).integers(0, 256, self.blocks * self.block_bytes, np.uint8)


class Measured(msgspec.Struct, frozen=True):
    """What has come of it. `seconds` by stream; `why` says why bytes went by way of the host, where they did."""

    lane: str
    on_device: bool
    why: str
    seconds: list[float]
    wrong_layers: list[int]


class _Pipe:
    """The pipe to the other process, read on the loop."""

    def __init__(self, conn: Connection) -> None:
        self._conn = conn

    def say(self, what: object) -> None:
        self._conn.send(what)

    async def hear(self) -> Any:
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self._conn.fileno(), ready.set)
        try:
            async with asyncio.timeout(SECONDS):
                await ready.wait()
        finally:
            loop.remove_reader(self._conn.fileno())
        heard = self._conn.recv()
        if not isinstance(heard, bytes | tuple):
            raise RuntimeError(getattr(heard, "error", repr(heard)))
        return heard


@asynccontextmanager
async def _worker(name: str, pool: KVPool, config: RuntimeConfig, pipe: _Pipe) -> AsyncIterator[Runtime]:
    """A runtime that knows the one of the other process."""
    hub = MemoryBrokerServer()
    async with (
        MemoryBroker(hub) as own,
        MemoryBroker(hub) as other,
        Runtime(name, pool=pool, broker=own, config=config) as runtime,
        Registry(other, rng=random.Random(1), clock=asyncio.get_running_loop().time) as registry,
    ):
        pipe.say(msgspec.msgpack.encode(runtime.record))
        record = msgspec.msgpack.decode(await pipe.hear(), type=WorkerRecord)
        await registry.register(record)
        await runtime.registry.wait_for(record.id, SECONDS)
        yield runtime


def serve_streams(conn: Connection, transfer: Transfer) -> None:
    """The second process: the source. It sends a stream whenever it is told the name of one."""
    asyncio.run(_serve(_Pipe(conn), transfer))


async def _serve(pipe: _Pipe, transfer: Transfer) -> None:
    pool = transfer.pool()
    table = transfer.table(1)
    for layer in range(transfer.layers):
        pool.unpack(layer, table, transfer.content(layer))
    tokens = transfer.blocks * transfer.layout.block_tokens
    async with _worker("source", pool, transfer.config, pipe) as runtime:
        while (heard := await pipe.hear()) != b"enough":
            begin = time.perf_counter()
            async with runtime.send(heard.decode(), blocks=table, tokens=tokens, to="target", deadline=SECONDS) as tx:
                for layer in range(transfer.layers):
                    tx.layer_ready(layer, event=pool.mark())
                report = await tx.done()
            pipe.say((time.perf_counter() - begin, report.lane))


async def receive_streams(conn: Connection, transfer: Transfer, rounds: int) -> Measured:
    """The first process: receive `rounds` streams, and compare all bytes after the last."""
    pool = transfer.pool()
    table = transfer.table(2)
    tokens = transfer.blocks * transfer.layout.block_tokens
    pipe = _Pipe(conn)
    seconds: list[float] = []
    lane = ""
    async with _worker("target", pool, transfer.config, pipe) as runtime:
        for n in range(rounds):
            async with runtime.receive(f"r{n}", blocks=table, tokens=tokens, deadline=SECONDS) as rx:
                pipe.say(f"r{n}".encode())
                took, lane = await pipe.hear()
                await rx.done()
            seconds.append(took)
        paths = runtime.stats().devices
        pipe.say(b"enough")
    out = np.empty(transfer.blocks * transfer.block_bytes, np.uint8)
    wrong: list[int] = []
    for layer in range(transfer.layers):
        pool.pack(layer, table, out)
        if not np.array_equal(out, transfer.content(layer)):
            wrong.append(layer)
    return Measured(
        lane=lane,
        on_device=any(path.used for path in paths),
        why=" ".join(path.why for path in paths),
        seconds=seconds,
        wrong_layers=wrong,
    )
