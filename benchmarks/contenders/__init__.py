"""What the benchmarks compare: each module measures one way to move the same blocks between two processes.

A contender runs in processes of its own (some bring their own UCX) and reports the seconds of each round, its CPU time,
and whether the bytes were right. Round 0 is warm-up and not reported.
"""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec

__all__ = ["Rounds", "cpu_seconds", "run_pair"]


class Rounds(msgspec.Struct):
    """`seconds` per round; `cpu` seconds of both processes per round; `lag_p99`: event-loop lag in ms, where there is
    a loop; `setup`: seconds before the first round that a user would pay once."""

    seconds: list[float]
    cpu: float
    lag_p99: float = 0.0
    setup: float = 0.0


def cpu_seconds() -> float:
    """User and system time of this process so far, all threads."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def run_pair(source: Callable[..., None], destination: Callable[..., None], *arguments: Any, timeout: float) -> Rounds:
    """Run both functions in fresh processes, joined by a pipe; the source sends the result over a second one.

    Raises RuntimeError with what went wrong there, or when it takes longer than `timeout` seconds.
    """
    context = multiprocessing.get_context("spawn")
    left, right = context.Pipe()
    ours, theirs = context.Pipe()
    processes = [
        context.Process(target=_guarded, args=(theirs, destination, left, *arguments), daemon=True),
        context.Process(target=_guarded, args=(theirs, source, right, *arguments, theirs), daemon=True),
    ]
    for process in processes:
        process.start()
    theirs.close()
    left.close()
    right.close()
    try:
        if not ours.poll(timeout):
            raise RuntimeError(f"not finished within {timeout} s")
        try:
            result = ours.recv()
        except EOFError:
            raise RuntimeError("the processes ended without a result") from None
    finally:
        for process in processes:
            process.kill()
            process.join()
        ours.close()
    if isinstance(result, str):
        raise RuntimeError(result)
    return msgspec.convert(result, Rounds)


def _guarded(results: Connection, work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(*arguments)
    except (Exception, SystemExit) as error:
        results.send(f"{type(error).__name__}: {error}")
        raise
