"""KVPool: blocks go where the table says and nowhere else, whatever memory an engine brings.

Every test of copying runs on both implementations, that of GPUs against a stand-in for CuPy.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstream.errors import ConfigError, Corrupted, LayoutMismatch, Refused
from kvstream.layout import KVLayout
from kvstream.memory import KVPool
from kvstream.memory.arrays import describe, disjoint, self_overlapping
from kvstream.memory.devices import open_device
from tests.fake_cupy import FakeCupy, OnDevice

SMALL = KVLayout(layers=2, kv_heads=2, head_dim=4, block_tokens=3, dtype="bfloat16")


@pytest.fixture(params=["cpu", "cuda:1"])
def device(request: pytest.FixtureRequest) -> str:
    if request.param != "cpu":
        request.getfixturevalue("cupy")
    return request.param


def on(device: str, arrays: Any) -> Any:
    """`arrays`, as an engine on `device` would pass them."""
    if device == "cpu":
        return arrays
    return [tuple(map(OnDevice, entry)) if isinstance(entry, tuple) else OnDevice(entry) for entry in arrays]


# --- ways in which engines arrange KV memory --------------------------------------------------------------------

GUARD = 7  # elements around and between what belongs to the pool

Entry = Any  # an array, or a pair of arrays
Arrange = Callable[[KVLayout, int, npt.NDArray[Any]], list[Entry]]
"""From a flat element buffer, views of it, one entry per layer. The same views of an array that counts its
elements say where each element of each block lies."""


def contiguous(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    n = blocks * int(np.prod(layout.block_shape))
    starts = [GUARD + layer * (n + GUARD) for layer in range(layout.layers)]
    return [flat[start : start + n].reshape(blocks, *layout.block_shape) for start in starts]


def merged_axes(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    return [array.reshape(blocks, -1) for array in contiguous(layout, blocks, flat)]


def layers_interleaved(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    shape = (blocks, layout.layers, *layout.block_shape)
    whole = flat[GUARD : GUARD + int(np.prod(shape))].reshape(shape)
    return [whole[:, layer] for layer in range(layout.layers)]


def padded_blocks(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    n = int(np.prod(layout.block_shape))
    shape = (layout.layers, blocks, n + GUARD)
    whole = flat[GUARD : GUARD + int(np.prod(shape))].reshape(shape)
    return [whole[layer, :, :n].reshape(blocks, *layout.block_shape) for layer in range(layout.layers)]


def axes_reversed(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """As Fortran order: the block axis varies fastest."""
    n = blocks * int(np.prod(layout.block_shape))
    starts = [GUARD + layer * (n + GUARD) for layer in range(layout.layers)]
    shape = (blocks, *layout.block_shape)
    return [flat[start : start + n].reshape(shape[::-1]).transpose() for start in starts]


def other_order(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """Memory with tokens and heads the other way round than the layout, shown through a transposed view."""
    shape = list(layout.block_shape)
    shape[-3:-1] = shape[-3:-1][::-1]
    n = blocks * int(np.prod(shape))
    starts = [GUARD + layer * (n + GUARD) for layer in range(layout.layers)]
    return [flat[start : start + n].reshape(blocks, *shape).swapaxes(-3, -2) for start in starts]


def every_second(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    n = 2 * blocks * int(np.prod(layout.block_shape))
    starts = [GUARD + layer * (n + GUARD) for layer in range(layout.layers)]
    return [flat[start : start + n : 2].reshape(blocks, *layout.block_shape) for start in starts]


def backwards(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    return [array[::-1] for array in contiguous(layout, blocks, flat)]


def kv_first(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """One tensor (2, blocks, ...) per layer, as pairs."""
    shape = layout.block_shape[1:]
    n = 2 * blocks * int(np.prod(shape))
    starts = [GUARD + layer * (n + GUARD) for layer in range(layout.layers)]
    return [tuple(flat[start : start + n].reshape(2, blocks, *shape)) for start in starts]


def kv_second(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """One tensor (blocks, 2, ...) per layer, as pairs; the value before the key."""
    return [(array[:, 1], array[:, 0]) for array in contiguous(layout, blocks, flat)]


def kv_apart(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """All keys of all layers, then all values."""
    shape = (2, layout.layers, blocks, *layout.block_shape[1:])
    whole = flat[GUARD : GUARD + int(np.prod(shape))].reshape(shape)
    return [(whole[0, layer], whole[1, layer]) for layer in range(layout.layers)]


def kv_by_element(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """Key and value elements alternate."""
    shape = (layout.layers, blocks, *layout.block_shape[1:], 2)
    whole = flat[GUARD : GUARD + int(np.prod(shape))].reshape(shape)
    return [(layer[..., 0], layer[..., 1]) for layer in whole]


def kv_off_the_grid(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """Key and value in one tensor, but the value does not start at a multiple of its size."""
    n = int(np.prod(layout.block_shape[1:]))
    whole = flat[GUARD : GUARD + layout.layers * blocks * 4 * n].reshape(layout.layers, blocks, 4 * n)
    shape = (blocks, *layout.block_shape[1:])
    start = n + (n + 1) // 2
    return [(layer[:, :n].reshape(shape), layer[:, start : start + n].reshape(shape)) for layer in whole]


def kv_of_unequal_strides(layout: KVLayout, blocks: int, flat: npt.NDArray[Any]) -> list[Entry]:
    """Dense keys, and right behind them values with gaps."""
    n = int(np.prod(layout.block_shape[1:]))
    whole = flat[GUARD : GUARD + layout.layers * 3 * blocks * n].reshape(layout.layers, 3 * blocks * n)
    shape = (blocks, *layout.block_shape[1:])
    return [
        (layer[: blocks * n].reshape(shape), layer[blocks * n :].reshape(blocks, 2 * n)[:, :n].reshape(shape))
        for layer in whole
    ]


SINGLE: list[Arrange] = [
    contiguous,
    merged_axes,
    layers_interleaved,
    padded_blocks,
    axes_reversed,
    every_second,
    backwards,
]
PAIRS: list[Arrange] = [kv_first, kv_second, kv_apart, kv_by_element, kv_off_the_grid, kv_of_unequal_strides]


class Model:
    """Engine memory between guards, and for each layer which element of it is which element of which block."""

    def __init__(self, layout: KVLayout, blocks: int, arrange: Arrange, seed: int) -> None:
        itemsize = layout.np_dtype.itemsize
        size = 3 * (layout.layers + 1) * (blocks * (layout.block_bytes // itemsize + GUARD) + GUARD)
        self.layout = layout
        self.memory = np.random.default_rng(seed).integers(0, 256, (size, itemsize), np.uint8)
        flat = self.memory.reshape(-1).view(layout.np_dtype)
        self.arrays = arrange(layout, blocks, flat)
        self._where: list[npt.NDArray[np.intp]] = []
        for entry in arrange(layout, blocks, np.arange(size)):
            parts = entry if isinstance(entry, tuple) else (entry,)
            self._where.append(np.concatenate([part.reshape(blocks, -1) for part in parts], axis=1))

    def read(self, layer: int, ids: npt.NDArray[np.intp]) -> bytes:
        return self.memory[self._where[layer][ids]].tobytes()

    def written(self, layer: int, ids: npt.NDArray[np.intp], data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """The whole memory, guards included, as it must be after `data` went into these blocks."""
        expected = self.memory.copy()
        expected[self._where[layer][ids]] = data.reshape(len(ids), -1, self.memory.shape[1])
        return expected


layouts = st.builds(
    KVLayout,
    layers=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 5),
    block_tokens=st.integers(1, 4),
    dtype=st.sampled_from(["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8"]),
    order=st.sampled_from(["NHD", "HND"]),
    parts=st.sampled_from(["split", "packed"]),
) | st.builds(
    KVLayout,
    layers=st.integers(1, 3),
    kv_heads=st.just(1),
    head_dim=st.integers(1, 9),
    block_tokens=st.integers(1, 4),
    dtype=st.sampled_from(["bfloat16", "uint8"]),
    parts=st.just("latent"),
)


def arrangements(layout: KVLayout) -> list[Arrange]:
    heads = [other_order] if layout.parts != "latent" else []
    return [*SINGLE, *heads, *(PAIRS if layout.parts == "split" else [])]


@st.composite
def tables(draw: st.DrawFn, blocks: int) -> npt.NDArray[np.intp]:
    """Shuffled tables, runs, single blocks; without duplicates."""
    if draw(st.booleans()):
        start = draw(st.integers(0, blocks - 1))
        return np.arange(start, draw(st.integers(start + 1, blocks)))
    return np.array(draw(st.permutations(range(blocks))))[: draw(st.integers(1, blocks))]


# --- blocks arrive where they belong, and nothing else changes ---------------------------------------------------


@settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
@given(st.data())
def test_pack_and_unpack_touch_exactly_their_blocks(device: str, data: st.DataObject) -> None:
    layout = data.draw(layouts)
    blocks = data.draw(st.integers(1, 6))
    model = Model(layout, blocks, data.draw(st.sampled_from(arrangements(layout))), data.draw(st.integers(0, 9)))
    pool = KVPool.wrap(layout, on(device, model.arrays))
    assert (pool.blocks, pool.device) == (blocks, device)
    rng = np.random.default_rng(1)
    for _ in range(3):
        layer = data.draw(st.integers(0, layout.layers - 1))
        ids = data.draw(tables(blocks))
        nbytes = len(ids) * layout.block_bytes

        before = model.memory.copy()
        out = np.full(nbytes + 5, 0xA5, np.uint8)
        assert pool.pack(layer, ids, out) == nbytes
        assert out[:nbytes].tobytes() == model.read(layer, ids)
        assert (out[nbytes:] == 0xA5).all()
        assert np.array_equal(model.memory, before)

        # Three bytes in: a slot of a shared segment need not be aligned to the elements.
        arriving = rng.integers(0, 256, nbytes + 3, np.uint8)[3:]
        expected = model.written(layer, ids, arriving)
        pool.unpack(layer, ids, arriving)
        assert np.array_equal(model.memory, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_bytes_survive_between_pools_of_different_strides(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    source = Model(layout, data.draw(st.integers(4, 6)), data.draw(st.sampled_from(arrangements(layout))), 1)
    target = Model(layout, data.draw(st.integers(4, 6)), data.draw(st.sampled_from(arrangements(layout))), 2)
    sending, receiving = KVPool.wrap(layout, source.arrays), KVPool.wrap(layout, target.arrays)
    n = data.draw(st.integers(1, 4))
    from_ids, to_ids = data.draw(tables(4))[:n], data.draw(tables(4))[:n]
    from_ids, to_ids = from_ids[: len(to_ids)], to_ids[: len(from_ids)]
    slot = np.empty(len(from_ids) * layout.block_bytes, np.uint8)
    for layer in range(layout.layers):
        sending.pack(layer, from_ids, slot)
        receiving.unpack(layer, to_ids, slot)
        assert target.read(layer, to_ids) == source.read(layer, from_ids)


def test_larger_blocks_in_every_arrangement(device: str) -> None:
    """Blocks of several KiB, so that gathers from strided memory take more than one chunk."""
    layout = KVLayout(layers=2, kv_heads=4, head_dim=64, block_tokens=16, dtype="bfloat16")
    ids = np.random.default_rng(0).permutation(40)[:33]
    for arrange in arrangements(layout):
        model = Model(layout, 40, arrange, 3)
        pool = KVPool.wrap(layout, on(device, model.arrays))
        out = np.empty(len(ids) * layout.block_bytes, np.uint8)
        pool.pack(1, ids, out)
        assert out.tobytes() == model.read(1, ids), arrange.__name__
        expected = model.written(1, ids, out[::-1].copy())
        pool.unpack(1, ids, out[::-1].copy())
        assert np.array_equal(model.memory, expected), arrange.__name__


def test_gathers_do_not_copy_strided_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """np.take copies a source that is not C-contiguous whole, and an `out` of mode "raise" too."""
    seen: list[bool] = []
    take = np.take

    def spy(rows: Any, index: Any, *, axis: int, out: Any, mode: str) -> Any:
        seen.append(rows.flags.c_contiguous and out.flags.c_contiguous and mode == "clip" and index.dtype == np.intp)
        return take(rows, index, axis=axis, out=out, mode=mode)

    monkeypatch.setattr(np, "take", spy)
    layout = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
    for arrange in (contiguous, merged_axes, layers_interleaved, kv_first, kv_second):
        model = Model(layout, 8, arrange, 0)
        KVPool.wrap(layout, model.arrays).pack(1, np.array([3, 1, 2]), np.empty(3 * layout.block_bytes, np.uint8))
    assert seen == [True] * 5


def test_ids_of_any_int_type(device: str) -> None:
    model = Model(SMALL, 6, contiguous, 0)
    pool = KVPool.wrap(SMALL, on(device, model.arrays))
    for dtype in (np.int32, np.uint32, np.uint8, np.int64, np.uint64):
        out = np.empty(2 * SMALL.block_bytes, np.uint8)
        pool.pack(0, np.array([5, 2], dtype), out)
        assert out.tobytes() == model.read(0, np.array([5, 2]))


def test_no_blocks_move_no_bytes(device: str) -> None:
    pool = KVPool.allocate(SMALL, blocks=2, device=device)
    none = np.empty(0, np.intp)
    assert pool.pack(0, none, np.empty(0, np.uint8)) == 0
    pool.unpack(0, none, np.empty(0, np.uint8))


# --- the side that moves bytes checks the bounds -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "ids", "size", "error", "says"),
    [
        (2, [0], 1, ConfigError, "layer: must be 0 to 1, not 2"),
        (-1, [0], 1, ConfigError, "layer: must be 0 to 1, not -1"),
        (0, [0, 4], 2, ConfigError, "block_ids: block 4 is outside the pool, whose blocks are 0 to 3"),
        (0, [-1, 0], 2, ConfigError, "block_ids: block -1 is outside"),
        (0, [[0]], 1, ConfigError, "block_ids: must be one-dimensional"),
        (0, [0.0], 1, ConfigError, "block_ids: .* not float64"),
    ],
)
def test_wrong_calls_move_nothing(
    device: str, layer: int, ids: Any, size: int, error: type[Exception], says: str
) -> None:
    model = Model(SMALL, 4, contiguous, 0)
    before = model.memory.copy()
    pool = KVPool.wrap(SMALL, on(device, model.arrays))
    buffer = np.full(size * SMALL.block_bytes, 0xA5, np.uint8)
    with pytest.raises(error, match=says):
        pool.pack(layer, np.array(ids), buffer)
    assert (buffer == 0xA5).all()
    with pytest.raises(error, match=says):
        pool.unpack(layer, np.array(ids), buffer)
    assert np.array_equal(model.memory, before)


@pytest.mark.parametrize("size", [SMALL.block_bytes - 1, SMALL.block_bytes + 1, 0])
def test_a_wrong_number_of_arriving_bytes_is_corruption(device: str, size: int) -> None:
    pool = KVPool.allocate(SMALL, blocks=2, device=device)
    with pytest.raises(Corrupted, match=f"layer 1: {size} bytes arrived for 1 blocks, which take {SMALL.block_bytes}"):
        pool.unpack(1, np.array([0]), np.ones(size, np.uint8))
    assert not np.asarray(pool.layer(1)).view(np.uint8).any()


def test_wrong_buffers_are_refused(device: str) -> None:
    pool = KVPool.allocate(SMALL, blocks=2, device=device)
    one = np.array([0])
    n = SMALL.block_bytes
    read_only = np.zeros(n, np.uint8)
    read_only.setflags(write=False)
    wrong = {
        f"has {n - 1} bytes, but 1 blocks need {n}": np.zeros(n - 1, np.uint8),
        "read-only": read_only,
        "flat contiguous uint8": np.zeros((n, 1), np.uint8),
        "not int8": np.zeros(n, np.int8),
        r"not uint8 of shape \(96,\)": np.zeros(2 * n, np.uint8)[::2],
    }
    for says, out in wrong.items():
        with pytest.raises(ConfigError, match=f"^out: .*{says}"):
            pool.pack(0, one, out)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^data: "):
        pool.unpack(0, one, np.zeros(n, np.int8))  # type: ignore[arg-type]
    pool.unpack(0, one, read_only)


# --- allocate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e5m2", "int8"])
def test_an_allocated_pool_is_one_zeroed_slab(dtype: str) -> None:
    layout = KVLayout(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype=dtype)
    pool = KVPool.allocate(layout, blocks=5)
    layers = [pool.layer(layer) for layer in range(3)]
    assert pool.nbytes == sum(layer.nbytes for layer in layers) == 3 * 5 * layout.block_bytes
    for layer in layers:
        assert layer.shape == (5, 2, 4, 2, 8)
        assert layer.dtype == layout.np_dtype
        assert not layer.view(np.uint8).any()
    first = layers[0].ctypes.data
    assert first % 4096 == 0
    assert [layer.ctypes.data - first for layer in layers] == [0, 5 * layout.block_bytes, 10 * layout.block_bytes]


def test_writing_to_a_layer_is_writing_to_the_pool() -> None:
    pool = KVPool.allocate(SMALL, blocks=4)
    pool.layer(1)[2] = ml_dtypes.bfloat16(1.5)
    out = np.empty(2 * SMALL.block_bytes, np.uint8)
    pool.pack(1, np.array([2, 0]), out)
    values = out.view(ml_dtypes.bfloat16).reshape(2, *SMALL.block_shape)
    assert (values[0] == 1.5).all()
    assert (values[1] == 0).all()


def test_a_device_pool(cupy: FakeCupy) -> None:
    pool = KVPool.allocate(SMALL, blocks=4, device="cuda")
    assert pool.device == "cuda:0"
    assert pool.layer(0).shape == (4, *SMALL.block_shape)
    assert pool.layer(0).dtype == np.uint16  # bfloat16, which CuPy may not have
    data = np.arange(2 * SMALL.block_bytes, dtype=np.uint8)
    pool.unpack(1, np.array([3, 1]), data)
    data.fill(0)  # unpack must not return while the copy may still read its data
    out = np.empty_like(data)
    pool.pack(1, np.array([3, 1]), out)
    assert np.array_equal(out, np.arange(2 * SMALL.block_bytes, dtype=np.uint8))
    assert cupy.current is None


def test_native_dtypes_stay_on_a_device(cupy: FakeCupy) -> None:
    layout = KVLayout(layers=1, kv_heads=1, head_dim=2, block_tokens=2, dtype="float16")
    assert KVPool.allocate(layout, blocks=1, device="cuda:1").layer(0).dtype == np.float16


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda0", "cpu:0", ""])
def test_an_unknown_device(device: str) -> None:
    with pytest.raises(ConfigError, match=r'^device: must be "cpu", "cuda" or "cuda:N"'):
        KVPool.allocate(SMALL, blocks=1, device=device)


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"^device: GPU memory needs CuPy: install kvstream-runtime\[cu12\]"):
        KVPool.allocate(SMALL, blocks=1, device="cuda:0")


def test_without_a_gpu(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^device: cuda:2 does not exist, this machine shows 2 GPUs"):
        KVPool.allocate(SMALL, blocks=1, device="cuda:2")

    def no_driver() -> int:
        raise RuntimeError("cudaErrorNoDevice")

    monkeypatch.setattr(cupy.cuda.runtime, "getDeviceCount", no_driver)
    with pytest.raises(ConfigError, match=r"^device: cuda:0 .* cudaErrorNoDevice; or use \"cpu\""):
        KVPool.allocate(SMALL, blocks=1, device="cuda:0")


@pytest.mark.parametrize("blocks", [0, -1, 2**31, True, 1.0])
def test_a_wrong_number_of_blocks(blocks: Any) -> None:
    with pytest.raises(ConfigError, match=r"^blocks: must be an int from 1"):
        KVPool.allocate(SMALL, blocks=blocks)


def test_more_than_there_is() -> None:
    huge = KVLayout(layers=4096, kv_heads=128, head_dim=1024, block_tokens=1024, dtype="float32")
    with pytest.raises(ConfigError, match=r"^blocks: .* bytes, which cpu does not have"):
        KVPool.allocate(huge, blocks=2**31 - 1)


# --- wrap -------------------------------------------------------------------------------------------------------


class Torch:
    """What torch tensors offer, without torch. NumPy's and DLPack's ways out of it are closed, as for bfloat16."""

    def __init__(self, array: npt.NDArray[Any], device: str = "cpu", index: int | None = None) -> None:
        self._array = array
        self.shape = array.shape
        self.dtype = _TorchDtype(array.dtype.name)
        self.device = SimpleNamespace(type=device, index=index)

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def element_size(self) -> int:
        return self._array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(stride // self._array.itemsize for stride in self._array.strides)

    def __array__(self, *args: Any) -> Any:
        raise TypeError("Got unsupported ScalarType BFloat16")

    def __dlpack__(self, **kwargs: Any) -> Any:
        raise BufferError("bfloat16")


class _TorchDtype:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return f"torch.{self._name}"


class Dlpack:
    """An array known by DLPack alone."""

    def __init__(self, array: npt.NDArray[Any], device: tuple[int, int] = (1, 0)) -> None:
        self._array = array
        self._device = device

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self._array.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


class Interface:
    """An array known by its array interface alone."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


