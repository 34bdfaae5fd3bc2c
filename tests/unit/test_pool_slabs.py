"""Which memory a pool has to lend: every run of every block, in stretches that are apart."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest

from kvstream import ConfigError, KVLayout, KVPool

LAYOUT = KVLayout(layers=3, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16", parts="split")
BLOCKS = 5
PART = LAYOUT.block_bytes // 2


def assert_covers(pool: KVPool) -> None:
    slabs = pool.slabs
    for (low, nbytes), (after, _) in pairwise(slabs):
        assert low + nbytes < after
    for layer in range(pool.layout.layers):
        found = pool.addresses(layer, np.arange(pool.blocks))
        assert found is not None
        starts, run = found
        for start in starts.tolist():
            assert any(low <= start and start + run <= low + nbytes for low, nbytes in slabs)


def test_an_allocated_pool_is_one_slab() -> None:
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    assert pool.slabs == [(pool.layer(0).ctypes.data, pool.nbytes)]
    assert_covers(pool)


def test_k_and_v_of_one_tensor_are_one_slab() -> None:
    tensors = [np.zeros((2, BLOCKS, *LAYOUT.block_shape[1:]), np.float16) for _ in range(3)]
    pool = KVPool.wrap(LAYOUT, [(tensor[0], tensor[1]) for tensor in tensors])
    assert_covers(pool)
    assert sum(nbytes for _, nbytes in pool.slabs) == sum(tensor.nbytes for tensor in tensors)
    assert len(pool.slabs) <= 3


def test_memory_that_is_apart_stays_apart() -> None:
    memory = np.zeros((100, BLOCKS, PART), np.uint8)
    parts = [(memory[10 * i], memory[10 * i + 5]) for i in range(3)]
    pool = KVPool.wrap(LAYOUT, parts)
    assert pool.slabs == [(int(part.ctypes.data), BLOCKS * PART) for pair in parts for part in pair]
    assert_covers(pool)


def test_interleaved_layers_are_one_slab() -> None:
    memory = np.zeros((BLOCKS, 3, 2, PART + 64), np.uint8)
    pool = KVPool.wrap(LAYOUT, [(memory[:, i, 0, :PART], memory[:, i, 1, :PART]) for i in range(3)])
    assert pool.slabs == [(int(memory.ctypes.data), memory.nbytes - 64)]
    assert_covers(pool)


def test_blocks_in_pieces_have_none() -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
    padded = np.zeros((BLOCKS, *layout.block_shape[:-1], 16), np.float16)
    assert KVPool.wrap(layout, [padded[..., :8]]).slabs == []


def test_the_mean_run_joins_neighbours_in_table_and_memory() -> None:
    pool = KVPool.allocate(LAYOUT, blocks=12)
    block = LAYOUT.block_bytes
    for ids, mean in (
        ([3], 1),
        ([3, 4, 5, 6], 4),
        ([3, 4, 8, 9], 2),
        ([3, 4, 5, 9], 2),
        ([6, 5, 4, 3], 1),
        ([0, 2, 4], 1),
    ):
        assert pool.mean_run(1, np.array(ids)) == mean * block, ids
    assert pool.mean_run(1, np.array([], np.intp)) == 0


def test_the_mean_run_of_k_and_v_apart_is_that_of_each() -> None:
    memory = np.zeros((2, 12, PART), np.uint8)
    pool = KVPool.wrap(msgspec.structs.replace(LAYOUT, layers=1), [(memory[0], memory[1])])
    assert pool.mean_run(0, np.arange(4)) == 4 * PART
    padded = np.zeros((2, 12, PART + 64), np.uint8)[..., :PART]
    pool = KVPool.wrap(msgspec.structs.replace(LAYOUT, layers=1), [(padded[0], padded[1])])
    assert pool.mean_run(0, np.arange(4)) == PART


def test_a_plan_serves_every_layer() -> None:
    """Layers that are laid out alike, and one that is not."""
    k, v = np.zeros((2, 12, PART), np.uint8), np.zeros((12, 2, PART + 64), np.uint8)
    pool = KVPool.wrap(LAYOUT, [(k[0], k[1]), (v[:, 0, :PART], v[:, 1, :PART]), np.zeros((12, 2 * PART), np.uint8)])
    ids = np.array([3, 4, 5, 9])
    plan = pool.plan(ids)
    assert pool.plan(plan) is plan
    for layer in (0, 1, 2, 0):
        planned, found = pool.addresses(layer, plan), pool.addresses(layer, ids)
        assert planned is not None and found is not None
        assert planned[0].tolist() == found[0].tolist()
        assert planned[1] == found[1]
        assert pool.mean_run(layer, plan) == pool.mean_run(layer, ids)
    out = [np.zeros(4 * LAYOUT.block_bytes, np.uint8) for _ in range(2)]
    k[:] = np.random.default_rng(1).integers(0, 256, k.shape, np.uint8)
    assert pool.pack(0, plan, out[0]) == pool.pack(0, ids, out[1])
    assert np.array_equal(*out)


def test_a_plan_is_of_one_pool() -> None:
    pools = [KVPool.allocate(LAYOUT, blocks=12) for _ in range(2)]
    plan = pools[0].plan(np.array([11]))
    with pytest.raises(ConfigError, match="plan of another pool"):
        pools[1].pack(0, plan, np.zeros(LAYOUT.block_bytes, np.uint8))
    with pytest.raises(ConfigError, match="block 12 is outside the pool"):
        pools[0].plan(np.array([12]))
