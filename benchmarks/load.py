"""Prompts that arrive whether or not there is capacity for them, between two processes.

Capacity is measured first, closed-loop: so many streams at a time, each followed by the next. Then prompts arrive
open-loop, at random (Poisson) times, at half of that rate, at it, and at twice it. The receiver takes a few streams at
a time, lets a bounded number of offers wait, and refuses the others. Times count from when a prompt was due, so that a
sender that is late counts as slow. Recovery is the time from the end of the arrivals until a single prompt again takes
no longer than twice its time on the idle receiver, and 10 ms.

Beside it, at full load: a short prompt next to one of 100,000 tokens; streams with deadlines, in the order of these and
in the order of arrival; and two classes of unequal weight.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import machine
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel
from kvstream import KVLayout, KVPool, KVStreamError, Offer, Refused, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer

LAYOUT = KVLayout(layers=8, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
"""KV blocks of 4 KiB."""
PROMPT_BLOCKS = 256
"""8 MiB in all layers."""
SHORT_BLOCKS = 8
LONG_TOKENS = 100_000
RECEIVING, WAITING = 16, 64
"""Streams that the receiver takes at a time, and offers that it lets wait."""
FACTORS = (0.5, 1.0, 2.0)
SECONDS = 5.0
WEIGHTS = {"gold": 3.0, "plain": 1.0}
START_TIMEOUT = 60.0
MIB = 1 << 20


class Shape(msgspec.Struct, frozen=True):
    """What is different with --quick and --tiny."""

    seconds: float = SECONDS
    prompt_blocks: int = PROMPT_BLOCKS
    long_tokens: int = LONG_TOKENS
    short_rounds: int = 20
    deadline_streams: int = 60

    @property
    def pool_blocks(self) -> int:
        return LAYOUT.blocks_for(self.long_tokens) + (RECEIVING + 1) * self.prompt_blocks

    @property
    def prompt_bytes(self) -> int:
        return self.prompt_blocks * LAYOUT.layers * LAYOUT.block_bytes


class Peak(msgspec.Struct, frozen=True):
    """Of the receiver since it was last asked, in bytes: resident memory; and offers that waited at most."""

    resident: int
    offers: int


# ---------------------------------------------------------------------- the receiver's process


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Highest resident memory since `_reset_peak`, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


class _Blocks:
    """The receiver's allocator: it takes what it has blocks for."""

    def __init__(self, runtime: Runtime, count: int) -> None:
        self._runtime = runtime
        self._free = list(range(count))
        self.most_offers = 0

    async def handle(self, offer: Offer) -> None:
        self.most_offers = max(self.most_offers, self._runtime.stats().offers_waiting)
        needed = LAYOUT.blocks_for(offer.tokens)
        if needed > len(self._free):
            offer.refuse("no blocks", retry_after=0.05)
            return
        mine, self._free = self._free[:needed], self._free[needed:]
        try:
            async with offer.accept(blocks=mine) as rx:
                await rx.done()
        except KVStreamError:
            pass  # the source counts it
        finally:
            self._free += mine


async def _receive(pipe: Connection, url: str, config: RuntimeConfig, blocks: int) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=blocks)
    async with Runtime("receiver", roles={"decode"}, pool=pool, nats=url, config=config) as runtime:
        allocator = _Blocks(runtime, blocks)
        runtime.on_offer(allocator.handle)
        pipe.send("ready")
        while await asyncio.to_thread(pipe.recv):
            pipe.send(Peak(_peak(), allocator.most_offers))
            allocator.most_offers = 0
            _reset_peak()


def _child(pipe: Connection, url: str, config: bytes, blocks: int) -> None:
    uvloop.run(_receive(pipe, url, msgspec.json.decode(config, type=RuntimeConfig), blocks))


# ---------------------------------------------------------------------- the sender's process