def in_every_guise(array: npt.NDArray[Any]) -> Iterator[tuple[str, Any]]:
    yield "ndarray", array
    yield "ndarray as bytes", array.reshape(len(array), -1).view(np.uint8)
    yield "ndarray as int8", array.reshape(len(array), -1).view(np.int8)
    yield "ndarray as uint16", array.view(np.uint16)
    yield "torch", Torch(array)
    yield "array interface", Interface(array)
    yield "dlpack", Dlpack(array.view(np.uint16))
    yield "memoryview", memoryview(array.view(np.uint16))
    size = array.nbytes // len(array)
    yield "ctypes", ((ctypes.c_uint8 * size) * len(array)).from_buffer(array.view(np.uint8).reshape(-1))


def test_arrays_of_every_kind_are_wrapped_without_a_copy() -> None:
    names = [name for name, _ in in_every_guise(np.zeros((4, *SMALL.block_shape), ml_dtypes.bfloat16))]
    for position, name in enumerate(names):
        model = Model(SMALL, 4, contiguous, position)
        guises = [list(in_every_guise(array))[position][1] for array in model.arrays]
        pool = KVPool.wrap(SMALL, guises)
        ids = np.array([3, 0, 2])
        data = np.random.default_rng(position).integers(0, 256, 3 * SMALL.block_bytes, np.uint8)
        expected = model.written(1, ids, data)
        pool.unpack(1, ids, data)
        assert np.array_equal(model.memory, expected), name
        assert pool.layer(1) is guises[1]


