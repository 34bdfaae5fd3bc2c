"""A stand-in for CuPy and a GPU, for machines without either.

Its "device memory" is host memory that refuses to be mixed with plain NumPy arrays. Its device is a thread: work that
is put on a stream runs later, in the stream's order, behind the events that it waits for, and only while the device is
not held; kernels are the NumPy twin of the real ones. So whatever forgets to wait, or to keep a buffer, is found out.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvstream.memory.kernels import UNITS, Plan

__all__ = ["DeviceArray", "FakeCupy", "OnDevice"]


class DeviceArray(np.ndarray[Any, Any]):
    """As cupy.ndarray: never mixes with NumPy arrays by itself. `owner` is the memory, if it is one of its own."""

    owner: Any = None

    def __array_finalize__(self, parent: Any) -> None:
        self.owner = getattr(parent, "owner", None)

    def __getitem__(self, index: Any) -> Any:
        assert not isinstance(index, np.ndarray) or isinstance(index, DeviceArray)
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        assert not isinstance(index, np.ndarray) or isinstance(index, DeviceArray)
        assert isinstance(value, DeviceArray)
        super().__setitem__(index, value)

    def view(self, *args: Any, **kwargs: Any) -> Any:
        assert self.flags.c_contiguous
        return super().view(*args, **kwargs)

    @property
    def data(self) -> Any:
        return SimpleNamespace(ptr=self.ctypes.data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self.__array_interface__


class OnDevice:
    """Host memory posing as an array of some GPU library."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return self._array.__array_interface__


