"""A worker in a process of its own, steered by a test over a pipe: the other side of the tests between processes.

The parent uses `Worker`; the child runs `serve`. Children come from a fork server that has imported the heavy modules,
so that a test can afford to kill dozens of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvloop

from kvstream import KVLayout, KVPool, KVStreamError, Offer, ReceiveStream, Runtime, RuntimeConfig
from kvstream.discovery import Changes, Left
from tests.fake_cupy import FakeCupy

WAYS = {
    "shared": ("shared", RuntimeConfig(stall_timeout=30)),
    "lent": ("shared", RuntimeConfig(stall_timeout=30, lend_bytes=64)),
    "get": ("get", RuntimeConfig(stall_timeout=30)),
    "lent-get": ("get", RuntimeConfig(stall_timeout=30, get_lend_bytes=64)),
    "put": ("put", RuntimeConfig(stall_timeout=30)),
}
"""How bytes move: the lane and the configuration for it. "lent" and "lent-get" are the lanes with every block
read in place. The stall time-out is long: it must not be what finds the dead, a kill has to show at once."""

DEVICE_WAYS = {
    "device": ("get", RuntimeConfig(stall_timeout=30, device_slot_bytes=64 << 10, device_staging=8 << 20)),
}
"""The same from GPU to GPU, which are stand-ins: both ends have their pools there."""
ALL_WAYS = {**WAYS, **DEVICE_WAYS}

LAYOUT = KVLayout(layers=8, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
BLOCKS = 512


def checksum(pool: KVPool, blocks: list[int]) -> str:
    """Of these blocks of every layer, in table order."""
    digest = hashlib.blake2b(digest_size=16)
    for layer in range(pool.layout.layers):
        digest.update(pool.layer(layer)[blocks].tobytes())
    return digest.hexdigest()


def rss() -> int:
    """Resident memory of this process that is its own, in bytes: private and shared pages that are touched."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Tally:
    """What a child has seen; sent to the parent on request."""

    ended: dict[str, int] = field(default_factory=dict)
    twice: list[str] = field(default_factory=list)
    wrong_bytes: list[str] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    left: list[str] = field(default_factory=list)
    """Workers that the registry told to have left."""

    def end(self, stream: str, code: str) -> None:
        if stream in self.seen:
            self.twice.append(stream)
        self.seen.add(stream)
        self.ended[code] = self.ended.get(code, 0) + 1


