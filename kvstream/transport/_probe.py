"""What of the UCX transport works on this host, found out by trying; run as a module it is the second process of that.

Owns `probe_lanes`. It must never be called on an event loop (it starts a process and waits for it).
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys

import msgspec

from kvstream.transport import _ucp
from kvstream.transport._host import has_rdma, read_process
from kvstream.transport._slots import MemoryFile, map_peer

__all__ = ["LaneReport", "probe_lanes"]

_NBYTES = 64
_SECONDS = 30.0


class LaneReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `probe_lanes` found. `shared` and `cma` are empty where they work, and else say why they do not."""

    ucx_version: str
    library: str
    transports: tuple[str, ...]
    shared: str
    cma: str
    rdma: bool


def probe_lanes() -> LaneReport:
    """Try the lanes of one host between this process and another. Takes about a second.

    Raises ConfigError when ucxx is not installed.
    """
    ucp = _ucp.load()
    transports = tuple(dict.fromkeys(re.findall(r"^# +resource .* (\w+)/", ucp.describe_context({}), re.MULTILINE)))
    file = MemoryFile(_NBYTES)
    try:
        file.memory[:] = 0xA5
        # The other process reads this one, not the reverse: Yama lets a parent read its children in any case.
        arguments = (os.getpid(), file.fd, int(file.memory.ctypes.data))
        command = [sys.executable, "-m", "kvstream.transport._probe", *map(str, arguments)]
        try:
            done = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True, text=True)
            shared, cma = msgspec.json.decode(done.stdout, type=tuple[str, str])
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
            shared = cma = f"could not be tried: {error}"
    finally:
        file.close()
    return LaneReport(
        ucx_version=ucp.version,
        library=ucp.path,
        transports=transports,
        shared=shared,
        cma=cma,
        rdma=has_rdma(),
    )


def _try_peer(pid: int, fd: int, address: int) -> tuple[str, str]:
    expected = b"\xa5" * _NBYTES
    shared = cma = ""
    try:
        if map_peer(pid, fd, _NBYTES).tobytes() != expected:
            shared = "another process's memory was opened"
    except (OSError, ValueError) as error:
        shared = str(error)
    try:
        if read_process(pid, address, _NBYTES) != expected:
            cma = "another process's memory was read"
    except OSError as error:
        cma = f"{error}; CMA takes ptrace rights: the same user, CAP_SYS_PTRACE or kernel.yama.ptrace_scope=0"
    return shared, cma


if __name__ == "__main__":
    # Ends with its parent: nobody would read what it finds.
    ctypes.CDLL(None).prctl(1, 9)
    sys.stdout.buffer.write(msgspec.json.encode(_try_peer(*map(int, sys.argv[1:4]))))