class CudaError(RuntimeError):
    """As cupy.cuda.runtime.CUDARuntimeError."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError {status}")
        self.status = status


class _Pinned(np.ndarray[Any, Any]):
    """As cupy.cuda.PinnedMemoryPointer."""

    @property
    def ptr(self) -> int:
        return self.ctypes.data


class FakeCupy(ModuleType):
    """`hold` and `release` stop and start the device; `fail` breaks it, as an illegal address would."""

    def __init__(self, gpus: int = 2) -> None:
        super().__init__("cupy")
        self.gpus = gpus
        self.registered: dict[int, tuple[int, int]] = {}
        """Page-locked memory: bytes and flags by address."""
        self.registrations = 0
        """Calls of cudaHostRegister."""
        self.refuses_pinning = False
        self.shares_pools = True
        """Whether CUDA IPC can open what is not of a cudaMalloc of its own."""
        self.memory_left = 1 << 30
        """Bytes that cudaMalloc can still give."""
        self.launches: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []
        self.host_functions = 0
        self._thread_state = threading.local()
        self._condition = threading.Condition()
        self._streams: list[Any] = []  # all that ever were: a stream that is destroyed finishes its work
        self._events: dict[int, int] = {}  # recordings that are under way, by handle
        self._handles = itertools.count(1000)
        self._held = 0
        self._error = 0
        self._closed = False
        self._worker = threading.Thread(target=self._work, name="fake GPU", daemon=True)
        self._build()
        self._worker.start()

    def close(self) -> None:
        with self._condition:
            self._closed = True
            self._condition.notify_all()
        self._worker.join(10)
        assert not self._worker.is_alive()

    # -- what tests do to the device

    def hold(self) -> None:
        """The device starts nothing from now on."""
        with self._condition:
            self._held += 1

    def release(self) -> None:
        with self._condition:
            self._held -= 1
            self._condition.notify_all()

    def fail(self, status: int = 700) -> None:
        """The device is lost: what is queued never runs, and every call says so."""
        with self._condition:
            self._error = status
            self._condition.notify_all()

    def settle(self) -> None:
        """Wait until the device has run everything."""
        with self._condition:
            assert self._condition.wait_for(lambda: not any(s.queue or s.busy for s in self._streams), 10)

    @property
    def current(self) -> int | None:
        """The calling thread's current device, None where it has set none."""
        return getattr(self._thread_state, "device", None)

    # -- the device

    def _work(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._closed or self._runnable() is not None)
                if self._closed:
                    return
                stream = self._runnable()
                assert stream is not None
                stream.busy = True
                work = stream.queue.popleft()
            if isinstance(work, types.FunctionType):
                work()
            with self._condition:
                stream.busy = False
                self._condition.notify_all()

    def _runnable(self) -> Any:
        if self._held or self._error:
            return None
        for stream in self._streams:
            # An int is an event to wait for.
            if stream.queue and not stream.busy and not self._events.get(stream.queue[0], 0):
                return stream
        return None

    def _put(self, stream: Any, work: Any) -> None:
        with self._condition:
            self._check()
            stream.queue.append(work)
            self._condition.notify_all()

    def _check(self) -> None:
        if self._error:
            raise CudaError(self._error)

    # -- the library

    def _build(self) -> None:
        fake = self
        state = self._thread_state

        class Device:
            def __init__(self, index: int) -> None:
                self._index = index

            def __enter__(self) -> None:
                self._before = fake.current
                state.device = self._index

            def __exit__(self, *exc: object) -> None:
                state.device = self._before

        class Stream:
            def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
                assert null or fake.current is not None, "a stream belongs to the current device"
                self.device = fake.current
                self.ptr = 0 if null else next(fake._handles)
                self.queue: deque[Any] = deque()
                self.busy = False
                self._before: list[Any] = []
                fake._streams.append(self)

            def __enter__(self) -> None:
                assert fake.current == self.device
                self._before.append(getattr(state, "stream", None))
                state.stream = self

            def __exit__(self, *exc: object) -> None:
                state.stream = self._before.pop()

            def synchronize(self) -> None:
                with fake._condition:
                    fake._condition.wait_for(lambda: fake._error or not (self.queue or self.busy))
                    fake._check()

            def record(self, event: Any = None) -> Any:
                event = event or Event()
                event.record(self)
                return event

            def launch_host_func(self, call: Callable[[Any], None], argument: Any) -> None:
                def run() -> None:
                    fake.host_functions += 1
                    call(argument)

                fake._put(self, run)

        class Event:
            def __init__(self, disable_timing: bool = False) -> None:
                assert fake.current is not None
                self.ptr = next(fake._handles)
                fake._events[self.ptr] = 0

            def record(self, stream: Any = None) -> None:
                handle = self.ptr
                with fake._condition:
                    fake._events[handle] += 1

                def passed() -> None:
                    with fake._condition:
                        fake._events[handle] -= 1

                fake._put(stream or get_current_stream(), passed)

            @property
            def done(self) -> bool:
                return not fake._events[self.ptr]

        null = Stream(null=True)

        def get_current_stream() -> Any:
            return getattr(state, "stream", None) or null

        def find(pointer: int) -> Any:
            return next(stream for stream in fake._streams if stream.ptr == pointer)

        def memcpy_async(to: int, source: int, nbytes: int, kind: int, stream: int) -> None:
            fake._put(find(stream), lambda: ctypes.memmove(to, source, nbytes) and None)

        def register(address: int, nbytes: int, flags: int) -> None:
            fake.registrations += 1
            if fake.refuses_pinning:
                raise CudaError(304)
            if address in fake.registered:
                raise CudaError(712)
            fake.registered[address] = nbytes, flags

        def ipc_handle(address: int) -> bytes:
            assert fake.current is not None
            if not fake.shares_pools:
                raise CudaError(1)
            return b"handle"

        def query(busy: bool) -> int:
            return fake._error or (600 if busy else 0)

        def pinned(nbytes: int) -> Any:
            return np.full(nbytes, 0xEE, np.uint8).view(_Pinned)

        class Memory:
            """A cudaMalloc. It is host memory, and the driver says so: other processes get at it as at such."""

            def __init__(self, nbytes: int) -> None:
                assert fake.current is not None
                fake._check()
                if nbytes > fake.memory_left:
                    raise CudaError(2)
                fake.memory_left -= nbytes
                self.array = np.full(nbytes, 0xEE, np.uint8)
                weakref.finalize(self, fake._freed, nbytes).atexit = False

        self.cuda = SimpleNamespace(
            Memory=Memory,
            MemoryPointer=lambda memory, offset: (memory, offset),
            Device=Device,
            Stream=Stream,
            Event=Event,
            get_current_stream=get_current_stream,
            alloc_pinned_memory=pinned,
            runtime=SimpleNamespace(
                getDeviceCount=lambda: self.gpus,
                pointerGetAttributes=lambda _: SimpleNamespace(device=1, type=1),
                memcpyHostToDevice=1,
                memcpyDeviceToHost=2,
                memcpyAsync=memcpy_async,
                streamWaitEvent=lambda stream, event: fake._put(find(stream), event),
                streamQuery=lambda stream: query(bool(find(stream).queue or find(stream).busy)),
                eventQuery=lambda event: query(bool(fake._events.get(event, 0))),
                hostRegister=register,
                ipcGetMemHandle=ipc_handle,
                hostUnregister=self.registered.pop,
            ),
        )

        class RawModule:
            def __init__(self, *, code: str, options: tuple[str, ...]) -> None:
                assert fake.current is not None
                self._code = code

            def get_function(self, name: str) -> Callable[..., None]:
                what, _, unit = name.partition("_")
                assert f"{what}_##BYTES" in self._code
                assert f"KERNELS({unit}, " in self._code

                def launch(grid: Any, block: Any, arguments: Any) -> None:
                    words, ids, units, staging = arguments
                    assert all(isinstance(array, DeviceArray) for array in (words, ids, staging))
                    assert isinstance(units, np.uint32)
                    assert int(unit) in UNITS
                    fake.launches.append((name, grid, block))
                    plan = Plan(int(unit), int(units), np.array(words))
                    fake._put(get_current_stream(), lambda: _run(what, plan, grid[0], ids, staging))

                return launch

        self.RawModule = RawModule

    def _freed(self, nbytes: int) -> None:
        self.memory_left += nbytes

    def ndarray(self, n: int, dtype: Any, pointer: Any) -> DeviceArray:
        memory, offset = pointer
        array = memory.array[offset : offset + n].view(dtype).view(DeviceArray)
        array.owner = memory
        return array

    def zeros(self, n: int, dtype: Any) -> DeviceArray:
        assert self.current is not None
        array = np.full(n, 0xEE, dtype)
        self._put(self.cuda.get_current_stream(), lambda: array.fill(0))
        return array.view(DeviceArray)

    def empty(self, n: int, dtype: Any) -> DeviceArray:
        assert self.current is not None
        return np.full(n, 0xEE, dtype).view(DeviceArray)

    def asarray(self, source: npt.NDArray[Any]) -> DeviceArray:
        assert self.current is not None
        return np.array(source, copy=True).view(DeviceArray)


def _run(what: str, plan: Plan, blocks: int, ids: Any, staging: Any) -> None:
    """One launch, as gather_scatter.cu does it."""
    table = np.asarray(ids).view(np.int32)[:blocks].astype(np.intp)
    addresses = plan.addresses(table)
    assert not (addresses % plan.unit).any(), "a GPU can't read across the alignment of its elements"
    low = int(addresses.min())
    span = int(addresses.max()) + plan.unit - low
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * span).from_address(low))
    bytes_of = (addresses - low)[:, :, None] + np.arange(plan.unit)
    wire = np.asarray(staging)[: blocks * plan.units * plan.unit].reshape(bytes_of.shape)
    if what == "gather":
        wire[...] = memory[bytes_of]
    else:
        memory[bytes_of] = wire
