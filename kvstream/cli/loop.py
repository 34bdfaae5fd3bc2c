"""How the commands run their event loop: on uvloop, as a worker does.

Owns that choice, and how a command that serves ends: by a signal, cleanly. The commands that have to work in a broken
installation (`doctor`) run without uvloop too.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_loop", "until_signalled"]

_T = TypeVar("_T")


def run_loop(main: Coroutine[Any, Any, _T]) -> _T:
    """Run `main` to its end on a new loop, and close the loop. Ctrl-C cancels it and raises KeyboardInterrupt."""
    try:
        import uvloop
    except ImportError:
        factory = None
    else:
        factory = uvloop.new_event_loop
    try:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(main)
    finally:
        # An interrupt may come before it has begun; Python warns of a coroutine that was neither run nor closed.
        main.close()


async def until_signalled(work: Coroutine[Any, Any, None]) -> int:
    """Run `work` until it ends, or until SIGINT or SIGTERM, which cancel it: also while it is still starting. Returns
    the signal's number, or 0; raises what `work` raises."""
    loop = asyncio.get_running_loop()
    signalled: asyncio.Future[int] = loop.create_future()

    def stop(number: int) -> None:
        if not signalled.done():
            signalled.set_result(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    working = loop.create_task(work)
    try:
        await asyncio.wait({working, signalled}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        await asyncio.wait({working})
    if not working.cancelled():
        working.result()
    return signalled.result() if signalled.done() else 0
