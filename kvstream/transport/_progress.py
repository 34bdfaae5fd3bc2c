"""Progress of a UCP worker, on the event loop: driven by the worker's descriptor and by what is posted.

Owns when progress runs. It must never run without bound (the loop has others to serve), never poll while there is
nothing to do, and never wait in any other way than through the loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Pump"]

_STEPS = 16
"""Progress steps in one turn of the loop. A step copies at most about 1 MiB (0.1 ms)."""


class Pump:
    """Progress until idle, arm, and again while arming says that something came in meanwhile.

    `step` makes one step and says whether it did anything; `settle` handles what the steps brought (and may post
    more); `arm` asks for a wake-up through `descriptor` and is False when there is work already.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        *,
        step: Callable[[], bool],
        settle: Callable[[], None],
        arm: Callable[[], bool],
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._step = step
        self._settle = settle
        self._arm = arm
        self._scheduled = False
        self._closed = False
        self._idle: list[asyncio.Future[None]] = []
        loop.add_reader(descriptor, self._run)
        self.kick()

    def kick(self) -> None:
        """Something was posted: run on the loop's next turn. Many calls make one run."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._scheduled_run)

    def idle(self) -> asyncio.Future[None]:
        """Resolves when progress has next come to an end with nothing left to do."""
        future: asyncio.Future[None] = self._loop.create_future()
        if self._closed:
            future.set_result(None)
        else:
            self._idle.append(future)
            self.kick()
        return future

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._resolve_idle()

    def _scheduled_run(self) -> None:
        self._scheduled = False
        self._run()

    def _run(self) -> None:
        try:
            for _ in range(_STEPS):
                if self._closed:
                    return
                if self._step():
                    continue
                self._settle()
                if self._scheduled:  # settling posted something, which has asked for its own run
                    return
                if self._arm():
                    self._resolve_idle()
                    return
            self._settle()
        except BaseException:
            # What the callbacks above raise is reported by the loop; it must not end progress for the others.
            self.kick()
            raise
        self.kick()

    def _resolve_idle(self) -> None:
        waiting, self._idle = self._idle, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
