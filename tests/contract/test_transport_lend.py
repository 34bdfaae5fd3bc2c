"""Lending: a source lets the destination read runs of its memory where they are, by way of a slot (shared lane)."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection as Pipe

import numpy as np
import pytest
from transport_suite import SLOT_BYTES, SLOTS, Harness, move, pattern

from kvstream.errors import Corrupted, PeerLost, ProtocolError
from kvstream.transport._host import PeerMemory
from kvstream.transport.base import Lent, StagingBudget
from kvstream.transport.ucx import UcxTransport


@pytest.fixture
async def shared() -> AsyncIterator[Harness]:
    harness = Harness(
        UcxTransport(budget=StagingBudget(1 << 26)), UcxTransport(budget=StagingBudget(1 << 26)), "shared"
    )
    await harness.start()
    yield harness
    await harness.aclose()
    harness.assert_budgets_returned()


def runs(memory: np.ndarray, order: list[int], run: int) -> Lent:
    """Runs of `run` bytes of a flat array, in this order."""
    return Lent((memory.ctypes.data + np.array(order) * run).astype(np.uint64), run)


async def borrow(pair: object, generation: int, local: Lent) -> None:
    destination = pair.destination.connection  # type: ignore[attr-defined]
    lent = await destination.take(0, generation, local.nbytes)
    assert isinstance(lent, Lent)
    destination.borrow(lent, local)


@pytest.mark.parametrize(("remote_run", "local_run"), [(64, 64), (128, 64), (64, 192), (4096, 4096)])
async def test_runs_arrive_in_their_order_and_nowhere_else(shared: Harness, remote_run: int, local_run: int) -> None:
    pair = await shared.connect()
    assert pair.source.connection.lends
    assert pair.destination.connection.lends
    rng = np.random.default_rng(remote_run + local_run)
    source, target = pattern(1, 192 * 2048), pattern(2, 192 * 2048)
    total = min(SLOT_BYTES // 8 * remote_run, 128 * 192)
    total -= total % (3 * 128 * 64 if total >= 3 * 128 * 64 else 64)
    theirs = rng.permutation(source.size // remote_run)[: total // remote_run].tolist()
    ours = rng.permutation(target.size // local_run)[: total // local_run].tolist()
    expected = target.copy()
    moved = source.reshape(-1, remote_run)[theirs].reshape(-1, local_run)
    expected.reshape(-1, local_run)[ours] = moved
    generation = pair.source.connection.lend(0, runs(source, theirs, remote_run))
    await borrow(pair, generation, runs(target, ours, local_run))
    assert pair.destination.connection.check(0, generation)
    assert np.array_equal(target, expected)


async def test_more_runs_than_one_system_call_takes(shared: Harness) -> None:
    pair = await shared.connect()
    source, target = pattern(1, 3000 * 64), np.zeros(3000 * 64, np.uint8)
    order = np.random.default_rng(3).permutation(3000).tolist()
    generation = pair.source.connection.lend(0, runs(source, order, 64))
    await borrow(pair, generation, runs(target, list(range(3000)), 64))
    assert np.array_equal(target.reshape(-1, 64), source.reshape(-1, 64)[order])
    # By way of one buffer, as into a pool whose blocks are in pieces.
    whole = np.zeros_like(target)
    await borrow(pair, generation, runs(whole, [0], whole.size))
    assert np.array_equal(whole, target)


async def test_what_is_recalled_is_not_believed(shared: Harness) -> None:
    pair = await shared.connect()
    source, target = pattern(1, 256), np.zeros(256, np.uint8)
    generation = pair.source.connection.lend(0, runs(source, [0, 1], 128))
    lent = await pair.destination.connection.take(0, generation, 256)
    assert isinstance(lent, Lent)
    pair.destination.connection.borrow(lent, runs(target, [0], 256))
    pair.source.connection.recall(0, generation)
    assert not pair.destination.connection.check(0, generation)
    with pytest.raises(Corrupted):
        await pair.destination.connection.take(0, generation, 256)


async def test_a_recall_does_not_touch_what_came_after(shared: Harness) -> None:
    pair = await shared.connect()
    source = pattern(1, 256)
    old = pair.source.connection.lend(0, runs(source, [0], 256))
    new = await move(pair, 0, pattern(4, 300))
    pair.source.connection.recall(0, old)
    assert pair.destination.connection.check(0, new)


async def test_a_slot_of_bytes_follows_a_loan_and_the_other_way_round(shared: Harness) -> None:
    pair = await shared.connect()
    source, target = pattern(1, 256), np.zeros(256, np.uint8)
    for seed in range(3):
        await move(pair, 0, pattern(seed, 100))
        generation = pair.source.connection.lend(0, runs(source, [1, 0], 128))
        await borrow(pair, generation, runs(target, [0, 1], 128))
        assert target.tobytes() == source[128:].tobytes() + source[:128].tobytes()


async def test_what_is_lent_ends_with_the_connection(shared: Harness) -> None:
    """The source's user may overwrite its blocks as soon as it is told of the loss; a reader must find that out."""
    pair = await shared.connect()
    source = pattern(1, 256)
    generation = pair.source.connection.lend(0, runs(source, [0], 256))
    assert pair.destination.connection.check(0, generation)
    pair.source.connection.close()
    assert not pair.destination.connection.check(0, generation)


