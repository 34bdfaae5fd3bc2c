"""What a bare machine with a GPU allows, whether the GPU code is right on it, and how fast it is.

One file to run where there is no network, no broker and perhaps no CuPy: `python -m benchmarks.gpu_check`. It ends
within `--seconds`, says what it could not do and why, and prints one JSON object as its last line. Each step runs in
processes of its own, so that one that crashes, or hangs, costs its own result only. Without a GPU the steps that check
correctness run on host memory, and the others are skipped. Exit status 1 when something that could run gave wrong bytes
or failed.

    probes        CUDA IPC and CMA between two processes; UCX's transports
    correctness   the kernels against NumPy; KVPool; streams between runtimes, over each lane; in two processes: gather
                  -> staging -> one-sided get by UCX -> scatter; and streams, whose bytes should stay on the GPU
    bandwidth     by block size, shuffled tables, against the copy bandwidth of the device; and staged through the host;
                  streams between two processes: on the GPU, lent from where the blocks are, and through the host
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import functools
import json
import multiprocessing
import multiprocessing.context
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.cuda_raw import Cuda, CudaError, Unavailable
from benchmarks.gpu_peers import Transfer, receive_streams, serve_streams
from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer
from kvstream.errors import ConfigError, KVStreamError
from kvstream.memory.arrays import describe
from kvstream.memory.kernels import Plan, source
from kvstream.transport import _ucp
from kvstream.transport._host import read_process
from kvstream.transport._worker import Endpoint, UcpWorker
from kvstream.transport.base import LANES, Lane, Slab

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30
BLOCK_SIZES = (4 * KiB, 16 * KiB, 64 * KiB, 256 * KiB, 1 * MiB)
CHUNK = 8 * MiB
UCX_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "as kvstream sets it": {"RNDV_THRESH": "inf", "NET_DEVICES": "lo"},
    "UCX's defaults": {"NET_DEVICES": "lo"},
}

PEER_WAYS: Mapping[str, tuple[Mapping[str, int], tuple[int, ...]]] = {
    "staged on the GPU": ({"device_lend_bytes": GiB}, BLOCK_SIZES),
    "staged by 32 MiB": ({"device_lend_bytes": GiB, "device_slot_bytes": 32 * MiB}, BLOCK_SIZES[::2]),
    "lent in place": ({"device_lend_bytes": 64}, BLOCK_SIZES[2:]),
    "through the host": ({"device_staging": 0}, BLOCK_SIZES[::4]),
}
"""What the runtimes in two processes are told, and by which blocks each is measured: `device_lend_bytes` belongs where
the third overtakes the first."""

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]
GPU_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "as kvstream sets it": {"CUDA_IPC_ENABLE_GET_ZCOPY": "y"},
    "UCX's defaults": {},
}
Facts = dict[str, Any]
"""What a step has found out, for the JSON."""


class Skip(Exception):
    """A step can't be done here."""


class Wrong(Exception):
    """Bytes are not what they have to be."""


# --- running steps ----------------------------------------------------------------------------------------------


class Run:
    """Runs the steps, one after the other, each in a process of its own, and keeps what came of them."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds
        self.steps: dict[str, Facts] = {}
        self.failed: list[dict[str, str]] = []
        self.skipped: list[dict[str, str]] = []

    def skip(self, name: str, why: str) -> None:
        self.skipped.append({"step": name, "why": why})
        print(f"skipped  {name}: {why}", flush=True)

    def step(self, name: str, work: Callable[[], Facts], at_most: float = 60.0) -> Facts | None:
        """The facts, or None where the step was skipped or failed."""
        left = min(at_most, self._end - time.monotonic() - 1.0)
        if left < 1.0:
            self.skip(name, "the time is up (--seconds)")
            return None
        begin = time.monotonic()
        kind, value = _in_process(work, left)
        took = time.monotonic() - begin
        if kind == "ok":
            self.steps[name] = value
            shown = ", ".join(f"{key} {item}" for key, item in value.items())
            print(f"ok       {name} ({took:.1f} s): {shown}", flush=True)
            return value
        if kind == "skip":
            self.skip(name, value)
        else:
            self.failed.append({"step": name, "why": value})
            print(f"FAILED   {name} ({took:.1f} s): {value}", flush=True)
        return None


def _in_process(work: Callable[[], Facts], seconds: float) -> tuple[str, Any]:
    context = _processes()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_perform, args=(work, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(seconds):
            return "failed", f"no result within {seconds:.0f} s"
        return ours.recv()
    except EOFError:
        process.join(5)
        return "failed", f"the process ended with status {process.exitcode}"
    finally:
        if process.is_alive():
            process.join(2)
        if process.is_alive() and process.pid is not None:
            # With the processes that it has started.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
        process.join()
        ours.close()


def _processes() -> multiprocessing.context.ForkServerContext:
    """Processes without CUDA or UCX in them, that need not import everything anew."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.cuda_raw", "kvstream", "kvstream.transport._worker"])
    return context