def test_one_array_with_a_layer_axis_is_a_sequence_of_layers() -> None:
    whole = np.zeros((2, 4, *SMALL.block_shape), ml_dtypes.bfloat16)
    pool = KVPool.wrap(SMALL, whole)  # type: ignore[arg-type]
    pool.unpack(1, np.array([2]), np.ones(SMALL.block_bytes, np.uint8))
    assert whole[1, 2].view(np.uint8).all()
    assert not whole[0].view(np.uint8).any()


def test_the_pool_keeps_the_memory_alive() -> None:
    pool = KVPool.wrap(SMALL, [Interface(np.zeros((4, SMALL.block_bytes), np.uint8)) for _ in range(2)])
    pool.unpack(0, np.array([1, 3]), np.full(2 * SMALL.block_bytes, 7, np.uint8))
    out = np.empty(4 * SMALL.block_bytes, np.uint8)
    pool.pack(0, np.arange(4), out)
    assert out.reshape(4, -1).max(axis=1).tolist() == [0, 7, 0, 7]


def test_a_layer_keeps_its_memory_alive_by_itself() -> None:
    array = Interface(np.zeros((4, SMALL.block_bytes), np.uint8))
    alive = weakref.ref(array)
    layer = open_device("cpu").layer([describe(array, "array")])
    del array
    assert alive() is not None
    del layer
    assert alive() is None


