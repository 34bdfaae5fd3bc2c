"""The CUDA driver and NVRTC through ctypes: as much as `gpu_check` needs on a machine where nothing is installed.

It owns function signatures and the loading of libraries, and turns every status into a CudaError. It keeps no account
of memory: who allocates frees, or ends its process.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from collections.abc import Iterator, Sequence
from ctypes import POINTER, byref, c_char_p, c_float, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

__all__ = ["Cuda", "CudaError", "Unavailable"]

_IPC_LAZY_PEER = 1
_REGISTER_PORTABLE = 1
_STREAM_NON_BLOCKING = 1
_ATTRIBUTES = {"multiprocessors": 16, "major": 75, "minor": 76, "unified_addressing": 41}


class Unavailable(Exception):
    """There is no GPU, or a library is missing; the message says which."""


class CudaError(Exception):
    """A call of the driver or of NVRTC failed."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * 64),)


def _load(names: Sequence[str]) -> ctypes.CDLL:
    """The first library that can be loaded, by name or from where wheels and toolkits put it."""
    folders = [f"{path}/nvidia" for path in sys.path if path] + ["/usr/local/nvidia", *glob.glob("/usr/local/cuda*")]
    for name in names:
        for path in (name, *_found(folders, name)):
            try:
                return ctypes.CDLL(path)
            except OSError:
                continue
    raise Unavailable(f"{names[0]} is not there")


def _found(folders: Sequence[str], name: str) -> Iterator[str]:
    for folder in folders:
        if os.path.isdir(folder):
            yield from sorted(glob.glob(f"{glob.escape(folder)}/**/{name}*", recursive=True))