def _perform(work: Callable[[], Facts], conn: Connection) -> None:
    os.setpgid(0, 0)
    _end_with_parent()
    try:
        result: tuple[str, Any] = "ok", work()
    except (Skip, Unavailable) as error:
        result = "skip", str(error)
    except (Wrong, CudaError, KVStreamError, OSError, RuntimeError, TimeoutError, EOFError) as error:
        result = "failed", f"{type(error).__name__}: {error}"
    conn.send(result)
    conn.close()


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def second_process(serve: Callable[..., None], *arguments: Any) -> Any:
    """A process that runs `serve(conn, *arguments)`, and the connection to it."""
    context = _processes()
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(serve, theirs, arguments))
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(5)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(serve: Callable[..., None], conn: Connection, arguments: tuple[Any, ...]) -> None:
    _end_with_parent()
    with contextlib.suppress(EOFError, BrokenPipeError):  # the other one has seen enough
        try:
            serve(conn, *arguments)
        except (Unavailable, CudaError, KVStreamError, OSError, RuntimeError) as error:
            conn.send(SimpleNamespace(error=f"the other process: {type(error).__name__}: {error}"))


def answer(conn: Connection, seconds: float = 20.0) -> Any:
    """The next message of the second process."""
    if not conn.poll(seconds):
        raise TimeoutError(f"the other process did not answer within {seconds:.0f} s")
    message = conn.recv()
    if isinstance(message, SimpleNamespace) and hasattr(message, "error"):
        raise RuntimeError(message.error)
    return message


# --- memory of both kinds ---------------------------------------------------------------------------------------


class Address:
    """Memory by its address, as far as registration with UCX looks at arrays."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.ctypes = SimpleNamespace(data=address)
        self.nbytes = nbytes


class Side(Protocol):
    """One process's KV blocks (blocks, block_bytes), known bytes in them, and staging beside them."""

    staging: Any

    def gather(self, ids: Ids, at: int) -> None: ...
    def scatter(self, ids: Ids, at: int) -> None: ...
    def sync(self) -> None: ...
    def read(self) -> Bytes: ...


def contents(seed: int, blocks: int, block_bytes: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), np.uint8)


class HostSide:
    def __init__(self, blocks: int, block_bytes: int, staging: int, seed: int) -> None:
        self._memory = contents(seed, blocks, block_bytes)
        self.staging = np.zeros(staging, np.uint8)

    def gather(self, ids: Ids, at: int) -> None:
        np.take(self._memory, ids, axis=0, out=self._wire(ids, at), mode="clip")

    def scatter(self, ids: Ids, at: int) -> None:
        self._memory[ids] = self._wire(ids, at)

    def _wire(self, ids: Ids, at: int) -> Bytes:
        width = self._memory.shape[1]
        return self.staging[at : at + len(ids) * width].reshape(len(ids), width)

    def sync(self) -> None:
        pass

    def read(self) -> Bytes:
        return self._memory


