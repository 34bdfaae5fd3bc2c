"""A prefill that computes layer after layer while its KV cache leaves: kvstream layer by layer, NIXL in one or several
transfers, each in processes of its own that do one prefill after the other on request.

Exposed is the time that a prefill took longer, until its last byte was in place, than its computing alone. For kvstream
that is when the destination's user sees the last layer, for NIXL when the writer knows of the end of its last WRITE:
that its peer has to hear of it comes on top and is not counted.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import msgspec
import numpy as np
import uvloop

from benchmarks.compute import thread_compute
from benchmarks.contenders import Pair, nixl
from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig, SendStream
from kvstream.discovery import EmbeddedServer

__all__ = ["KVStreamPair", "NixlPair", "Prefill", "Shape"]

PROBED = 10
"""Layers whose own transfer is measured, of a stream that leaves enough time between them."""

_WAIT = 60.0


class Shape(msgspec.Struct, frozen=True):
    """How much KV a prefill makes."""

    layers: int
    layer_bytes: int
    block_bytes: int

    @property
    def blocks(self) -> int:
        """KV blocks of a layer."""
        return self.layer_bytes // self.block_bytes

    @property
    def layout(self) -> KVLayout:
        """Blocks of 16 tokens of float16."""
        return KVLayout(
            layers=self.layers, kv_heads=1, head_dim=self.block_bytes // 64, block_tokens=16, dtype="float16"
        )


class Prefill(msgspec.Struct, frozen=True):
    """One prefill, in seconds. `computing`: in computations, as long as they really took; `prefill`: from its start to
    the end of the last layer's call; `calls`: inside the contender's calls on the engine's thread, up to there, of
    that `enter` before the first layer; `exposed`: see this module; `done`: the same until the source's user knows."""

    computing: float
    prefill: float
    calls: float
    enter: float
    exposed: float
    done: float


class _Job(msgspec.Struct, frozen=True):
    compute: str
    seconds: float
    chunks: int = 1


class _Contender:
    """A running pair."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def __enter__(self) -> Self:
        self._pair.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pair.__exit__(kind, error, trace)

    def _ask(self, job: _Job) -> Any:
        self._pair.tell(job)
        return self._pair.result(_WAIT)


# ---------------------------------------------------------------------- kvstream


class KVStreamPair(_Contender):
    """Two runtimes of that shape. RuntimeError from any method says what went wrong in them."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(Pair(_kvstream_source, _kvstream_destination, shape))

    def one_layer(self, spacing: float) -> float:
        """Median seconds from a layer's `layer_ready` to its arrival, with `spacing` seconds between layers. The bytes
        of the last layer are checked."""
        return self._ask(_Job("probe", spacing))

    def prefill(self, compute: str, seconds: float) -> Prefill:
        """One prefill that computes for that many seconds a layer."""
        return self._ask(_Job(compute, seconds))


def _kvstream_source(*arguments: Any) -> None:
    uvloop.run(_source(*arguments))


def _kvstream_destination(*arguments: Any) -> None:
    uvloop.run(_destination(*arguments))


def _tables(blocks: int) -> tuple[list[int], list[int]]:
    rng = np.random.default_rng(0)
    return rng.permutation(blocks).tolist(), rng.permutation(blocks).tolist()


def _checksum(pool: KVPool, layer: int, table: list[int]) -> int:
    return zlib.crc32(pool.layer(layer)[table].tobytes())


async def _destination(pipe: Connection, shape: Shape) -> None:
    _, table = _tables(shape.blocks)
    pool = KVPool.allocate(shape.layout, blocks=shape.blocks)
    url = await asyncio.to_thread(pipe.recv)
    config = RuntimeConfig(deadline=_WAIT)
    async with Runtime("decode-0", roles={"decode"}, pool=pool, nats=url, config=config) as runtime:
        pipe.send("ready")
        while True:
            name = await asyncio.to_thread(pipe.recv)
            async with runtime.receive(name, blocks=table, tokens=16 * shape.blocks) as rx:
                pipe.send("receiving")
                async for _ in rx:
                    pass
                seen = time.monotonic()
                report = await rx.done()
            checksum = _checksum(pool, shape.layers - 1, table) if name.startswith("probe") else 0
            pipe.send((seen, report.layer_times, checksum))


