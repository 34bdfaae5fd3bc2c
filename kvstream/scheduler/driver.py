"""The asyncio pump of the scheduler core: it feeds the core events and time, and has its commands performed.

It owns the pace of bulk work (one slot's gather or scatter per turn of the loop, the more urgent first) and the one
timer. It decides nothing about streams, and it must be used from the event loop's thread only.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from typing import Protocol

from kvstream.errors import KVStreamError
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Command,
    Declined,
    Dial,
    Drop,
    Ended,
    Fetched,
    Move,
    Offered,
    Rerouted,
    Route,
    Stage,
    Stalled,
    Transmit,
    Withdrawn,
)
from kvstream.scheduler.core import Scheduler
from kvstream.wire import Frame

__all__ = ["Driver", "Effects"]


class Effects(Protocol):
    """What performs the commands. None of these may block; `stage` and `move` do at most one slot's copy inline and
    report through `Driver.staged`, `moved` and so on, at once or later."""

    def transmit(self, link: int, frames: list[Frame]) -> None: ...
    def dial(self, peer: str) -> None: ...
    def drop(self, link: int, error: KVStreamError) -> None: ...
    def stage(self, command: Stage) -> None: ...
    def move(self, command: Move) -> None: ...
    def notify(
        self,
        command: Offered | Withdrawn | Fetched | Accepted | Rerouted | Route | Arrived | Ended | Stalled | Declined,
    ) -> None: ...
    def pumped(self) -> None:
        """Every command is performed: a good moment to look at the core's state."""


class Driver:
    """Runs a core on the running loop. Every entry point hands an event to the core and then pumps its commands."""

    def __init__(self, core: Scheduler, effects: Effects, loop: asyncio.AbstractEventLoop) -> None:
        self.core = core
        self._effects = effects
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._commands: deque[Command] = deque()
        self._outbox: dict[int, list[Frame]] = {}
        self._bulk: list[tuple[tuple[float, int, int], int, Stage | Move]] = []
        self._bulk_handle: asyncio.Handle | None = None
        self._bulk_count = 0
        self._pump_handle: asyncio.Handle | None = None
        self._pumping = False
        self._stopped = False

    def now(self) -> float:
        """The time that the core lives by: the loop's clock, in seconds."""
        return self._loop.time()

    def pump(self) -> None:
        """Have every command performed that the core has to give. Call it after each event given to the core.

        Commands may report back at once, which gives the core further events: they are pumped by the call that is
        already running, never recursively, so that frames stay in order. Should an effect raise, its error comes out
        here, and what it kept from being performed is performed by the next turn of the loop.
        """
        if self._pumping:
            return
        self._pumping = True
        finished = False
        try:
            while self._perform_all():
                self._flush()
            finished = True
            self._effects.pumped()
        finally:
            self._pumping = False
            if not finished:
                self._loop.call_soon(self.pump)
            self._rearm()

    def pump_soon(self) -> None:
        """Pump in the next turn of the loop: for a call that should cost its caller no system call, and whose frames
        then share messages with those of others."""
        if self._pump_handle is None:
            self._pump_handle = self._loop.call_soon(self._pump_due)

    def _pump_due(self) -> None:
        self._pump_handle = None
        self.pump()

    def stop(self) -> None:
        """No timer and no bulk work from now on. Idempotent."""
        self._stopped = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._bulk_handle is not None:
            self._bulk_handle.cancel()
            self._bulk_handle = None
        self._bulk.clear()

    def _perform_all(self) -> bool:
        """Perform what the core has to give, frames only collected. Returns whether there are any."""
        while True:
            self._commands.extend(self.core.take())
            if not self._commands:
                return bool(self._outbox)
            while self._commands:
                self._perform(self._commands.popleft())

    def _flush(self) -> None:
        """One call per link for all its frames: they share messages."""
        while self._outbox:
            link = next(iter(self._outbox))
            self._effects.transmit(link, self._outbox.pop(link))

    def _perform(self, command: Command) -> None:
        if isinstance(command, Transmit):
            self._outbox.setdefault(command.link, []).append(command.frame)
        elif isinstance(command, Stage | Move):
            if self._stopped:
                return
            self._bulk_count += 1
            heapq.heappush(self._bulk, (command.order, self._bulk_count, command))
            if self._bulk_handle is None:
                self._bulk_handle = self._loop.call_soon(self._work)
        elif isinstance(command, Dial):
            self._effects.dial(command.peer)
        elif isinstance(command, Drop):
            # What was said before on this link still goes out before it is closed.
            frames = self._outbox.pop(command.link, None)
            if frames:
                self._effects.transmit(command.link, frames)
            self._effects.drop(command.link, command.error)
        else:
            self._effects.notify(command)

    def _work(self) -> None:
        """One gather or scatter, then back to the loop: bulk never keeps frames, timers or the user waiting long."""
        self._bulk_handle = None
        if not self._bulk:
            return
        command = heapq.heappop(self._bulk)[2]
        if self._bulk:
            self._bulk_handle = self._loop.call_soon(self._work)
        if isinstance(command, Stage):
            self.core.staging(command)
            self._effects.stage(command)
        else:
            self.core.moving(command)
            self._effects.move(command)
        self.pump()

    def _rearm(self) -> None:
        due = self.core.next_timer()
        if self._timer is not None:
            if due == self._timer_due:
                return
            self._timer.cancel()
            self._timer = None
        if due is not None and not self._stopped:
            self._timer_due = due
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        # The loop may call a little before the due time (its clock's resolution); the core must not be asked again
        # and again for a timer that is not due by its own arithmetic.
        self.core.tick(max(self.now(), self._timer_due))
        self.pump()