class DeviceSide:
    """The same on the GPU, by the kernels of the pool, without CuPy."""

    def __init__(self, blocks: int, block_bytes: int, staging: int, seed: int) -> None:
        self.cuda = cuda = Cuda()
        cuda.compile(source())
        self.stream = cuda.stream()
        self.blocks, self.block_bytes = blocks, block_bytes
        self._memory = cuda.alloc(blocks * block_bytes)
        self.staging = Address(cuda.alloc(staging), staging)
        given = contents(seed, blocks, block_bytes)
        cuda.copy(self._memory, given.ctypes.data, given.nbytes)
        shape = SimpleNamespace(__array_interface__=_interface(self._memory, (blocks, block_bytes)))
        self._plan = Plan.over([describe(shape, "memory")])
        self._words = cuda.alloc(self._plan.words.nbytes)
        cuda.copy(self._words, self._plan.words.ctypes.data, self._plan.words.nbytes)
        self._kernels = {what: cuda.kernel(f"{what}_{self._plan.unit}") for what in ("gather", "scatter")}
        self._tables: dict[int, int] = {}

    def table(self, ids: Ids) -> int:
        """The device's copy of a block table; each table is brought there once."""
        if id(ids) not in self._tables:
            raw = ids.astype(np.int32)
            address = self._tables[id(ids)] = self.cuda.alloc(raw.nbytes)
            self.cuda.copy(address, raw.ctypes.data, raw.nbytes)
        return self._tables[id(ids)]

    def gather(self, ids: Ids, at: int) -> None:
        self._launch("gather", ids, at)

    def scatter(self, ids: Ids, at: int) -> None:
        self._launch("scatter", ids, at)

    def _launch(self, what: str, ids: Ids, at: int) -> None:
        grid, (threads,) = self._plan.launch(len(ids))
        u64 = ctypes.c_uint64
        wire = self.staging.ctypes.data + at
        arguments = (u64(self._words), u64(self.table(ids)), ctypes.c_uint(self._plan.units), u64(wire))
        self.cuda.launch(self._kernels[what], grid, threads, arguments, self.stream)

    def sync(self) -> None:
        self.cuda.synchronize(self.stream)

    def read(self) -> Bytes:
        self.sync()
        out = np.empty((self.blocks, self.block_bytes), np.uint8)
        self.cuda.copy(out.ctypes.data, self._memory, out.nbytes)
        return out

    def timed(self, work: Callable[[], None]) -> float:
        """Seconds that the stream takes for it; the better of three rounds after one to warm up."""
        work()
        times: list[float] = []
        for _ in range(3):
            start = self.cuda.record(self.stream)
            work()
            times.append(self.cuda.seconds(start, self.cuda.record(self.stream)))
        return min(times)


def _interface(address: int, shape: tuple[int, ...]) -> Facts:
    return {"data": (address, False), "shape": shape, "strides": None, "typestr": "|u1", "version": 3}


def open_side(on_gpu: bool, blocks: int, block_bytes: int, staging: int, seed: int) -> Side:
    return (DeviceSide if on_gpu else HostSide)(blocks, block_bytes, staging, seed)