def test_a_wrapped_buffer_can_not_be_resized() -> None:
    buffer = bytearray(96)
    region = describe(buffer, "buffer")
    with pytest.raises(BufferError):
        buffer.extend(b"more")
    assert region.shape == (96,)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_through_an_interface_that_cannot_name_it(dtype: str) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=4, block_tokens=3, dtype=dtype)
    array = np.zeros((4, *layout.block_shape), layout.np_dtype)
    KVPool.wrap(layout, [Interface(array)]).unpack(0, np.array([3]), np.ones(layout.block_bytes, np.uint8))
    assert array.view(np.uint8).reshape(4, -1).any(axis=1).tolist() == [False, False, False, True]


def test_a_torch_tensor_on_a_gpu(cupy: FakeCupy) -> None:
    arrays = [np.zeros((4, *SMALL.block_shape), ml_dtypes.bfloat16) for _ in range(2)]
    pool = KVPool.wrap(SMALL, [Torch(array, "cuda", 1) for array in arrays])
    assert pool.device == "cuda:1"
    pool.unpack(1, np.array([2, 0]), np.ones(2 * SMALL.block_bytes, np.uint8))
    assert arrays[1].view(np.uint8).reshape(4, -1).any(axis=1).tolist() == [True, False, True, False]


def test_an_unreachable_device() -> None:
    array = np.zeros((4, *SMALL.block_shape), ml_dtypes.bfloat16)
    with pytest.raises(ConfigError, match=r"^arrays\[0\]: is on the device mps"):
        KVPool.wrap(SMALL, [Torch(array, "mps")] * 2)
    with pytest.raises(ConfigError, match=r"^arrays\[0\]: is on DLPack device 8"):
        KVPool.wrap(SMALL, [Dlpack(array, (8, 0))] * 2)


