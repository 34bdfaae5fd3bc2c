"""What it costs to hand over many blocks: the time until the engine has its thread back, and until all is announced.

kvstream: from `send` to the last `layer_ready`, and until the last announcement has left; control messages are counted
where they are encoded and decoded. NIXL: from its descriptors (a NumPy array, its fastest form) to the return of the
post. Each pair of processes does one stream after the other, and the first is warm-up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks.contenders import Pair, nixl, require
from kvstream import KVLayout, KVPool, Offer, Runtime, RuntimeConfig, wire
from kvstream.discovery import EmbeddedServer

__all__ = ["Posted", "post_kvstream", "post_nixl", "tiny_streams"]

_WAIT = 60.0


class Posted(msgspec.Struct, frozen=True):
    """Times in seconds, sizes in bytes; of one stream. `announced` and `done` count from the start. `chunk_bytes`:
    announcements and confirmations. `control`: everything that both sides sent, encoded."""

    post: float
    announced: float
    done: float
    chunks: int = 0
    chunk_bytes: int = 0
    control: int = 0
    messages: int = 0


class _Meter:
    """Counts what this process encodes, by wrapping the codec: it has no other way in."""

    def __init__(self) -> None:
        self._encode = wire.encode
        self._encoder = msgspec.msgpack.Encoder()
        wire.encode = self._count
        self.clear()

    def clear(self) -> None:
        self.total = self.messages = 0
        self.last_ready = 0.0
        self.by_frame: Counter[str] = Counter()
        self.frames: Counter[str] = Counter()

    def _count(self, sequence: int, frames: Sequence[wire.Frame]) -> list[bytes]:
        messages = self._encode(sequence, frames)
        self.total += sum(map(len, messages))
        self.messages += len(messages)
        for frame in frames:
            name = type(frame).__name__
            self.frames[name] += 1
            self.by_frame[name] += len(self._encoder.encode(frame))
            if name == "Ready":
                self.last_ready = time.monotonic()
        return messages


# ---------------------------------------------------------------------- kvstream


def post_kvstream(layers: int, blocks: int, block_bytes: int, rounds: int) -> list[Posted]:
    """Streams of `layers` layers and a shuffled table of `blocks` blocks. Control messages are counted in every round:
    that is some microseconds a message."""
    with Pair(_kvstream_source, _kvstream_destination, layers, blocks, block_bytes, rounds) as pair:
        return msgspec.convert(pair.result(_WAIT), list[Posted])


def _kvstream_source(*arguments: Any) -> None:
    uvloop.run(_source(*arguments))


def _kvstream_destination(*arguments: Any) -> None:
    uvloop.run(_destination(*arguments))


def _layout(layers: int, block_bytes: int) -> KVLayout:
    return KVLayout(layers=layers, kv_heads=1, head_dim=block_bytes // 64, block_tokens=16, dtype="float16")


async def _destination(pipe: Connection, layers: int, blocks: int, block_bytes: int, rounds: int) -> None:
    table = np.random.default_rng(1).permutation(blocks).tolist()
    pool = KVPool.allocate(_layout(layers, block_bytes), blocks=blocks)
    url = await asyncio.to_thread(pipe.recv)
    config = RuntimeConfig(deadline=_WAIT)
    async with Runtime("decode-0", pool=pool, nats=url, config=config) as runtime:
        pipe.send("ready")
        meter = _Meter()
        for number in range(rounds + 1):
            meter.clear()
            async with runtime.receive(f"r{number}", blocks=table, tokens=16 * blocks) as rx:
                pipe.send("receiving")
                await rx.done()
            pipe.send((meter.total, meter.messages, meter.by_frame["Confirm"]))
        await asyncio.to_thread(pipe.recv)


async def _source(
    pipe: Connection, layers: int, blocks: int, block_bytes: int, rounds: int, results: Connection
) -> None:
    table = np.random.default_rng(0).permutation(blocks).tolist()
    pool = KVPool.allocate(_layout(layers, block_bytes), blocks=blocks)
    posted: list[Posted] = []
    async with EmbeddedServer() as server:
        pipe.send(server.url)
        await asyncio.to_thread(pipe.recv)
        config = RuntimeConfig(deadline=_WAIT)
        async with Runtime("prefill-0", pool=pool, nats=server.url, config=config) as runtime:
            meter = _Meter()
            for number in range(rounds + 1):
                await asyncio.to_thread(pipe.recv)
                posted.append(await _one(runtime, f"r{number}", table, meter, pipe))
            results.send(msgspec.to_builtins(posted[1:]))
            pipe.send("end")


async def _one(runtime: Runtime, name: str, table: list[int], meter: _Meter, pipe: Connection) -> Posted:
    meter.clear()
    start = time.monotonic()
    async with runtime.send(name, blocks=table, tokens=16 * len(table), to="decode-0") as tx:
        for layer in range(runtime.pool.layout.layers):
            tx.layer_ready(layer)
        post = time.monotonic() - start
        await tx.done()
        done = time.monotonic() - start
    total, messages, confirms = await asyncio.to_thread(pipe.recv)
    return Posted(
        post,
        meter.last_ready - start,
        done,
        chunks=meter.frames["Ready"],
        chunk_bytes=meter.by_frame["Ready"] + confirms,
        control=meter.total + total,
        messages=meter.messages + messages,
    )


# ---------------------------------------------------------------------- tiny streams


def tiny_streams(count: int, together: int) -> float:
    """Streams per second of one block of one layer (4 KiB), from `send` to the destination's decision, `together` at a
    time. The destination hears of each by its offer."""
    with Pair(_tiny_source_process, _tiny_destination_process, count, together) as pair:
        return pair.result(_WAIT)


def _tiny_source_process(*arguments: Any) -> None:
    uvloop.run(_tiny_source(*arguments))


def _tiny_destination_process(*arguments: Any) -> None:
    uvloop.run(_tiny_destination(*arguments))


async def _tiny_destination(pipe: Connection, _count: int, together: int) -> None:
    pool = KVPool.allocate(_layout(1, 4096), blocks=together)
    url = await asyncio.to_thread(pipe.recv)
    async with Runtime("decode-0", pool=pool, nats=url) as runtime:

        @runtime.on_offer
        async def _(offer: Offer) -> None:
            offer.accept(blocks=[offer.metadata])

        pipe.send("ready")
        await asyncio.to_thread(pipe.recv)


async def _tiny_source(pipe: Connection, count: int, together: int, results: Connection) -> None:
    pool = KVPool.allocate(_layout(1, 4096), blocks=together)
    async with EmbeddedServer() as server:
        pipe.send(server.url)
        await asyncio.to_thread(pipe.recv)
        async with Runtime("prefill-0", pool=pool, nats=server.url) as runtime:

            async def prompts(block: int, number: int) -> None:
                for n in range(number):
                    name = f"{block}-{number}-{n}"
                    async with runtime.send(name, blocks=[block], tokens=16, to="decode-0", metadata=block) as tx:
                        tx.layer_ready(0)
                        await tx.done()

            await prompts(0, 20)
            each = count // together
            start = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for block in range(together):
                    group.create_task(prompts(block, each))
            results.send(each * together / (time.monotonic() - start))
            pipe.send("end")


# ---------------------------------------------------------------------- NIXL


def post_nixl(layers: int, blocks: int, block_bytes: int, rounds: int) -> list[Posted]:
    """The same blocks as one WRITE with a descriptor for each."""
    require("nixl_cu12")
    with Pair(_nixl_source, _nixl_destination, layers * blocks, block_bytes, rounds) as pair:
        return msgspec.convert(pair.result(_WAIT), list[Posted])


def _nixl_destination(pipe: Connection, count: int, block_bytes: int, _rounds: int) -> None:
    me = nixl.agent("destination")
    buffer = np.zeros(count * block_bytes, np.uint8)
    nixl.register(me, buffer)
    pipe.send((me.get_agent_metadata(), buffer.ctypes.data))
    pipe.recv()


def _nixl_source(pipe: Connection, count: int, block_bytes: int, rounds: int, results: Connection) -> None:
    me = nixl.agent("source")
    buffer = np.full(count * block_bytes, 7, np.uint8)
    nixl.register(me, buffer)
    metadata, address = pipe.recv()
    peer = me.add_remote_agent(metadata)
    rng = np.random.default_rng(0)
    lists: list[np.ndarray] = []
    for base in (buffer.ctypes.data, address):
        descriptors = np.zeros((count, 3), np.uint64)
        descriptors[:, 0] = np.uint64(base) + rng.permutation(count).astype(np.uint64) * np.uint64(block_bytes)
        descriptors[:, 1] = block_bytes
        lists.append(descriptors)
    posted: list[Posted] = []
    for _ in range(rounds + 1):
        start = time.monotonic()
        local, remote = (me.get_xfer_descs(side, "DRAM") for side in lists)
        handle = me.initialize_xfer("WRITE", local, remote, peer, b"done")
        state = me.transfer(handle)
        post = time.monotonic() - start
        while state != "DONE":
            if state == "ERR":
                raise RuntimeError("the transfer failed")
            state = me.check_xfer_state(handle)
        done = time.monotonic() - start
        me.release_xfer_handle(handle)
        posted.append(Posted(post, post, done))
    results.send(msgspec.to_builtins(posted[1:]))
