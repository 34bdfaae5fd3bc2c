"""Virtual time: a `World` holds the clock and the order of all callbacks, a `Process` is one event loop in it.

Each simulated process has an event loop of its own, so it can be stopped, slowed or killed as a whole, and what it
awaits can't be mixed up with another's. Callbacks take no time; the clock moves only when nothing is ready, straight to
the next timer. Ready callbacks run first in, first out, timers by (time, order of creation). It must never wait for
anything real: there are no files, sockets, signals or threads here.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import sys
import threading
import weakref
from asyncio import events
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

__all__ = ["Livelock", "Process", "Quiet", "World"]

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")

_MAX_AT_ONCE = 1_000_000
"""Callbacks at one instant before the world counts as stuck in it."""


class Quiet(RuntimeError):
    """Nothing is ready and no timer is set: what is waited for can't happen any more."""


class Livelock(RuntimeError):
    """Callbacks keep scheduling callbacks and time stands still, or hardly moves."""


class Process(asyncio.BaseEventLoop):
    """One event loop of a World. Made by `World.process`.

    While it is held (`hold`), its callbacks and timers are kept back in order, as in a stopped process; what others
    do to it meanwhile waits. One that is killed is held for good; `World.bury` unwinds its tasks when all is over.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.pace = 0.0
        """Seconds that each callback keeps this process busy; 0 costs nothing."""
        self.holds = 0
        self.held: deque[tuple[asyncio.Handle, bool]] = deque()
        """Kept back while `holds`; the flag tells timers."""
        self._thread_of_world = threading.get_ident()
        self._stop_asked = False
        self._created: weakref.WeakSet[asyncio.Task[Any]] = weakref.WeakSet()
        super().__init__()

    def __repr__(self) -> str:
        return f"<Process {self.name}>"

    def __del__(self) -> None:
        """Nothing to close: unlike a real loop's, its end loses no file and no thread."""

    # -- stopping and killing

    def hold(self) -> None:
        """Stop the process, as SIGSTOP does. Counted: it takes as many `release`s."""
        self.holds += 1

    def release(self, *, timers_first: bool = False) -> None:
        """Let it go on: with what was kept back in the order in which it came, or timers that are overdue first."""
        self.holds -= 1
        if self.holds:
            return
        held, self.held = self.held, deque()
        ordered = sorted(held, key=lambda entry: not entry[1]) if timers_first else held
        self.world.ready.extend((self, handle) for handle, _ in ordered)

    def kill(self) -> None:
        """It runs no more, not even its cleanup. Cutting it off from the network is the caller's."""
        self.alive = False
        self.holds += 1

    # -- what asyncio asks of a loop

    def time(self) -> float:
        return self.world.now

    def call_soon(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.Handle(callback, args, self, context)
        self.world.ready.append((self, handle))
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread_of_world:
            raise RuntimeError("a simulated process has no threads: call it from the thread that runs the world")
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self.world.now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[Unpack[_Ts]], object], *args: *_Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.add_timer(when, self, handle)
        return handle

    def create_task(
        self,
        coro: Generator[Any, None, _T] | Coroutine[Any, Any, _T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[_T]:
        task = super().create_task(coro, name=name, context=context)
        self._created.add(task)
        return task

    def tasks(self) -> list[asyncio.Task[Any]]:
        """Those that have not ended. (`asyncio.all_tasks` goes through the tasks of all processes.)"""
        return [task for task in self._created if not task.done()]

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]  # typeshed's is not generic in this way
        self, executor: Executor | None, func: Callable[[Unpack[_Ts]], _T], *args: *_Ts
    ) -> asyncio.Future[_T]:
        """Run at once, inline: there are no threads, and blocking work takes no virtual time."""
        future: asyncio.Future[_T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - whatever the function raises is the future's
            future.set_exception(error)
        return future

    # -- running

    def run_forever(self) -> None:
        """Run the whole world until `stop` is called on this process."""
        self._stop_asked = False
        self.world.run(lambda: self._stop_asked)

    def stop(self) -> None:
        self._stop_asked = True
        self.world.interrupt()

    def is_running(self) -> bool:
        return self.world.running

    def _write_to_self(self) -> None:
        """Nothing sleeps that would have to be woken."""


class World:
    """The clock (seconds, from 0) and the queue. `steps` counts callbacks that ran; more than `max_steps` of them are a
    Livelock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.steps = 0
        self.max_steps = math.inf
        self.running = False
        self.ready: deque[tuple[Process, asyncio.Handle]] = deque()
        self.processes: list[Process] = []
        self._timers: list[tuple[float, int, Process, asyncio.TimerHandle]] = []
        self._timer_count = 0
        self._interrupted = False
        self.fabric = self.process("fabric")
        """Runs what belongs to no process: messages under way, servers, faults. It is never held."""

    def process(self, name: str) -> Process:
        """A new process."""
        process = Process(self, name)
        self.processes.append(process)
        return process

    def add_timer(self, when: float, process: Process, handle: asyncio.TimerHandle) -> None:
        """For Process."""
        if math.isnan(when):
            raise ValueError("a timer at NaN")
        self._timer_count += 1
        heapq.heappush(self._timers, (when, self._timer_count, process, handle))

    def interrupt(self) -> None:
        """Have `run` look at its condition before the next callback."""
        self._interrupted = True

    def run(self, done: Callable[[], bool], *, until: float = math.inf) -> None:
        """Run callbacks until `done()` holds, which is asked whenever time is about to move and after `interrupt`, or
        until the clock would pass `until`. Raises Quiet when nothing is left to run, Livelock when time stands still or
        `max_steps` have run.
        """
        if self.running:
            raise RuntimeError("the world is running already")
        self.running = True
        hooks = sys.get_asyncgen_hooks()
        outer = events._get_running_loop()  # pyright: ignore[reportPrivateUsage]  # what event loops are given to use
        sys.set_asyncgen_hooks(finalizer=_finalize)
        try:
            self._run(done, until)
        finally:
            self.running = False
            events._set_running_loop(outer)  # pyright: ignore[reportPrivateUsage]  # as above
            sys.set_asyncgen_hooks(*hooks)

    def _run(self, done: Callable[[], bool], until: float) -> None:
        ready = self.ready
        enter = events._set_running_loop  # pyright: ignore[reportPrivateUsage]  # what event loops are given to use
        current: Process | None = None
        at_once = 0
        while True:
            if self._interrupted or not ready:
                self._interrupted = False
                if done():
                    return
            if not ready:
                if not self._advance(until):
                    return
                at_once = 0
                if self.steps > self.max_steps:
                    raise Livelock(f"{self.steps} callbacks, and no end at {self.now} s")
                continue
            process, handle = ready.popleft()
            if process.holds:
                process.held.append((handle, isinstance(handle, asyncio.TimerHandle)))
                continue
            if handle.cancelled():
                continue
            if process is not current:
                enter(process)
                current = process
            at_once += 1
            if at_once > _MAX_AT_ONCE:
                raise Livelock(f"{_MAX_AT_ONCE} callbacks at {self.now} s, the last one {handle!r}")
            self.steps += 1
            handle._run()  # pyright: ignore[reportPrivateUsage]  # the one way to run a handle, exceptions included
            if process.pace:
                process.hold()
                self.fabric.call_later(process.pace, process.release)

    def _advance(self, until: float) -> bool:
        """Move the clock to the next timer and make what is due ready. False: that would pass `until`."""
        timers = self._timers
        while timers and timers[0][3].cancelled():
            heapq.heappop(timers)
        if not timers:
            if until < math.inf:
                self.now = max(self.now, until)
                return False
            raise Quiet(f"nothing is scheduled any more at {self.now} s")
        when = timers[0][0]
        if when > until:
            self.now = max(self.now, until)
            return False
        self.now = max(self.now, when)
        while timers and timers[0][0] <= self.now:
            _, _, process, handle = heapq.heappop(timers)
            if not handle.cancelled():
                self.ready.append((process, handle))
        return True

    def bury(self) -> list[asyncio.Task[Any]]:
        """Unwind what is left of every process, as nothing that matters can see it any more: let all go on, cancel
        every task, and run until they have ended. Returns those that would not end within 60 virtual seconds.
        """
        for process in self.processes:
            process.pace = 0.0
            if process.holds:
                process.holds = 1
                process.release()
        left = [task for process in self.processes for task in process.tasks()]
        for task in left:
            task.cancel()
        try:
            self.max_steps = self.steps + _MAX_AT_ONCE
            self.run(lambda: all(task.done() for task in left), until=self.now + 60.0)
        except (Quiet, Livelock):
            pass  # what waits, or runs, for ever shows below
        left = [task for process in self.processes for task in process.tasks()]
        self.ready.clear()
        self._timers.clear()
        for process in self.processes:
            process.close()
        return left


def _finalize(generator: AsyncGenerator[Any, Any]) -> None:
    """An async generator that nobody iterates any more is closed by a task of the process that dropped it."""
    loop = asyncio.get_running_loop()
    loop.call_soon(_close, loop, generator)


def _close(loop: asyncio.AbstractEventLoop, generator: AsyncGenerator[Any, Any]) -> None:
    # Not held: the loop keeps a task alive that is ready to run, and a generator that does not wait ends in one step.
    loop.create_task(_aclose(generator))


async def _aclose(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