def test_arrays_on_two_devices(cupy: FakeCupy) -> None:
    arrays = [np.zeros((4, *SMALL.block_shape), ml_dtypes.bfloat16) for _ in range(2)]
    with pytest.raises(ConfigError, match="layer 1 is on cuda:1, but layer 0 is on cpu"):
        KVPool.wrap(SMALL, [arrays[0], OnDevice(arrays[1])])


def fresh(*shape: int, dtype: Any = ml_dtypes.bfloat16) -> npt.NDArray[Any]:
    return np.zeros(shape, dtype)


READ_ONLY = fresh(4, *SMALL.block_shape)
READ_ONLY.setflags(write=False)
SHARED = fresh(9, *SMALL.block_shape)


@pytest.mark.parametrize(
    ("arrays", "error", "says"),
    [
        ([], LayoutMismatch, "0 layers given, the layout has 2"),
        ([fresh(4, 2, 3, 2, 4)], LayoutMismatch, "1 layers given, the layout has 2"),
        ([fresh(4, 2, 3, 2, 4), fresh(5, 2, 3, 2, 4)], LayoutMismatch, "layer 1: 5 blocks, but layer 0 has 4"),
        ([fresh(4, 2, 3, 2, 4), (fresh(4, 3, 2, 4), fresh(5, 3, 2, 4))], LayoutMismatch, "layer 1: 5 blocks"),
        ([fresh(4, 2, 3, 2, 4), fresh(4, 2, 3, 2, 5)], LayoutMismatch, "layer 1: 120 bytes .* the layout has 96"),
        ([fresh(4, 2, 2, 3, 4)] * 2, LayoutMismatch, r"shape \(2, 2, 3, 4\) per block, .* \(2, 3, 2, 4\)$"),
        ([fresh(2, 4, 3, 2, 4)] * 2, LayoutMismatch, r"pass the pair \(a\[0\], a\[1\]\)"),
        ([fresh(4, 95, dtype=np.uint8)] * 2, LayoutMismatch, "layer 0: 95 bytes"),
        ([fresh(4, 2, 3, 2, 4, dtype=np.float16)] * 2, LayoutMismatch, "layer 0: dtype float16, .* bfloat16"),
        ([fresh(4, 2, 3, 2, 2, dtype=np.uint32)] * 2, LayoutMismatch, "layer 0: dtype uint32"),
        ([fresh()] * 2, LayoutMismatch, r"layer 0: no blocks in an array of shape \(\)"),
        ([fresh(0, 2, 3, 2, 4)] * 2, LayoutMismatch, "layer 0: no blocks"),
        ([(fresh(4, 3, 2, 4),)] * 2, LayoutMismatch, "a pair .* 1 arrays given"),
        ([fresh(4, 2, 3, 2, 4), READ_ONLY], ConfigError, r"arrays\[1\]: layer 1 is read-only"),
        ([bytes(4 * 96), bytearray(4 * 96)], LayoutMismatch, "layer 0: 1 bytes"),
        ([np.zeros((4, 48), ">u2")] * 2, ConfigError, r"arrays\[0\]: dtype >u2 is not in this machine's byte order"),
        (["k", "v"], ConfigError, r"arrays\[0\]: str is no array"),
        ([None, None], ConfigError, r"arrays\[0\]: NoneType is no array"),
        ([SHARED[:4], SHARED[3:7]], ConfigError, r"arrays\[1\]: layers 0 and 1 overlap"),
        ([SHARED[4:8], SHARED[:5][:4]], None, ""),
        ([SHARED[:4], SHARED[:4]], ConfigError, "layers 0 and 1 overlap"),
        ([SHARED[:8:2], SHARED[1:9:2]], None, ""),
        ([SHARED[:4], (SHARED[4:8, 0], SHARED[4:8, 0])], ConfigError, "K and V of layer 1 overlap"),
        ([SHARED[:4], (SHARED[3:7, 0], SHARED[3:7, 1])], ConfigError, "overlap"),
        ([np.broadcast_to(fresh(2, 3, 2, 4), (4, 2, 3, 2, 4))] * 2, ConfigError, "read-only"),
    ],
)
def test_wrapping_the_wrong_arrays(arrays: Any, error: type[Exception] | None, says: str) -> None:
    if error is None:
        KVPool.wrap(SMALL, arrays)
        return
    with pytest.raises(error, match=says):
        KVPool.wrap(SMALL, arrays)


