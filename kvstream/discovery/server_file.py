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
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from kvstream.errors import ConfigError

__all__ = [
    "ServerInfo",
    "announce_server",
    "find_server",
    "process_start",
    "read_server_file",
    "runtime_directory",
    "server_file_path",
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
    except msgspec.DecodeError:
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


@asynccontextmanager
async def announce_server(
    host: str, port: int, user: str, password: str, *, environ: Mapping[str, str] | None = None
) -> AsyncIterator[Path]:
    """Be this user's server while the context lasts: hold the lock, and keep the file there. The file's path.

    Raises ConfigError that says which server runs already. Call `server_lock` first where starting is expensive.
    """
    async with server_lock(environ=environ):
        pid = os.getpid()
        info = ServerInfo(
            pid=pid, start=process_start(pid) or 0, host=host, port=port, user=user, password=password
        )
        path = server_file_path(environ)
        await asyncio.to_thread(_write_private, path, msgspec.json.encode(info))
        try:
            yield path
        finally:
            await asyncio.to_thread(path.unlink, missing_ok=True)