class Child:
    """In the child: a runtime, an offer handler that obeys the offer's metadata, and commands from the parent."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.tally = Tally()
        self.tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def on_offer(self, offer: Offer) -> None:
        action = (offer.metadata or {}).get("action", "take")
        if action == "refuse":
            offer.refuse("told to", retry_after=0.1)
            return
        blocks = self.runtime.pool.acquire(self.runtime.pool.layout.blocks_for(offer.tokens))
        blocks = blocks[1::2] + blocks[::2]
        self.start(self.take(offer.accept(blocks=blocks), blocks, action, (offer.metadata or {}).get("layers", 0)))

    async def take(self, rx: ReceiveStream, blocks: list[int], action: str, layers: int) -> None:
        try:
            async with rx:
                if action == "cancel":
                    async for layer in rx:
                        if layer >= layers:
                            break
                    rx.cancel("told to")
                await rx.done()
                if rx.payload["sum"] != checksum(self.runtime.pool, blocks):
                    self.tally.wrong_bytes.append(rx.stream)
        except KVStreamError as error:
            self.tally.end(rx.stream, error.code)
        else:
            self.tally.end(rx.stream, "done")
        finally:
            self.runtime.pool.release(blocks)

    async def send(self, stream: str, to: str, tokens: int, pause: float) -> None:
        """Send a layer each `pause` seconds, and never the last one: the stream is still running when its source, this
        process, is killed."""
        pool = self.runtime.pool
        blocks = pool.acquire(pool.layout.blocks_for(tokens))
        async with self.runtime.send(stream, blocks=blocks, tokens=tokens, to=to) as tx:
            for layer in range(pool.layout.layers - 1):
                tx.layer_ready(layer)
                await asyncio.sleep(pause)
            await tx._report()

    async def follow(self, changes: Changes) -> None:
        async for change in changes:
            if isinstance(change, Left):
                self.tally.left.append(change.record.id)

    async def stats(self) -> dict[str, Any]:
        if self.tasks:
            await asyncio.wait(self.tasks)
        core = self.runtime._streams.core
        return {
            "ended": self.tally.ended,
            "twice": self.tally.twice,
            "wrong_bytes": self.tally.wrong_bytes,
            "left": self.tally.left,
            "free_blocks": self.runtime.pool.free_blocks,
            "streams": core.streams,
            "idle": core.idle,
            "rss": rss(),
        }


def allocate(way: str) -> KVPool:
    """A pool for this way."""
    return KVPool.allocate(LAYOUT, blocks=BLOCKS, device="cuda:0" if way in DEVICE_WAYS else "cpu")


async def serve(
    pipe: Connection,
    name: str,
    url: str,
    lane: str,
    config: RuntimeConfig,
    interface: str | None = None,
    pool: KVPool | None = None,
) -> None:
    """The child's main: obey the parent until it says quit or is gone."""
    loop = asyncio.get_running_loop()
    commands: asyncio.Queue[tuple[Any, ...] | None] = asyncio.Queue()

    def readable() -> None:
        try:
            commands.put_nowait(pipe.recv())
        except EOFError:
            commands.put_nowait(None)

    pool = pool or KVPool.allocate(LAYOUT, blocks=BLOCKS)
    async with (
        Runtime(
            name, roles={"decode"}, pool=pool, nats=url, lanes=lane, config=config, data_interface=interface
        ) as runtime,
        runtime.registry.watch() as changes,
    ):
        child = Child(runtime)
        follower = loop.create_task(child.follow(changes))
        runtime.on_offer(child.on_offer)
        loop.add_reader(pipe.fileno(), readable)
        pipe.send("ready")
        while (command := await commands.get()) is not None and command[0] != "quit":
            if command[0] == "stats":
                pipe.send(await child.stats())
            elif command[0] == "send":
                child.start(child.send(*command[1:]))
            elif command[0] == "block":
                time.sleep(command[1])  # noqa: ASYNC251 - what an engine does that computes on the loop
                pipe.send("blocked")
        loop.remove_reader(pipe.fileno())
        for task in (follower, *child.tasks):
            task.cancel()


def main(pipe: Connection, name: str, url: str, way: str) -> None:
    """Entry of the child process."""
    if way in DEVICE_WAYS:
        sys.modules["cupy"] = FakeCupy()
    uvloop.run(serve(pipe, name, url, *ALL_WAYS[way], pool=allocate(way)))


class Worker:
    """In the parent: a child process and its pipe."""

    def __init__(self, process: multiprocessing.process.BaseProcess | None, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    @property
    def pid(self) -> int:
        assert self.process is not None and self.process.pid is not None
        return self.process.pid

    async def answer(self) -> Any:
        """The next thing the child says; EOFError when it is gone."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        loop.add_reader(self.pipe.fileno(), ready.set)
        try:
            async with asyncio.timeout(60):
                await ready.wait()
        finally:
            loop.remove_reader(self.pipe.fileno())
        return self.pipe.recv()

    async def ask(self, *command: Any) -> Any:
        self.pipe.send(command)
        return await self.answer()

    def tell(self, *command: Any) -> None:
        self.pipe.send(command)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.integration.preload"])


@contextlib.asynccontextmanager
async def worker(name: str, url: str, way: str) -> AsyncIterator[Worker]:
    """Start a child and wait until it is registered; on exit it is gone, whatever happened."""
    ours, theirs = _context.Pipe()
    process = _context.Process(target=main, args=(theirs, name, url, way), daemon=True)
    process.start()
    theirs.close()
    it = Worker(process, ours)
    try:
        assert await it.answer() == "ready"
        yield it
    finally:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            it.tell("quit")
        await asyncio.to_thread(process.join, 5)
        if process.is_alive():
            process.kill()
            await asyncio.to_thread(process.join, 5)
        ours.close()
        process.close()
