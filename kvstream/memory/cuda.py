"""The memory of one GPU, through CuPy: copies between a pool's blocks and host memory, on streams of the pool's own.

Owns the streams, the staging on the device, and the completions of what is under way. On the event loop it only issues
work and never waits for the device; the device reports back by host functions. It leaves the calling thread's current
device and stream as they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from collections.abc import Generator, Sequence
from typing import Any, Final, Literal

import numpy as np

from kvstream.errors import ConfigError, KVStreamError
from kvstream.log import get_logger
from kvstream.memory.arrays import Bytes, Ids, LayerMemory, Region, Spans, Staged, spans_of
from kvstream.memory.completion import COMPLETED, Completion, DeviceCompletion
from kvstream.memory.kernels import UNITS, Plan, source

__all__ = ["CupyOps", "event_handle"]

# Values of cudaError_t and of the flags of cudaHostRegister for which CuPy has no names.
_SUCCESS: Final = 0
_NOT_READY: Final = 600
_ALREADY_REGISTERED: Final = 712
_PORTABLE: Final = 1
_READ_ONLY: Final = 8
_DEVICE_MEMORY: Final = 2  # of cudaMemoryType

_WATCHES: Final = 4
_LOOK_SECONDS: Final = 1.0

_log = get_logger("memory")


def event_handle(event: object) -> int:
    """The cudaEvent_t behind what an engine calls an event. Raises ConfigError naming `event`."""
    for attribute in ("ptr", "cuda_event"):  # cupy.cuda.Event, torch.cuda.Event
        handle = getattr(event, attribute, None)
        if handle is not None:
            break
    else:
        handle = event
    if type(handle) is not int:
        raise ConfigError(
            "event",
            "must be a recorded cupy.cuda.Event or torch.cuda.Event, or the cudaEvent_t as an int, "
            f"is a {type(event).__name__}",
        )
    if handle <= 0:
        raise ConfigError("event", "has never been recorded; record it on the stream that writes the layer")
    return handle


class CupyOps:
    """Memory of one GPU. One for each pool: its streams are the pool's own, and none waits for another.

    Gathers and scatters have a stream each, issued from the event loop's thread. What blocks its caller has another,
    under a lock, so that engine threads may use it.
    """

    __slots__ = (
        "__weakref__",
        "_cupy",
        "_direct",
        "_gathers",
        "_index",
        "_kernels",
        "_pinned",
        "_scatters",
        "_told",
        "_watches",
    )

    is_device = True

    def __init__(self, cupy: Any, index: int) -> None:
        """Compiles the kernels, or takes them from CuPy's cache: up to a second. Raises KVStreamError."""
        self._cupy = cupy
        self._index = index
        self._pinned: set[int] = set()
        self._told = False
        with self._here():
            module = cupy.RawModule(code=source(), options=("--std=c++17",))
            names = [f"{what}_{unit}" for what in ("gather", "scatter") for unit in UNITS]
            self._kernels = {name: module.get_function(name) for name in names}
            self._gathers, self._scatters = _Queue(cupy), _Queue(cupy)
            self._direct = _Direct(cupy)
            self._watches = [_Queue(cupy) for _ in range(_WATCHES)]

    @property
    def device(self) -> str:
        return f"cuda:{self._index}"

    def zeros(self, nbytes: int) -> Any:
        with self._cupy.cuda.Device(self._index):
            slab = self._cupy.zeros(nbytes, np.uint8)
            # It is filled on a stream that the pool's own do not wait for.
            self._cupy.cuda.get_current_stream().synchronize()
            return slab

    def typed(self, raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        # ml_dtypes' types are of kind "V"; CuPy has no kernels for them, or only for some.
        known = dtype if dtype.kind in "fiu" else np.dtype(f"u{dtype.itemsize}")
        with self._cupy.cuda.Device(self._index):
            return raw.view(known).reshape(shape)

    def layer(self, parts: Sequence[Region]) -> LayerMemory:
        return _CupyLayer(self, parts)

    # -- order

    def mark(self) -> object:
        with self._here():
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record()
            return event

    def passed(self, event: object) -> Completion:
        runtime = self._cupy.cuda.runtime
        handle = event_handle(event)
        with self._here():
            status = int(runtime.eventQuery(handle))
            if status == _SUCCESS:
                return COMPLETED
            # By host functions: nothing here may wait for the device. And on the least busy of a few streams, as
            # whatever is behind an event of a slow engine on its stream waits with it.
            queue = min(self._watches, key=len)
            queue.wait(handle)
            return queue.finish(event)

    # -- host memory

    def pin(self, buffer: Bytes) -> None:
        area = buffer
        while isinstance(area.base, np.ndarray):
            area = area.base
        address = area.ctypes.data
        if address in self._pinned:
            return
        self._pinned.add(address)
        runtime = self._cupy.cuda.runtime
        flags = _PORTABLE if area.flags.writeable else _PORTABLE | _READ_ONLY
        try:
            with self._cupy.cuda.Device(self._index):
                runtime.hostRegister(address, area.nbytes, flags)
        except RuntimeError as error:
            registered = False
            if getattr(error, "status", None) != _ALREADY_REGISTERED and not self._told:
                self._told = True
                _log.info("staging is not page-locked, copies take longer", device=self.device, why=str(error))
        else:
            registered = True
        # The area is unmapped when its last array goes, and has to be known to the driver until then.
        release = weakref.finalize(area, _unpin, weakref.ref(self), runtime, address, registered)
        release.atexit = False

    # -- staging on the device

    def staging(self, nbytes: int, sample: bytes) -> tuple[Staged, bool]:
        cupy = self._cupy
        with self._here():
            # Not from CuPy's pools: whoever opens an allocation in another process is given all of it, which must be
            # nothing but staging; and what a pool has by cudaMallocAsync can't be opened by way of CUDA IPC at all.
            # `Memory` is a cudaMalloc of its own.
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(nbytes), 0)
            slab = cupy.ndarray(nbytes, np.uint8, pointer)
            slab[: len(sample)] = cupy.asarray(np.frombuffer(sample, np.uint8))
            # It is filled on a stream that the pool's own do not wait for.
            cupy.cuda.get_current_stream().synchronize()
            address = int(slab.data.ptr)
            kind = int(cupy.cuda.runtime.pointerGetAttributes(address).type)
        return Staged(address, nbytes, slab), kind == _DEVICE_MEMORY

    def store(self, staged: Staged, data: bytes) -> Completion:
        queue, cupy = self._gathers, self._cupy
        runtime = cupy.cuda.runtime
        with self._here():
            memory = cupy.cuda.alloc_pinned_memory(len(data))
            np.frombuffer(memory, np.uint8, len(data))[...] = np.frombuffer(data, np.uint8)
            runtime.memcpyAsync(staged.address, memory.ptr, len(data), runtime.memcpyHostToDevice, queue.stream.ptr)
            return queue.finish(memory, staged)

    def fetch(self, staged: Staged) -> tuple[Completion, Bytes]:
        queue, cupy = self._gathers, self._cupy
        runtime = cupy.cuda.runtime
        with self._here():
            # Page-locked: else the call waits for the stream.
            memory = cupy.cuda.alloc_pinned_memory(staged.nbytes)
            runtime.memcpyAsync(memory.ptr, staged.address, staged.nbytes, runtime.memcpyDeviceToHost, queue.stream.ptr)
            return queue.finish(memory, staged), np.frombuffer(memory, np.uint8, staged.nbytes)

    def shareable(self, address: int) -> bool:
        """Memory of cudaMallocAsync, of virtual address ranges (PyTorch's expandable segments) and managed memory can't
        be opened by way of CUDA IPC: only what is within a cudaMalloc."""
        try:
            with self._cupy.cuda.Device(self._index):
                self._cupy.cuda.runtime.ipcGetMemHandle(address)
        except RuntimeError:
            return False
        return True

    def current(self) -> contextlib.AbstractContextManager[object]:
        return self._cupy.cuda.Device(self._index)

    # -- copies; for the layers

    def gather_async(self, plan: _Placed, ids: Ids, out: Bytes, after: object | None) -> Completion:
        queue = self._gathers
        with self._here():
            if after is not None:
                queue.wait(event_handle(after))
            table = self._launch(queue, "gather", plan, ids, queue.staging(out.nbytes))
            queue.download(out)
            return queue.finish(out, table, after, plan)

    def gather_staged(self, plan: _Placed, ids: Ids, out: Staged) -> Completion:
        queue = self._gathers
        with self._here():
            table = self._launch(queue, "gather", plan, ids, out.array)
            return queue.finish(out, table, plan)

    def scatter_staged(self, plan: _Placed, ids: Ids, data: Staged, after: object | None) -> Completion:
        queue = self._scatters
        with self._here():
            if after is not None:
                queue.wait(event_handle(after))
            table = self._launch(queue, "scatter", plan, ids, data.array)
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(queue.stream)
            return queue.finish(data, table, after, plan, event=event)

    def scatter_async(self, plan: _Placed, ids: Ids, data: Bytes, after: object | None) -> Completion:
        queue = self._scatters
        with self._here():
            if after is not None:
                queue.wait(event_handle(after))
            queue.upload(data)
            table = self._launch(queue, "scatter", plan, ids, queue.staging(data.nbytes))
            event = self._cupy.cuda.Event(disable_timing=True)
            event.record(queue.stream)
            return queue.finish(data, table, after, plan, event=event)

    def gather(self, plan: _Placed, ids: Ids, out: Bytes) -> None:
        with self._direct.lock, self._here():
            queue = self._direct.queue
            queue.wait(event_handle(self.mark()))
            _table = self._launch(queue, "gather", plan, ids, queue.staging(out.nbytes))
            queue.download(out)
            queue.stream.synchronize()

    def scatter(self, plan: _Placed, ids: Ids, data: Bytes) -> None:
        with self._direct.lock, self._here():
            queue = self._direct.queue
            queue.wait(event_handle(self.mark()))
            queue.upload(data)
            _table = self._launch(queue, "scatter", plan, ids, queue.staging(data.nbytes))
            queue.stream.synchronize()

    def place(self, parts: Sequence[Region]) -> _Placed:
        """A layer's plan, on the device."""
        plan = Plan.over(parts)
        with self._here():
            words = self._cupy.asarray(plan.words)
            # It is read on streams that do not wait for this one.
            self._cupy.cuda.get_current_stream().synchronize()
        return _Placed(plan, words, parts)

    def _launch(
        self, queue: _Queue, what: Literal["gather", "scatter"], placed: _Placed, ids: Ids, staging: Any
    ) -> object:
        """Issue one kernel between blocks and a dense buffer. Returns the block table, which has to live until then."""
        plan = placed.plan
        table = queue.table(ids)
        kernel = self._kernels[f"{what}_{plan.unit}"]
        grid, block = plan.launch(len(ids))
        with queue.stream:
            kernel(grid, block, (placed.words, queue.ids, np.uint32(plan.units), staging))
        return table

    @contextlib.contextmanager
    def _here(self) -> Generator[None]:
        """Work on this device, with its library's errors as ours."""
        try:
            with self._cupy.cuda.Device(self._index):
                yield
        except (RuntimeError, MemoryError) as error:  # CuPy's errors of runtime and driver, and of its memory pools
            raise KVStreamError(f"{self.device}: {error}") from error


