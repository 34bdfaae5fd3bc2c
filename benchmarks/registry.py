"""What a large registry costs: how soon a newcomer is seen, a snapshot, processor time of watchers and of the server.

A real nats-server, and a fleet of simulated workers in a process of its own: each puts its record by the product's
broker and renews it three times a lease of the default length, over a few connections that they share. First all of
them join at once; then, while they renew, others join one at a time. Seen is when the registry of a watcher, in a
second process, tells of it. Every renewal is republished to every watcher, so what a watcher takes grows with the
workers, and what the server takes with workers times watchers: measured with one watcher and with many.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from benchmarks import machine
from benchmarks.contenders import Pair, cpu_seconds
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel
from kvstream import RuntimeConfig
from kvstream.discovery import (
    Broker,
    Conflict,
    DataAddress,
    EmbeddedServer,
    Joined,
    Load,
    NatsBroker,
    Registry,
    Synced,
    WorkerRecord,
    resolve_target,
)
from kvstream.discovery.records import encode_record, lease_key
from kvstream.errors import BrokerUnavailable

WORKERS = 1000
WATCHERS = (1, 20)
CONNECTIONS = 8
"""Of the fleet."""
STEADY = 6.0
"""Seconds."""
NEWCOMERS = 200
"""That join in that time."""
SNAPSHOTS = 5
TTL = RuntimeConfig().lease_ttl
TIMEOUT = 120.0


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    """Times in ms, processor time in cores. `lost`: leases that the fleet did not renew in time."""

    workers: int
    watchers: int
    burst_p50_ms: float
    burst_p99_ms: float
    seen_p50_ms: float
    seen_p99_ms: float
    snapshot_ms: float
    watcher_cores: float
    server_cores: float
    fleet_cores: float
    lost: int


# ---------------------------------------------------------------------- the fleet


class _Sent(msgspec.Struct, frozen=True):
    """When each worker's record was put (time.monotonic), and the fleet's processor time so far and lost leases."""

    times: dict[str, float]
    cpu: float
    lost: int


class _Fleet:
    def __init__(self, brokers: list[Broker]) -> None:
        self._brokers = brokers
        self._tasks: list[asyncio.Task[None]] = []
        self._rng = random.Random(1)
        self._lost = 0

    async def join(self, count: int) -> _Sent:
        """All at once; they stay, and renew."""
        sent: dict[str, float] = {}
        await asyncio.gather(*(self._register(f"worker-{number}", number, sent) for number in range(count)))
        return self._sent(sent)

    async def newcomers(self, count: int, seconds: float) -> _Sent:
        """One after the other."""
        sent: dict[str, float] = {}
        loop = asyncio.get_running_loop()
        start = loop.time()
        for number in range(count):
            await asyncio.sleep(start + seconds * number / count - loop.time())
            await self._register(f"newcomer-{number}", number, sent)
        return self._sent(sent)

    def _sent(self, times: dict[str, float]) -> _Sent:
        return _Sent(times, cpu_seconds(), self._lost)

    async def _register(self, name: str, number: int, sent: dict[str, float]) -> None:
        record = encode_record(_record(name, number))
        sent[name] = time.monotonic()
        broker = self._brokers[number % len(self._brokers)]
        revision = await broker.put(lease_key(name, 0), record, ttl=TTL, revision=0)
        self._tasks.append(asyncio.get_running_loop().create_task(self._renew(broker, name, record, revision)))

    async def _renew(self, broker: Broker, name: str, record: bytes, revision: int) -> None:
        pause = self._rng.uniform(0.0, TTL / 3)
        while True:
            await asyncio.sleep(pause)
            pause = TTL / 3
            try:
                revision = await broker.put(lease_key(name, 0), record, ttl=TTL, revision=revision)
            except (Conflict, BrokerUnavailable) as error:
                self._lost += 1
                revision = error.revision if isinstance(error, Conflict) else 0

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)


def _record(name: str, number: int) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        incarnation=f"{number:032x}",
        key="00" * 32,
        roles=("decode",),
        address=DataAddress(transport="ucx", host="127.0.0.1", port=1, host_id="h"),
        fingerprint="f" * 32,
        pid=1,
        host="host",
        load=Load(0, 1000, 1000),
        started=0.0,
    )


def _fleet_process(*arguments: Any) -> None:
    uvloop.run(_run_fleet(*arguments))


async def _run_fleet(pipe: Connection, *_: int) -> None:
    url = await asyncio.to_thread(pipe.recv)
    async with AsyncExitStack() as stack:
        fleet = _Fleet([await stack.enter_async_context(await _connect(url, number)) for number in range(CONNECTIONS)])
        while command := await asyncio.to_thread(pipe.recv):
            match command:
                case ("join", count):
                    pipe.send(msgspec.to_builtins(await fleet.join(count)))
                case ("newcomers", count, seconds):
                    pipe.send(msgspec.to_builtins(await fleet.newcomers(count, seconds)))
                case _:
                    pipe.send(statistics.median([await _snapshot(url) for _ in range(SNAPSHOTS)]))
        await fleet.close()


async def _connect(url: str, number: int) -> NatsBroker:
    # Patient: twenty registries in a process keep its loop busy.
    return await NatsBroker.connect(
        await resolve_target(url), rng=random.Random(number), connect_timeout=20.0, timeout=20.0
    )


async def _snapshot(url: str) -> float:
    """Seconds from the begin of a watch, on a connection that stands, to its Synced."""
    async with await _connect(url, 0) as broker:
        start = time.monotonic()
        async with broker.watch() as events:
            while not isinstance(await anext(events), Synced):
                pass
        return time.monotonic() - start


# ---------------------------------------------------------------------- the watchers


class _Watcher:
    """A registry that follows, and when it has seen whom (time.monotonic)."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._more = asyncio.Event()
        self.seen: dict[str, float] = {}

    async def follow(self) -> None:
        async with self._registry.watch() as changes:
            async for change in changes:
                if isinstance(change, Joined):
                    self.seen.setdefault(change.record.name, time.monotonic())
                    self._more.set()

    async def until(self, count: int) -> None:
        while len(self.seen) < count:
            self._more.clear()
            await self._more.wait()