def tables(blocks: int, block_bytes: int, seed: int) -> list[Ids]:
    """All blocks in random order, cut into chunks."""
    order = np.random.default_rng(seed).permutation(blocks)
    per_chunk = max(1, CHUNK // block_bytes)
    return [order[start : start + per_chunk] for start in range(0, blocks, per_chunk)]


# --- probes -----------------------------------------------------------------------------------------------------


def probe_gpu() -> Facts:
    cuda = Cuda()
    return {
        "name": cuda.name,
        "count": cuda.count,
        "driver": cuda.driver,
        "memory": cuda.memory[1],
        "compute": f"{cuda.attribute('major')}.{cuda.attribute('minor')}",
        "multiprocessors": cuda.attribute("multiprocessors"),
    }


def probe_cupy() -> Facts:
    try:
        import cupy  # pyright: ignore[reportMissingImports]  # optional dependency
    except ImportError as error:
        raise Skip(f"CuPy is not installed ({error})") from error
    return {"version": cupy.__version__, "runtime": int(cupy.cuda.runtime.runtimeGetVersion())}


def probe_nvrtc() -> Facts:
    cuda = Cuda()
    begin = time.perf_counter()
    cuda.compile(source())
    return {"compile_ms": round(1e3 * (time.perf_counter() - begin)), "kernel": bool(cuda.kernel("gather_16"))}


def probe_ucx() -> Facts:
    ucp = _load_ucx()
    lines = ucp.describe_context({}).splitlines()
    resources = [line.split("--")[-1].strip() for line in lines if " resource " in line]
    names = sorted({resource.partition("/")[0].split()[-1] for resource in resources if resource})
    return {"version": ucp.version, "transports": names}


def _load_ucx() -> _ucp.Ucp:
    try:
        return _ucp.load()
    except ConfigError as error:
        raise Skip(str(error)) from error


def probe_cma() -> Facts:
    """process_vm_readv and process_vm_writev between two processes of one user."""
    with second_process(_serve_memory) as conn:
        pid, address, expected = answer(conn)
        rights: Facts = {}
        try:
            rights["readv"] = read_process(pid, address, len(expected)) == expected
        except OSError as error:
            rights["readv"] = f"no: {error}"
        rights["writev"] = _write_process(pid, address, b"written!") or _written(conn)
    return rights


def _serve_memory(conn: Connection) -> None:
    memory = np.frombuffer(bytearray(b"read me!"), np.uint8)
    conn.send((os.getpid(), memory.ctypes.data, memory.tobytes()))
    conn.recv()
    conn.send(memory.tobytes())


def _written(conn: Connection) -> bool:
    conn.send("look")
    return answer(conn) == b"written!"


def _write_process(pid: int, address: int, data: bytes) -> str:
    """Why not, or "" """

    class IoVec(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(data, len(data))
    local, remote = IoVec(ctypes.addressof(buffer), len(data)), IoVec(address, len(data))
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    libc.process_vm_writev.restype = ctypes.c_ssize_t
    count = libc.process_vm_writev(ctypes.c_int(pid), ctypes.byref(local), one, ctypes.byref(remote), one, none)
    return "" if count == len(data) else f"no: {os.strerror(ctypes.get_errno())}"


def probe_ipc() -> Facts:
    """One process's device memory, opened and read in another."""
    with second_process(_serve_device_memory) as conn:
        handle, nbytes = answer(conn)
        cuda = Cuda()
        address = cuda.ipc_open(handle)
        out = np.zeros(nbytes, np.uint8)
        cuda.copy(out.ctypes.data, address, nbytes)
        cuda.ipc_close(address)
        if not (out == 0xA5).all():
            raise Wrong("what CUDA IPC shows is not the other process's memory")
    return {"cuda_ipc": True, "bytes": nbytes}


def _serve_device_memory(conn: Connection) -> None:
    cuda = Cuda()
    nbytes = 4 * MiB
    address = cuda.alloc(nbytes)
    cuda.fill(address, 0xA5, nbytes)
    conn.send((cuda.ipc_handle(address), nbytes))
    conn.recv()


# --- correctness ------------------------------------------------------------------------------------------------


def check_kernels(on_gpu: bool) -> Facts:
    """Gather and scatter of several shapes against plain indexing."""
    checked = 0
    for blocks, block_bytes in ((64, 4 * KiB), (33, 12 * KiB), (7, 256 * KiB), (50, 8 * 13), (50, 2 * 13), (50, 13)):
        side = open_side(on_gpu, blocks, block_bytes, blocks * block_bytes, seed=1)
        before = contents(1, blocks, block_bytes)
        read, write = (np.random.default_rng(n).permutation(blocks)[: blocks - 3] for n in (2, 3))
        side.gather(read, 0)
        side.scatter(write, 0)
        expected = before.copy()
        expected[write] = before[read]
        if not np.array_equal(side.read(), expected):
            raise Wrong(f"{blocks} blocks of {block_bytes} bytes")
        checked += 1
    return {"shapes": checked}


def check_strided(on_gpu: bool) -> Facts:
    """The index arithmetic for strided memory, in NumPy where there is no GPU: `Plan.addresses`."""
    memory = contents(4, 1, 8 * 6 * 4 * 32).reshape(8, 6, 4, 32)
    views = [memory[:, 0], memory.transpose(0, 2, 1, 3), memory[::-1], memory[:, 1:4, :, 8:24]]
    ids = np.array([5, 0, 3])
    for view in views:
        plan = Plan.over([describe(view, "view")])
        offsets = plan.addresses(ids) - memory.ctypes.data
        found = memory.reshape(-1)[offsets[:, :, None] + np.arange(plan.unit)]
        if on_gpu:
            found = _strided_on_gpu(memory, plan, ids)
        if found.tobytes() != np.ascontiguousarray(view[ids]).tobytes():
            raise Wrong(f"a view of strides {view.strides}")
    return {"views": len(views)}


def _strided_on_gpu(memory: Bytes, plan: Plan, ids: Ids) -> Bytes:
    cuda = Cuda()
    cuda.compile(source())
    on_device = cuda.alloc(memory.nbytes)
    cuda.copy(on_device, memory.ctypes.data, memory.nbytes)
    words = plan.words.copy()
    words[:, 0] += on_device - memory.ctypes.data
    table = ids.astype(np.int32)
    out = np.zeros(len(ids) * plan.units * plan.unit, np.uint8)
    places: list[int] = []
    for array in (words, table, out):
        places.append(cuda.alloc(array.nbytes))
        cuda.copy(places[-1], array.ctypes.data, array.nbytes)
    stream = cuda.stream()
    grid, (threads,) = plan.launch(len(ids))
    u64 = ctypes.c_uint64
    arguments = (u64(places[0]), u64(places[1]), ctypes.c_uint(plan.units), u64(places[2]))
    cuda.launch(cuda.kernel(f"gather_{plan.unit}"), grid, threads, arguments, stream)
    cuda.synchronize(stream)
    cuda.copy(out.ctypes.data, places[2], out.nbytes)
    return out


def check_pool(on_gpu: bool) -> Facts:
    """KVPool on cuda:0 (or the CPU): allocated and wrapped, inline and asynchronous, behind events."""
    return asyncio.run(_check_pool("cuda:0" if on_gpu else "cpu"))


async def _check_pool(device: str) -> Facts:
    layout = KVLayout(layers=3, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    try:
        pool = KVPool.allocate(layout, blocks=64, device=device)
    except ConfigError as error:
        raise Skip(str(error)) from error
    ids = np.random.default_rng(1).permutation(64)[:32]
    given = contents(2, 1, 32 * layout.block_bytes)[0]
    out = np.zeros_like(given)
    pool.pin(out)
    pool.unpack(0, ids, given)
    pool.pack(0, ids, out)
    _same("pack and unpack", out, given)
    out.fill(0)
    scatter = pool.unpack_async(1, ids[::-1].copy(), given)
    gather = pool.pack_async(1, ids, out, after=scatter.event)
    begin = time.perf_counter()
    await asyncio.wait_for(_over(scatter), 10)
    await asyncio.wait_for(_over(gather), 10)
    waited = time.perf_counter() - begin
    _same("the asynchronous form", out.reshape(32, -1)[::-1].reshape(-1), given)
    facts: Facts = {"device": pool.device, "completion_ms": round(1e3 * waited, 3)}
    if pool.is_device:
        facts |= await _check_engine(pool, layout)
    return facts


async def _over(completion: Any) -> None:
    await completion


async def _check_engine(pool: KVPool, layout: KVLayout) -> Facts:
    """An engine that computes on a stream of its own: the gather comes after its event, and the loop is free."""
    import cupy  # pyright: ignore[reportMissingImports]  # a pool on a GPU has it

    ids = np.arange(8)
    out = np.zeros(8 * layout.block_bytes, np.uint8)
    area = pool.layer(2)
    busy = cupy.ones((8192, 8192), dtype=cupy.float32)
    cupy.sin(busy, out=busy)  # compiled now
    cupy.cuda.get_current_stream().synchronize()
    engine = cupy.cuda.Stream(non_blocking=True)
    with engine:
        for _ in range(200):
            cupy.sin(busy, out=busy)
        area.fill(0x1234)
        event = engine.record()
    passed = pool.passed(event)
    early = not passed.done()
    turns = 0
    copy = pool.pack_async(2, ids, out, after=event)
    async with asyncio.timeout(20):
        while not copy.done():
            turns += 1
            await asyncio.sleep(0)
    if not (out.view(np.uint16) == 0x1234).all():
        raise Wrong("the gather did not wait for the engine's event")
    return {"event_was_pending": early, "loop_turns_meanwhile": turns}


def check_stream(on_gpu: bool, lane: Lane) -> Facts:
    """Two runtimes in this process over one lane of UCX: a stream, layer by layer, on a GPU behind events."""
    return asyncio.run(_check_stream("cuda:0" if on_gpu else "cpu", lane))


async def _check_stream(device: str, lane: Lane) -> Facts:
    _load_ucx()
    layout = KVLayout(layers=16, kv_heads=8, head_dim=128, block_tokens=16, dtype="bfloat16")
    blocks = 64
    try:
        pools = [KVPool.allocate(layout, blocks=2 * blocks, device=device) for _ in range(2)]
    except ConfigError as error:
        raise Skip(str(error)) from error
    order = [np.random.default_rng(seed).permutation(2 * blocks)[:blocks] for seed in (1, 2)]
    given = contents(3, layout.layers, blocks * layout.block_bytes)
    for layer, data in enumerate(given):
        pools[0].unpack(layer, order[0], data)
    hub, tokens = MemoryBrokerServer(), blocks * layout.block_tokens
    seconds: list[float] = []
    async with (
        MemoryBroker(hub) as one,
        MemoryBroker(hub) as two,
        Runtime("prefill-0", roles={"prefill"}, pool=pools[0], broker=one, lanes=lane) as prefill,
        Runtime("decode-0", roles={"decode"}, pool=pools[1], broker=two, lanes=lane) as decode,
    ):
        for n in range(4):
            begin = time.perf_counter()
            async with (
                decode.receive(f"r{n}", blocks=order[1], tokens=tokens) as rx,
                prefill.send(f"r{n}", blocks=order[0], tokens=tokens, to="decode-0", deadline=20.0) as tx,
            ):
                for layer in range(layout.layers):
                    tx.layer_ready(layer, event=pools[0].mark())
                report = await tx.done()
                await rx.done()
            seconds.append(time.perf_counter() - begin)
    out = np.empty_like(given[0])
    for layer, data in enumerate(given):
        pools[1].pack(layer, order[1], out)
        _same(f"layer {layer}", out, data)
    return {"device": device, "lane": report.lane, "gbps": _gbps(report.bytes, min(seconds))}


def _same(what: str, found: Bytes, expected: Bytes) -> None:
    if not np.array_equal(found, expected):
        raise Wrong(f"{what}: {int((found != expected).sum())} of {expected.size} bytes differ")


def check_peers(transfer: Transfer, *, on_device: bool, copy_gbps: float | None = None) -> Facts:
    """Two processes, a runtime in each: whole streams, announced and confirmed; byte-exact."""
    _load_ucx()
    try:
        with second_process(serve_streams, transfer) as conn:
            found = asyncio.run(receive_streams(conn, transfer, rounds=5))
    except ConfigError as error:
        raise Skip(str(error)) from error
    if found.wrong_layers:
        raise Wrong(f"layers {found.wrong_layers} are not what was sent")
    if on_device and not found.on_device:
        raise Wrong(f"the bytes did not stay on the device: {found.why}")
    best, median = min(found.seconds), sorted(found.seconds)[len(found.seconds) // 2]
    facts: Facts = {
        "lane": found.lane,
        "on_device": found.on_device,
        "gbps": _gbps(transfer.nbytes, best),
        "median_gbps": _gbps(transfer.nbytes, median),
        "first_ms": round(1e3 * found.seconds[0], 1),
    }
    if copy_gbps:
        facts["of_copy"] = round(facts["gbps"] / copy_gbps, 2)
    return facts


def check_get(on_gpu: bool, options: str, blocks: int, block_bytes: int) -> Facts:
    """Two processes: gather into registered staging there, ucp_get into the staging here, scatter; byte-exact."""
    return asyncio.run(_get_stream(on_gpu, options, blocks, block_bytes))


async def _get_stream(on_gpu: bool, options: str, blocks: int, block_bytes: int) -> Facts:
    ucp = _load_ucx()
    nbytes = blocks * block_bytes
    side = open_side(on_gpu, blocks, block_bytes, nbytes, seed=12)
    chunks = tables(blocks, block_bytes, seed=22)
    sources = tables(blocks, block_bytes, seed=21)
    with second_process(_serve_get, on_gpu, options, blocks, block_bytes) as conn:
        port, remote, packed = answer(conn, 30)
        worker = _open_worker(ucp, options)
        try:
            endpoint = worker.connect("127.0.0.1", port)
            lost: list[str] = []
            endpoint.on_failure = lost.append
            await _final(endpoint.flush, lost)
            region = worker.register(Slab.of(side.staging))
            rkey = endpoint.unpack_rkey(packed)
            get = functools.partial(_get, endpoint, side.staging.ctypes.data, remote, rkey, lost)
            seconds: list[float] = []
            for _ in range(3):
                begin = time.perf_counter()
                conn.send("gather all")
                at = 0
                for ids in chunks:
                    await _readable(conn)
                    if answer(conn) != at:
                        raise RuntimeError("chunks are out of order")
                    await get(at, len(ids) * block_bytes)
                    side.scatter(ids, at)
                    at += len(ids) * block_bytes
                side.sync()
                seconds.append(time.perf_counter() - begin)
            only: list[float] = []
            for _ in range(2):
                begin = time.perf_counter()
                await asyncio.gather(*(get(start, min(CHUNK, nbytes - start)) for start in range(0, nbytes, CHUNK)))
                only.append(time.perf_counter() - begin)
            names = sorted({name for name, _ in endpoint.transports()})
            expected = np.empty((blocks, block_bytes), np.uint8)
            expected[np.concatenate(chunks)] = contents(11, blocks, block_bytes)[np.concatenate(sources)]
            _same("the received blocks", side.read(), expected)
            region.unregister()
        finally:
            worker.close()
    return {
        "transports": names,
        "get_gbps": round(nbytes / min(only) / 1e9, 2),
        "gather_get_scatter_gbps": round(nbytes / min(seconds) / 1e9, 2),
    }


def _open_worker(ucp: _ucp.Ucp, options: str) -> UcpWorker:
    loop = asyncio.get_running_loop()
    return UcpWorker(ucp, loop, dict(UCX_OPTIONS[options]), gpu_options=GPU_OPTIONS[options])


async def _get(
    endpoint: Endpoint, local: int, remote: int, rkey: int, lost: list[str], offset: int, nbytes: int
) -> None:
    await _final(lambda done: endpoint.get(local + offset, nbytes, remote + offset, rkey, done), lost)


async def _final(post: Callable[[Callable[[int], None]], None], lost: list[str]) -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    post(lambda status: future.done() or future.set_result(status))
    async with asyncio.timeout(20):
        status = await future
    if status != _ucp.OK:
        raise RuntimeError(f"UCX: status {status} {' '.join(lost)}")


async def _readable(conn: Connection) -> None:
    """Let the loop, and UCX with it, run until the other process has said something."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(conn.fileno(), ready.set)
    try:
        async with asyncio.timeout(20):
            await ready.wait()
    finally:
        loop.remove_reader(conn.fileno())


def _serve_get(conn: Connection, on_gpu: bool, options: str, blocks: int, block_bytes: int) -> None:
    asyncio.run(_serve_staging(conn, on_gpu, options, blocks, block_bytes))


async def _serve_staging(conn: Connection, on_gpu: bool, options: str, blocks: int, block_bytes: int) -> None:
    side = open_side(on_gpu, blocks, block_bytes, blocks * block_bytes, seed=11)
    chunks = tables(blocks, block_bytes, seed=21)
    worker = _open_worker(_ucp.load(), options)
    try:
        region = worker.register(Slab.of(side.staging))
        worker.on_endpoint = lambda _: None
        worker.listen("127.0.0.1", 0)
        conn.send((worker.port, region.address, region.rkey))
        while True:
            await _until_readable(conn)
            conn.recv()
            at = 0
            for ids in chunks:
                side.gather(ids, at)
                side.sync()
                conn.send(at)
                at += len(ids) * block_bytes
    finally:
        worker.close()


async def _until_readable(conn: Connection) -> None:
    ready = asyncio.Event()
    asyncio.get_running_loop().add_reader(conn.fileno(), ready.set)
    await ready.wait()
    asyncio.get_running_loop().remove_reader(conn.fileno())


# --- bandwidth --------------------------------------------------------------------------------------------------


def measure_copy(nbytes: int) -> Facts:
    """The device's own copy, and copies between it and page-locked and pageable host memory."""
    side = DeviceSide(1, nbytes, nbytes, seed=1)
    cuda, staging = side.cuda, side.staging.ctypes.data
    other = cuda.alloc(nbytes)
    facts: Facts = {"device_gbps": _gbps(nbytes, side.timed(lambda: cuda.copy(other, staging, nbytes, side.stream)))}
    for kind in ("pageable", "page_locked"):
        host = np.zeros(nbytes, np.uint8)
        if kind == "page_locked":
            try:
                cuda.pin(host.ctypes.data, nbytes)
            except CudaError as error:
                facts[kind] = f"no: {error}"
                continue
        for name, to, start in (("to_host", host.ctypes.data, staging), ("to_device", staging, host.ctypes.data)):
            copy = functools.partial(cuda.copy, to, start, nbytes, side.stream)
            facts[f"{kind}_{name}_gbps"] = _gbps(nbytes, side.timed(copy))
        if kind == "page_locked":
            cuda.unpin(host.ctypes.data)
    return facts


def measure_blocks(nbytes: int, block_bytes: int, copy_gbps: float | None) -> Facts:
    """Gather and scatter of all blocks, shuffled: on the device, and, chunk by chunk, staged through the host."""
    blocks = nbytes // block_bytes
    side = DeviceSide(blocks, block_bytes, nbytes, seed=1)
    cuda, staging = side.cuda, side.staging.ctypes.data
    chunks = tables(blocks, block_bytes, seed=2)
    starts = [index * len(chunks[0]) * block_bytes for index in range(len(chunks))]
    for ids in chunks:
        side.table(ids)

    def all_chunks(step: Callable[[Ids, int], None]) -> None:
        for ids, at in zip(chunks, starts, strict=True):
            step(ids, at)

    host = np.zeros(nbytes, np.uint8)
    with contextlib.suppress(CudaError):  # measure_copy says so
        cuda.pin(host.ctypes.data, nbytes)

    def to_host(ids: Ids, at: int) -> None:
        side.gather(ids, at)
        cuda.copy(host.ctypes.data + at, staging + at, len(ids) * block_bytes, side.stream)

    def from_host(ids: Ids, at: int) -> None:
        cuda.copy(staging + at, host.ctypes.data + at, len(ids) * block_bytes, side.stream)
        side.scatter(ids, at)

    # In one launch each: small ones would measure how fast Python launches.
    every = np.concatenate(chunks)
    gather = _gbps(nbytes, side.timed(lambda: side.gather(every, 0)))
    scatter = _gbps(nbytes, side.timed(lambda: side.scatter(every, 0)))
    return {
        "gather_gbps": gather,
        "scatter_gbps": scatter,
        "gather_of_copy": round(gather / copy_gbps, 2) if copy_gbps else None,
        "scatter_of_copy": round(scatter / copy_gbps, 2) if copy_gbps else None,
        "gather_to_host_gbps": _gbps(nbytes, side.timed(lambda: all_chunks(to_host))),
        "scatter_from_host_gbps": _gbps(nbytes, side.timed(lambda: all_chunks(from_host))),
    }


def _gbps(nbytes: int, seconds: float) -> float:
    """Bytes moved once, as everywhere in these benchmarks: a copy reads and writes them."""
    return round(nbytes / seconds / 1e9, 2)


def _transfer(device: str, nbytes: int, block_bytes: int, changes: Mapping[str, int]) -> Transfer:
    layers = 16
    blocks = max(1, nbytes // layers // block_bytes)
    config = msgspec.structs.replace(RuntimeConfig(device_staging=GiB), **changes)
    return Transfer(device, layers, blocks, block_bytes, config)


# --- all of it --------------------------------------------------------------------------------------------------


def check(seconds: float, nbytes: int) -> Facts:
    run = Run(seconds)
    gpu = run.step("gpu", probe_gpu)
    on_gpu = gpu is not None
    run.step("cupy", probe_cupy)
    nvrtc = run.step("nvrtc", probe_nvrtc) if on_gpu else None
    run.step("cma", probe_cma)
    run.step("ucx", probe_ucx)
    if on_gpu:
        run.step("cuda ipc", probe_ipc)
    else:
        for name in ("nvrtc", "cuda ipc", "copy bandwidth", "bandwidth by block size", "get over CUDA IPC"):
            run.skip(name, "no GPU; what can be checked of it on host memory follows")
    kernels = on_gpu and nvrtc is not None
    if on_gpu and not kernels:
        run.skip("kernels on the GPU", "they can't be compiled without NVRTC; checked on the CPU, and by CuPy's pool")
    run.step("kernels", functools.partial(check_kernels, kernels))
    run.step("strided views", functools.partial(check_strided, kernels))
    run.step("pool", functools.partial(check_pool, on_gpu))
    for lane in LANES:
        run.step(f"stream, {lane}", functools.partial(check_stream, on_gpu, lane))
    peers = _transfer("cuda:0" if on_gpu else "cpu", 16 * MiB, 64 * KiB, {})
    run.step("peers", functools.partial(check_peers, peers, on_device=on_gpu))
    for options in UCX_OPTIONS:
        run.step(f"get, {options}", functools.partial(check_get, kernels, options, 64, 64 * KiB))
    best = max(UCX_OPTIONS, key=lambda options: run.steps.get(f"get, {options}", {}).get("get_gbps", 0.0))
    if kernels:
        copies = run.step("copy bandwidth", functools.partial(measure_copy, nbytes)) or {}
        for block_bytes in BLOCK_SIZES:
            name = f"blocks of {block_bytes // KiB} KiB"
            run.step(name, functools.partial(measure_blocks, nbytes, block_bytes, copies.get("device_gbps")))
        for way, (changes, sizes) in PEER_WAYS.items():
            for block_bytes in sizes:
                transfer = _transfer("cuda:0", nbytes, block_bytes, changes)
                on_device = transfer.config.device_staging > 0
                check_it = functools.partial(
                    check_peers, transfer, on_device=on_device, copy_gbps=copies.get("device_gbps")
                )
                run.step(f"peers, {way}, blocks of {block_bytes // KiB} KiB", check_it, at_most=20.0)
        for block_bytes in BLOCK_SIZES:
            name = f"get, blocks of {block_bytes // KiB} KiB"
            run.step(name, functools.partial(check_get, True, best, nbytes // block_bytes, block_bytes))
    return {
        "gpu": gpu,
        "machine": {"system": platform.platform(), "python": platform.python_version(), "cpus": os.cpu_count()},
        "bytes": nbytes,
        "steps": run.steps,
        "failed": run.failed,
        "skipped": run.skipped,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=240.0, help="time limit of all (%(default)s)")
    parser.add_argument("--mib", type=int, default=256, help="bytes moved in each measurement, in MiB (%(default)s)")
    arguments = parser.parse_args(argv)
    result = check(arguments.seconds, arguments.mib * MiB)
    print(json.dumps(result))
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
