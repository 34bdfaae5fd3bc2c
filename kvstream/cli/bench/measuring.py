"""The measuring end of `kvstream bench`: from this process to a worker that serves measurements, over real streams.

Nothing here is measured by other means than an engine has: runtimes, streams, offers. It holds one slab of memory for
all block sizes and ends what it opened, however it ends.
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstream.cli.bench.protocol import (
    CONCURRENT,
    CONTROL_LAYOUT,
    PONG,
    ROLE,
    Close,
    Open,
    Part,
    Ping,
    Probe,
    Request,
    Shape,
    Verify,
    allocate,
    digest,
    encode,
)
from kvstream.cli.bench.report import (
    Link,
    Report,
    Row,
    Times,
    judge_host,
    judge_network,
    link_lines,
    row_header,
    row_line,
)
from kvstream.config import RuntimeConfig
from kvstream.discovery import WorkerRecord
from kvstream.discovery.broker import Broker
from kvstream.errors import ConfigError, KVStreamError, PeerLost, Refused, UnknownWorker
from kvstream.memory import KVPool
from kvstream.runtime.reports import StreamReport
from kvstream.runtime.runtime import Runtime
from kvstream.transport.base import LANES, Connection, Lane, ListenAddress, StagingBudget
from kvstream.transport.ucx import UcxTransport

__all__ = ["Plan", "measure"]

_FRESH = 5
"""Fresh connections that are timed."""
_WARM_PINGS = 20
_ROW_SECONDS = 10.0
"""After that a row gets no further round."""
_FIND_SECONDS, _OPEN_SECONDS = 2.0, 10.0
"""How long a worker may take to show up in the registry: one that should be there, and one that was just opened."""
_TABLE_SEED, _CONTENT_SEED = 0, 2
_CONTENT_STEP = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What to measure. `shapes`: a pool for each block size; `rounds` of each row, without the first, which warms up;
    `pings`: messages that are timed.
    `lane`: the only one allowed, None for the usual choice."""

    to: str
    shapes: Sequence[Shape]
    rounds: int
    pings: int = 500
    lane: Lane | None = None
    data_interface: str | None = None


class _Transport(UcxTransport):
    """Remembers the connection that it has dialed, to ask it what carries it."""

    dialed: Connection | None = None

    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        self.dialed = connection = await super().dial(address, lanes)
        return connection


async def measure(plan: Plan, broker: Broker, tell: Callable[[str], None]) -> Report:
    """Measure everything; `tell` gets each line of text as soon as it is known.

    Raises UnknownWorker, ConfigError (not a worker that serves measurements), Refused (it is busy, serves less memory,
    or found bytes that differ), PeerLost where it leaves in the middle, and whatever ends a stream.
    """
    measurement = _Measurement(plan, broker)
    firsts = [await measurement.first_byte() for _ in range(_FRESH - 1)]
    async with measurement.control() as (runtime, transport):
        firsts.append(await measurement.probe(runtime))
        # Whether that much is served is asked before it is taken here.
        largest = max(plan.shapes, key=lambda shape: shape.nbytes)
        await measurement.ask(runtime, Open(secrets.token_hex(4), largest))
        trips = await measurement.round_trips(runtime)
        link = measurement.link(transport, firsts, trips)
        tell(f"{link_lines(link)}\n\n{row_header(CONCURRENT)}")
        rows: list[Row] = []
        slab = await asyncio.to_thread(_contents, largest.nbytes)
        try:
            for shape in plan.shapes:
                rows.append(await measurement.row(runtime, shape, shape.pool(slab)))
                tell(row_line(rows[-1]))
            await measurement.ask(runtime, Close())
        except UnknownWorker as error:
            raise PeerLost(f"{link.to} has left in the middle of the measurement: {error}") from error
    checks = judge_host(link, plan.lane) + await judge_network(link, plan.lane)
    return Report(link=link, concurrent=CONCURRENT, verified=True, rows=rows, checks=checks)