def _watchers_process(*arguments: Any) -> None:
    uvloop.run(_run_watchers(*arguments))


async def _run_watchers(
    pipe: Connection, workers: int, watchers: int, newcomers: int, steady: float, results: Connection
) -> None:
    async with EmbeddedServer() as server, AsyncExitStack() as stack, asyncio.timeout(TIMEOUT):
        pipe.send(server.url)
        following = [await _follow(stack, server.url, number) for number in range(watchers)]
        joined = await _ask(pipe, "join", workers)
        for watcher in following:
            await watcher.until(workers)
        # What the burst leaves behind is no part of what follows.
        await asyncio.sleep(TTL / 3)
        assert server.pid is not None
        start, own, its = time.monotonic(), cpu_seconds(), _cpu_of(server.pid)
        later = await _ask(pipe, "newcomers", newcomers, steady)
        for watcher in following:
            await watcher.until(workers + newcomers)
        took = time.monotonic() - start
        own, its = cpu_seconds() - own, _cpu_of(server.pid) - its
        pipe.send(("snapshot",))
        snapshot = await asyncio.to_thread(pipe.recv)
        pipe.send(None)
        burst, seen = (
            [watcher.seen[name] - put for watcher in following for name, put in sent.times.items()]
            for sent in (joined, later)
        )
        row = _Row(
            workers=workers,
            watchers=watchers,
            burst_p50_ms=_percentile(burst, 50),
            burst_p99_ms=_percentile(burst, 99),
            seen_p50_ms=_percentile(seen, 50),
            seen_p99_ms=_percentile(seen, 99),
            snapshot_ms=round(1e3 * snapshot, 1),
            watcher_cores=round(own / took / watchers, 3),
            server_cores=round(its / took, 3),
            fleet_cores=round((later.cpu - joined.cpu) / took, 3),
            lost=later.lost,
        )
        results.send(msgspec.to_builtins(row))