async def _source(pipe: Connection, shape: Shape, control: Connection) -> None:
    table, _ = _tables(shape.blocks)
    pool = KVPool.allocate(shape.layout, blocks=shape.blocks)
    rng = np.random.default_rng(1)
    for layer in range(shape.layers):
        pool.layer(layer).view(np.uint8).reshape(-1)[:] = rng.integers(0, 256, shape.layer_bytes, np.uint8)
    async with EmbeddedServer() as server:
        pipe.send(server.url)
        await asyncio.to_thread(pipe.recv)
        config = RuntimeConfig(deadline=_WAIT)
        async with Runtime("prefill-0", roles={"prefill"}, pool=pool, nats=server.url, config=config) as runtime:
            number = 0
            while True:
                job: _Job = await asyncio.to_thread(control.recv)
                number += 1
                name = f"{job.compute}-{number}"
                pipe.send(name)
                await asyncio.to_thread(pipe.recv)
                if job.compute == "probe":
                    control.send(await _probe(runtime, pool, name, table, job, pipe))
                else:
                    control.send(await _prefill(runtime, name, table, job, pipe))


async def _probe(runtime: Runtime, pool: KVPool, name: str, table: list[int], job: _Job, pipe: Connection) -> float:
    layers = pool.layout.layers
    async with runtime.send(name, blocks=table, tokens=16 * len(table), to="decode-0") as tx:
        for layer in range(layers):
            if layer < PROBED:
                await asyncio.sleep(job.seconds)
            tx.layer_ready(layer)
        report = await tx.done()
    _, arrived, checksum = await asyncio.to_thread(pipe.recv)
    if checksum != _checksum(pool, layers - 1, table):
        raise RuntimeError("the bytes of the last layer are wrong")
    # The last probed one has the others behind it, the first may have found everything cold.
    times = [there - here for here, there in zip(report.layer_times, arrived, strict=True)][1 : PROBED - 1]
    return float(np.median(times))


async def _prefill(runtime: Runtime, name: str, table: list[int], job: _Job, pipe: Connection) -> Prefill:
    layers = runtime.pool.layout.layers
    entering = time.monotonic()
    async with runtime.send(name, blocks=table, tokens=16 * len(table), to="decode-0") as tx:
        start = time.monotonic()
        if job.compute == "awaited":
            computing, calls = await _awaited(tx, layers, job.seconds)
        else:
            computing, calls = await asyncio.to_thread(
                _computed, tx.layer_ready, layers, thread_compute(job.compute), job.seconds
            )
        end = time.monotonic()
        await tx.done()
        done = time.monotonic()
    seen, _, _ = await asyncio.to_thread(pipe.recv)
    ready = start + computing
    enter = start - entering
    return Prefill(computing, end - start, calls + enter, enter, seen - ready, done - ready)


async def _awaited(tx: SendStream, layers: int, seconds: float) -> tuple[float, float]:
    """Computes elsewhere, as a GPU does: the loop waits. Seconds of waiting, and in kvstream's calls."""
    computing = calls = 0.0
    for layer in range(layers):
        before = time.monotonic()
        await asyncio.sleep(seconds)
        between = time.monotonic()
        tx.layer_ready(layer)
        computing += between - before
        calls += time.monotonic() - between
    return computing, calls


def _computed(
    on_layer: Callable[[int], None], layers: int, compute: Callable[[float], None], seconds: float
) -> tuple[float, float]:
    """Computes on this thread, the engine's. Seconds of computing, and in `on_layer`."""
    computing = calls = 0.0
    for layer in range(layers):
        before = time.monotonic()
        compute(seconds)
        between = time.monotonic()
        on_layer(layer)
        computing += between - before
        calls += time.monotonic() - between
    return computing, calls