def test_a_pair_needs_split_parts() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=4, block_tokens=3, dtype="bfloat16", parts="packed")
    with pytest.raises(LayoutMismatch, match='parts="packed"'):
        KVPool.wrap(layout, [(fresh(4, 3, 2, 4), fresh(4, 3, 2, 4))])


def test_overlapping_blocks() -> None:
    flat = np.zeros(1024, np.uint8)
    blocks = np.lib.stride_tricks.as_strided(flat, (4, 96), (95, 1))
    with pytest.raises(ConfigError, match=r"arrays\[0\]: blocks of layer 0 overlap.* strides \(95, 1\)"):
        KVPool.wrap(SMALL, [blocks, fresh(4, 2, 3, 2, 4)])


strided = st.tuples(
    st.integers(0, 20),
    st.lists(st.tuples(st.integers(1, 3), st.integers(-13, 13)), min_size=1, max_size=3),
)


def view_of(memory: npt.NDArray[np.uint8], start: int, axes: list[tuple[int, int]], itemsize: int) -> Any:
    typed = memory[200 + start : 200 + start + itemsize].view(f"u{itemsize}")
    return np.lib.stride_tricks.as_strided(typed, [n for n, _ in axes], [stride for _, stride in axes])


def bytes_of(start: int, axes: list[tuple[int, int]], itemsize: int) -> list[int]:
    places = np.array([start])
    for n, stride in axes:
        places = np.add.outer(places, np.arange(n) * stride).reshape(-1)
    return np.add.outer(places, np.arange(itemsize)).reshape(-1).tolist()