class _Sender:
    """Streams to the receiver; `blocks` of the pool are sent over and over, which harms nobody."""

    def __init__(self, runtime: Runtime, pipe: Connection, shape: Shape) -> None:
        self._runtime = runtime
        self._pipe = pipe
        self.shape = shape
        self._count = 0

    async def prompt(self, blocks: int | None = None, **more: Any) -> None:
        """One prompt, all of it ready at once."""
        self._count += 1
        table = list(range(blocks or self.shape.prompt_blocks))
        tokens = len(table) * LAYOUT.block_tokens
        async with self._runtime.send(f"p{self._count}", blocks=table, tokens=tokens, to="receiver", **more) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()

    async def timed(self, blocks: int | None = None, **more: Any) -> float:
        """Its time in seconds."""
        start = time.perf_counter()
        await self.prompt(blocks, **more)
        return time.perf_counter() - start

    async def peak(self) -> Peak:
        """The receiver's, since the last call."""
        self._pipe.send(True)
        return await asyncio.to_thread(self._pipe.recv)

    async def closed(self, together: int, seconds: float, share: Callable[[int], str] = lambda _: "") -> Counter[str]:
        """Streams per class in that time, so many at a time."""
        done: Counter[str] = Counter()
        stop = time.perf_counter() + seconds

        async def one(number: int) -> None:
            while time.perf_counter() < stop:
                await self.prompt(share_class=share(number))
                if time.perf_counter() < stop:
                    done[share(number)] += 1

        await asyncio.gather(*(one(number) for number in range(together)))
        return done


@asynccontextmanager
async def _pair(url: str, shape: Shape, **settings: Any) -> AsyncIterator[_Sender]:
    """A receiver in a process of its own, and a sender in this one, both with these settings."""
    config = RuntimeConfig(max_receiving=RECEIVING, max_pending_offers=WAITING, **settings)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    arguments = (theirs, url, msgspec.json.encode(config), shape.pool_blocks)
    process = context.Process(target=_child, args=arguments, daemon=True)
    process.start()
    try:
        async with asyncio.timeout(START_TIMEOUT):
            await asyncio.to_thread(ours.recv)
        pool = KVPool.allocate(LAYOUT, blocks=max(LAYOUT.blocks_for(shape.long_tokens), shape.prompt_blocks))
        for layer in range(LAYOUT.layers):
            pool.layer(layer)[...] = 1
        async with Runtime("sender", pool=pool, nats=url, config=config) as runtime:
            sender = _Sender(runtime, ours, shape)
            # Pages are touched, the connection is there, the processor is awake.
            await asyncio.gather(*(sender.prompt() for _ in range(RECEIVING)))
            yield sender
    finally:
        process.kill()
        process.join()
        ours.close()


async def _open(sender: _Sender, rate: float, alone: float) -> dict[str, Any]:
    """Prompts at so many per second."""
    shape, rng = sender.shape, random.Random(1)
    await sender.peak()
    _reset_peak()
    times: list[float] = []
    outcomes: Counter[str] = Counter()
    advised: list[float] = []
    within = 0
    start = time.perf_counter()
    stop = start + shape.seconds

    async def one(due: float) -> None:
        nonlocal within
        try:
            await sender.prompt(deadline=30.0)
        except Refused as error:
            outcomes["refused" if error.retry_after is not None else "refused without advice"] += 1
            advised.append(error.retry_after or 0.0)
        except KVStreamError as error:
            outcomes[error.code] += 1
        else:
            now = time.perf_counter()
            outcomes["done"] += 1
            times.append(now - due)
            within += now <= stop

    async with asyncio.TaskGroup() as group:
        due = start
        while (due := due + rng.expovariate(rate)) < stop:
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            group.create_task(one(due))
        arrived = time.perf_counter()
        recovery = await _recovery(sender, arrived, 2 * alone + 0.010)
    times.sort()
    peak = await sender.peak()
    return {
        "arrivals": outcomes.total(),
        "outcomes": dict(sorted(outcomes.items())),
        "goodput": round(within / shape.seconds, 1),
        "p50_ms": round(statistics.median(times) * 1e3, 2),
        "p99_ms": round(times[int(len(times) * 0.99)] * 1e3, 2),
        "advised_ms": round(statistics.median(advised) * 1e3, 1) if advised else None,
        "receiver_peak_mib": round(peak.resident / MIB, 1),
        "sender_peak_mib": round(_peak() / MIB, 1),
        "most_offers": peak.offers,
        "recovery_ms": round(recovery * 1e3, 1),
    }


