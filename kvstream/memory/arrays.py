"""Array memory of any origin, reduced to addresses and strides, and the copying of KV blocks in and out of it.

`describe` turns what an engine hands over (NumPy, CuPy, torch, DLPack, the array interfaces, a plain buffer) into a
`Region`; `HostOps` (and `CupyOps`, in cuda.py) turn regions into `LayerMemory`, which gathers and scatters blocks. No
checks of ids or sizes happen here: that is the pool's part. Nothing here copies an engine's array, and neither CuPy nor
torch is imported unless an array already comes from it or the caller names a GPU.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from kvstream.errors import ConfigError, KVStreamError
from kvstream.memory.completion import COMPLETED, Completion

__all__ = [
    "ArrayOps",
    "Bytes",
    "Grid",
    "HostOps",
    "Ids",
    "LayerMemory",
    "Region",
    "Spans",
    "Staged",
    "describe",
    "disjoint",
    "grid_of",
    "import_cupy",
    "self_overlapping",
    "spans_of",
]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.intp]

# Temporaries of a gather from strided memory: small enough for the second-level cache.
_CHUNK_BYTES: Final = 128 * 1024
_PAGE_BYTES: Final = 4096
_NO_STAGING: Final = "staging on a device is for pools on a GPU, and this one is on the cpu"

_DLPACK_HOST: Final = (1, 3)  # kDLCPU, kDLCUDAHost
_DLPACK_CUDA: Final = (2, 13)  # kDLCUDA, kDLCUDAManaged


@dataclass(frozen=True, slots=True)
class Region:
    """Strided memory: where each element of an array is.

    `shape` counts elements of `itemsize` bytes, `strides` are in bytes and may be negative, `address` is that of the
    element with all indices zero. `dtype` is the element type's NumPy name, `device` "cpu" or "cuda:N". `owner` is
    whatever keeps the memory alive.
    """

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    dtype: str
    device: str
    writable: bool
    owner: object

    @property
    def extent(self) -> tuple[int, int]:
        """First byte and one past the last byte."""
        spans = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        low = self.address + sum(span for span in spans if span < 0)
        return low, self.address + sum(span for span in spans if span > 0) + self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes in one entry of the first axis."""
        return math.prod(self.shape[1:]) * self.itemsize


def self_overlapping(region: Region) -> bool:
    """Whether two elements may share a byte.

    Sufficient, not exact: every stride must step over all that the smaller strides span, which holds for each
    slice, transposition and interleaving of a dense array. Exactness would cost an integer programme.
    """
    return not _nested(region.shape, region.strides, region.itemsize)


def disjoint(a: Region, b: Region) -> bool:
    """Whether no byte belongs to both. Sufficient, not exact: interleaved regions must have equal strides."""
    (a_low, a_high), (b_low, b_high) = a.extent, b.extent
    if a_high <= b_low or b_high <= a_low:
        return True
    if (a.shape, a.strides, a.itemsize) != (b.shape, b.strides, b.itemsize):
        return False
    # The two are then one array with one more axis, of length two, from the one to the other.
    return _nested((2, *a.shape), (b.address - a.address, *a.strides), a.itemsize)


