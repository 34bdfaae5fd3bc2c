"""The table of a loan and the plan of its gets: bytes end up where they belong, and nothing is read beyond a slab."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstream.errors import ProtocolError
from kvstream.transport._loans import MAX_KEY_BYTES, MAX_KEYS_BYTES, Exports, Get, KeyedSlab, Loan, Shelf, plan
from kvstream.transport.base import Lent

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
BASE = 1 << 40
OURS = 1 << 41


def addresses(*values: int) -> np.ndarray:
    return np.array(values, np.uint64)


def unpack(packed: bytes) -> int:
    return int.from_bytes(packed, "little")


@quick
@given(
    run=st.sampled_from([1, 3, 8]),
    remote_factor=st.integers(1, 3),
    local_factor=st.integers(1, 3),
    count=st.integers(0, 12),
    spread=st.integers(1, 3),
    keys=st.integers(1, 2),
    seed=st.integers(0, 1 << 32),
)
def test_every_byte_goes_where_it_belongs(
    run: int, remote_factor: int, local_factor: int, count: int, spread: int, keys: int, seed: int
) -> None:
    if local_factor != 1:
        remote_factor = 1  # one run's length divides the other's
    rng = np.random.default_rng(seed)
    total = count * remote_factor * local_factor
    theirs, ours = run * remote_factor, run * local_factor
    remote = rng.permutation(total // remote_factor * spread)[: total // remote_factor] * theirs
    local = rng.permutation(total // local_factor * spread)[: total // local_factor] * ours
    of = rng.integers(0, keys, len(remote)).astype(np.uint64)
    loan = Loan((BASE + remote).astype(np.uint64), theirs, 0, of)
    memory = rng.integers(0, 256, (keys, total * spread * run), np.uint8)  # the same addresses under each key
    expected = np.concatenate([memory[key, at : at + theirs] for key, at in zip(of, remote, strict=True)] or [[]])
    target = np.zeros(total * spread * run, np.uint8)
    gets = plan(loan, Lent((OURS + local).astype(np.uint64), ours))
    for local_at, nbytes, remote_at, key in gets:
        at = remote_at - BASE
        target[local_at - OURS : local_at - OURS + nbytes] = memory[key, at : at + nbytes]
    got = np.concatenate([target[at : at + ours] for at in local] or [[]])
    assert np.array_equal(got, expected)
    assert sum(get.nbytes for get in gets) == total * run


def test_what_is_adjacent_on_both_sides_is_one_get() -> None:
    key = addresses(7, 7, 7, 7)
    there = addresses(BASE, BASE + 64, BASE + 128, BASE + 256)
    here = addresses(OURS, OURS + 64, OURS + 128, OURS + 192)
    assert plan(Loan(there, 64, 0, key), Lent(here, 64)) == [
        Get(OURS, 192, BASE, 7),
        Get(OURS + 192, 64, BASE + 256, 7),
    ]
    assert len(plan(Loan(there, 64, 0, addresses(7, 7, 8, 8)), Lent(here, 64))) == 3
    assert len(plan(Loan(there, 64, 0, key), Lent(here[::-1].copy(), 64))) == 4


def test_k_and_v_that_take_turns_are_two_gets() -> None:
    k, v = BASE, BASE + (1 << 20)
    there = addresses(k, v, k + 64, v + 64, k + 128, v + 128)
    here = there - np.uint64(BASE) + np.uint64(OURS)
    gets = plan(Loan(there, 64, 0, np.zeros(6, np.uint64)), Lent(here, 64))
    assert [get.nbytes for get in gets] == [192, 192]


@quick
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(64, 200))
def test_a_table_names_the_slabs_of_its_runs_and_no_others(places: list[int], run: int) -> None:
    slabs = [KeyedSlab(BASE + 10_000 * i, 4096, bytes([i + 1]) * (i + 1)) for i in range(3)]
    exports = Exports(slabs)
    runs = addresses(*(slabs[place % 3].address + 97 * place for place in places))
    keys = exports.keys(Lent(runs, run)).tobytes()
    assert len(keys) % 8 == 0
    assert len(keys) <= MAX_KEYS_BYTES
    asked: list[bytes] = []

    def note(packed: bytes) -> int:
        asked.append(packed)
        return unpack(packed)

    loan = Shelf(keys, note).loan(runs, run, 3)
    assert loan.keys.tolist() == [unpack(slabs[place % 3].rkey) for place in places]
    assert sorted(asked) == sorted({slabs[place % 3].rkey for place in places})


@pytest.mark.parametrize("address", [0, BASE - 1, BASE + 4096 - 63, BASE + 4096, (1 << 64) - 1, (1 << 64) - 64])
def test_runs_outside_of_the_slabs(address: int) -> None:
    exports = Exports([KeyedSlab(BASE, 4096, b"k")])
    with pytest.raises(ValueError, match="exposed"):
        exports.keys(Lent(addresses(BASE, address), 64))
    shelf = Shelf(exports.keys(Lent(addresses(BASE), 64)).tobytes(), unpack)
    with pytest.raises(ProtocolError, match="not all within"):
        shelf.loan(addresses(BASE, address), 64, 0)
    with pytest.raises(ProtocolError, match="not all within"):
        shelf.loan(addresses(BASE), (1 << 64) - 1, 0)
    shelf.loan(addresses(BASE, BASE + 4096 - 64), 64, 0)


def test_too_many_slabs_at_once() -> None:
    slabs = [KeyedSlab(BASE + 100 * i, 64, b"k") for i in range(5)]
    exports = Exports(slabs)
    starts = addresses(*(slab.address for slab in slabs))
    exports.keys(Lent(starts[:4], 64))
    with pytest.raises(ValueError, match="5 slabs"):
        exports.keys(Lent(starts, 64))
    five = b"".join(Exports([slab]).keys(Lent(addresses(slab.address), 64)).tobytes() for slab in slabs)
    with pytest.raises(ProtocolError):
        Shelf(five, unpack)


@quick
@given(st.binary(max_size=80))
def test_keys_of_garbage(raw: bytes) -> None:
    try:
        shelf = Shelf(raw, unpack_short)
    except ProtocolError:
        return
    with pytest.raises(ProtocolError):
        shelf.loan(addresses(0, (1 << 64) - 1), 1, 0)


def unpack_short(packed: bytes) -> int:
    assert 0 < len(packed) <= MAX_KEY_BYTES
    return len(packed)
