"""When a copy between a pool and host memory is over: at once on the CPU, some time later on a GPU.

`Completion` is what `KVPool.pack_async`, `unpack_async` and `passed` return. It is used on the event loop's thread
only, and cancelling who waits for it never stops or hides the copy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import Any, Final, Protocol

from kvstream.errors import KVStreamError

__all__ = ["COMPLETED", "Completion", "DeviceCompletion"]


class Completion(Protocol):
    """The end of one copy. Awaiting it raises the copy's KVStreamError, if it failed."""

    @property
    def event(self) -> Any:
        """A cupy.cuda.Event recorded behind the copy, for other streams to wait for; None on the CPU."""
        ...

    def done(self) -> bool:
        """Whether the copy is over: its buffer may be used again, whether or not it failed."""
        ...

    def error(self) -> KVStreamError | None:
        """What went wrong with a copy that is over."""
        ...

    def add_done_callback(self, call: Callable[[Completion], None]) -> None:
        """Have `call` called with this once it is over: now, if it is, else from the loop."""
        ...

    def __await__(self) -> Generator[Any, None, None]: ...


class _Completed:
    """A copy that was over before anybody could ask."""

    __slots__ = ()

    event = None

    def done(self) -> bool:
        return True

    def error(self) -> KVStreamError | None:
        return None

    def add_done_callback(self, call: Callable[[Completion], None]) -> None:
        call(self)

    def __await__(self) -> Generator[Any, None, None]:
        yield from ()


COMPLETED: Final = _Completed()
"""The one completion of every copy that is made inline."""


class DeviceCompletion:
    """A copy that a device makes. `held` is what it needs until then: buffers, tables, events."""

    __slots__ = ("_event", "_future", "_held")

    def __init__(self, loop: asyncio.AbstractEventLoop, held: tuple[object, ...], event: Any = None) -> None:
        # The error is the result: one that nobody asks for is no "exception never retrieved".
        self._future: asyncio.Future[KVStreamError | None] = loop.create_future()
        self._held: tuple[object, ...] = held
        self._event = event

    @property
    def event(self) -> Any:
        return self._event

    def done(self) -> bool:
        return self._future.done()

    def error(self) -> KVStreamError | None:
        return self._future.result()

    def add_done_callback(self, call: Callable[[Completion], None]) -> None:
        if self._future.done():
            call(self)
        else:
            self._future.add_done_callback(lambda _: call(self))

    def __await__(self) -> Generator[Any, None, None]:
        error = yield from asyncio.shield(self._future).__await__()
        if error is not None:
            raise error

    def finish(self, error: KVStreamError | None = None) -> None:
        """For the device's queue: the copy is over. Does nothing the second time."""
        if not self._future.done():
            self._held = ()
            self._future.set_result(error)