class _Placed:
    """The plan of one layer, with its words on the device; it keeps the layer's memory alive."""

    __slots__ = ("owners", "plan", "words")

    def __init__(self, plan: Plan, words: Any, parts: Sequence[Region]) -> None:
        self.plan = plan
        self.words = words
        self.owners = tuple(part.owner for part in parts)


class _CupyLayer:
    """Blocks on a GPU: one kernel between them and a dense device buffer, one copy between that and host memory."""

    __slots__ = ("_ops", "_placed", "spans")

    def __init__(self, ops: CupyOps, parts: Sequence[Region]) -> None:
        self.spans: Spans | None = spans_of(parts)
        self._ops = ops
        self._placed = ops.place(parts)

    def gather(self, ids: Ids, out: Bytes) -> None:
        self._ops.gather(self._placed, ids, out)

    def scatter(self, ids: Ids, data: Bytes) -> None:
        self._ops.scatter(self._placed, ids, data)

    def gather_async(self, ids: Ids, out: Bytes, after: object | None) -> Completion:
        return self._ops.gather_async(self._placed, ids, out, after)

    def scatter_async(self, ids: Ids, data: Bytes, after: object | None) -> Completion:
        return self._ops.scatter_async(self._placed, ids, data, after)

    def gather_staged(self, ids: Ids, out: Staged) -> Completion:
        return self._ops.gather_staged(self._placed, ids, out)

    def scatter_staged(self, ids: Ids, data: Staged, after: object | None) -> Completion:
        return self._ops.scatter_staged(self._placed, ids, data, after)


