"""kvstream, end to end: a stream of layers from one runtime's pool into another's, until the destination has decided
that every byte is in place. Offer, block tables that differ on both sides, announcements and confirmations included."""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.contenders import Rounds, cpu_seconds, run_pair
from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer

__all__ = ["measure"]

LAYERS = 16


def measure(
    block_bytes: int, total: int, rounds: int, *, lane: str = "auto", config: RuntimeConfig | None = None
) -> Rounds:
    """Move `total` bytes in blocks of `block_bytes`, in 16 layers; see contenders.Rounds. `config` is that of both
    workers."""
    settings = config or RuntimeConfig()
    return run_pair(_source_process, _destination_process, block_bytes, total, rounds, lane, settings, timeout=120)


def _layout(block_bytes: int) -> KVLayout:
    return KVLayout(layers=LAYERS, kv_heads=1, head_dim=block_bytes // 64, block_tokens=16, dtype="float16")


def _tables(total: int, block_bytes: int) -> tuple[list[int], list[int]]:
    blocks = total // block_bytes // LAYERS
    rng = np.random.default_rng(0)
    return rng.permutation(blocks).tolist(), rng.permutation(blocks).tolist()


class _Lag:
    """How late the loop wakes a sleeper, in ms: what everybody else on the loop would feel."""

    def __init__(self) -> None:
        self.samples: list[float] = []
        self._task = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while True:
            start = time.perf_counter()
            await asyncio.sleep(0.001)
            self.samples.append((time.perf_counter() - start - 0.001) * 1e3)

    def p99(self) -> float:
        return sorted(self.samples)[int(len(self.samples) * 0.99)] if self.samples else 0.0


async def _destination(
    pipe: Connection, block_bytes: int, total: int, rounds: int, lane: Any, config: RuntimeConfig
) -> None:
    mine, theirs = _tables(total, block_bytes)
    blocks = len(theirs)
    pool = KVPool.allocate(_layout(block_bytes), blocks=blocks)
    url = await asyncio.to_thread(pipe.recv)
    async with Runtime("decode-0", roles={"decode"}, pool=pool, nats=url, lanes=lane, config=config) as runtime:
        pipe.send("ready")
        lag = _Lag()
        cpu = 0.0
        for number in range(rounds + 1):
            if number == 1:
                cpu = cpu_seconds()
                lag.samples.clear()
            async with runtime.receive(f"r{number}", blocks=theirs, tokens=16 * blocks) as rx:
                pipe.send("receiving")
                await rx.done()
        used = cpu_seconds() - cpu
        source = _contents(block_bytes, blocks)
        for layer in range(LAYERS):
            expected = source[layer % len(source)][mine]
            got = pool.layer(layer)[theirs].view(np.uint8).reshape(blocks, -1)
            assert np.array_equal(got, expected), f"layer {layer} differs"
        pipe.send((used, lag.p99()))
        await asyncio.to_thread(pipe.recv)


def _contents(block_bytes: int, blocks: int) -> list[np.ndarray]:
    """Random bytes of a few layers; the others repeat them."""
    rng = np.random.default_rng(1)
    return [rng.integers(0, 256, (blocks, block_bytes), np.uint8) for _ in range(3)]


async def _source(
    pipe: Connection, block_bytes: int, total: int, rounds: int, lane: Any, config: RuntimeConfig, results: Connection
) -> None:
    mine, _ = _tables(total, block_bytes)
    blocks = len(mine)
    pool = KVPool.allocate(_layout(block_bytes), blocks=blocks)
    contents = _contents(block_bytes, blocks)
    for layer in range(LAYERS):
        pool.layer(layer).view(np.uint8).reshape(blocks, -1)[...] = contents[layer % len(contents)]
    del contents
    seconds: list[float] = []
    async with EmbeddedServer() as server:
        pipe.send(server.url)
        await asyncio.to_thread(pipe.recv)
        async with Runtime("prefill-0", roles={"prefill"}, pool=pool, nats=server.url, lanes=lane, config=config) as rt:
            lag = _Lag()
            cpu = 0.0
            for number in range(rounds + 1):
                await asyncio.to_thread(pipe.recv)
                if number == 1:
                    cpu = cpu_seconds()
                    lag.samples.clear()
                start = time.perf_counter()
                async with rt.send(f"r{number}", blocks=mine, tokens=16 * blocks, to="decode-0") as tx:
                    for layer in range(LAYERS):
                        tx.layer_ready(layer)
                    await tx.done()
                seconds.append(time.perf_counter() - start)
            used = cpu_seconds() - cpu
            theirs, their_lag = await asyncio.to_thread(pipe.recv)
            result = Rounds(seconds[1:], (used + theirs) / rounds, max(lag.p99(), their_lag), seconds[0])
            results.send(msgspec.to_builtins(result))
            pipe.send("done")


def _destination_process(*arguments: Any) -> None:
    uvloop.run(_destination(*arguments))


def _source_process(*arguments: Any) -> None:
    uvloop.run(_source(*arguments))