# ---------------------------------------------------------------------- NIXL


class NixlPair(_Contender):
    """Two NIXL agents with memory of that shape, descriptor lists prepared, memory registered, connection warm.

    NIXL's progress threads poll, half a core each or more, also while there is nothing to do: between its turns the
    pair is stopped.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__(Pair(_nixl_source, _nixl_destination, shape))

    def __enter__(self) -> Self:
        super().__enter__()
        with suppress(RuntimeError):  # the first prefill says it again
            self._pair.result(_WAIT)
        self._pair.pause()
        return self

    def prefill(self, compute: str, seconds: float, chunks: int) -> Prefill:
        """One prefill, its layers written in `chunks` transfers, each posted as soon as its layers are computed."""
        self._pair.resume()
        try:
            return self._ask(_Job(compute, seconds, chunks))
        finally:
            self._pair.pause()


def _nixl_destination(pipe: Connection, shape: Shape) -> None:
    me = nixl.agent("destination")
    buffer = np.zeros(shape.layers * shape.layer_bytes, np.uint8)
    nixl.register(me, buffer)
    pipe.send((me.get_agent_metadata(), buffer.ctypes.data))
    pipe.recv()


def _nixl_source(pipe: Connection, shape: Shape, control: Connection) -> None:
    me = nixl.agent("source")
    buffer = np.full(shape.layers * shape.layer_bytes, 7, np.uint8)
    nixl.register(me, buffer)
    metadata, address = pipe.recv()
    peer = me.add_remote_agent(metadata)
    rng = np.random.default_rng(0)
    sides = []
    for name, base in (("NIXL_INIT_AGENT", buffer.ctypes.data), (peer, address)):
        blocks = rng.permutation(shape.blocks).astype(np.uint64)
        descriptors = np.zeros((shape.layers, shape.blocks, 3), np.uint64)
        layers = np.arange(shape.layers, dtype=np.uint64) * np.uint64(shape.layer_bytes)
        descriptors[..., 0] = np.uint64(base) + layers[:, None] + blocks * np.uint64(shape.block_bytes)
        descriptors[..., 1] = shape.block_bytes
        sides.append(me.prep_xfer_dlist(name, descriptors.reshape(-1, 3), "DRAM"))

    def post(first: int, last: int) -> Any:
        ids = np.arange(first * shape.blocks, last * shape.blocks, dtype=np.int32)
        handle = me.make_prepped_xfer("WRITE", sides[0], ids, sides[1], ids, b"done")
        if me.transfer(handle) == "ERR":
            raise RuntimeError("the transfer failed")
        return handle

    def finish(handles: list[Any]) -> float:
        for handle in handles:
            while (state := me.check_xfer_state(handle)) != "DONE":
                if state == "ERR":
                    raise RuntimeError("the transfer failed")
        end = time.monotonic()
        for handle in handles:
            me.release_xfer_handle(handle)
        return end

    finish([post(0, shape.layers)])
    control.send(True)
    while True:
        job: _Job = control.recv()
        compute = thread_compute(job.compute)
        ends = [shape.layers * (chunk + 1) // job.chunks for chunk in range(job.chunks)]
        handles: list[Any] = []
        posted = 0

        def on_layer(layer: int, ends: list[int] = ends, handles: list[Any] = handles) -> None:
            nonlocal posted
            if layer + 1 in ends:
                handles.append(post(posted, layer + 1))
                posted = layer + 1

        start = time.monotonic()
        computing, calls = _computed(on_layer, shape.layers, compute, job.seconds)
        end = time.monotonic()
        exposed = finish(handles) - start - computing
        control.send(Prefill(computing, end - start, calls, 0.0, exposed, exposed))