async def test_loans_that_make_no_sense(shared: Harness) -> None:
    pair = await shared.connect()
    source = pattern(1, 256)
    too_large = Lent(np.full(SLOT_BYTES // 8 + 1, source.ctypes.data, np.uint64), 1)
    with pytest.raises(ValueError, match="lending"):
        pair.source.connection.lend(0, too_large)
    with pytest.raises(ValueError, match="runs of 63 bytes"):
        pair.source.connection.lend(0, runs(source, [0], 63))
    with pytest.raises(ValueError, match="slot"):
        pair.source.connection.lend(SLOTS, runs(source, [0], 64))
    generation = pair.source.connection.lend(0, runs(source, [0], 64))
    with pytest.raises(ProtocolError):
        await pair.destination.connection.take(0, generation, 65)
    lent = await pair.destination.connection.take(0, generation, 64)
    assert isinstance(lent, Lent)
    for local in (runs(source, [0], 63), runs(source, [0, 1], 64)):
        with pytest.raises(Corrupted):
            pair.destination.connection.borrow(lent, local)
    nowhere = Lent(np.array([8], np.uint64), 64)
    generation = pair.source.connection.lend(0, nowhere)
    with pytest.raises(Corrupted, match="can't be read"):
        await borrow(pair, generation, runs(source, [0], 64))


async def test_other_lanes_do_not_lend() -> None:
    harness = Harness(UcxTransport(budget=StagingBudget(1 << 26)), UcxTransport(budget=StagingBudget(1 << 26)), "put")
    await harness.start()
    pair = await harness.connect()
    assert not pair.source.connection.lends
    with pytest.raises(ValueError, match="lends: False"):
        pair.source.connection.lend(0, runs(pattern(1, 64), [0], 64))
    await harness.aclose()


async def test_without_the_right_to_read_slots_are_used(shared: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(PeerMemory, "read", denied)
    pair = await shared.connect()
    assert pair.source.connection.lane == "shared"
    assert not pair.source.connection.lends
    await move(pair, 0, pattern(1, 1000))


async def test_nothing_is_borrowed_after_the_fence(shared: Harness) -> None:
    pair = await shared.connect()
    source, target = pattern(1, 256), np.zeros(256, np.uint8)
    generation = pair.source.connection.lend(0, runs(source, [0], 256))
    lent = await pair.destination.connection.take(0, generation, 256)
    assert isinstance(lent, Lent)
    await pair.destination.connection.fence()
    with pytest.raises(Corrupted, match="closed"):
        pair.destination.connection.borrow(lent, runs(target, [0], 256))
    assert not target.any()
    with pytest.raises(PeerLost):
        await pair.destination.connection.take(0, generation, 256)


def _sleeper(pipe: Pipe) -> None:
    memory = pattern(1, 4096)
    pipe.send(memory.ctypes.data)
    pipe.recv()


async def test_a_dead_process_is_not_read() -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_sleeper, args=(theirs,), daemon=True)
    process.start()
    try:
        address = await asyncio.to_thread(ours.recv)
        memory = PeerMemory(process.pid or 0)
        target = np.zeros(4096, np.uint8)
        remote, local = np.array([address], np.uint64), np.array([target.ctypes.data], np.uint64)
        memory.read(remote, 4096, local, 4096)
        assert np.array_equal(target, pattern(1, 4096))
        assert memory.alive
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        ours.close()
        theirs.close()
    assert not memory.alive
    with pytest.raises(OSError):
        memory.read(remote, 4096, local, 4096)
    memory.close()
    memory.close()