class Cuda:
    """The first GPU, with its primary context current on the calling thread. Addresses and handles are ints."""

    def __init__(self) -> None:
        self._lib = _load(["libcuda.so.1", "libcuda.so"])
        self._module: int | None = None
        count = c_int()
        device = c_int()
        context = c_void_p()
        try:
            self._call("cuInit", c_uint(0))
            self._call("cuDeviceGetCount", byref(count))
            if not count.value:
                raise Unavailable("the driver shows no GPU")
            self._call("cuDeviceGet", byref(device), c_int(0))
            self._call("cuDevicePrimaryCtxRetain", byref(context), device)
            self._call("cuCtxSetCurrent", context)
        except CudaError as error:
            raise Unavailable(f"the CUDA driver can't be used: {error}") from error
        self._device = device
        self.count = count.value

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._lib, name)
        function.restype = c_int
        status = function(*arguments)
        if status:
            text = c_char_p()
            self._lib.cuGetErrorName(c_int(status), byref(text))
            raise CudaError(f"{name}: {(text.value or b'?').decode()} ({status})")

    # -- the device

    @property
    def name(self) -> str:
        buffer = ctypes.create_string_buffer(256)
        self._call("cuDeviceGetName", buffer, c_int(256), self._device)
        return buffer.value.decode()

    @property
    def driver(self) -> str:
        version = c_int()
        self._call("cuDriverGetVersion", byref(version))
        return f"{version.value // 1000}.{version.value % 1000 // 10}"

    @property
    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""
        free, total = c_size_t(), c_size_t()
        self._call("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def attribute(self, name: str) -> int:
        value = c_int()
        self._call("cuDeviceGetAttribute", byref(value), c_int(_ATTRIBUTES[name]), self._device)
        return value.value

    # -- memory

    def alloc(self, nbytes: int) -> int:
        address = c_uint64()
        self._call("cuMemAlloc_v2", byref(address), c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", c_uint64(address))

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8_v2", c_uint64(address), ctypes.c_ubyte(value), c_size_t(nbytes))
        self.synchronize(0)

    def copy(self, to: int, source: int, nbytes: int, stream: int = 0) -> None:
        """Between any two of device and host; with a stream, and page-locked host memory, later."""
        if stream:
            self._call("cuMemcpyAsync", c_uint64(to), c_uint64(source), c_size_t(nbytes), c_void_p(stream))
        else:
            self._call("cuMemcpy", c_uint64(to), c_uint64(source), c_size_t(nbytes))
            # From pageable memory it returns when the driver has the bytes, not when the device has them.
            self.synchronize(0)

    def pin(self, address: int, nbytes: int) -> None:
        self._call("cuMemHostRegister_v2", c_void_p(address), c_size_t(nbytes), c_uint(_REGISTER_PORTABLE))

    def unpin(self, address: int) -> None:
        self._call("cuMemHostUnregister", c_void_p(address))

    def ipc_handle(self, address: int) -> bytes:
        handle = _IpcHandle()
        self._call("cuIpcGetMemHandle", byref(handle), c_uint64(address))
        return bytes(handle)

    def ipc_open(self, handle: bytes) -> int:
        address = c_uint64()
        opened = _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", byref(address), opened, c_uint(_IPC_LAZY_PEER))
        return address.value

    def ipc_close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", c_uint64(address))

    # -- streams and events

    def stream(self) -> int:
        stream = c_void_p()
        self._call("cuStreamCreate", byref(stream), c_uint(_STREAM_NON_BLOCKING))
        return stream.value or 0

    def synchronize(self, stream: int) -> None:
        self._call("cuStreamSynchronize", c_void_p(stream))

    def record(self, stream: int) -> int:
        """A new event, recorded on the stream."""
        event = c_void_p()
        self._call("cuEventCreate", byref(event), c_uint(0))
        self._call("cuEventRecord", event, c_void_p(stream))
        return event.value or 0

    def seconds(self, start: int, end: int) -> float:
        """Between two events; waits for the second, and destroys both."""
        self._call("cuEventSynchronize", c_void_p(end))
        milliseconds = c_float()
        name = "cuEventElapsedTime_v2" if hasattr(self._lib, "cuEventElapsedTime_v2") else "cuEventElapsedTime"
        self._call(name, byref(milliseconds), c_void_p(start), c_void_p(end))
        for event in (start, end):
            self._call("cuEventDestroy_v2", c_void_p(event))
        return milliseconds.value / 1e3

    # -- kernels

    def compile(self, source: str) -> None:
        """Compile CUDA C++ for this device, for `launch`. Raises Unavailable without NVRTC."""
        nvrtc = _load(["libnvrtc.so", "libnvrtc.so.13", "libnvrtc.so.12"])
        program = c_void_p()

        def call(name: str, *arguments: Any) -> None:
            status = getattr(nvrtc, name)(*arguments)
            if status:
                size = c_size_t()
                nvrtc.nvrtcGetProgramLogSize(program, byref(size))
                log = ctypes.create_string_buffer(size.value or 1)
                nvrtc.nvrtcGetProgramLog(program, log)
                raise CudaError(f"{name} failed ({status}): {log.value.decode(errors='replace')[:2000]}")

        options = (c_char_p * 2)(
            b"--std=c++17", f"--gpu-architecture=sm_{self.attribute('major')}{self.attribute('minor')}".encode()
        )
        call("nvrtcCreateProgram", byref(program), source.encode(), b"kernels.cu", c_int(0), None, None)
        call("nvrtcCompileProgram", program, c_int(2), options)
        size = c_size_t()
        call("nvrtcGetCUBINSize", program, byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        call("nvrtcGetCUBIN", program, cubin)
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), cubin)
        self._module = module.value

    def kernel(self, name: str) -> int:
        function = c_void_p()
        self._call("cuModuleGetFunction", byref(function), c_void_p(self._module), name.encode())
        return function.value or 0

    def launch(
        self, kernel: int, grid: tuple[int, int], threads: int, arguments: Sequence[c_uint64 | c_uint], stream: int
    ) -> None:
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self._call(
            "cuLaunchKernel", c_void_p(kernel),
            c_uint(grid[0]), c_uint(grid[1]), c_uint(1), c_uint(threads), c_uint(1), c_uint(1),
            c_uint(0), c_void_p(stream), ctypes.cast(pointers, POINTER(c_void_p)), None,
        )  # fmt: skip