async def _follow(stack: AsyncExitStack, url: str, number: int) -> _Watcher:
    broker = await stack.enter_async_context(await _connect(url, number))
    registry = Registry(broker, rng=random.Random(number), ttl=TTL)
    await registry.start(timeout=20.0)
    stack.push_async_callback(registry.aclose)
    watcher = _Watcher(registry)
    task = asyncio.create_task(watcher.follow())
    stack.push_async_callback(_end, task)
    return watcher


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


async def _ask(pipe: Connection, *command: object) -> _Sent:
    pipe.send(command)
    return msgspec.convert(await asyncio.to_thread(pipe.recv), _Sent)


def _cpu_of(pid: int) -> float:
    """User and system time of a process so far, seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _percentile(times: list[float], percent: int) -> float:
    """In ms, of times in seconds."""
    ordered = sorted(times)
    return round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)], 2)


# ---------------------------------------------------------------------- all of it


def run(options: Options) -> dict[str, Any]:
    """A row for each number of watchers; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    workers, newcomers, steady = options.pick((WORKERS, NEWCOMERS, STEADY), (200, 40, 2.0), (30, 10, 0.5))
    rows: list[dict[str, Any]] = []
    for watchers in options.pick(WATCHERS, (1, 4), (1, 2)):
        with Pair(_watchers_process, _fleet_process, workers, watchers, newcomers, steady) as pair:
            rows.append(pair.result(TIMEOUT))
    return {"loaded": load.seen(), "machine": machine.describe(), "ttl": TTL, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'':16} {'joining':>16} {'all at once':>16} {'snapshot':>9} {'cores of':>9}",
        f"{'workers watchers':>16} {'p50 ms':>8} {'p99':>7} {'p50 ms':>8} {'p99':>7} {'ms':>9} {'a watcher':>9}"
        f" {'server':>7} {'fleet':>6} {'lost':>5}",
    ]
    lines += [
        f"{row['workers']:7} {row['watchers']:8} {row['seen_p50_ms']:8.2f} {row['seen_p99_ms']:7.2f}"
        f" {row['burst_p50_ms']:8.1f} {row['burst_p99_ms']:7.1f} {row['snapshot_ms']:9.1f} {row['watcher_cores']:9.3f}"
        f" {row['server_cores']:7.3f} {row['fleet_cores']:6.3f} {row['lost']:5}"
        for row in result["rows"]
    ]
    lines.append(
        f"leases of {result['ttl']:g} s, renewed three times: {3 / result['ttl']:g} messages a second per worker, each"
        " of them to every watcher"
    )
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the times as upper bounds.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Times and processors by the number of watchers."""
    rows = result["rows"]
    groups = tuple(f"{row['watchers']} watching {row['workers']:,}" for row in rows)
    return Figure(
        title="What a large registry costs",
        subtitle=machine.summary(result),
        panels=(
            Panel(
                title="ms until all watchers have seen a newcomer, and until one that starts has read all",
                groups=groups,
                series=(
                    ("newcomer, p50", tuple(row["seen_p50_ms"] for row in rows)),
                    ("newcomer, p99", tuple(row["seen_p99_ms"] for row in rows)),
                    ("snapshot", tuple(row["snapshot_ms"] for row in rows)),
                ),
                colors=(0, 5, 3),
                log=True,
            ),
            Panel(
                title="Cores",
                groups=groups,
                series=(
                    ("each watcher", tuple(row["watcher_cores"] for row in rows)),
                    ("nats-server", tuple(row["server_cores"] for row in rows)),
                ),
                colors=(0, 3),
            ),
        ),
    )
