"""Round trip of layer notifications between two processes, as an engine sees them.

The source reports layer l of stream "ping" ready; the peer, as soon as it sees the layer in place, reports layer l of
stream "pong" ready; the round ends when that layer is in place here. A round is two gathers, two announcements, two
scatters and two confirmations of one 4 KiB block, so that the bytes hardly count. Each peer is a real process.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from multiprocessing.connection import Connection
from typing import Any

import uvloop

from benchmarks import machine
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel
from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer

ROUNDS, WARM_UP = 2000, 200
TINY = 60, 10
LANES = ("shared", "get", "put")
CONFIG = RuntimeConfig(connect_timeout=10)
"""Each waits for the other to have started, however busy the machine is."""


def _pool(rounds: int) -> KVPool:
    layout = KVLayout(layers=rounds, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
    return KVPool.allocate(layout, blocks=2)


async def _peer(pipe: Connection, url: str, lane: str, rounds: int) -> None:
    pool = _pool(rounds)
    async with Runtime("peer", pool=pool, nats=url, lanes=lane, config=CONFIG) as runtime:
        pipe.send("ready")
        async with runtime.receive("ping", blocks=[0], tokens=16) as rx:
            async with runtime.send("pong", blocks=[1], tokens=16, to="here") as tx:
                async for layer in rx:
                    tx.layer_ready(layer)
                await tx.done()
            await rx.done()


def _child(pipe: Connection, url: str, lane: str, rounds: int) -> None:
    uvloop.run(_peer(pipe, url, lane, rounds))


async def _rounds(url: str, lane: str, rounds: int) -> list[float]:
    """Microseconds of each round."""
    times: list[float] = []
    pool = _pool(rounds)
    async with Runtime("here", pool=pool, nats=url, lanes=lane, config=CONFIG) as runtime:
        async with runtime.receive("pong", blocks=[1], tokens=16) as rx:
            async with runtime.send("ping", blocks=[0], tokens=16, to="peer") as tx:
                layers = aiter(rx)
                for layer in range(rounds):
                    start = time.perf_counter()
                    tx.layer_ready(layer)
                    await anext(layers)
                    times.append((time.perf_counter() - start) * 1e6)
                await tx.done()
            await rx.done()
    return times


async def _measure(lane: str, rounds: int, warm_up: int) -> dict[str, Any]:
    async with EmbeddedServer() as server:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, server.url, lane, rounds), daemon=True)
        process.start()
        try:
            await asyncio.to_thread(ours.recv)
            times = sorted((await _rounds(server.url, lane, rounds))[warm_up:])
        finally:
            process.kill()
            process.join()
    p99 = times[int(len(times) * 0.99)]
    return {"lane": lane, "median_us": round(statistics.median(times), 1), "p99_us": round(p99, 1)}


def measure(lane: str, rounds: int = ROUNDS, warm_up: int = WARM_UP) -> dict[str, Any]:
    """The row of one lane, of `rounds` round trips without the first `warm_up`."""
    return uvloop.run(_measure(lane, rounds, warm_up))


def run(options: Options) -> dict[str, Any]:
    """Measure each lane. `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    rounds, warm_up = options.pick((ROUNDS, WARM_UP), (ROUNDS, WARM_UP), TINY)
    rows = [measure(lane, rounds, warm_up) for lane in options.pick(LANES, LANES[:1], LANES[:1])]
    return {"loaded": load.seen(), "machine": machine.describe(), "rounds": rounds - warm_up, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'lane':8} {'median us':>10} {'p99 us':>10}"]
    lines += [f"{row['lane']:8} {row['median_us']:10.1f} {row['p99_us']:10.1f}" for row in result["rows"]]
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the figures as upper bounds")
    return "\n".join(lines)


def panel(rows: list[dict[str, Any]]) -> Panel:
    """Round trips by lane."""
    return Panel(
        title="Round trip of a layer's notification, µs",
        groups=tuple(row["lane"] for row in rows),
        series=(
            ("median", tuple(row["median_us"] for row in rows)),
            ("p99", tuple(row["p99_us"] for row in rows)),
        ),
        colors=(0, 5),
    )


def figure(result: dict[str, Any]) -> Figure:
    """The same as a plot."""
    return Figure(
        title="A layer is ready, is seen in place, and one comes back",
        subtitle=machine.summary(result),
        panels=(panel(result["rows"]),),
    )
