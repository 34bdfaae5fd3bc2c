"""What the machine itself can do, measured in the same run as everything else: copies, gathers, foreign load."""

from __future__ import annotations

import os
import platform
import time
from importlib import metadata
from pathlib import Path

import numpy as np

__all__ = ["copy_gbps", "describe", "gather_gbps", "is_loaded"]


def is_loaded() -> bool:
    """Whether something else uses the processors right now: more than a twentieth of them over half a second."""
    before = _busy_ticks()
    time.sleep(0.5)
    used = (_busy_ticks() - before) / os.sysconf("SC_CLK_TCK") / 0.5
    return used > 0.05 * (os.cpu_count() or 1)


def _busy_ticks() -> int:
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    idle, iowait = fields[3], fields[4]
    return sum(fields[:8]) - idle - iowait


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
        "kernel": platform.release(),
        "python": platform.python_version(),
        **versions,
    }
