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
from kvstream import KVLayout, KVPool, Runtime
from kvstream.discovery import EmbeddedServer

ROUNDS = 2000
WARM_UP = 200
LANES = ("shared", "get", "put")
LAYOUT = KVLayout(layers=ROUNDS, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")


async def _peer(pipe: Connection, url: str, lane: str) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=2)
    async with Runtime("peer", pool=pool, nats=url, lanes=lane) as runtime:
        pipe.send("ready")
        async with runtime.receive("ping", blocks=[0], tokens=16) as rx:
            async with runtime.send("pong", blocks=[1], tokens=16, to="here") as tx:
                async for layer in rx:
                    tx.layer_ready(layer)
                await tx.done()
            await rx.done()


def _child(pipe: Connection, url: str, lane: str) -> None:
    uvloop.run(_peer(pipe, url, lane))


async def _rounds(url: str, lane: str) -> list[float]:
    """Microseconds of each round."""
    times: list[float] = []
    pool = KVPool.allocate(LAYOUT, blocks=2)
    async with Runtime("here", pool=pool, nats=url, lanes=lane) as runtime:
        async with runtime.receive("pong", blocks=[1], tokens=16) as rx:
            async with runtime.send("ping", blocks=[0], tokens=16, to="peer") as tx:
                layers = aiter(rx)
                for layer in range(ROUNDS):
                    start = time.perf_counter()
                    tx.layer_ready(layer)
                    await anext(layers)
                    times.append((time.perf_counter() - start) * 1e6)
                await tx.done()
            await rx.done()
    return times[WARM_UP:]


async def _measure(lane: str) -> dict[str, Any]:
    async with EmbeddedServer() as server:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_child, args=(theirs, server.url, lane), daemon=True)
        process.start()
        try:
            await asyncio.to_thread(ours.recv)
            times = sorted(await _rounds(server.url, lane))
        finally:
            process.kill()
            process.join()
    p99 = times[int(len(times) * 0.99)]
    return {"lane": lane, "median_us": round(statistics.median(times), 1), "p99_us": round(p99, 1)}


def measure(lane: str) -> dict[str, Any]:
    """The row of one lane."""
    return uvloop.run(_measure(lane))


def run(options: Options) -> dict[str, Any]:
    """Measure each lane. `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad()
    rows = [measure(lane) for lane in (LANES[:1] if options.quick else LANES)]
    return {"loaded": load.seen(), "machine": machine.describe(), "rounds": ROUNDS - WARM_UP, "rows": rows}


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
