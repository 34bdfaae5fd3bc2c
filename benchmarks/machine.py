"""What the machine itself can do, measured in the same run as everything else: copies, gathers, foreign load."""

from __future__ import annotations

import os
import platform
import resource
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["ForeignLoad", "copy_gbps", "describe", "gather_gbps", "summary"]


class ForeignLoad:
    """Whether something else uses the processors: more than a twentieth of them in the `seconds` that it takes to
    create this, or more than a tenth of them from then on (what neither this process nor an ended child has used)."""

    def __init__(self, seconds: float = 0.5) -> None:
        before = _busy_seconds()
        time.sleep(seconds)
        self._busy = _busy_seconds()
        self._start, self._own = time.monotonic(), _own_seconds()
        self._before = self._busy - before > 0.05 * seconds * _processors()

    def seen(self) -> bool:
        """Call it when the benchmark's processes have ended."""
        foreign = _busy_seconds() - self._busy - (_own_seconds() - self._own)
        return self._before or foreign > 0.1 * _processors() * (time.monotonic() - self._start)


def _processors() -> int:
    return os.cpu_count() or 1


def _busy_seconds() -> float:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle, iowait = fields[3], fields[4]
    return (sum(fields[:8]) - idle - iowait) / os.sysconf("SC_CLK_TCK")


def _own_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _median_rate(work: object, nbytes: int, rounds: int) -> float:
    assert callable(work)
    work()
    times: list[float] = []
    for _ in range(rounds):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return nbytes / sorted(times)[len(times) // 2] / 1e9


def copy_gbps(total: int, rounds: int = 5) -> float:
    """One thread copying `total` bytes, in GB/s."""
    source, target = np.ones(total, np.uint8), np.zeros(total, np.uint8)
    return _median_rate(lambda: np.copyto(target, source), total, rounds)


def gather_gbps(block_bytes: int, total: int, rounds: int = 5) -> float:
    """One thread gathering `total` bytes of shuffled blocks into 1 MiB pieces by numpy.take, in GB/s."""
    count = total // block_bytes
    source = np.ones((count, block_bytes), np.uint8)
    order = np.random.default_rng(0).permutation(count)
    step = max(1, (1 << 20) // block_bytes)
    piece = np.zeros((step, block_bytes), np.uint8)

    def work() -> None:
        for start in range(0, count, step):
            ids = order[start : start + step]
            np.take(source, ids, axis=0, out=piece[: len(ids)], mode="clip")

    return _median_rate(work, total, rounds)


def describe() -> dict[str, str]:
    """Processor, kernel and versions, for the record."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions: dict[str, str] = {}
    for package in ("numpy", "ucxx-cu12", "libucx-cu12", "nixl-cu12", "mooncake-transfer-engine-non-cuda", "uvloop"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "absent"
    return {
        "cpu": f"{os.cpu_count()} x {cpu}",
        "kernel": ".".join(platform.release().split(".")[:2]),
        "python": platform.python_version(),
        **versions,
    }


def summary(result: Mapping[str, Any]) -> str:
    """One line for a plot: where its figures come from, and whether the machine was quiet."""
    about = result["machine"]
    names = {"ucxx-cu12": "UCXX", "libucx-cu12": "UCX", "nixl-cu12": "NIXL", "numpy": "NumPy"}
    versions = ", ".join(f"{name} {about[package]}" for package, name in names.items() if about[package] != "absent")
    busy = "; THE MACHINE WAS BUSY with something else" if result["loaded"] else ""
    return f"{about['cpu']}, Linux {about['kernel']}, Python {about['python']}, {versions}{busy}"
