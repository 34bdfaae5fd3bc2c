"""What `kvstream worker` runs: the contract between the daemon and an engine, the holder being one.

It holds the contract only. An engine is made by its factory with the options of its configuration, before the worker
is registered, so what a factory does must not take long and must not start anything.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from kvstream.runtime.runtime import Runtime

__all__ = ["Drains", "Engine"]


class Engine(Protocol):
    """Work of a worker. Its methods are called on the event loop, each once, in this order."""

    async def start(self, runtime: Runtime) -> None:
        """Begin to use the runtime, which is registered. Returns once the engine is ready for work; what raises here
        ends the worker."""
        ...

    async def close(self) -> None:
        """End all work, bounded. The runtime is still there; it is closed afterwards. Also called when `start` has
        failed or was cancelled."""
        ...


@runtime_checkable
class Drains(Protocol):
    """An engine that has something to finish before the worker leaves."""

    async def drain(self, budget: float) -> None:
        """Take no new work and finish what there is, within `budget` seconds, after which this call is cancelled."""
        ...
