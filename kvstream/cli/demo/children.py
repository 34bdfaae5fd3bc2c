"""The demo's child processes: started, spoken to over pipes, watched, and ended whatever happens.

Owns each child's life. A child is asked to leave by closing its stdin, which the kernel does too when this process
dies; one that does not leave in time is killed. Credentials reach it by its environment, never by its command line.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

from kvstream.cli.demo import engine as example
from kvstream.cli.demo import messages
from kvstream.cli.demo.messages import MAX_LINE, Command, Setup, WorkerMessage
from kvstream.errors import KVStreamError

__all__ = ["Child", "DemoError", "describe_end"]

LEAVE_TIMEOUT: Final = 5.0
"""How long a child may take to leave before it is killed."""


class DemoError(KVStreamError):
    """The demo can't go on; the message says which process, and why."""

    code = "demo"


class Child:
    """One worker process, as an async context manager.

    `on_message` gets what it says, `on_stderr` each line that it prints. `ended` resolves with its exit status
    (negative: a signal) once the process is gone and everything it said has been delivered.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        nats_url: str,
        blas_threads: int,
        on_message: Callable[[str, WorkerMessage], None],
        on_stderr: Callable[[str, str], None],
    ) -> None:
        self.name = setup.name
        self._setup = setup
        self._nats_url = nats_url
        self._blas_threads = blas_threads
        self._on_message = on_message
        self._on_stderr = on_stderr
        self._process: asyncio.subprocess.Process | None = None
        self._ended: asyncio.Task[int] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def ended(self) -> asyncio.Task[int]:
        assert self._ended is not None, "the child has not been started"
        return self._ended

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvstream.cli.demo.worker",
            self.name,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=MAX_LINE,
            env=_environment(self._nats_url, example.blas_environment(self._blas_threads)),
            # Ctrl-C goes to the coordinator alone: it ends the children in order.
            start_new_session=True,
        )
        self._ended = asyncio.create_task(self._follow(self._process), name=f"process {self.name}")
        self.send(self._setup)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        process, ended = self._process, self._ended
        assert process is not None and ended is not None
        self.leave()
        try:
            await asyncio.wait([ended], timeout=LEAVE_TIMEOUT)
        finally:
            # Also when cancelled above; synchronous, so that nothing can come between.
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    process.kill()
        await asyncio.wait([ended])

    def send(self, message: Setup | Command) -> None:
        """Queue a message; a few small ones at a time, so nothing is awaited. One to a dead child is dropped."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(messages.encode(message))

    def leave(self) -> None:
        """Ask it to leave, without waiting; leaving the context waits."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.close()

    async def _follow(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None and process.stderr is not None
        reading = [
            asyncio.create_task(self._read_messages(process.stdout), name=f"messages of {self.name}"),
            asyncio.create_task(self._read_stderr(process.stderr), name=f"stderr of {self.name}"),
        ]
        try:
            status = await process.wait()
            # The pipes end with the process, unless it has left a grandchild behind that holds them.
            await asyncio.wait(reading, timeout=2.0)
        finally:
            for task in reading:
                task.cancel()
        await asyncio.wait(reading)
        for task in reading:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return status

    async def _read_messages(self, stream: asyncio.StreamReader) -> None:
        # What a killed process was about to say has no end.
        while (line := await stream.readline()).endswith(b"\n"):
            self._on_message(self.name, messages.decode_message(line))

    async def _read_stderr(self, stream: asyncio.StreamReader) -> None:
        while not stream.at_eof():
            try:
                line = await stream.readline()
            except ValueError:  # longer than the reader's buffer, which has been dropped
                continue
            if text := line.decode(errors="replace").rstrip():
                self._on_stderr(self.name, text)


def describe_end(name: str, status: int) -> str:
    """How a process ended, in words."""
    if status >= 0:
        return f"{name} ended by itself, with exit status {status}"
    try:
        return f"{name} was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"{name} was killed by signal {-status}"


def _environment(nats_url: str, blas: Mapping[str, str]) -> dict[str, str]:
    """Ours, but for NATS settings that are about some other server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("NATS_", "KVSTREAM_NATS_"))}
    return {**kept, **blas, "KVSTREAM_NATS_URL": nats_url, "PYTHONUNBUFFERED": "1"}
