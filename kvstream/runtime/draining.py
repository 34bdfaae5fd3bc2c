"""Draining a worker: it takes nothing new, what is live may finish, and the rest is cancelled at the end of a budget.

Owns the order of these steps, and what the registry is told of it. It neither leaves the cluster nor closes anything:
a drained worker can be closed, or resumed.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kvstream.discovery import Registry
from kvstream.discovery.control import DrainReport
from kvstream.discovery.records import State
from kvstream.errors import Cancelled, KVStreamError, Refused
from kvstream.log import get_logger
from kvstream.runtime.events import Events
from kvstream.runtime.streams import Streams

__all__ = ["Draining"]

_RETRY_AFTER = 1.0
"""Seconds after which a source that has nowhere else to go may ask again: the worker may have been resumed."""


class Draining:
    """`wait` (seconds) bounds how long the ends of cancelled streams are waited for."""

    def __init__(self, worker: str, streams: Streams, registry: Registry, events: Events, wait: float) -> None:
        self._worker = worker
        self._streams = streams
        self._registry = registry
        self._events = events
        self._wait = wait
        self._resumed = 0
        self.active = False
        """Whether the worker takes nothing new."""
        self._log = get_logger("runtime", worker=worker)

    async def drain(self, budget: float) -> DrainReport:
        """See Runtime.drain."""
        streams, resumed = self._streams, self._resumed
        start = streams.driver.now()
        refusal = Refused(f"{self._worker} is draining: it takes nothing new", _RETRY_AFTER)
        self.active = True
        streams.refuse_new(refusal)
        live, cancelled = streams.live, 0
        self._events.draining(budget)
        self._log.info("draining", budget=budget, streams=live)
        publishing = asyncio.create_task(self._publish("draining"), name=f"drain {self._worker}")
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(budget):
                    await streams.until(lambda: not streams.live or self._resumed != resumed)
            if self._resumed == resumed:
                why = f"{self._worker} is draining, and the time for that is over"
                cancelled = streams.end_all(Cancelled(why), Refused(why, _RETRY_AFTER))
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._wait):
                        await streams.until(lambda: not streams.live)
            # The registry gets what is left of the budget; what it has not taken by then it takes later.
            await asyncio.wait({publishing}, timeout=max(0.0, start + budget - streams.driver.now()))
        finally:
            publishing.cancel()
            await asyncio.wait({publishing})
        left = 0 if self._resumed == resumed else min(live, streams.live)
        report = DrainReport(
            finished=max(0, live - cancelled - left), cancelled=cancelled, seconds=streams.driver.now() - start
        )
        self._log.info("drained", finished=report.finished, cancelled=report.cancelled)
        return report

    async def resume(self) -> None:
        """See Runtime.resume."""
        self._resumed += 1
        self.active = False
        self._streams.refuse_new(None)
        self._events.resumed()
        self._log.info("resumed")
        await self._publish("ready")

    async def _publish(self, state: State) -> None:
        try:
            await self._registry.update(state=state)
        except KVStreamError as error:
            self._log.warning("state not published yet", state=state, why=str(error))
