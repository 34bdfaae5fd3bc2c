"""How the commands run their event loop: on uvloop, as a worker does.

Owns nothing but that choice. The commands that have to work in a broken installation (`doctor`) run without uvloop too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["run_loop"]

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
