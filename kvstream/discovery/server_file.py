"""The file by which this user's programs find this user's `kvstream server`: where it is, and its credentials.

Mode 0600 in a directory that only the user can enter. A lock that dies with its process decides who may run;
the file itself may be left behind by a kill, so readers check that its writer still lives.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import tempfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvstream.errors import ConfigError

__all__ = [
    "ServerClaim",
    "ServerInfo",
    "claim_server",
    "find_server",
    "process_start",
    "read_server_file",
    "runtime_directory",
    "server_file_path",
    "write_private",
]


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A running server. `pid` and `start` (clock ticks since boot) are of the process that owns it."""

    pid: int
    start: int
    host: str
    port: int
    user: str
    password: str

    def __repr__(self) -> str:
        return f"ServerInfo({self.host}:{self.port}, pid={self.pid})"


def runtime_directory(environ: Mapping[str, str] | None = None) -> Path:
    """This user's private directory for files of running processes, made if needed, and checked.

    `$XDG_RUNTIME_DIR/kvstream`, else `kvstream-UID` in the directory for temporary files, which others may write
    to: hence the check that it is a directory, ours, and closed to everybody else. Raises ConfigError.
    """
    path = _runtime_path(os.environ if environ is None else environ)
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise ConfigError("XDG_RUNTIME_DIR", f"{path} can't be made: {error.strerror}") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            "XDG_RUNTIME_DIR", f"{path} must be a directory of this user with mode 0700; remove it or set the variable"
        )
    return path


def server_file_path(environ: Mapping[str, str] | None = None) -> Path:
    """Where `kvstream server` leaves its address. Touches nothing."""
    return _runtime_path(os.environ if environ is None else environ) / "server.json"


def _runtime_path(environ: Mapping[str, str]) -> Path:
    base = environ.get("XDG_RUNTIME_DIR", "")
    if base and os.path.isdir(base):
        return Path(base) / "kvstream"
    return Path(tempfile.gettempdir()) / f"kvstream-{os.getuid()}"


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None where there is no such process.

    With the pid it names a process for good: pids are used again, but not within one tick.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The second field is the command in parentheses and may hold anything, so count from behind it.
    fields = text.rpartition(b")")[2].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def read_server_file(environ: Mapping[str, str] | None = None) -> ServerInfo | None:
    """The running server of this user; None where there is none (no file, a file of others, a dead writer)."""
    try:
        descriptor = os.open(server_file_path(environ), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            return None
        data = file.read(4096)
    try:
        info = msgspec.json.decode(data, type=ServerInfo)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return info if process_start(info.pid) == info.start else None


async def find_server(wait: float = 5.0, *, environ: Mapping[str, str] | None = None) -> ServerInfo | None:
    """The running server of this user, waited for up to `wait` seconds; None where none comes.

    Another process writes the file and the standard library has no way to be told, so this looks again after
    growing pauses: about twenty looks in five seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait
    pause = 0.02
    while True:
        info = await asyncio.to_thread(read_server_file, environ)
        left = deadline - loop.time()
        if info is not None or left <= 0:
            return info
        await asyncio.sleep(min(pause, left))
        pause = min(pause * 1.5, 0.4)


class ServerClaim:
    """The right to be this user's server, held from `claim_server` on."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def announce(self, host: str, port: int, user: str, password: str) -> None:
        """Write the server file, or replace it."""
        await asyncio.to_thread(self._write, host, port, user, password)

    def _write(self, host: str, port: int, user: str, password: str) -> None:
        pid = os.getpid()
        info = ServerInfo(pid=pid, start=process_start(pid) or 0, host=host, port=port, user=user, password=password)
        write_private(self.path, msgspec.json.encode(info))


@asynccontextmanager
async def claim_server(*, environ: Mapping[str, str] | None = None) -> AsyncGenerator[ServerClaim]:
    """Be the one server of this user while the context lasts; the server file goes at its end.

    Raises ConfigError that says which server runs already. The lock is the kernel's, so it never outlives us.
    """
    descriptor = await asyncio.to_thread(_lock, environ)
    path = server_file_path(environ)
    try:
        yield ServerClaim(path)
    finally:
        # Two system calls on files of a RAM disk: done here, so that a cancelled exit can't skip them.
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(environ: Mapping[str, str] | None) -> int:
    path = runtime_directory(environ) / "server.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        info = read_server_file(environ)
        which = f"runs on port {info.port} (pid {info.pid})" if info else f"is starting (it holds {path})"
        raise ConfigError("server", f"a kvstream server of this user {which}; use it, or stop it first") from None
    return descriptor


def write_private(path: Path, data: bytes) -> None:
    """Put a file of mode 0600 at `path` at once: no reader sees a part of it, and its mode is never wider."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.unlink(missing_ok=True)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
    temporary.replace(path)
