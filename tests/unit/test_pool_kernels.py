"""The kernels' index arithmetic: in NumPy against plain indexing, and the kernels themselves, compiled for the CPU.

Where there is a C++ compiler, gather_scatter.cu is run as it is, one thread after the other, so that a slip between it
and its NumPy twin shows without a GPU.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstream.errors import ConfigError
from kvstream.layout import KVLayout
from kvstream.memory.arrays import describe
from kvstream.memory.kernels import MAX_AXES, UNITS, Plan, source
from tests.unit.test_pool import Model, arrangements, contiguous, layouts, other_order, tables

Run = Callable[[str, Plan, npt.NDArray[np.intp], npt.NDArray[np.uint8]], None]

# What CUDA gives a kernel, for a compiler that knows nothing of it.
_SHIM = """
#define __global__
#define __device__
struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct dim { unsigned x, y; };
static dim blockIdx, gridDim, blockDim, threadIdx;
#include SOURCE
extern "C" void run(void (*kernel)(const Part*, const int*, unsigned, void*), const Part* parts, const int* ids,
                    unsigned units, void* wire, unsigned x, unsigned y, unsigned threads) {
    gridDim = {x, y};
    blockDim = {threads, 1};
    for (unsigned i = 0; i < x * y * threads; ++i) {
        blockIdx = {i / threads / y, i / threads % y};
        threadIdx = {i % threads, 0};
        kernel(parts, ids, units, wire);
    }
}
"""


def plan_of(model: Model, layer: int) -> Plan:
    entry = model.arrays[layer]
    return Plan.over([describe(part, "part") for part in (entry if isinstance(entry, tuple) else (entry,))])


def by_addresses(model: Model, plan: Plan, ids: npt.NDArray[np.intp]) -> bytes:
    """What lies at the addresses that the twin computes."""
    offsets = plan.addresses(ids) - model.memory.ctypes.data
    return model.memory.reshape(-1)[offsets[:, :, None] + np.arange(plan.unit)].tobytes()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        # `make test` needs none; test_the_arithmetic_in_numpy needs none either.
        pytest.skip("no C++ compiler: the kernels' source is not run here, only their twin in NumPy")
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.cu").write_text(source())
    (folder / "shim.cpp").write_text(_SHIM)
    library = folder / "kernels.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-w", '-DSOURCE="kernels.cu"']
    subprocess.run([compiler, *flags, "shim.cpp", "-o", str(library)], cwd=folder, check=True, timeout=60)
    return _runner(library)


def _runner(library: Path) -> Run:
    kernels = ctypes.CDLL(str(library))

    def run(what: str, plan: Plan, ids: npt.NDArray[np.intp], wire: npt.NDArray[np.uint8]) -> None:
        assert wire.ctypes.data % plan.unit == 0
        table = ids.astype(np.int32)
        (x, y), (threads,) = plan.launch(len(ids))
        kernels.run(
            getattr(kernels, f"{what}_{plan.unit}"),
            ctypes.c_void_p(plan.words.ctypes.data),
            ctypes.c_void_p(table.ctypes.data),
            ctypes.c_uint(plan.units),
            ctypes.c_void_p(wire.ctypes.data),
            *map(ctypes.c_uint, (x, y, threads)),
        )

    return run


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    raw = np.zeros(nbytes + 16, np.uint8)
    start = -raw.ctypes.data % 16
    return raw[start : start + nbytes]


relaxed = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)


@relaxed
@given(st.data())
def test_the_arithmetic_in_numpy(data: st.DataObject) -> None:
    layout = data.draw(layouts)
    blocks = data.draw(st.integers(1, 6))
    model = Model(layout, blocks, data.draw(st.sampled_from(arrangements(layout))), data.draw(st.integers(0, 9)))
    ids = data.draw(tables(blocks))
    for layer in range(layout.layers):
        plan = plan_of(model, layer)
        assert plan.unit in UNITS
        assert plan.unit * plan.units == layout.block_bytes
        assert not (plan.addresses(ids) % plan.unit).any()
        assert by_addresses(model, plan, ids) == model.read(layer, ids)


@relaxed
@given(st.data())
def test_the_kernels_do_the_same(run: Run, data: st.DataObject) -> None:
    layout = data.draw(layouts)
    blocks = data.draw(st.integers(1, 6))
    model = Model(layout, blocks, data.draw(st.sampled_from(arrangements(layout))), data.draw(st.integers(0, 9)))
    ids = data.draw(tables(blocks))
    for layer in range(layout.layers):
        plan = plan_of(model, layer)
        wire = aligned(len(ids) * layout.block_bytes)
        run("gather", plan, ids, wire)
        assert wire.tobytes() == model.read(layer, ids)
        wire[...] = np.random.default_rng(layer).integers(0, 256, wire.size, np.uint8)
        expected = model.written(layer, ids, wire)
        run("scatter", plan, ids, wire)
        assert np.array_equal(model.memory, expected)


@pytest.mark.parametrize("arrange", [contiguous, other_order])
def test_large_blocks(run: Run, arrange: Any) -> None:
    """Several tiles of a full thread block each."""
    layout = KVLayout(layers=1, kv_heads=3, head_dim=128, block_tokens=16, dtype="float16")
    model = Model(layout, 4, arrange, 1)
    plan = plan_of(model, 0)
    assert plan.launch(3) == ((3, -(-plan.units // 256)), (256,))
    assert plan.launch(3)[0][1] > 1
    ids = np.array([2, 0, 3])
    wire = aligned(len(ids) * layout.block_bytes)
    run("gather", plan, ids, wire)
    assert wire.tobytes() == model.read(0, ids) == by_addresses(model, plan, ids)


def test_more_units_than_a_grid_has_threads(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstream.memory.kernels._MAX_TILES", 2)
    layout = KVLayout(layers=1, kv_heads=3, head_dim=128, block_tokens=16, dtype="float16")
    model = Model(layout, 2, contiguous, 1)
    plan = plan_of(model, 0)
    assert plan.launch(2) == ((2, 2), (256,))
    wire = aligned(2 * layout.block_bytes)
    run("gather", plan, np.array([1, 0]), wire)
    assert wire.tobytes() == model.read(0, np.array([1, 0]))


def test_the_widest_unit_that_everything_allows() -> None:
    def unit(*arrays: npt.NDArray[Any]) -> int:
        return Plan.over([describe(array, "array") for array in arrays]).unit

    memory = aligned(4096)
    assert unit(memory.reshape(8, 512)) == 16
    assert unit(memory[8:].reshape(2, -1)) == 4  # 4088 bytes: blocks begin at multiples of 4
    assert unit(memory[16:-16].reshape(4, -1)[:, :24]) == 8  # a run of 24 bytes, 1016 bytes apart
    assert unit(memory[:2048].reshape(8, 256), memory[2050:3074].reshape(8, 128)) == 2
    assert unit(memory[1:2049].reshape(8, 256)) == 1
    assert unit(memory.reshape(1, 4096)) == 16


def test_small_blocks_take_few_threads() -> None:
    plan = Plan.over([describe(aligned(256).reshape(4, 64), "array")])
    assert plan.units == 4
    assert plan.launch(4) == ((4, 1), (32,))


def test_more_axes_than_the_kernels_know() -> None:
    shape = (2,) * (MAX_AXES + 3)
    array = aligned(4 ** len(shape))[:: 2 ** len(shape)].reshape(shape)
    strided = np.lib.stride_tricks.as_strided(aligned(3 ** (MAX_AXES + 3)), shape, [3**n for n in range(len(shape))])
    assert Plan.over([describe(array, "array")]).units == 2 ** (MAX_AXES + 2)
    with pytest.raises(ConfigError, match=r"^arrays: a block has 11 strided axes, a GPU pool takes 8"):
        Plan.over([describe(strided, "array")])
