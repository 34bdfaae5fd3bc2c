"""What a new peer costs, and what many cost: time to the first byte, registration, memory, descriptors.

One worker meets 200 others, one after the other. The first byte to each is measured from `send` to the moment its only
layer is in place over there: dialing, the handshake over both sides' registry records, the lane, and the transfer of
one 4 KiB block. How long it takes is given by the number of peers known before. Each of these peers has just started
and meets its first other worker; a second worker then meets some of them again.

A few peers of each group live as workers do, in a process of their own, and are what is reported. The others share one
process, which stands for many hosts and so has the lowest priority: all its registries hear of each change of load, and
a peer in there waits until they have. What meeting these takes is reported as `crowded`.

Registration: KVPool.wrap of an engine's memory and the start of a runtime on it, which registers nothing of the pool
(only staging is ever registered); what UCX takes for a staging area; and many cycles of that.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import statistics
import time
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import uvloop

from benchmarks import machine
from benchmarks.contenders import Pair
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel
from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer, MemoryBrokerServer
from kvstream.transport import _ucp
from kvstream.transport._worker import UcpWorker
from kvstream.transport.base import Slab

PEERS = 200
KNOWN = (1, 10, 50, 200)
"""Peers are counted in groups: up to 1 known, up to 10, and so on."""
MIB = 1 << 20
CONFIG = RuntimeConfig(slots=2, slot_bytes=MIB, staging_limit=PEERS * 3 * MIB, lease_ttl=60)
"""Slots that let 200 connections fit into a cap on staging that is below the default one. Leases are renewed rarely:
200 workers that share a process, and all hear of each other's renewals, are otherwise busy with that alone."""
ALONE = 5
"""Peers of each group, at most, that have a process of their own."""
LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
POOL_BYTES = 1024 * MIB
STAGING_BYTES = 16 * MIB
CYCLES = 1000
START_TIMEOUT = 120.0


class _Cost(msgspec.Struct, frozen=True):
    """Of a process: resident memory in bytes, of that what is shared, open descriptors."""

    resident: int
    shared: int
    descriptors: int

    @classmethod
    def now(cls) -> _Cost:
        pages = [int(field) for field in Path("/proc/self/statm").read_text().split()]
        page = os.sysconf("SC_PAGE_SIZE")
        return cls(pages[1] * page, pages[2] * page, len(os.listdir("/proc/self/fd")))

    def since(self, before: _Cost) -> dict[str, float]:
        return {
            "resident_mib": round((self.resident - before.resident) / MIB, 1),
            "shared_mib": round((self.shared - before.shared) / MIB, 1),
            "descriptors": self.descriptors - before.descriptors,
        }


# ---------------------------------------------------------------------- peers


class _Met(msgspec.Struct, frozen=True):
    """Seconds to the first byte and to the source's `done`, per peer in the order of meeting. Of peers with a process
    of their own, seconds to the first byte `again`, over the same connections; and over those of another worker, to
    `seasoned` peers. `start`: of all the others, one after the other. What the connections `cost` the source's process,
    and what its runtime has `left` after its close."""

    first_byte: list[float]
    done: list[float]
    again: list[float]
    seasoned: list[float]
    start: float
    cost: dict[str, float]
    left: dict[str, float]


def _peer_process(pipe: Connection, number: int) -> None:
    uvloop.run(_peers(pipe, [number]))


def _crowd_process(pipe: Connection, count: int, alone: dict[int, Connection]) -> None:
    uvloop.run(_peers(pipe, [number for number in range(count) if number not in alone]))


def _worker_process(*arguments: Any) -> None:
    uvloop.run(_worker(*arguments))


