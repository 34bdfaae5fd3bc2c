"""Staging on a GPU (a stand-in): gathers into it, scatters out of it, and who may use which part of it when."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.errors import ConfigError, KVStreamError
from kvstream.layout import KVLayout
from kvstream.memory import KVPool, StagingLease, StagingSlab
from kvstream.memory.arrays import Staged
from tests.fake_cupy import FakeCupy

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
IDS = np.array([3, 1, 6])
NBYTES = len(IDS) * LAYOUT.block_bytes
SAMPLE = bytes(range(64))


@pytest.fixture
def pool(cupy: FakeCupy) -> KVPool:
    return KVPool.allocate(LAYOUT, blocks=8, device="cuda:1")


def bytes_of(staged: Staged) -> bytes:
    """The stand-in's device memory is host memory."""
    return np.asarray(staged.array).tobytes()


def fill(pool: KVPool) -> None:
    rng = np.random.default_rng(1)
    for layer in range(LAYOUT.layers):
        pool.unpack(layer, np.arange(8), rng.integers(0, 256, 8 * LAYOUT.block_bytes, np.uint8))


def lease(slab: StagingSlab, slots: int = 2, slot_bytes: int = NBYTES) -> StagingLease:
    found = slab.lease(slots, slot_bytes)
    assert found is not None
    return found


# --- copies


async def test_through_staging_from_pool_to_pool(cupy: FakeCupy, pool: KVPool) -> None:
    fill(pool)
    wire = np.empty(NBYTES, np.uint8)
    pool.pack(0, IDS, wire)
    staged = lease(pool.staging(4096, SAMPLE)).slot(1, NBYTES)
    cupy.launches.clear()
    cupy.hold()
    gather = pool.pack_staged(0, IDS, staged)
    scatter = pool.unpack_staged(1, IDS[::-1].copy(), staged)
    assert not gather.done() and not scatter.done()
    assert [name.partition("_")[0] for name, *_ in cupy.launches] == ["gather", "scatter"]
    cupy.release()
    await gather
    assert bytes_of(staged) == wire.tobytes()
    await scatter
    # They run on streams of their own: the scatter may have come first.
    await pool.unpack_staged(1, IDS[::-1].copy(), staged)
    pool.pack(1, IDS[::-1].copy(), wire)
    assert bytes_of(staged) == wire.tobytes()
    assert cupy.current is None


async def test_a_scatter_out_of_staging_waits_for_its_event(cupy: FakeCupy, pool: KVPool) -> None:
    fill(pool)
    staged = lease(pool.staging(4096, SAMPLE)).slot(0, NBYTES)
    gather = pool.pack_staged(0, IDS, staged)
    await gather
    with cupy.cuda.Device(1):
        event = cupy.cuda.Event()
    cupy._events[event.ptr] = 1
    scatter = pool.unpack_staged(1, IDS, staged, after=event)
    other = pool.pack_staged(0, IDS, staged)
    await other
    assert not scatter.done()
    cupy._events[event.ptr] = 0
    cupy.hold()
    cupy.release()
    await scatter
    assert scatter.event.done


@pytest.mark.parametrize("nbytes", [0, NBYTES - 1, NBYTES + 1])
def test_staging_of_another_size(cupy: FakeCupy, pool: KVPool, nbytes: int) -> None:
    whole = lease(pool.staging(4096, SAMPLE), slot_bytes=NBYTES + 1).slot(0, NBYTES + 1)
    for copy in (pool.pack_staged, pool.unpack_staged):
        with pytest.raises(ConfigError, match="block_ids"):
            copy(0, IDS, whole.part(0, nbytes))
        with pytest.raises(ConfigError, match="layer"):
            copy(2, IDS, whole.part(0, NBYTES))


async def test_the_sample_is_what_was_given(cupy: FakeCupy, pool: KVPool) -> None:
    slab = pool.staging(4096, SAMPLE)
    assert not slab.is_gpu  # as the driver calls the stand-in's memory
    assert slab.memory.nbytes == slab.limit == 4096
    completion, found = pool.fetch(slab.memory.part(0, len(SAMPLE)))
    await completion
    assert found.tobytes() == SAMPLE
    with pool.current():
        assert cupy.current == 1
    assert cupy.current is None


def test_no_memory_left(cupy: FakeCupy, pool: KVPool) -> None:
    cupy.memory_left = 4095
    with pytest.raises(KVStreamError, match="cuda:1"):
        pool.staging(4096, SAMPLE)


def test_it_is_freed_with_its_last_user(cupy: FakeCupy, pool: KVPool) -> None:
    before = cupy.memory_left
    slab: Any = pool.staging(4096, SAMPLE)
    part: Any = lease(slab).slot(1, 10)
    del slab
    gc.collect()
    assert cupy.memory_left == before - 4096
    del part
    gc.collect()
    assert cupy.memory_left == before


def test_a_pool_on_the_cpu_has_none() -> None:
    pool = KVPool.allocate(LAYOUT, blocks=8)
    staged = Staged(0, NBYTES, None)
    for call in (
        lambda: pool.staging(4096, SAMPLE),
        lambda: pool.pack_staged(0, IDS, staged),
        lambda: pool.unpack_staged(0, IDS, staged),
        lambda: pool.fetch(staged),
    ):
        with pytest.raises(KVStreamError, match="cpu"):
            call()
    with pool.current():
        pass


# --- leases


def empty_slab(nbytes: int) -> StagingSlab:
    return StagingSlab(Staged(1 << 20, nbytes, np.zeros(nbytes, np.uint8)), SAMPLE, is_gpu=False)


def test_a_lease_ends_when_its_last_copy_and_its_connection_have(cupy: FakeCupy) -> None:
    slab = empty_slab(4096)
    held = lease(slab, 2, 1000)
    assert slab.used == held.nbytes == 2048
    held.begin()
    held.begin()
    held.over()
    held.end()
    assert slab.used == 2048
    held.over()
    assert slab.used == 0
    held.end()
    assert slab.used == 0


def test_slots_out_of_range(cupy: FakeCupy) -> None:
    held = lease(empty_slab(4096), 2, 1000)
    for slot, nbytes in ((-1, 1), (2, 1), (0, 0), (0, 1001)):
        with pytest.raises(ValueError, match="slot"):
            held.slot(slot, nbytes)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 1500), st.integers(0, 5)), max_size=30))
def test_leases_never_overlap_and_all_comes_back(steps: list[tuple[int, int, int]]) -> None:
    slab = empty_slab(16384)
    held: list[StagingLease] = []
    for slots, slot_bytes, give_back in steps:
        found = slab.lease(slots, slot_bytes)
        if found is None:
            assert slab.used + slots * slot_bytes > 16384 - 512 or held
        else:
            held.append(found)
        if give_back < len(held):
            held.pop(give_back).end()
        spans = sorted(
            (part.address, part.address + part.nbytes)
            for each in held
            for part in (each.slot(n, each.slot_bytes) for n in range(each.slots))
        )
        low = (1 << 20) + len(SAMPLE)
        for start, end in spans:
            assert start % 512 == 0 and start >= low
            low = end
        assert low <= (1 << 20) + 16384
        assert slab.used == sum(each.nbytes for each in held)
    for each in held:
        each.end()
    assert slab.used == 0
    assert slab.lease(1, 16384 - 512) is not None