@settings(max_examples=300, deadline=None)
@given(strided, strided, st.booleans(), st.sampled_from([1, 2]))
def test_overlap_is_never_missed(
    a: tuple[int, list[tuple[int, int]]], b: tuple[int, list[tuple[int, int]]], same: bool, itemsize: int
) -> None:
    memory = np.zeros(500, np.uint8)
    if same:
        b = (b[0], a[1])
    first, second = (describe(view_of(memory, *spec, itemsize), "a") for spec in (a, b))
    of_first, of_second = (bytes_of(*spec, itemsize) for spec in (a, b))
    if len(set(of_first)) < len(of_first):
        assert self_overlapping(first)
    if set(of_first) & set(of_second):
        assert not disjoint(first, second)
    # A byte range tells where nothing interleaves.
    if max(of_first) < min(of_second) or max(of_second) < min(of_first):
        assert disjoint(first, second)


# --- tables and accounts ----------------------------------------------------------------------------------------


def test_check_blocks() -> None:
    pool = KVPool.allocate(SMALL, blocks=8)
    assert pool.check_blocks([7, 0, 3]).tolist() == [7, 0, 3]
    with pytest.raises(ConfigError, match=r"^blocks: block 8 is outside the pool, whose blocks are 0 to 7"):
        pool.check_blocks([0, 8])
    with pytest.raises(ConfigError, match=r"^source: block 1 appears twice"):
        pool.check_blocks([1, 1], "source")
    with pytest.raises(ConfigError, match=r"^blocks: is empty"):
        pool.check_blocks([])


def test_acquire_and_release() -> None:
    pool = KVPool.allocate(SMALL, blocks=4)
    assert pool.acquire(3) == [0, 1, 2]
    assert pool.free_blocks == 1
    with pytest.raises(Refused):
        pool.acquire(2)
    pool.release([1])
    assert pool.free_blocks == 2
    with pytest.raises(ConfigError, match="block 1 is not held"):
        pool.release([0, 1])
    assert pool.free_blocks == 2


def test_repr_is_short() -> None:
    assert repr(KVPool.allocate(SMALL, blocks=4)) == "KVPool(4 blocks x 2 layers x 96 bytes on cpu)"


@pytest.mark.parametrize("layer", [-1, 2])
def test_there_is_no_such_layer(layer: int) -> None:
    with pytest.raises(ConfigError, match=r"^layer: "):
        KVPool.allocate(SMALL, blocks=4).layer(layer)
