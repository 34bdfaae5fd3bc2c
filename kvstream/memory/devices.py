"""From the name of a device to the operations on its memory. The only place that decides whether CuPy is needed."""

from __future__ import annotations

from kvstream.errors import ConfigError
from kvstream.memory.arrays import ArrayOps, HostOps, import_cupy
from kvstream.memory.cuda import CupyOps

__all__ = ["open_device"]


def open_device(device: str) -> ArrayOps:
    """The operations for "cpu", "cuda" (GPU 0) or "cuda:N". Raises ConfigError naming the remedy."""
    if not isinstance(device, str):  # pyright: ignore[reportUnnecessaryIsInstance] - callers are not all typed
        raise ConfigError("device", f'must be "cpu", "cuda" or "cuda:N", not {device!r}')
    if device == "cpu":
        return HostOps()
    kind, _, number = device.partition(":")
    if kind != "cuda" or (device != kind and not (number.isascii() and number.isdigit())):
        raise ConfigError("device", f'must be "cpu", "cuda" or "cuda:N", not {device!r}')
    index = int(number or 0)
    cupy = import_cupy()
    try:
        gpus = int(cupy.cuda.runtime.getDeviceCount())
    except RuntimeError as error:  # CuPy's CUDARuntimeError is one
        raise ConfigError("device", f'{device} can\'t be used, the CUDA driver says: {error}; or use "cpu"') from error
    if index >= gpus:
        raise ConfigError("device", f"{device} does not exist, this machine shows {gpus} GPUs to the process")
    return CupyOps(cupy, index)
