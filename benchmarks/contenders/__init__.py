"""What the benchmarks compare: each module measures one way to move the same blocks between two processes.

A contender runs in processes of its own (some bring their own UCX) and reports the seconds of each round, its CPU time,
and whether the bytes were right. Round 0 is warm-up and not reported.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import msgspec

__all__ = ["Pair", "Rounds", "cpu_seconds", "require", "run_pair"]


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


def require(module: str) -> None:
    """Raise RuntimeError, as the processes would, where a contender's module is not installed."""
    if importlib.util.find_spec(module) is None:
        raise RuntimeError(f"not installed: there is no module {module}")


class Pair:
    """A source and a destination in fresh processes, joined by a pipe. Use it as a context manager: leaving kills them.

    The source is called as source(pipe, *arguments, control) and the destination as destination(pipe, *arguments).
    """

    def __init__(self, source: Callable[..., None], destination: Callable[..., None], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        left, right = context.Pipe()
        self._control, theirs = context.Pipe()
        self._failure = ""
        self._processes = [
            context.Process(target=_guarded, args=(theirs, destination, left, *arguments), daemon=True),
            context.Process(target=_guarded, args=(theirs, source, right, *arguments, theirs), daemon=True),
        ]
        for process in self._processes:
            process.start()
        for end in (theirs, left, right):
            end.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._control.close()

    def pause(self) -> None:
        """Stop both processes, so that one that polls while it is idle takes nothing from the others."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let both run again."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for process in self._processes:
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, number)

    def tell(self, message: Any) -> None:
        """Send the source what it is to do."""
        try:
            self._control.send(message)
        except OSError:
            pass  # it has ended: `result` says why

    def result(self, timeout: float) -> Any:
        """The next thing the source has to say. Raises RuntimeError with what went wrong in either process, or when
        there is nothing within `timeout` seconds; after that a pair is of no more use, and says the same again."""
        if not self._failure:
            try:
                result = self._control.recv() if self._control.poll(timeout) else f"not finished within {timeout} s"
            except (EOFError, ConnectionResetError):
                result = "the processes ended without a result"
            if not isinstance(result, str):
                return result
            self._failure = result
        raise RuntimeError(self._failure)


def run_pair(source: Callable[..., None], destination: Callable[..., None], *arguments: Any, timeout: float) -> Rounds:
    """Run a Pair whose source sends one result, its Rounds, within `timeout` seconds, else RuntimeError."""
    with Pair(source, destination, *arguments) as pair:
        return msgspec.convert(pair.result(timeout), Rounds)


def _guarded(results: Connection, work: Callable[..., None], *arguments: Any) -> None:
    try:
        work(*arguments)
    except ImportError as error:
        results.send(f"not installed: {error}")  # all there is to say: no traceback
    except (Exception, SystemExit) as error:
        results.send(f"{type(error).__name__}: {error}")
        raise
