"""The life of a worker process: start, serve, drain, leave; what it says of itself meanwhile, and its exit code.

It owns the order of these and what signals mean. What the worker does while it serves is its engine's.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import signal
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from kvstream.cli.worker.engines import make_engine
from kvstream.cli.worker.health import Readiness, health_server
from kvstream.cli.worker.notify import Notifier
from kvstream.cli.worker.settings import WorkerSettings, read_layout
from kvstream.engine import Drains, Engine
from kvstream.log import get_logger
from kvstream.memory import KVPool
from kvstream.runtime.runtime import Runtime

__all__ = ["Exit", "Running", "serve"]


class Exit(enum.IntEnum):
    """How a worker process ends."""

    CLEAN = 0
    FAILURE = 1
    BAD_CONFIG = 2
    FENCED = 3
    """Another worker has the name."""
    NO_BROKER = 4
    """NATS can't be reached at the start. (Later it may be away.)"""
    NOT_DRAINED = 5
    """Told to stop, it left while it still had work: the budget was over, or it was told twice."""


class Running(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says when it is ready. `health` is the port of the HTTP answers, if there are any."""

    name: str
    rank: int
    incarnation: str
    pid: int
    roles: tuple[str, ...]
    host: str
    port: int
    health: int | None


class _State:
    """What readiness is told from."""

    def __init__(self) -> None:
        self.text = "starting"
        self.runtime: Runtime | None = None

    def readiness(self) -> Readiness:
        if self.runtime is None:
            return Readiness(False, self.text)
        # Not a reason to be taken out of service: streams between workers that know each other need no broker.
        cut = "" if self.runtime.registry.connected else ", though the broker can't be reached"
        return Readiness(True, self.text + cut)


async def serve(settings: WorkerSettings, say: Callable[[Running], None]) -> Exit:
    """Run a worker until it is told to stop by SIGTERM or SIGINT. The first lets it finish what it has, within
    settings.drain seconds; the second stops it at once. Raises ConfigError, BrokerUnavailable, Fenced, and whatever
    the engine raises."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    ready = asyncio.Event()
    work = loop.create_task(_live(settings, say, ready, stop), name=f"worker {settings.name}")

    def told() -> None:
        # A worker that is still starting has nothing to finish.
        if stop.is_set() or not ready.is_set():
            work.cancel()
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    try:
        await asyncio.wait([work])
    finally:
        # Only one that is cancelled from outside gets here with the work unfinished.
        work.cancel()
        await asyncio.wait([work])
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
    if work.cancelled():
        return Exit.NOT_DRAINED if ready.is_set() else Exit.CLEAN
    return work.result()


async def _live(
    settings: WorkerSettings, say: Callable[[Running], None], ready: asyncio.Event, stop: asyncio.Event
) -> Exit:
    state, notifier = _State(), Notifier(os.environ, os.getpid())
    try:
        async with contextlib.AsyncExitStack() as stack:
            health = None
            if settings.health is not None:
                server = health_server(settings.health_host, settings.health, state.readiness)
                health = await stack.enter_async_context(server)
            runtime, engine = await _start(settings, stack)
            state.runtime, state.text = runtime, "ready"
            notifier.ready()
            ready.set()
            say(_describe(runtime, health))
            await _until(stop, runtime)
            state.runtime, state.text = None, "draining"
            notifier.stopping()
            drained = await _drain(runtime, engine, settings.drain)
    finally:
        notifier.close()
    return Exit.CLEAN if drained else Exit.NOT_DRAINED


async def _start(settings: WorkerSettings, stack: contextlib.AsyncExitStack) -> tuple[Runtime, Engine]:
    layout = await asyncio.to_thread(read_layout, settings)
    engine = make_engine(settings.engine, settings.options)
    # Every page is touched once, and there may be many.
    pool = await asyncio.to_thread(_allocate, settings, layout)
    lanes: Any = "auto" if settings.lanes == ("auto",) else settings.lanes
    runtime = await stack.enter_async_context(
        Runtime(
            settings.name,
            pool=pool,
            roles=settings.roles,
            nats=settings.nats,
            lanes=lanes,
            data_interface=settings.data_interface,
            shard=settings.shard,
            config=settings.runtime,
        )
    )
    await stack.enter_async_context(_started(engine, runtime))
    return runtime, engine


def _allocate(settings: WorkerSettings, layout: Any) -> KVPool:
    return KVPool.allocate(layout, blocks=settings.blocks, device=settings.device)


@contextlib.asynccontextmanager
async def _started(engine: Engine, runtime: Runtime) -> AsyncGenerator[None]:
    try:
        await engine.start(runtime)
        yield
    finally:
        try:
            async with asyncio.timeout(runtime.config.close_wait):
                await engine.close()
        except TimeoutError:
            get_logger("worker").warning("the engine did not close in time", seconds=runtime.config.close_wait)


async def _until(stop: asyncio.Event, runtime: Runtime) -> None:
    """Wait until the worker is told to stop. Raises Fenced when another one has taken its name."""
    stopped = asyncio.create_task(stop.wait())
    fenced = asyncio.create_task(runtime.until_fenced())
    try:
        await asyncio.wait([stopped, fenced], return_when=asyncio.FIRST_COMPLETED)
        if fenced.done():
            raise fenced.result()
    finally:
        for task in (stopped, fenced):
            task.cancel()
        await asyncio.wait([stopped, fenced])


async def _drain(runtime: Runtime, engine: Engine, budget: float) -> bool:
    """Let the engine and the runtime finish what they have. Returns whether they have."""
    async with asyncio.TaskGroup() as group:
        works = [group.create_task(_leave(runtime, budget))]
        if isinstance(engine, Drains):
            works.append(group.create_task(_finish(engine, budget)))
    finished = all(work.result() for work in works)
    if not finished:
        get_logger("worker").warning("left with work unfinished", budget=budget)
    return finished


async def _finish(engine: Drains, budget: float) -> bool:
    """Returns whether the engine has finished in time."""
    try:
        async with asyncio.timeout(budget):
            await engine.drain(budget)
    except TimeoutError:
        return False
    return True


async def _leave(runtime: Runtime, budget: float) -> bool:
    """Have the runtime end its streams. Returns whether all of them came to their own end."""
    report = await runtime.drain(budget)
    return not report.cancelled


def _describe(runtime: Runtime, health: int | None) -> Running:
    record = runtime.record
    return Running(
        name=record.name,
        rank=record.rank,
        incarnation=record.incarnation,
        pid=record.pid,
        roles=record.roles,
        host=record.address.host,
        port=record.address.port,
        health=health,
    )