@contextmanager
def _homes(numbers: Sequence[int]) -> Generator[dict[int, Connection]]:
    """A process for each of these peers, and the pipe to it."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[int, Connection] = {}
    processes: list[BaseProcess] = []
    try:
        for number in numbers:
            pipes[number], theirs = context.Pipe()
            process = context.Process(target=_peer_process, args=(theirs, number), daemon=True)
            process.start()
            processes.append(process)
            theirs.close()
        yield pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes.values():
            pipe.close()


def _alone(count: int) -> list[int]:
    """Which of so many peers have a process of their own: some of each group, spread over it."""
    numbers: list[int] = []
    for low, high in zip((0, *KNOWN), KNOWN, strict=False):
        size = min(high, count) - low
        if size > 0:
            some = max(1, min(ALONE, size // 2))
            numbers += [low + (index + 1) * size // some - 1 for index in range(some)]
    return numbers


async def _peers(pipe: Connection, numbers: Sequence[int]) -> None:
    url = await asyncio.to_thread(pipe.recv)
    arrived: list[float] = []
    start = time.monotonic()
    async with AsyncExitStack() as stack:
        runtimes: dict[int, Runtime] = {}
        for number in numbers:
            pool = KVPool.allocate(LAYOUT, blocks=1)
            runtime = Runtime(f"peer-{number}", pool=pool, nats=url, lanes="shared", config=CONFIG)
            runtimes[number] = await stack.enter_async_context(runtime)
        pipe.send(time.monotonic() - start)
        if len(numbers) > 1:
            os.nice(19)
        while (number := await asyncio.to_thread(pipe.recv)) >= 0:
            await _quiet()
            async with runtimes[number].receive(f"s{number}-{len(arrived)}", blocks=[0], tokens=16) as rx:
                pipe.send(f"s{number}-{len(arrived)}")
                report = await rx.done()
                arrived.append(report.layer_times[0])
            pipe.send(arrived[-1])
    pipe.send(None)


async def _worker(crowd: Connection, count: int, alone: dict[int, Connection], results: Connection) -> None:
    pipes = {number: alone.get(number, crowd) for number in range(count)}
    async with EmbeddedServer() as server:
        for pipe in (crowd, *alone.values()):
            pipe.send(server.url)
        start = await asyncio.to_thread(crowd.recv)
        for pipe in alone.values():
            await asyncio.to_thread(pipe.recv)
        pool = KVPool.allocate(LAYOUT, blocks=1)
        async with Runtime("warm-up", pool=pool, nats=server.url, lanes="shared", config=CONFIG):
            pass  # what the libraries take once is no peer's cost
        begin = _Cost.now()
        async with Runtime("worker", pool=pool, nats=server.url, lanes="shared", config=CONFIG) as runtime:
            async with asyncio.timeout(START_TIMEOUT), runtime.registry.watch() as changes:
                while len(runtime.registry.workers()) <= count:
                    await anext(aiter(changes))
            before = _Cost.now()
            met = [await _meet(runtime, number, pipe) for number, pipe in pipes.items()]
            cost = _Cost.now().since(before)
            again = [await _meet(runtime, number, pipe) for number, pipe in alone.items()]
        left = _Cost.now().since(begin)
        async with Runtime("worker-2", pool=pool, nats=server.url, lanes="shared", config=CONFIG) as runtime:
            # The first one meets a fresh worker, if not a fresh peer.
            seasoned = [await _meet(runtime, number, pipe) for number, pipe in alone.items()][1:]
        for pipe in alone.values():
            pipe.send(-1)
            await asyncio.to_thread(pipe.recv)
        found = _Met(
            first_byte=[one[0] for one in met],
            done=[one[1] for one in met],
            again=[one[0] for one in again],
            seasoned=[one[0] for one in seasoned],
            start=start,
            cost=cost,
            left=left,
        )
        results.send(msgspec.to_builtins(found))


async def _quiet() -> None:
    """Wait, at most two seconds, until this loop wakes on time: the registry's news of the stream before is heard."""
    loop = asyncio.get_running_loop()
    end = loop.time() + 2.0
    punctual = 0
    while punctual < 3 and loop.time() < end:
        start = time.monotonic()
        await asyncio.sleep(0.003)
        punctual = punctual + 1 if time.monotonic() - start < 0.0055 else 0


