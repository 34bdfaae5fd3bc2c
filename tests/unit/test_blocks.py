"""Block tables and the block allocator: exact accounts, and nothing half applied."""

from __future__ import annotations

import random
from array import array
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstream.errors import ConfigError, Refused
from kvstream.memory import BlockAllocator
from kvstream.memory.blocks import block_table


@pytest.mark.parametrize(
    "ids",
    [
        [3, 0, 9],
        (3, 0, 9),
        array("i", [3, 0, 9]),
        np.array([3, 0, 9], np.int32),
        np.array([3, 0, 9], np.uint64),
        np.array([3, 7, 0, 7, 9])[::2],
        [np.int64(3), np.int32(0), np.uint8(9)],
    ],
)
def test_a_table_keeps_its_order(ids: Any) -> None:
    table = block_table(ids, 10, "blocks")
    assert table.tolist() == [3, 0, 9]
    assert table.dtype == np.intp
    assert not table.flags.writeable


def test_a_range_is_a_table() -> None:
    assert block_table(range(4, 8), 10, "blocks").tolist() == [4, 5, 6, 7]


def test_a_table_is_a_copy() -> None:
    ids = np.array([1, 2, 3])
    table = block_table(ids, 10, "blocks")
    ids[:] = 0
    assert table.tolist() == [1, 2, 3]


def test_an_empty_table_passes() -> None:
    assert block_table([], 10, "blocks").tolist() == []
    assert block_table(np.array([], np.int64), 10, "blocks").tolist() == []


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ([0, 10], "block 10 is outside the pool, whose blocks are 0 to 9"),
        ([0, -1], "block -1 is outside the pool"),
        (np.array([4, -3, 99]), "block -3 is outside the pool"),
        (np.array([2**64 - 1], np.uint64), "block 18446744073709551615 is outside"),
        ([2**70], "ints"),
        ([3, 5, 3], "block 3 appears twice"),
        ([1.0, 2.0], "ints"),
        ([True, 5], "entry 0 is True"),
        ([5, False], "entry 1 is False"),
        (np.array([True, False]), "not bool"),
        (np.array([1.5]), "not float64"),
        (np.array([[1, 2]]), r"shape \(1, 2\)"),
        ("123", "not str"),
        (b"123", "not bytes"),
        ({1, 2}, "not set"),
        (7, "not int"),
        (None, "not NoneType"),
        (["1"], "ints"),
        ([[1, 2]], "ints"),
    ],
)
def test_a_wrong_table_is_refused(ids: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^table: .*{says}") as caught:
        block_table(ids, 10, "table")
    assert caught.value.field == "table"


@given(st.integers(1, 40), st.lists(st.integers(-3, 45), max_size=12), st.booleans())
def test_a_table_is_right_or_refused(blocks: int, ids: list[int], as_array: bool) -> None:
    right = all(0 <= i < blocks for i in ids) and len(set(ids)) == len(ids)
    given_ids = np.array(ids, np.int64) if as_array else ids
    if right:
        assert block_table(given_ids, blocks, "blocks").tolist() == ids
    else:
        with pytest.raises(ConfigError):
            block_table(given_ids, blocks, "blocks")


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_table_of_any_length_is_a_read_only_copy_or_refused(length: int) -> None:
    ids = list(range(length))[::-1]
    table = block_table(ids, length, "blocks")
    ids[0] = 0
    assert table.dtype == np.intp
    assert table.tolist() == list(range(length))[::-1]
    assert not table.flags.writeable
    wrongs: list[tuple[list[Any], int]] = [(ids, length), ([*ids[1:], length], length), ([*ids[1:], -1], length)]
    wrongs += [([*ids[1:-1], False], length), ([*ids[1:], 1.0], length)]
    for wrong, blocks in wrongs:
        with pytest.raises(ConfigError):
            block_table(wrong, blocks, "blocks")


def test_the_lowest_free_blocks_come_first() -> None:
    allocator = BlockAllocator(6)
    assert allocator.acquire(4) == [0, 1, 2, 3]
    allocator.release([2, 0])
    assert allocator.acquire(3) == [0, 2, 4]
    assert repr(allocator) == "BlockAllocator(1 of 6 free)"
    assert all(type(block) is int for block in allocator.acquire(1))


def test_acquiring_too_many_takes_none() -> None:
    allocator = BlockAllocator(4)
    allocator.acquire(3)
    with pytest.raises(Refused, match="no free blocks: 2 wanted, 1 of 4 free") as caught:
        allocator.acquire(2)
    assert caught.value.retry_after is None
    assert allocator.free == 1
    assert allocator.acquire(1) == [3]
    assert allocator.acquire(0) == []


@pytest.mark.parametrize("wrong", [[0, 1, 5], [0, 0], [0, 1, 3], [1, 4], [-1, 0], [0, 1.0]])
def test_a_wrong_release_changes_nothing(wrong: Any) -> None:
    allocator = BlockAllocator(4)
    allocator.acquire(3)
    with pytest.raises(ConfigError) as caught:
        allocator.release(wrong)
    assert caught.value.field == "blocks"
    assert allocator.free == 1
    allocator.release([0, 1, 2])
    assert allocator.acquire(4) == [0, 1, 2, 3]


def test_double_free_is_refused() -> None:
    allocator = BlockAllocator(4)
    allocator.acquire(2)
    allocator.release([1])
    with pytest.raises(ConfigError, match="block 1 is not held"):
        allocator.release([0, 1])
    assert allocator.free == 3


def test_releasing_nothing_is_fine() -> None:
    allocator = BlockAllocator(4)
    allocator.release([])
    assert allocator.free == 4


@pytest.mark.parametrize("wrong", [0, -1, True, 1.0, 2**31, None])
def test_a_wrong_number_of_blocks(wrong: Any) -> None:
    with pytest.raises(ConfigError, match=r"^blocks: "):
        BlockAllocator(wrong)


@pytest.mark.parametrize("wrong", [-1, 1.0, True, None])
def test_a_wrong_count(wrong: Any) -> None:
    allocator = BlockAllocator(4)
    with pytest.raises(ConfigError, match=r"^n: "):
        allocator.acquire(wrong)
    assert allocator.free == 4


@pytest.mark.parametrize("seed", range(3))
def test_accounts_stay_exact_over_ten_thousand_operations(seed: int) -> None:
    rng = random.Random(seed)
    blocks = 97
    allocator = BlockAllocator(blocks)
    held: set[int] = set()
    refused = 0
    for _ in range(10_000):
        choice = rng.random()
        if choice < 0.5:
            n = rng.randrange(0, 12)
            free = sorted(set(range(blocks)) - held)
            if n > len(free):
                with pytest.raises(Refused):
                    allocator.acquire(n)
                refused += 1
            else:
                taken = allocator.acquire(n)
                assert taken == free[:n]
                held.update(taken)
        elif choice < 0.9:
            gone = rng.sample(sorted(held), rng.randrange(0, min(12, len(held)) + 1))
            allocator.release(gone if rng.random() < 0.5 else np.array(gone, np.int32))
            held.difference_update(gone)
        else:
            some = rng.sample(sorted(held), min(3, len(held)))
            foreign = rng.choice([-1, blocks, *sorted(set(range(blocks)) - held)])
            with pytest.raises(ConfigError):
                allocator.release([*some, foreign])
        assert allocator.free == blocks - len(held)
    assert refused > 0