async def _recovery(sender: _Sender, since: float, limit: float) -> float:
    """Until a prompt takes no longer than `limit` again: from `since` to its beginning, in seconds."""
    while True:
        begun = time.perf_counter()
        try:
            if await sender.timed() <= limit:
                return max(0.0, begun - since)
        except Refused:
            await asyncio.sleep(0.005)


async def _load(url: str, shape: Shape) -> dict[str, Any]:
    async with _pair(url, shape) as sender:
        alone = statistics.median([await sender.timed() for _ in range(shape.short_rounds)])
        capacity = (await sender.closed(RECEIVING, shape.seconds)).total() / shape.seconds
        rows: list[dict[str, Any]] = []
        for factor in FACTORS:
            row = await _open(sender, capacity * factor, alone)
            rows.append({"load": factor, "of_capacity": round(row["goodput"] / capacity, 3), **row})
        beside = await _beside(sender)
    return {
        "prompt_bytes": shape.prompt_bytes,
        "alone_ms": round(alone * 1e3, 2),
        "capacity_per_s": round(capacity, 1),
        "capacity_gbps": round(capacity * shape.prompt_bytes / 1e9, 2),
        "rows": rows,
        "beside": beside,
    }


async def _beside(sender: _Sender) -> dict[str, Any]:
    """A short prompt alone, and while a long one is under way."""
    shape = sender.shape
    long = LAYOUT.blocks_for(shape.long_tokens)
    await sender.prompt(long)
    alone = [await sender.timed(SHORT_BLOCKS) for _ in range(5 * shape.short_rounds)]
    beside: list[float] = []
    while len(beside) < shape.short_rounds:
        task = asyncio.create_task(sender.prompt(long))
        # The first meets the long one while that is still being offered; it does not count.
        await sender.prompt(SHORT_BLOCKS)
        while not task.done() and len(beside) < shape.short_rounds:
            seconds = await sender.timed(SHORT_BLOCKS)
            if not task.done():
                beside.append(seconds)
        await task
    limit = 2 * statistics.median(alone) + 0.010
    return {
        "long_tokens": shape.long_tokens,
        "short_tokens": SHORT_BLOCKS * LAYOUT.block_tokens,
        "alone_ms": round(statistics.median(alone) * 1e3, 2),
        "beside_ms": round(statistics.median(beside) * 1e3, 2),
        "beside_max_ms": round(max(beside) * 1e3, 2),
        "limit_ms": round(limit * 1e3, 2),
        "within": max(beside) <= limit,
    }


async def _deadlines(url: str, shape: Shape, each: float, *, fifo: bool) -> dict[str, Any]:
    """Streams that all begin together, each with a deadline that it can meet if its turn comes in time."""
    count = shape.deadline_streams
    # Patience of next to nothing: everybody is due at once, so that age decides.
    settings: dict[str, Any] = {"patience": 1e-6} if fifo else {"patience": 1e6}
    turns = list(range(count))
    random.Random(2).shuffle(turns)
    missed = 0
    async with _pair(url, shape, **settings) as sender:

        async def one(turn: int) -> None:
            nonlocal missed
            try:
                await sender.prompt(deadline=(turn + 1) * each * 1.5 + 0.02)
            except KVStreamError:
                missed += 1

        await asyncio.gather(*(one(turn) for turn in turns))
    return {"order": "arrival" if fifo else "deadline", "streams": count, "missed": missed}