class _Measurement:
    """One run against one worker."""

    def __init__(self, plan: Plan, broker: Broker) -> None:
        self._plan = plan
        self._broker = broker
        self._token = secrets.token_hex(4)
        self._runtimes = 0
        self._streams = 0
        self._record: WorkerRecord | None = None
        self._report: StreamReport | None = None
        self._same_host = False

    @asynccontextmanager
    async def worker(self, pool: KVPool) -> AsyncGenerator[tuple[Runtime, _Transport]]:
        """A worker of our own, without a role: nobody sends to it. Each is new to the other end."""
        plan = self._plan
        lanes: tuple[Lane, ...] = LANES if plan.lane is None else (plan.lane,)
        budget = StagingBudget(RuntimeConfig().staging_limit)
        transport = _Transport(interface=plan.data_interface, budget=budget, lanes=lanes)
        self._runtimes += 1
        name = f"bench-{self._token}-{self._runtimes}"
        async with AsyncExitStack() as stack:
            stack.push_async_callback(transport.aclose)
            runtime = Runtime(name, pool=pool, lanes=lanes, broker=self._broker, transport=transport)
            yield await stack.enter_async_context(runtime), transport

    @asynccontextmanager
    async def control(self) -> AsyncGenerator[tuple[Runtime, _Transport]]:
        """A worker for requests, once the other end is known to be there and to serve."""
        async with self.worker(KVPool.allocate(CONTROL_LAYOUT, blocks=1)) as (runtime, transport):
            record = await runtime.registry.wait_for(self._plan.to, _FIND_SECONDS)
            if ROLE not in record.roles:
                raise ConfigError(
                    "--to",
                    f"{record.id} ({', '.join(record.roles) or 'no roles'}) does not serve measurements; start"
                    " `kvstream bench --serve NAME` on its host, and measure to NAME",
                )
            self._record = record
            self._same_host = record.address.host_id == runtime.record.address.host_id
            yield runtime, transport

    # -- requests

    async def ask(self, runtime: Runtime, request: Request) -> StreamReport:
        """A request that the other end has to take. Raises Refused with its reason."""
        return await self._send(runtime, self._plan.to, [0], CONTROL_LAYOUT.block_tokens, request)

    async def _send(self, runtime: Runtime, to: str, blocks: Any, tokens: int, request: Request) -> StreamReport:
        """A stream of blocks that are all ready, to its end."""
        self._streams += 1
        name = f"{runtime.name}-{self._streams}"
        async with runtime.send(name, blocks=blocks, tokens=tokens, to=to, metadata=encode(request)) as tx:
            for layer in range(runtime.pool.layout.layers):
                tx.layer_ready(layer)
            return await tx.done()

    # -- the link

    async def first_byte(self) -> float:
        """Seconds over a connection that is made for it."""
        async with self.control() as (runtime, _):
            return await self.probe(runtime)

    async def probe(self, runtime: Runtime) -> float:
        start = time.perf_counter()
        self._report = await self.ask(runtime, Probe())
        return time.perf_counter() - start

    async def round_trips(self, runtime: Runtime) -> list[float]:
        """Seconds of an offer and its refusal, each: two messages and nothing else."""
        times: list[float] = []
        for _ in range(_WARM_PINGS + self._plan.pings):
            start = time.perf_counter()
            try:
                await self.ask(runtime, Ping())
            except Refused as error:
                if PONG not in str(error):
                    raise
            else:
                raise KVStreamError(f"{self._plan.to} took what it has to refuse; is it of another version?")
            times.append(time.perf_counter() - start)
        return times[_WARM_PINGS:]

    def link(self, transport: _Transport, firsts: Sequence[float], trips: Sequence[float]) -> Link:
        assert self._record is not None
        assert self._report is not None
        connection = transport.dialed
        return Link(
            to=self._record.id,
            host=self._record.host,
            same_host=self._same_host,
            lane=self._report.lane,
            direct_reads=connection is not None and connection.lends,
            transports=connection.describe() if connection is not None else "",
            first_byte_ms=_times(firsts, 1e3),
            round_trip_us=_times(trips, 1e6),
        )

    # -- throughput

    async def row(self, control: Runtime, shape: Shape, pool: KVPool) -> Row:
        """One block size: a worker at each end with a pool of that shape, one stream at a time, then several. All bytes
        are compared after each of the two."""
        token = secrets.token_hex(4)
        await self.ask(control, Open(token, shape))
        to = f"{self._plan.to.partition('/')[0]}-{token}"
        table = shape.table(_TABLE_SEED)
        expected = await asyncio.to_thread(digest, pool, table)
        async with self.worker(pool) as (runtime, _):
            await runtime.registry.wait_for(to, _OPEN_SECONDS)
            part = shape.blocks // CONCURRENT

            async def move(first: int, count: int) -> None:
                blocks = table[first : first + count]
                await self._send(runtime, to, blocks, shape.tokens(count), Part(first, count))

            async def one() -> None:
                await move(0, shape.blocks)

            async def several() -> None:
                try:
                    async with asyncio.TaskGroup() as group:
                        for number in range(CONCURRENT):
                            group.create_task(move(number * part, part))
                except ExceptionGroup as failed:
                    known, others = failed.split(KVStreamError)
                    if known is None or others is not None:
                        raise
                    # They all go the same way: one reason says it.
                    raise known.exceptions[0] from None

            alone = await self._rounds(one)
            await self.ask(control, Verify(expected))
            together = await self._rounds(several)
            await self.ask(control, Verify(expected))
        return Row(
            block_bytes=shape.block_bytes,
            nbytes=shape.nbytes,
            rounds=min(len(alone), len(together)),
            gbps=_rate(shape, alone),
            concurrent_gbps=_rate(shape, together),
        )

    async def _rounds(self, work: Callable[[], Any]) -> list[float]:
        """Seconds of each round but the first."""
        await work()
        seconds: list[float] = []
        while len(seconds) < self._plan.rounds and sum(seconds) < _ROW_SECONDS:
            start = time.perf_counter()
            await work()
            seconds.append(time.perf_counter() - start)
        return seconds


def _contents(nbytes: int) -> Any:
    """Bytes that no other block has."""
    memory = allocate(-(-nbytes // 8) * 8)
    rng = np.random.default_rng(_CONTENT_SEED)
    for start in range(0, len(memory), _CONTENT_STEP):
        part = memory[start : start + _CONTENT_STEP].view(np.uint64)
        part[:] = rng.integers(0, 1 << 64, len(part), np.uint64)
    return memory


def _rate(shape: Shape, seconds: Sequence[float]) -> float:
    return round(shape.nbytes / statistics.median(seconds) / 1e9, 3)


def _times(seconds: Sequence[float], unit: float) -> Times:
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
    found = (statistics.median(ordered), p99, ordered[-1])
    return Times(len(ordered), *(round(value * unit, 3) for value in found))
