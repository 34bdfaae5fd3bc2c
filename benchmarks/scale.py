"""What the scheduler costs per event when many streams are active, and what the registry costs when many workers are.

Scheduler: two cores of the product face each other without a network or memory. Each stream has a layer ready, and what
follows from it goes to and fro: gathers, announcements, reads, confirmations. Counted are the calls of either core, by
which events come in; each takes its commands out too. All streams stay active, in as many as 8 classes with deadlines
of their own.

Registry: a registry of the product follows a lease table in memory that holds so many workers. Measured are the time
until it knows them all, until it knows of a change, and what a look-up, the list of all and a choice by the default
routing policy take.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from benchmarks import machine
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel
from kvstream import Candidate, LeastLoaded, RouteRequest, RuntimeConfig
from kvstream.discovery import DataAddress, Load, MemoryBrokerServer, Registry, WorkerRecord
from kvstream.discovery.records import encode_record, lease_key
from kvstream.runtime.routing import Candidates
from kvstream.scheduler.commands import Dial, Drop, Ended, Move, Stage, Transmit
from kvstream.scheduler.core import Scheduler

STREAMS = (10, 1000, 10_000)
WORKERS = (10, 100, 1000)
LAYERS = 64
"""At least; as many as no stream comes to its end with."""
BLOCK_TOKENS, SLOTS, PEERS, CLASSES = 16, 8, 8, 8
CYCLES = 20_000
"""Chunks that go from end to end in a round."""
ROUNDS = 3
CHANGES = 200
TTL = 600.0


class _Cores:
    """A source's core and a destination's, the frames between them delivered at once."""

    def __init__(self, streams: int, chunks: int) -> None:
        config = RuntimeConfig(
            max_streams=streams,
            max_receiving=streams,
            deadline=1e6,
            idle_timeout=1e6,
            stall_timeout=1e6,
            beat_interval=1e5,
            reservation_timeout=1e6,
        )
        layers = max(LAYERS, chunks // streams + 2)
        self._source = Scheduler(config, layers=layers, block_tokens=BLOCK_TOKENS)
        self._destination = Scheduler(config, layers=layers, block_tokens=BLOCK_TOKENS)
        self.events = 0
        self.chunks = 0
        rng = random.Random(1)
        for link in range(1, PEERS + 1):
            self._source.link_up(0.0, link, f"d{link}", outgoing=True, slots=SLOTS, slot_blocks=1)
            self._destination.link_up(0.0, link, f"s{link}", outgoing=False, slots=SLOTS, slot_blocks=1)
        self._keys: list[int] = []
        for number in range(streams):
            deadline = rng.uniform(1e4, 1e5)
            self._destination.receive(0.0, f"s{number}", tokens=BLOCK_TOKENS, deadline=1e6)
            self._keys.append(
                self._source.send(
                    0.0,
                    f"s{number}",
                    tokens=BLOCK_TOKENS,
                    held=1,
                    candidates=[f"d{number % PEERS + 1}"],
                    deadline=deadline,
                    share=f"class-{number % CLASSES}",
                )
            )
        self._settle()
        self._next = [0] * streams
        self._turn = 0

    def cycle(self, count: int) -> float:
        """Have so many chunks go across, a layer of one stream after the other; seconds."""
        stop = self.chunks + count
        start = time.perf_counter()
        while self.chunks < stop:
            # Never all at once: an engine has its layers one by one.
            for _ in range(min(len(self._keys), PEERS * SLOTS, stop - self.chunks)):
                stream = self._turn % len(self._keys)
                self._source.layer_ready(0.0, self._keys[stream], self._next[stream], 0, BLOCK_TOKENS)
                self._next[stream] += 1
                self.events += 1
                self._turn += 1
            self._settle()
        return time.perf_counter() - start

    def _settle(self) -> None:
        """Perform commands until there are none."""
        source, destination = self._source, self._destination
        while True:
            given = source.take()
            for command in given:
                if isinstance(command, Transmit):
                    self.events += 1
                    destination.frame(0.0, command.link, command.frame)
                elif isinstance(command, Stage):
                    self.events += 2
                    source.staging(command)
                    source.staged(0.0, command, 1)
                elif isinstance(command, Dial | Drop | Ended):
                    raise RuntimeError(f"unexpected: {command}")
            taken = destination.take()
            for command in taken:
                if isinstance(command, Transmit):
                    self.events += 1
                    source.frame(0.0, command.link, command.frame)
                elif isinstance(command, Move):
                    self.events += 2
                    self.chunks += 1
                    destination.moving(command)
                    destination.moved(0.0, command)
                elif isinstance(command, Drop | Ended):
                    raise RuntimeError(f"unexpected: {command}")
            if not given and not taken:
                return


def _scheduler(streams: int, cycles: int, rounds: int) -> dict[str, Any]:
    warm_up = max(cycles // 10, streams)
    start = time.perf_counter()
    cores = _Cores(streams, warm_up + rounds * cycles)
    opened = time.perf_counter() - start
    cores.cycle(warm_up)
    costs: list[float] = []
    per_chunk: list[float] = []
    for _ in range(rounds):
        events, chunks = cores.events, cores.chunks
        seconds = cores.cycle(cycles)
        costs.append(seconds / (cores.events - events) * 1e6)
        per_chunk.append(seconds / (cores.chunks - chunks) * 1e6)
    return {
        "streams": streams,
        "open_us": round(opened / streams * 1e6, 1),
        "event_us": round(statistics.median(costs), 2),
        "chunk_us": round(statistics.median(per_chunk), 1),
    }


# ---------------------------------------------------------------------- registry


def _record(number: int, streams: int = 0) -> WorkerRecord:
    return WorkerRecord(
        name=f"w{number}",
        incarnation=f"{number:032x}",
        key="00" * 32,
        roles=("decode",),
        address=DataAddress(transport="ucx", host="127.0.0.1", port=1, host_id="h"),
        fingerprint="f",
        pid=1,
        host="h",
        load=Load(streams, 1000, 1000),
        started=0.0,
    )


def _us(call: Callable[[], object], rounds: int) -> float:
    call()
    start = time.perf_counter()
    for _ in range(rounds):
        call()
    return round((time.perf_counter() - start) / rounds * 1e6, 1)


async def _registry(workers: int, changes: int) -> dict[str, Any]:
    hub = MemoryBrokerServer()
    revisions: list[int] = []
    async with hub.connect() as publisher, hub.connect() as broker:
        for number in range(workers):
            record = _record(number)
            revisions.append(await publisher.put(lease_key(record.name, 0), encode_record(record), ttl=TTL, revision=0))
        start = time.perf_counter()
        async with Registry(broker, rng=random.Random(1), ttl=TTL) as registry, registry.watch() as watch:
            known = 0
            while known < workers:
                await anext(watch)
                known += 1
            joined = time.perf_counter() - start
            times: list[float] = []
            for change in range(changes):
                number = change % workers
                record = _record(number, change + 1)
                data = encode_record(record)
                start = time.perf_counter()
                revisions[number] = await publisher.put(
                    lease_key(record.name, 0), data, ttl=TTL, revision=revisions[number]
                )
                await anext(watch)
                times.append(time.perf_counter() - start)
            me = msgspec.structs.replace(_record(workers), name="me", roles=("prefill",))
            request = RouteRequest(stream="s", tokens=16, blocks=1, share_class="", priority=0, me=me)
            policy, chance = LeastLoaded(), random.Random(2).random
            rounds = max(20, 20_000 // workers)

            def choose() -> object:
                candidates = Candidates(registry.records(), lambda record: Candidate(record=record))
                return policy.route(request, candidates, chance)

            return {
                "workers": workers,
                "join_us": round(joined / workers * 1e6, 1),
                "change_us": round(statistics.median(times) * 1e6, 1),
                "lookup_us": _us(lambda: registry.lookup("w1/0"), 2000),
                "list_us": _us(registry.workers, rounds),
                "route_us": _us(choose, rounds),
            }


def run(options: Options) -> dict[str, Any]:
    """Both tables; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad()
    cycles, rounds, changes = options.pick((CYCLES, ROUNDS, CHANGES), (2000, 1, 20), (2000, 1, 20))
    scheduler = [_scheduler(streams, cycles, rounds) for streams in STREAMS]
    least = scheduler[0]["event_us"]
    for row in scheduler:
        row["ratio"] = round(row["event_us"] / least, 2)
    registry = [asyncio.run(_registry(workers, changes)) for workers in WORKERS]
    return {"loaded": load.seen(), "machine": machine.describe(), "scheduler": scheduler, "registry": registry}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [f"{'streams':>8} {'us/event':>9} {'ratio':>6} {'us/chunk':>9} {'us to open':>11}"]
    lines += [
        f"{row['streams']:8} {row['event_us']:9.2f} {row['ratio']:6.2f} {row['chunk_us']:9.1f} {row['open_us']:11.1f}"
        for row in result["scheduler"]
    ]
    lines += [
        "chunk: all events of its way from layer_ready to the confirmation, on both sides",
        "",
        f"{'workers':>8} {'us/join':>9} {'us/change':>10} {'us/look-up':>11} {'us/list':>9} {'us/route':>9}",
    ]
    lines += [
        f"{row['workers']:8} {row['join_us']:9.1f} {row['change_us']:10.1f} {row['lookup_us']:11.1f}"
        f" {row['list_us']:9.1f} {row['route_us']:9.1f}"
        for row in result["registry"]
    ]
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the times as upper bounds.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Cost by number."""
    scheduler, registry = result["scheduler"], result["registry"]
    return Figure(
        title="What many cost",
        subtitle=machine.summary(result),
        panels=(
            Panel(
                title="Scheduler: µs per event, by active streams",
                groups=tuple(f"{row['streams']:,}" for row in scheduler),
                series=(("event", tuple(row["event_us"] for row in scheduler)),),
            ),
            Panel(
                title="Registry: µs, by workers",
                groups=tuple(f"{row['workers']:,}" for row in registry),
                series=(
                    ("a change is known", tuple(row["change_us"] for row in registry)),
                    ("look-up", tuple(row["lookup_us"] for row in registry)),
                    ("routing, all considered", tuple(row["route_us"] for row in registry)),
                ),
                colors=(0, 5, 3),
                log=True,
            ),
        ),
    )