async def _meet(runtime: Runtime, number: int, pipe: Connection) -> tuple[float, float]:
    pipe.send(number)
    name = await asyncio.to_thread(pipe.recv)
    await _quiet()
    start = time.monotonic()
    async with runtime.send(name, blocks=[0], tokens=16, to=f"peer-{number}") as tx:
        tx.layer_ready(0)
        await tx.done()
    done = time.monotonic()
    return await asyncio.to_thread(pipe.recv) - start, done - start


def _first_bytes(met: _Met, count: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    alone = set(_alone(count))
    low = 0
    for high in KNOWN:
        group = range(low, min(high, count))
        mine = [number for number in group if number in alone]
        crowd = [met.first_byte[number] for number in group if number not in alone]
        if mine:
            times = [met.first_byte[number] for number in mine]
            rows.append(
                {
                    "peers_known": f"{low}" if high == low + 1 else f"{low}-{group[-1]}",
                    "peers": len(mine),
                    "median_ms": round(1e3 * statistics.median(times), 3),
                    "max_ms": round(1e3 * max(times), 3),
                    "done_median_ms": round(1e3 * statistics.median(met.done[number] for number in mine), 3),
                    "crowded_median_ms": round(1e3 * statistics.median(crowd), 3) if crowd else None,
                }
            )
        low = high
    return rows


# ---------------------------------------------------------------------- registration


async def _pool_start(nbytes: int) -> dict[str, float]:
    """Seconds for wrap and start, over memory that the engine has touched."""
    layout = KVLayout(layers=16, kv_heads=8, head_dim=128, block_tokens=16, dtype="float16")
    blocks = nbytes // layout.layers // layout.block_bytes
    arrays = [np.ones((blocks, *layout.block_shape), layout.np_dtype) for _ in range(layout.layers)]
    hub = MemoryBrokerServer()
    times: list[tuple[float, float]] = []
    for number in range(4):  # the first one loads UCX
        broker = hub.connect()
        start = time.monotonic()
        pool = KVPool.wrap(layout, arrays)
        wrapped = time.monotonic()
        async with Runtime(f"engine-{number}", pool=pool, broker=broker):
            times.append((wrapped - start, time.monotonic() - wrapped))
        await broker.aclose()
    wrap = statistics.median(one[0] for one in times[1:])
    begin = statistics.median(one[1] for one in times[1:])
    gib = sum(array.nbytes for array in arrays) / 2**30
    return {
        "pool_gib": round(gib, 3),
        "wrap_ms": round(1e3 * wrap, 3),
        "start_ms": round(1e3 * begin, 3),
        "wrap_and_start_gib_per_s": round(gib / (wrap + begin), 2),
    }


async def _cycles(count: int) -> dict[str, Any]:
    """Register and deregister a touched staging area, over and over, with the worker that serves `get`: the one that
    may use every transport."""
    ucp = await asyncio.to_thread(_ucp.load)
    worker = UcpWorker(ucp, asyncio.get_running_loop(), {"RNDV_THRESH": "inf", "NET_DEVICES": "lo"})
    memory = np.ones(STAGING_BYTES, np.uint8)
    times: list[float] = []
    registering: list[float] = []
    try:
        worker.register(Slab.of(memory)).unregister()
        before = _Cost.now()
        for _ in range(count):
            start = time.perf_counter()
            region = worker.register(Slab.of(memory))
            registering.append(time.perf_counter() - start)
            region.unregister()
            times.append(time.perf_counter() - start)
        cost = _Cost.now().since(before)
    finally:
        worker.close()
    tenth = max(1, count // 10)
    first, last = statistics.median(times[:tenth]), statistics.median(times[-tenth:])
    return {
        "cycles": count,
        "staging_mib": STAGING_BYTES // MIB,
        "register_gib_per_s": round(STAGING_BYTES / 2**30 / statistics.median(registering), 1),
        "first_tenth_us": round(first * 1e6, 1),
        "last_tenth_us": round(last * 1e6, 1),
        "growth": cost,
    }


# ---------------------------------------------------------------------- all of it


def run(options: Options) -> dict[str, Any]:
    """All of it; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    peers, pool_bytes, cycles = options.pick(
        (PEERS, POOL_BYTES, CYCLES), (12, POOL_BYTES >> 3, 100), (3, POOL_BYTES >> 6, 20)
    )
    with _homes(_alone(peers)) as alone, Pair(_worker_process, _crowd_process, peers, alone) as pair:
        met = msgspec.convert(pair.result(2 * START_TIMEOUT), _Met)
    registration, cycling = uvloop.run(_pool_start(pool_bytes)), uvloop.run(_cycles(cycles))
    return {
        "loaded": load.seen(),
        "machine": machine.describe(),
        "peers": peers,
        "slots": CONFIG.slots,
        "slot_bytes": CONFIG.slot_bytes,
        "first_byte": _first_bytes(met, peers),
        "first_byte_seasoned_peer_ms": round(1e3 * statistics.median(met.seasoned), 3),
        "first_byte_connected_ms": round(1e3 * statistics.median(met.again), 3),
        "peer_start_ms": round(1e3 * met.start / (peers - len(alone)), 2),
        "cost_of_all_peers": met.cost,
        "left_after_close": met.left,
        "registration": registration,
        "cycles": cycling,
    }


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'peers known':>12} {'first byte ms':>14} {'max':>8} {'done ms':>8} {'crowded':>8}"]
    lines += [
        f"{row['peers_known']:>12} {row['median_ms']:14.3f} {row['max_ms']:8.3f} {row['done_median_ms']:8.3f}"
        f" {row['crowded_median_ms'] or '-':>8}"
        for row in result["first_byte"]
    ]
    cost, left, pool, cycles = (
        result[name] for name in ("cost_of_all_peers", "left_after_close", "registration", "cycles")
    )
    lines += [
        f"{'seasoned':>12} {result['first_byte_seasoned_peer_ms']:14.3f}   (a new peer that has met others before)",
        f"{'connected':>12} {result['first_byte_connected_ms']:14.3f}",
        "crowded: medians of peers that share one process with nearly all others",
        "",
        f"{result['peers']} connections cost {cost['resident_mib']} MiB ({cost['shared_mib']} of it slots, as far as"
        f" touched) and {cost['descriptors']} descriptors; the closed runtime left {left['resident_mib']} MiB and"
        f" {left['descriptors']} descriptors",
        f"a peer's start takes {result['peer_start_ms']} ms",
        f"KVPool.wrap of {pool['pool_gib']} GiB {pool['wrap_ms']} ms, a runtime's start on it {pool['start_ms']} ms:"
        f" {pool['wrap_and_start_gib_per_s']} GiB/s",
        f"UCX registers {cycles['register_gib_per_s']} GiB/s (TCP and CMA pin nothing)",
        f"{cycles['cycles']} cycles of {cycles['staging_mib']} MiB: {cycles['first_tenth_us']} us each at first,"
        f" {cycles['last_tenth_us']} us at the end, growth {cycles['growth']['resident_mib']} MiB,"
        f" {cycles['growth']['descriptors']} descriptors",
    ]
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the times as upper bounds.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """First bytes by peers known."""
    rows = result["first_byte"]
    others = (result["first_byte_seasoned_peer_ms"], result["first_byte_connected_ms"])
    return Figure(
        title="First byte to a peer never met before",
        subtitle=machine.summary(result),
        panels=(
            Panel(
                title="ms from send to the layer in place, by the number of peers known",
                groups=(*(f"{row['peers_known']} known" for row in rows), "a peer that knows others", "connected"),
                series=(
                    ("median", (*(row["median_ms"] for row in rows), *others)),
                    ("max", (*(row["max_ms"] for row in rows), None, None)),
                    ("median, 190 peers in one process", (*(row["crowded_median_ms"] for row in rows), None, None)),
                ),
                colors=(0, 5, 2),
            ),
        ),
    )
