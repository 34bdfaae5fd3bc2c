"""Limits on real time in tests, such that a busy machine does not break them and a defect still does.

Owns `timed` and `in_time`, for promises about time that are statistical by nature: a test that missed its limit is
tried again, and only if each try misses it has it failed. Everything else that a test asserts counts in each try. Where
a limit can be told in other terms (who was first, how a process ended, virtual time) those are better.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import signal
from collections.abc import Callable
from typing import Any, TypeVar, cast

__all__ = ["TRIES", "Death", "Late", "in_time", "timed"]

TRIES = 3

_Test = TypeVar("_Test", bound=Callable[..., Any])


class Late(AssertionError):
    """A limit on real time was missed."""


def in_time(took: float, limit: float, what: str = "it") -> None:
    """Assert, in a test that is `timed`, that something took less than `limit` seconds."""
    if took >= limit:
        raise Late(f"{what} took {took:.3f} s, the limit is {limit} s")


def timed(test: _Test) -> _Test:
    """Try a test again that is Late, at most `TRIES` times in all. Its fixtures are set up once."""
    if inspect.iscoroutinefunction(test):

        @functools.wraps(test)
        async def tried(*args: Any, **kwargs: Any) -> None:
            for number in range(TRIES):
                try:
                    await test(*args, **kwargs)
                    return
                except Late as late:
                    _excuse(test, late, number)

    else:

        @functools.wraps(test)
        def tried(*args: Any, **kwargs: Any) -> None:
            for number in range(TRIES):
                try:
                    test(*args, **kwargs)
                    return
                except Late as late:
                    _excuse(test, late, number)

    return cast(_Test, tried)


def _excuse(test: Callable[..., Any], late: Late, number: int) -> None:
    if number + 1 == TRIES:
        raise late
    print(f"{test.__name__}: {late}; trying again")


class Death:
    """A SIGKILL, and when this loop got to know of it from the kernel. How long another way of noticing takes is
    measured from there: what the dying process and this one waited for a CPU is no part of it."""

    def __init__(self, pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._descriptor = os.pidfd_open(pid)
        self._seen: asyncio.Future[float] = self._loop.create_future()
        self._loop.add_reader(self._descriptor, self._see)
        os.kill(pid, signal.SIGKILL)

    def _see(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self._seen.set_result(self._loop.time())

    async def seen(self) -> float:
        """The loop's time at which it saw the death."""
        async with asyncio.timeout(30):
            return await self._seen