class _Direct:
    """The queue of those who wait for the device where they are."""

    __slots__ = ("lock", "queue")

    def __init__(self, cupy: Any) -> None:
        self.lock = threading.Lock()
        self.queue = _Queue(cupy)


class _Queue:
    """One non-blocking stream, its staging on the device, and the completions of what runs on it.

    Everything on a stream runs in order, so one staging buffer serves all its copies.
    """

    __slots__ = ("_cupy", "_flying", "_look_handle", "_loop", "_staging", "ids", "stream")

    def __init__(self, cupy: Any) -> None:
        """On the current device."""
        self._cupy = cupy
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._staging: Any = None
        self.ids: Any = None
        """The block table of the last launch, int32."""
        self._flying: dict[DeviceCompletion, None] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look_handle: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._flying)

    def wait(self, handle: int) -> None:
        """What is issued from now on runs after this event."""
        self._cupy.cuda.runtime.streamWaitEvent(self.stream.ptr, handle)

    def table(self, ids: Ids) -> object:
        """Bring block ids to the device. Returns the host's copy."""
        nbytes = 4 * len(ids)
        if self.ids is None or self.ids.nbytes < nbytes:
            with self.stream:
                self.ids = self._cupy.empty(nbytes, np.uint8)
        # Page-locked: else the driver may wait for the stream before it copies.
        table = self._cupy.cuda.alloc_pinned_memory(nbytes)
        np.frombuffer(table, np.int32, len(ids))[...] = ids
        runtime = self._cupy.cuda.runtime
        runtime.memcpyAsync(self.ids.data.ptr, table.ptr, nbytes, runtime.memcpyHostToDevice, self.stream.ptr)
        return table

    def staging(self, nbytes: int) -> Any:
        """A device buffer of at least so many bytes; its content is in the stream's order."""
        if self._staging is None or self._staging.nbytes < nbytes:
            # CuPy gives memory back to the stream it was allocated on: what still uses the old one comes first.
            with self.stream:
                self._staging = self._cupy.empty(nbytes, np.uint8)
        return self._staging

    def download(self, out: Bytes) -> None:
        """Copy the start of the staging to the host."""
        runtime = self._cupy.cuda.runtime
        staging = self.staging(out.nbytes)
        runtime.memcpyAsync(out.ctypes.data, staging.data.ptr, out.nbytes, runtime.memcpyDeviceToHost, self.stream.ptr)

    def upload(self, data: Bytes) -> None:
        """Copy from the host to the start of the staging."""
        runtime = self._cupy.cuda.runtime
        staging = self.staging(data.nbytes)
        runtime.memcpyAsync(
            staging.data.ptr, data.ctypes.data, data.nbytes, runtime.memcpyHostToDevice, self.stream.ptr
        )

    def finish(self, *held: object, event: Any = None) -> Completion:
        """The completion of all that has been issued. On the event loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            # Nobody is left to hear of what a former loop has issued; it holds its buffers until it is over.
            self._loop, self._flying, self._look_handle = loop, {}, None
        completion = DeviceCompletion(loop, held, event)
        landed = self._landed

        def ran(_: object) -> None:
            # On a thread of the driver, where nothing can be raised. A closed loop has nobody left to tell.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(landed, completion)

        try:
            self.stream.launch_host_func(ran, None)
        except RuntimeError:
            # Nobody will say when it is over, so it has to be over now.
            with contextlib.suppress(RuntimeError):
                self.stream.synchronize()
            raise
        self._flying[completion] = None
        if self._look_handle is None:
            self._look_handle = loop.call_later(_LOOK_SECONDS, self._look, loop)
        return completion

    def _landed(self, completion: DeviceCompletion) -> None:
        self._flying.pop(completion, None)
        if not self._flying and self._look_handle is not None:
            self._look_handle.cancel()
            self._look_handle = None
        completion.finish()

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        """CUDA calls no host function once the device has failed: ask, at times, whether it has."""
        self._look_handle = None
        status = int(self._cupy.cuda.runtime.streamQuery(self.stream.ptr))
        if status in (_SUCCESS, _NOT_READY):
            self._look_handle = loop.call_later(_LOOK_SECONDS, self._look, loop)
            return
        flying, self._flying = self._flying, {}
        for completion in flying:
            completion.finish(KVStreamError(f"the GPU has failed: cudaError {status}"))


def _unpin(ops: weakref.ref[CupyOps], runtime: Any, address: int, registered: bool) -> None:
    if (known := ops()) is not None:
        known._pinned.discard(address)  # pyright: ignore[reportPrivateUsage]  # the other half of `pin`
    if registered:
        # The device may be gone, with all that was registered with it.
        with contextlib.suppress(RuntimeError):
            runtime.hostUnregister(address)