def _nested(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    span = itemsize
    for stride, n in sorted((abs(stride), n) for n, stride in zip(shape, strides, strict=True) if n > 1):
        if stride < span:
            return False
        span += (n - 1) * stride
    return True


# --- what engines hand over -------------------------------------------------------------------------------------


def describe(array: object, field: str) -> Region:
    """Where the elements of `array` are, without copying or changing it. Raises ConfigError naming `field`."""
    if isinstance(array, np.ndarray):
        known = cast("npt.NDArray[Any]", array)
        return _from_numpy(known, field)
    if all(hasattr(array, name) for name in ("data_ptr", "stride", "element_size")):
        return _from_torch(array, field)
    if (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        index = import_cupy().cuda.runtime.pointerGetAttributes(interface["data"][0]).device
        return _from_interface(array, interface, f"cuda:{index}", field)
    if (interface := getattr(array, "__array_interface__", None)) is not None and interface.get("data") is not None:
        return _from_interface(array, interface, "cpu", field)
    try:
        view = memoryview(cast("bytes", array))
    except TypeError:
        pass
    else:
        return _from_numpy(np.asarray(view), field)
    if hasattr(array, "__dlpack__"):
        return _from_dlpack(array, field)
    raise ConfigError(
        field,
        f"{type(array).__name__} is no array: pass NumPy, CuPy or torch arrays, or objects with DLPack, an array "
        "interface or the buffer protocol",
    )


def _from_numpy(array: npt.NDArray[Any], field: str) -> Region:
    if not array.dtype.isnative:
        raise ConfigError(field, f"dtype {array.dtype.str} is not in this machine's byte order")
    return Region(
        address=array.ctypes.data,
        shape=array.shape,
        strides=array.strides,
        itemsize=array.dtype.itemsize,
        dtype=array.dtype.name,
        device="cpu",
        writable=array.flags.writeable,
        owner=array,
    )


def _from_torch(tensor: Any, field: str) -> Region:
    # Not through DLPack or __cuda_array_interface__: they lack bfloat16 or fp8, or refuse tensors with gradients.
    # Torch names its dtypes as NumPy and ml_dtypes do: "torch.bfloat16".
    kind = str(tensor.device.type)
    if kind not in ("cpu", "cuda"):
        raise ConfigError(field, f"is on the device {kind}; only cpu and cuda memory can be moved")
    itemsize = int(tensor.element_size())
    return Region(
        address=int(tensor.data_ptr()),
        shape=tuple(int(n) for n in tensor.shape),
        strides=tuple(int(n) * itemsize for n in tensor.stride()),
        itemsize=itemsize,
        dtype=str(tensor.dtype).removeprefix("torch."),
        device="cpu" if kind == "cpu" else f"cuda:{tensor.device.index or 0}",
        writable=True,
        owner=tensor,
    )


def _from_interface(array: object, interface: Mapping[str, Any], device: str, field: str) -> Region:
    # Not through np.asarray: NumPy can't parse what ml_dtypes' fp8 types call themselves here, "<f1", and bfloat16
    # is only "<V2". Their names are in the array's dtype, if it has one; without it they are raw elements.
    typestr = str(interface["typestr"])
    itemsize = int(typestr[2:])
    if itemsize > 1 and typestr[0] not in ("|", np.dtype(np.uint16).str[0]):
        raise ConfigError(field, f"dtype {typestr} is not in this machine's byte order")
    name = getattr(getattr(array, "dtype", None), "name", None)
    if not isinstance(name, str):
        name = f"void{8 * itemsize}" if typestr[1:] == "f1" else np.dtype(typestr).name
    address, read_only = interface["data"]
    shape = tuple(int(n) for n in interface["shape"])
    strides = interface.get("strides")
    return Region(
        address=int(address),
        shape=shape,
        strides=tuple(strides) if strides is not None else _c_strides(shape, itemsize),
        itemsize=itemsize,
        dtype=name,
        device=device,
        writable=not read_only,
        owner=array,
    )


def _from_dlpack(array: Any, field: str) -> Region:
    kind = int(array.__dlpack_device__()[0])
    try:
        if kind in _DLPACK_HOST:
            return _from_numpy(np.from_dlpack(array), field)
        if kind in _DLPACK_CUDA:
            return describe(import_cupy().from_dlpack(array), field)
    except (BufferError, RuntimeError, TypeError) as error:
        raise ConfigError(field, f"can't be read through DLPack ({error}); pass a view of it as bytes") from error
    raise ConfigError(field, f"is on DLPack device {kind}; only host and CUDA memory can be moved")


def _c_strides(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    strides: list[int] = []
    for n in reversed(shape):
        strides.append(itemsize)
        itemsize *= n
    return tuple(reversed(strides))


# --- copying blocks ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Spans:
    """Blocks whose every part is one run of memory: part p of block i is `nbytes` at bases[p] + i * steps[p]."""

    bases: npt.NDArray[np.uint64]
    steps: npt.NDArray[np.uint64]
    nbytes: int

    def addresses(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """Where the runs of the blocks `ids` (n,) are, in wire order: shape (n * parts,)."""
        return (self.offsets(ids) + self.bases).ravel()

    def offsets(self, ids: Ids) -> npt.NDArray[np.uint64]:
        """The same from the bases on: shape (n, parts)."""
        return ids.astype(np.uint64)[:, None] * self.steps

    def alike(self, other: Spans) -> bool:
        """Whether blocks lie in this layer as in the other one, but for where the layer is."""
        return self is other or (self.nbytes == other.nbytes and np.array_equal(self.steps, other.steps))

    def mean_run(self, ids: Ids) -> float:
        """Mean length in bytes of the runs of these blocks (n >= 1), where neighbours in the table that are neighbours
        in memory count as one."""
        if bool((self.steps != self.nbytes).any()):
            return self.nbytes
        stretches = 1 + int(np.count_nonzero(ids[1:] - ids[:-1] != 1))
        return self.nbytes * len(ids) / stretches

    def extents(self, blocks: int) -> list[tuple[int, int]]:
        """For each part: its first byte in any of `blocks` blocks, and one past its last."""
        ends = self.bases + self.steps * np.uint64(blocks - 1) + np.uint64(self.nbytes)
        return list(zip(self.bases.tolist(), ends.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class Staged:
    """Some bytes of a device's staging (see `StagingSlab`). `array` is a view of them, of the device's library."""

    address: int
    nbytes: int
    array: Any

    def part(self, start: int, nbytes: int) -> Staged:
        """A part of it."""
        return Staged(self.address + start, nbytes, self.array[start : start + nbytes])


class LayerMemory(Protocol):
    """The KV blocks of one layer, as bytes. Ids and shapes are the caller's responsibility."""

    spans: Spans | None
    """Where the blocks are in memory; None where they are in pieces."""

    def gather(self, ids: Ids, out: Bytes) -> None:
        """Copy the blocks `ids` (n,) into `out` (n, block_bytes), C-contiguous host memory."""
        ...

    def scatter(self, ids: Ids, data: Bytes) -> None:
        """Copy `data` (n, block_bytes), C-contiguous host memory, into the blocks `ids` (n,)."""
        ...

    def gather_async(self, ids: Ids, out: Bytes, after: object | None) -> Completion:
        """As `gather`, behind the device event `after`; `out` is the device's until the completion."""
        ...

    def scatter_async(self, ids: Ids, data: Bytes, after: object | None) -> Completion:
        """As `scatter`, behind the device event `after`; `data` and the blocks are the device's until then."""
        ...

    def gather_staged(self, ids: Ids, out: Staged) -> Completion:
        """As `gather_async`, into staging of the blocks' own device: one launch, and no copy to the host."""
        ...

    def scatter_staged(self, ids: Ids, data: Staged, after: object | None) -> Completion:
        """As `scatter_async`, out of staging of the blocks' own device."""
        ...


class ArrayOps(Protocol):
    """Memory of one device."""

    is_device: bool
    """Whether the memory is a GPU's, so that copies complete later and are ordered by events."""

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        ...

    def pin(self, buffer: Bytes) -> None:
        """Page-lock the whole array that `buffer` is a part of, until that array goes, if the device gains by it."""
        ...

    def mark(self) -> object | None:
        """An event behind all that the calling thread's current stream has been given; None where nothing is late."""
        ...

    def passed(self, event: object) -> Completion:
        """When the device has passed `event`. On the event loop."""
        ...

    def staging(self, nbytes: int, sample: bytes) -> tuple[Staged, bool]:
        """New memory of this device that other processes can be given, beginning with `sample`; and whether it is a
        GPU's in the driver's own words. Raises KVStreamError where there is none."""
        ...

    def store(self, staged: Staged, data: bytes) -> Completion:
        """Fill a few bytes of staging."""
        ...

    def fetch(self, staged: Staged) -> tuple[Completion, Bytes]:
        """A few bytes of staging in host memory, which has them after the completion."""
        ...

    def shareable(self, address: int) -> bool:
        """Whether other processes can be given the allocation at this address."""
        ...

    def current(self) -> AbstractContextManager[object]:
        """The device as the calling thread's current one."""
        ...

    def zeros(self, nbytes: int) -> Any:
        """A new zero-filled uint8 array, shape (nbytes,), on this device. Raises MemoryError."""
        ...

    def typed(self, raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Any:
        """A contiguous uint8 array seen as `dtype`, or as unsigned ints where the device's library lacks it."""
        ...

    def layer(self, parts: Sequence[Region]) -> LayerMemory:
        """One layer whose blocks are the entries of `parts`, side by side in this order."""
        ...


@dataclass(frozen=True, slots=True)
class Grid:
    """A region as an array of unsigned ints of `unit` bytes, its inner axes merged as far as their strides allow."""

    unit: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dense_blocks(self) -> bool:
        """Whether each block is one run of bytes."""
        return len(self.shape) == 2

    @property
    def typestr(self) -> str:
        return np.dtype(f"u{self.unit}").str


def grid_of(region: Region, *, widest: int) -> Grid:
    """Elements become bytes, bytes become the widest ints (up to `widest`) that every stride and run allows."""
    axes: list[tuple[int, int]] = []
    for n, stride in zip((*region.shape[1:], region.itemsize), (*region.strides[1:], 1), strict=True):
        if n == 1:
            continue
        if axes and axes[-1][1] == n * stride:
            axes[-1] = (axes[-1][0] * n, stride)
        else:
            axes.append((n, stride))
    if not axes or axes[-1][1] != 1:
        axes.append((1, 1))
    run = axes.pop()[0]
    steps = (region.strides[0], *(stride for _, stride in axes))
    unit = math.gcd(widest, run, region.address, *steps)
    return Grid(
        unit=unit,
        shape=(region.shape[0], *(n for n, _ in axes), run // unit),
        strides=(*steps, unit),
    )


class _HostView:
    """Lends a region to NumPy, which keeps this object, and so the memory's owner, alive."""

    def __init__(self, region: Region, grid: Grid) -> None:
        self.owner = region.owner
        self.__array_interface__ = _interface(region, grid)


def _interface(region: Region, grid: Grid) -> Mapping[str, object]:
    return {
        "data": (region.address, False),
        "shape": grid.shape,
        "strides": grid.strides,
        "typestr": grid.typestr,
        "version": 3,
    }


class HostOps:
    """Host memory, through NumPy."""

    __slots__ = ()

    device = "cpu"
    is_device = False

    def pin(self, buffer: Bytes) -> None:
        pass

    def mark(self) -> None:
        return None

    def passed(self, event: object) -> Completion:
        raise ConfigError("event", "is of a GPU, and this pool is on the cpu; call when the layer is complete")

    def staging(self, nbytes: int, sample: bytes) -> tuple[Staged, bool]:
        raise KVStreamError(_NO_STAGING)

    def store(self, staged: Staged, data: bytes) -> Completion:
        raise KVStreamError(_NO_STAGING)

    def fetch(self, staged: Staged) -> tuple[Completion, Bytes]:
        raise KVStreamError(_NO_STAGING)

    def shareable(self, address: int) -> bool:
        return True

    def current(self) -> AbstractContextManager[object]:
        return nullcontext()

    def zeros(self, nbytes: int) -> Bytes:
        raw = np.empty(nbytes + _PAGE_BYTES, np.uint8)
        start = -raw.ctypes.data % _PAGE_BYTES
        slab = raw[start : start + nbytes]
        # Written, not np.zeros: the pages exist from now on, and no page fault lands in the event loop later.
        slab.fill(0)
        return slab

    def typed(self, raw: Bytes, dtype: np.dtype[Any], shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return raw.view(dtype).reshape(shape)

    def layer(self, parts: Sequence[Region]) -> LayerMemory:
        return _HostLayer(parts)


class _HostLayer:
    """Blocks in host memory.

    Three ways to gather, fastest first: ids that are one ascending run are a slice; blocks that are rows of one
    dense table go through np.take with `out=`; the rest through fancy indexing, in chunks. (np.take copies the
    whole of a source that is not C-contiguous first: a hundred times slower, which is why the table matters.)
    """

    __slots__ = ("_columns", "_parts", "_table", "spans")

    def __init__(self, parts: Sequence[Region]) -> None:
        grids = [grid_of(part, widest=8) for part in parts]
        self.spans = _spans(parts, grids)
        self._parts = [np.asarray(_HostView(part, grid)) for part, grid in zip(parts, grids, strict=True)]
        self._columns = _columns(parts)
        self._table = _RowTable.over(parts, grids)

    def gather(self, ids: Ids, out: Bytes) -> None:
        run = _ascending_run(ids)
        if run is None and self._table is not None:
            self._table.take(ids, out)
            return
        for memory, columns in zip(self._parts, self._columns, strict=True):
            rows = _shaped(out[:, columns], memory)
            if run is not None:
                rows[...] = memory[run]
                continue
            step = max(1, _CHUNK_BYTES // (columns.stop - columns.start))
            for start in range(0, len(ids), step):
                rows[start : start + step] = memory[ids[start : start + step]]

    def scatter(self, ids: Ids, data: Bytes) -> None:
        run = _ascending_run(ids)
        for memory, columns in zip(self._parts, self._columns, strict=True):
            memory[ids if run is None else run] = _shaped(data[:, columns], memory)

    def gather_async(self, ids: Ids, out: Bytes, after: object | None) -> Completion:
        self.gather(ids, out)
        return COMPLETED

    def scatter_async(self, ids: Ids, data: Bytes, after: object | None) -> Completion:
        self.scatter(ids, data)
        return COMPLETED

    def gather_staged(self, ids: Ids, out: Staged) -> Completion:
        raise KVStreamError(_NO_STAGING)

    def scatter_staged(self, ids: Ids, data: Staged, after: object | None) -> Completion:
        raise KVStreamError(_NO_STAGING)


@dataclass(frozen=True, slots=True)
class _RowTable:
    """All parts of all blocks as rows of one C-contiguous table: part p of block i is row i * step + first[p].

    So interleaved layers, and K and V in one tensor, whatever its axes, still go through np.take at full speed.
    Rows between, which belong to others, are never read.
    """

    rows: Bytes
    step: int
    first: Ids

    @staticmethod
    def over(parts: Sequence[Region], grids: Sequence[Grid]) -> _RowTable | None:
        """The table over `parts`, or None where their blocks are no rows of one."""
        row = parts[0].block_bytes
        stride = parts[0].strides[0]
        blocks = parts[0].shape[0]
        if blocks == 1:
            return None  # one block is always a run
        if any(not grid.dense_blocks for grid in grids) or stride < row or stride % row:
            return None
        base = min(part.address for part in parts)
        offsets = [part.address - base for part in parts]
        if any(part.strides[0] != stride or part.block_bytes != row for part in parts) or any(
            offset % row for offset in offsets
        ):
            return None
        # The table must not span memory that belongs to nobody: parts that lie apart are gathered one by one.
        extents = sorted(part.extent for part in parts)
        if any(later[0] > earlier[1] for earlier, later in pairwise(extents)):
            return None
        end = max(high for _, high in extents)
        whole = Region(base, ((end - base) // row, row), (row, 1), 1, "uint8", "cpu", True, parts)
        rows = np.asarray(_HostView(whole, Grid(1, whole.shape, whole.strides)))
        return _RowTable(rows, stride // row, np.array([offset // row for offset in offsets], np.intp))

    def take(self, ids: Ids, out: Bytes) -> None:
        index = ids if self.step == 1 and len(self.first) == 1 else (ids[:, None] * self.step + self.first).ravel()
        # mode="clip" writes straight into `out`; the default, "raise", would buffer all of it.
        np.take(self.rows, index, axis=0, out=out.reshape(len(index), -1), mode="clip")


def _spans(parts: Sequence[Region], grids: Sequence[Grid]) -> Spans | None:
    same = {part.block_bytes for part in parts}
    if len(same) != 1 or not all(grid.dense_blocks for grid in grids) or any(part.strides[0] < 0 for part in parts):
        return None
    bases = np.array([part.address for part in parts], np.uint64)
    steps = np.array([part.strides[0] for part in parts], np.uint64)
    return Spans(bases, steps, same.pop())


def spans_of(parts: Sequence[Region]) -> Spans | None:
    """Where the blocks are that consist of these parts, if each is one run."""
    return _spans(parts, [grid_of(part, widest=8) for part in parts])


def _columns(parts: Sequence[Region]) -> list[slice]:
    """The bytes of each part within a block on the wire."""
    columns: list[slice] = []
    start = 0
    for part in parts:
        columns.append(slice(start, start + part.block_bytes))
        start += part.block_bytes
    return columns


def _shaped(rows: Bytes, memory: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`rows` (n, bytes of a part), seen as blocks of `memory`. A view: only a contiguous axis is split."""
    return rows.view(memory.dtype).reshape(len(rows), *memory.shape[1:])


def _ascending_run(ids: Ids) -> slice | None:
    """`ids` as a slice where they are consecutive and ascending, else None."""
    first, last = int(ids[0]), int(ids[-1])
    if last - first != len(ids) - 1 or not bool(np.all(ids[1:] > ids[:-1])):
        return None
    return slice(first, last + 1)


def import_cupy() -> Any:
    """CuPy. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("cupy")
    except ImportError as error:
        raise ConfigError(
            "device",
            "GPU memory needs CuPy: install kvstream-runtime[cu12] or kvstream-runtime[cu13], as your CUDA is",
        ) from error