async def _shares(url: str, shape: Shape, weights: dict[str, float]) -> dict[str, Any]:
    """Two classes with as many streams each, all of them always busy."""
    names = tuple(WEIGHTS)
    async with _pair(url, shape, share_weights=weights) as sender:
        done = await sender.closed(RECEIVING, shape.seconds / 2, lambda number: names[number % len(names)])
    return {
        "weights": weights,
        "streams": {name: done[name] for name in names},
        "ratio": round(done[names[0]] / max(1, done[names[1]]), 2),
    }


async def _with_server(work: Callable[[str], Awaitable[dict[str, Any]]]) -> dict[str, Any]:
    async with EmbeddedServer() as server:
        return await work(server.url)


def run(options: Options) -> dict[str, Any]:
    """All of it; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    load = machine.ForeignLoad()
    small = Shape(0.5, 64, 8000, 5, 12)
    shape = options.pick(Shape(), small, small)
    result = uvloop.run(_with_server(lambda url: _load(url, shape)))
    each = 1 / result["capacity_per_s"]
    return {
        **result,
        "deadlines": [
            uvloop.run(_with_server(lambda url, fifo=fifo: _deadlines(url, shape, each, fifo=fifo)))
            for fifo in (True, False)
        ],
        "shares": [
            uvloop.run(_with_server(lambda url, weights=weights: _shares(url, shape, weights)))
            for weights in ({}, WEIGHTS)
        ],
        "loaded": load.seen(),
        "machine": machine.describe(),
    }


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"prompts of {result['prompt_bytes'] / MIB:.0f} MiB; alone {result['alone_ms']} ms; capacity"
        f" {result['capacity_per_s']} per second ({result['capacity_gbps']} GB/s)",
        "",
        f"{'load':>5} {'arrived':>8} {'per s':>7} {'of cap.':>8} {'p50 ms':>8} {'p99 ms':>8} {'refused':>8}"
        f" {'advised':>8} {'offers':>7} {'peak MiB':>9} {'recovery ms':>12}",
    ]
    for row in result["rows"]:
        others = {code: count for code, count in row["outcomes"].items() if code not in ("done", "refused")}
        lines.append(
            f"{row['load']:5} {row['arrivals']:8} {row['goodput']:7.1f} {row['of_capacity']:8.3f} {row['p50_ms']:8.2f}"
            f" {row['p99_ms']:8.2f} {row['outcomes'].get('refused', 0):8} {row['advised_ms'] or '-':>8}"
            f" {row['most_offers']:7} {row['receiver_peak_mib']:9.1f} {row['recovery_ms']:12.1f}"
            + (f"  {others}" if others else "")
        )
    beside = result["beside"]
    lines += [
        "",
        f"{beside['short_tokens']} tokens: alone {beside['alone_ms']} ms, beside {beside['long_tokens']} tokens"
        f" {beside['beside_ms']} ms (at most {beside['beside_max_ms']}; limit {beside['limit_ms']})",
    ]
    lines += [
        f"{row['missed']} of {row['streams']} streams miss their deadline in the order of {row['order']}"
        for row in result["deadlines"]
    ]
    lines += [
        f"weights {row['weights'] or 'equal'}: " + ", ".join(f"{name} {n}" for name, n in row["streams"].items())
        for row in result["shares"]
    ]
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the figures as lower bounds.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Goodput and completion by load."""
    rows = result["rows"]
    groups = tuple(f"{row['load']:g} × capacity" for row in rows)
    return Figure(
        title="Prompts that arrive whether or not there is room",
        subtitle=machine.summary(result),
        panels=(
            Panel(
                title="Streams per second",
                groups=groups,
                series=(
                    ("done", tuple(row["goodput"] for row in rows)),
                    ("capacity", tuple(result["capacity_per_s"] for _ in rows)),
                ),
                colors=(0, 3),
            ),
            Panel(
                title="ms from when a prompt was due to its end",
                groups=groups,
                series=(
                    ("median", tuple(row["p50_ms"] for row in rows)),
                    ("p99", tuple(row["p99_ms"] for row in rows)),
                ),
                colors=(0, 5),
                log=True,
            ),
        ),
    )
