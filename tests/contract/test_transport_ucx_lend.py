"""Lending: a source lets the destination read runs of its memory where they are, by way of a slot; on the two lanes
that can do so, `shared` and `get`."""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from collections.abc import AsyncIterator, Callable, Iterable
from multiprocessing.connection import Connection as Pipe

import msgspec
import numpy as np
import pytest
from transport_suite import SLOT_BYTES, SLOTS, Harness, Pair, move, pattern, turns

from kvstream.errors import ConfigError, Corrupted, PeerLost, ProtocolError, Recalled
from kvstream.transport import _loans, ucx
from kvstream.transport._host import PeerMemory
from kvstream.transport._loans import Exports
from kvstream.transport._worker import Endpoint, UcpWorker
from kvstream.transport.base import Lane, Lent, Slab, StagingBudget
from kvstream.transport.ucx import UcxConnection, UcxTransport

Memory = np.ndarray
LENDABLE = 1 << 20


def slab(memory: Memory) -> Slab:
    return Slab(memory.ctypes.data, memory.nbytes, memory)


def runs(memory: Memory, order: Iterable[int], run: int) -> Lent:
    """Runs of `run` bytes of a flat array, in this order."""
    return Lent((memory.ctypes.data + np.array(list(order), np.int64) * run).astype(np.uint64), run)


class Lender:
    """A pair of transports on one lane, and the source's memory that it may lend: random bytes."""

    def __init__(self, lane: Lane) -> None:
        self.memory = pattern(1, LENDABLE)
        budgets = StagingBudget(1 << 26), StagingBudget(1 << 26)
        self.harness = Harness(*(UcxTransport(budget=budget, lanes=(lane,)) for budget in budgets), lane)
        self.harness.source.expose([slab(self.memory)])

    async def connect(self) -> Pair:
        pair = await self.harness.connect()
        assert pair.source.connection.lends
        assert pair.destination.connection.lends
        return pair

    async def aclose(self) -> None:
        await self.harness.aclose()
        self.harness.assert_budgets_returned()


async def opened(lane: Lane) -> AsyncIterator[Lender]:
    lender = Lender(lane)
    await lender.harness.start()
    yield lender
    await lender.aclose()


@pytest.fixture(params=["shared", "get"])
async def lender(request: pytest.FixtureRequest) -> AsyncIterator[Lender]:
    async for lender in opened(request.param):
        yield lender


@pytest.fixture
async def shared() -> AsyncIterator[Lender]:
    async for lender in opened("shared"):
        yield lender


@pytest.fixture
async def reader() -> AsyncIterator[Lender]:
    """On the lane `get`."""
    async for lender in opened("get"):
        yield lender


async def taken(pair: Pair, generation: int, nbytes: int, slot: int = 0) -> Lent:
    lent = await pair.destination.connection.take(slot, generation, nbytes)
    assert isinstance(lent, Lent)
    return lent


async def borrow(pair: Pair, generation: int, local: Lent) -> None:
    await pair.destination.connection.borrow(await taken(pair, generation, local.nbytes), local)


# -- bytes


@pytest.mark.parametrize(("remote_run", "local_run"), [(64, 64), (128, 64), (64, 192), (4096, 4096)])
async def test_runs_arrive_in_their_order_and_nowhere_else(lender: Lender, remote_run: int, local_run: int) -> None:
    pair = await lender.connect()
    rng = np.random.default_rng(remote_run + local_run)
    source, target = lender.memory[: 192 * 2048], pattern(2, 192 * 2048)
    total = 128 * 192
    theirs = rng.permutation(source.size // remote_run)[: total // remote_run]
    ours = rng.permutation(target.size // local_run)[: total // local_run]
    expected, before = target.copy(), lender.memory.copy()
    expected.reshape(-1, local_run)[ours] = source.reshape(-1, remote_run)[theirs].reshape(-1, local_run)
    generation = pair.source.connection.lend(0, runs(source, theirs, remote_run))
    await borrow(pair, generation, runs(target, ours, local_run))
    assert pair.destination.connection.check(0, generation)
    assert np.array_equal(target, expected)
    assert np.array_equal(lender.memory, before)


async def test_more_runs_than_one_call_or_batch_takes(lender: Lender) -> None:
    pair = await lender.connect()
    count = 3000
    source, target = lender.memory[: count * 64], np.zeros(count * 64, np.uint8)
    order = np.random.default_rng(3).permutation(count)
    generation = pair.source.connection.lend(0, runs(source, order, 64))
    await borrow(pair, generation, runs(target, range(count), 64))
    assert np.array_equal(target.reshape(-1, 64), source.reshape(-1, 64)[order])
    # By way of one buffer, as into a pool whose blocks are in pieces.
    whole = np.zeros_like(target)
    await borrow(pair, generation, runs(whole, [0], whole.size))
    assert np.array_equal(whole, target)


async def test_the_most_runs_and_more_bytes_than_a_slot_holds(lender: Lender) -> None:
    pair = await lender.connect()
    count = pair.source.connection.lent_runs
    assert count == pair.destination.connection.lent_runs
    assert count * 64 > 7 * SLOT_BYTES
    order = np.random.default_rng(4).permutation(count)
    target = np.zeros(count * 64, np.uint8)
    generation = pair.source.connection.lend(0, runs(lender.memory, order, 64))
    await borrow(pair, generation, runs(target, range(count), 64))
    assert np.array_equal(target.reshape(-1, 64), lender.memory[: count * 64].reshape(-1, 64)[order])
    with pytest.raises(ValueError, match=f"lending {count + 1} runs"):
        pair.source.connection.lend(0, runs(lender.memory, range(count + 1), 64))


async def test_all_slots_at_once(lender: Lender) -> None:
    pair = await lender.connect()
    source = pair.source.connection
    for round_ in range(5):
        targets = [np.zeros(128 << 10, np.uint8) for _ in range(SLOTS)]
        order = np.random.default_rng(round_).permutation(SLOTS * 4).reshape(SLOTS, 4)
        generations = [source.lend(slot, runs(lender.memory, order[slot], 32 << 10)) for slot in range(SLOTS)]

        async def one(slot: int, generation: int, target: Memory) -> None:
            lent = await taken(pair, generation, target.nbytes, slot)
            await pair.destination.connection.borrow(lent, runs(target, [0, 1], 64 << 10))
            assert pair.destination.connection.check(slot, generation)

        await asyncio.gather(*(one(slot, generations[slot], targets[slot]) for slot in range(SLOTS)))
        for slot, target in enumerate(targets):
            assert np.array_equal(target.reshape(4, -1), lender.memory.reshape(-1, 32 << 10)[order[slot]])


async def test_a_slot_of_bytes_follows_a_loan_and_the_other_way_round(lender: Lender) -> None:
    pair = await lender.connect()
    target = np.zeros(256, np.uint8)
    for seed in range(3):
        await move(pair, 0, pattern(seed, 60_000))
        generation = pair.source.connection.lend(0, runs(lender.memory, [1, 0], 128))
        await borrow(pair, generation, runs(target, [0, 1], 128))
        assert target.tobytes() == lender.memory[128:256].tobytes() + lender.memory[:128].tobytes()
        many = np.zeros(1000 * 64, np.uint8)
        generation = pair.source.connection.lend(0, runs(lender.memory, range(1000), 64))
        await borrow(pair, generation, runs(many, [0], many.nbytes))
        assert np.array_equal(many, lender.memory[: many.nbytes])


async def test_memory_of_two_slabs_in_one_loan(reader: Lender) -> None:
    """K and V that are registered apart."""
    other = pattern(5, 4096)
    reader.harness.source.expose([slab(other)])
    pair = await reader.connect()
    both = np.concatenate([runs(reader.memory, [3, 1], 256).addresses, runs(other, [2, 9], 256).addresses])
    order = np.array([0, 2, 1, 3])  # taking turns, as in wire order
    generation = pair.source.connection.lend(0, Lent(both[order], 256))
    target = np.zeros(1024, np.uint8)
    await borrow(pair, generation, runs(target, range(4), 256))
    first, second = reader.memory.reshape(-1, 256), other.reshape(-1, 256)
    assert np.array_equal(target.reshape(4, 256), [first[3], second[2], first[1], second[9]])


# -- what is taken back


@pytest.mark.parametrize("when", ["before", "between", "after"])
async def test_what_is_recalled_is_not_believed(lender: Lender, when: str) -> None:
    pair = await lender.connect()
    source, destination = pair.source.connection, pair.destination.connection
    generation = source.lend(0, runs(lender.memory, [0, 1], 128))
    if when == "before":
        source.recall(0, generation)
    else:
        lent = await taken(pair, generation, 256)
        if when == "between":
            source.recall(0, generation)
        await destination.borrow(lent, runs(np.zeros(256, np.uint8), [0], 256))
        if when == "after" and destination.lane == "shared":
            # There `check` sees the source's own header; with `get` the copy that came behind the bytes.
            assert destination.check(0, generation)
            source.recall(0, generation)
        elif when == "after":
            source.recall(0, generation)
            assert destination.check(0, generation)
            return
    assert not destination.check(0, generation)
    with pytest.raises(Recalled):
        await destination.take(0, generation, 256)


async def test_what_is_recalled_in_the_middle_of_a_read_is_not_believed(
    reader: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the bytes are read before the source takes them back and overwrites them, some after."""
    pair = await reader.connect()
    source, destination = pair.source.connection, pair.destination.connection
    count = 3 * _loans._BATCH
    generation = source.lend(0, runs(reader.memory, range(0, 2 * count, 2), 64))
    batches: list[int] = []
    get_all = Endpoint.get_all

    def interrupted(endpoint: Endpoint, gets: list[_loans.Get], done: Callable[[int], None]) -> None:
        batches.append(len(gets))
        if len(batches) == 2:
            source.recall(0, generation)
            reader.memory[:] = 0xEE
        get_all(endpoint, gets, done)

    monkeypatch.setattr(Endpoint, "get_all", interrupted)
    target = np.zeros(count * 64, np.uint8)
    await borrow(pair, generation, runs(target, range(count), 64))
    assert batches == [_loans._BATCH] * 3
    assert (target[-64:] == 0xEE).all()
    assert not (target[:64] == 0xEE).all()
    assert not destination.check(0, generation)


async def test_a_recall_does_not_touch_what_came_after(lender: Lender) -> None:
    pair = await lender.connect()
    old = pair.source.connection.lend(0, runs(lender.memory, [0], 256))
    new = await move(pair, 0, pattern(4, 300))
    pair.source.connection.recall(0, old)
    assert pair.destination.connection.check(0, new)
    await pair.destination.connection.take(0, new, 300)


async def test_what_is_lent_ends_with_the_connection(shared: Lender) -> None:
    """The source's user may overwrite its blocks as soon as it is told of the loss; a reader must find that out."""
    pair = await shared.connect()
    generation = pair.source.connection.lend(0, runs(shared.memory, [0], 256))
    assert pair.destination.connection.check(0, generation)
    pair.source.connection.close()
    assert not pair.destination.connection.check(0, generation)


async def test_what_is_lent_ends_with_the_connection_for_gets_too(
    reader: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, where the destination has not heard of the loss when it has read the bytes."""
    pair = await reader.connect()
    source, destination = pair.source.connection, pair.destination.connection
    assert isinstance(source, UcxConnection)
    generation = source.lend(0, runs(reader.memory, [0], 256))
    lent = await taken(pair, generation, 256)
    monkeypatch.setattr(source._endpoint, "close", lambda: None)  # the news of it is slow
    source.close()
    await destination.borrow(lent, runs(np.zeros(256, np.uint8), [0], 256))
    assert not destination.check(0, generation)
    monkeypatch.undo()
    source._endpoint.close()


# -- what makes no sense


async def test_loans_that_make_no_sense(lender: Lender) -> None:
    pair = await lender.connect()
    source, destination = pair.source.connection, pair.destination.connection
    memory = lender.memory
    with pytest.raises(ValueError, match="lending"):
        source.lend(0, Lent(np.full(SLOT_BYTES // 8 + 1, memory.ctypes.data, np.uint64), 64))
    with pytest.raises(ValueError, match="runs of 63 bytes"):
        source.lend(0, runs(memory, [0], 63))
    with pytest.raises(ValueError, match="slot"):
        source.lend(SLOTS, runs(memory, [0], 64))
    generation = source.lend(0, runs(memory, [0], 64))
    for nbytes in (-1, 63, 65, 1 << 30, 1 << 62):
        with pytest.raises(ProtocolError):
            await destination.take(0, generation, nbytes)
    lent = await taken(pair, generation, 64)
    for local in (runs(memory, [0], 63), runs(memory, [0, 1], 64)):
        with pytest.raises(Corrupted, match="are wanted"):
            await destination.borrow(lent, local)
    # None of it has hurt the connection.
    target = np.zeros(64, np.uint8)
    await destination.borrow(lent, runs(target, [0], 64))
    assert destination.check(0, generation)
    assert np.array_equal(target, memory[:64])


async def test_memory_that_is_not_there_is_corruption(shared: Lender) -> None:
    pair = await shared.connect()
    generation = pair.source.connection.lend(0, Lent(np.array([8], np.uint64), 64))
    with pytest.raises(Corrupted, match="can't be read"):
        await borrow(pair, generation, runs(shared.memory, [0], 64))


async def test_memory_that_was_not_exposed_is_not_lent(reader: Lender) -> None:
    pair = await reader.connect()
    start, end = reader.memory.ctypes.data, reader.memory.ctypes.data + LENDABLE
    for address in (0, start - 1, end - 63, end, (1 << 64) - 1):
        with pytest.raises(ValueError, match="exposed"):
            pair.source.connection.lend(0, Lent(np.array([start, address], np.uint64), 64))
    pair.source.connection.lend(0, Lent(np.array([start, end - 64], np.uint64), 64))


async def test_tables_of_garbage_are_refused_or_stay_within_the_slabs(reader: Lender) -> None:
    """Whatever a table says, the destination reads nothing outside of the memory that it names, and the connection
    lives. (The packed keys themselves are UCX's, which trusts them.)"""
    pair = await reader.connect()
    source, destination = pair.source.connection, pair.destination.connection
    assert isinstance(source, UcxConnection)
    own = source._own
    assert own is not None
    rng = random.Random(5)
    sane = runs(reader.memory, [5, 0, 3], 64)
    refused = 0
    low, high = reader.memory.ctypes.data, reader.memory.ctypes.data + LENDABLE
    for _ in range(400):
        generation = source.lend(0, sane)
        keys = own.lent_keys(0)
        table = own.data(0, keys + 24)
        what = rng.randrange(5)
        if what == 0:  # an address
            table[keys:].view(np.uint64)[rng.randrange(3)] = rng.choice((rng.getrandbits(64), high - 63, low - 1, 0))
        elif what == 1:  # the slab's address, size, or the key's length
            table[:24].view(np.uint64)[rng.randrange(3)] = rng.choice((rng.getrandbits(64), 0, 1 << 63, keys))
        elif what == 2:
            own.stamp(0, generation, 64, rng.choice((0, 8, keys - 8, keys + 8, 1 << 32, (1 << 64) - 8, 7)))
        elif what == 3:
            own.stamp(0, generation, rng.choice((1, 63, 65, 192, 1 << 63, (1 << 64) - 1)), keys)
        else:
            table[: rng.choice((8, 24, keys))] = 0
        try:
            lent = await taken(pair, generation, 192)
        except (ProtocolError, Corrupted):
            refused += 1
        else:
            assert all(low <= address <= high - lent.run_bytes for address in lent.addresses.tolist())
    assert refused > 300
    assert not destination.lost
    await borrow(pair, source.lend(0, sane), runs(np.zeros(192, np.uint8), [0], 192))


async def test_a_key_that_makes_no_sense(reader: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await reader.connect()

    def unusable(endpoint: Endpoint, packed: bytes) -> int:
        raise PeerLost("unusable remote key")

    monkeypatch.setattr(Endpoint, "unpack_rkey", unusable)
    generation = pair.source.connection.lend(0, runs(reader.memory, [0], 64))
    with pytest.raises(ProtocolError, match="unusable remote key"):
        await pair.destination.connection.take(0, generation, 64)
    assert not pair.destination.connection.lost


async def test_keys_are_unpacked_once_and_their_number_is_bounded(
    reader: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpacked: list[bytes] = []
    unpack = Endpoint.unpack_rkey

    def counted(endpoint: Endpoint, packed: bytes) -> int:
        unpacked.append(packed)
        return unpack(endpoint, packed)

    pair = await reader.connect()
    monkeypatch.setattr(Endpoint, "unpack_rkey", counted)
    for _ in range(3):
        await taken(pair, pair.source.connection.lend(0, runs(reader.memory, [0], 64)), 64)
    assert len(unpacked) == 1
    monkeypatch.setattr(ucx, "_MAX_SHELVES", 1)
    await taken(pair, pair.source.connection.lend(0, runs(reader.memory, [0], 64)), 64)
    other = pattern(2, 64)
    reader.harness.source.expose([slab(other)])
    generation = pair.source.connection.lend(0, runs(other, [0], 64))
    with pytest.raises(ProtocolError, match="more than 1 sets of slabs"):
        await pair.destination.connection.take(0, generation, 64)


async def test_a_slot_is_not_read_twice_at_once(reader: Lender) -> None:
    pair = await reader.connect()
    generation = pair.source.connection.lend(0, runs(reader.memory, [0], 64))
    lent = await taken(pair, generation, 64)
    targets = [np.zeros(64, np.uint8) for _ in range(2)]
    first, second = (pair.destination.connection.borrow(lent, runs(target, [0], 64)) for target in targets)
    third = pair.destination.connection.take(0, generation, 64)
    await first
    for refused in (second, third):
        with pytest.raises(ProtocolError, match="while it is read"):
            await refused
    assert np.array_equal(targets[0], reader.memory[:64])
    assert not targets[1].any()


# -- when it is possible


async def test_other_lanes_do_not_lend() -> None:
    harness = Harness(UcxTransport(budget=StagingBudget(1 << 26)), UcxTransport(budget=StagingBudget(1 << 26)), "put")
    await harness.start()
    pair = await harness.connect()
    assert not pair.source.connection.lends
    assert pair.source.connection.lent_runs == 0
    with pytest.raises(ValueError, match="lends: False"):
        pair.source.connection.lend(0, runs(pattern(1, 64), [0], 64))
    await harness.aclose()


async def test_get_without_exposed_memory_uses_slots() -> None:
    harness = Harness(UcxTransport(budget=StagingBudget(1 << 26)), UcxTransport(budget=StagingBudget(1 << 26)), "get")
    await harness.start()
    pair = await harness.connect()
    assert not pair.source.connection.lends
    assert not pair.destination.connection.lends
    await move(pair, 0, pattern(1, 1000))
    await harness.aclose()


async def test_slots_too_small_for_the_keys_do_not_lend(reader: Lender) -> None:
    pair = await reader.harness.connect(open_lane=False)
    pair.open("get", slot_bytes=_loans.MAX_KEYS_BYTES)
    assert not pair.source.connection.lends
    assert not pair.destination.connection.lends
    await move(pair, 0, pattern(1, 1000))


async def test_memory_that_cannot_be_registered_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    register = UcpWorker.register

    def limited(worker: UcpWorker, memory: Slab, *, writable: bool = False) -> object:
        if memory.nbytes == LENDABLE:
            raise ConfigError("staging", "UCX can't register that much")
        return register(worker, memory, writable=writable)

    monkeypatch.setattr(UcpWorker, "register", limited)
    lender = Lender("get")
    await lender.harness.start()
    pair = await lender.harness.connect()
    assert not pair.source.connection.lends
    await move(pair, 0, pattern(1, 1000))
    await lender.aclose()


async def test_memory_is_registered_once_and_until_the_transport_closes(
    reader: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    registered: list[int] = []
    register = UcpWorker.register

    def counted(worker: UcpWorker, memory: Slab, *, writable: bool = False) -> object:
        registered.append(memory.address)
        assert not writable  # what is lent, and what a destination gets into, no peer has to write
        return register(worker, memory, writable=writable)

    monkeypatch.setattr(UcpWorker, "register", counted)
    for _ in range(3):
        pair = await reader.connect()
    assert registered.count(reader.memory.ctypes.data) == 1
    assert isinstance(reader.harness.source, UcxTransport)
    await pair.source.connection.fence()
    pair = await reader.connect()
    await borrow(
        pair, pair.source.connection.lend(0, runs(reader.memory, [0], 64)), runs(np.zeros(64, np.uint8), [0], 64)
    )
    await reader.harness.source.aclose()
    assert reader.harness.source.exports() is None
    assert registered.count(reader.memory.ctypes.data) == 1


async def test_an_answer_that_takes_up_loans_nobody_offered(reader: Lender) -> None:
    pair = await reader.harness.connect(open_lane=False)
    source, destination = pair.source.connection, pair.destination.connection
    offer = msgspec.msgpack.decode(source.offer_lanes(("get",), 2, 100), type=ucx._Offer)
    assert not offer.lends
    answer = msgspec.msgpack.decode(destination.accept_lane(msgspec.msgpack.encode(offer), ("get",)), type=ucx._Answer)
    with pytest.raises(ProtocolError, match="not offered"):
        source.open_lane(msgspec.msgpack.encode(msgspec.structs.replace(answer, lends=True)))


async def test_without_the_right_to_read_slots_are_used(shared: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(PeerMemory, "read", denied)
    pair = await shared.harness.connect()
    assert pair.source.connection.lane == "shared"
    assert not pair.source.connection.lends
    await move(pair, 0, pattern(1, 1000))


# -- the end


async def test_nothing_is_borrowed_after_the_fence(lender: Lender) -> None:
    pair = await lender.connect()
    target = np.zeros(256, np.uint8)
    generation = pair.source.connection.lend(0, runs(lender.memory, [0], 256))
    lent = await taken(pair, generation, 256)
    await pair.destination.connection.fence()
    with pytest.raises((Corrupted, PeerLost), match="closed"):
        await pair.destination.connection.borrow(lent, runs(target, [0], 256))
    assert not target.any()
    with pytest.raises(PeerLost):
        await pair.destination.connection.take(0, generation, 256)


@pytest.mark.parametrize("how", ["close", "fence", "aclose", "peer"])
async def test_a_borrow_under_way_ends_when_nothing_is_written_any_more(reader: Lender, how: str) -> None:
    """Whatever ends the connection: once the future is done the memory is ours."""
    for patience in range(8):
        pair = await reader.connect()
        source, destination = pair.source.connection, pair.destination.connection
        count = 8
        generation = source.lend(0, runs(reader.memory, range(count), LENDABLE // count))
        lent = await taken(pair, generation, LENDABLE)
        target = np.zeros(LENDABLE, np.uint8)
        reading = destination.borrow(lent, runs(target, reversed(range(count)), LENDABLE // count))
        await turns(patience)
        if how == "close":
            destination.close()
        elif how == "fence":
            await destination.fence()
            assert reading.done()
        elif how == "peer":
            await source.fence()
        elif patience == 7:  # that is the end of every connection: once
            await reader.harness.destination.aclose()
            assert reading.done()
        async with asyncio.timeout(5):
            await asyncio.wait([reading])
        assert reading.exception() is None or isinstance(reading.exception(), PeerLost)
        target[:] = 0xEE
        await destination.fence()
        await turns()
        assert (target == 0xEE).all()


async def test_a_borrow_is_not_over_before_its_last_status(reader: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await reader.connect()
    destination = pair.destination.connection
    generation = pair.source.connection.lend(0, runs(reader.memory, [0], 64))
    lent = await taken(pair, generation, 64)
    held: list[Callable[[int], None]] = []
    get_all = Endpoint.get_all

    def hold(endpoint: Endpoint, gets: list[_loans.Get], done: Callable[[int], None]) -> None:
        get_all(endpoint, gets, lambda status: held.append(lambda: done(status)))

    monkeypatch.setattr(Endpoint, "get_all", hold)
    reading = destination.borrow(lent, runs(np.zeros(64, np.uint8), [0], 64))
    destination.close()
    await pair.destination.until_lost()
    await destination.fence()
    assert not reading.done()
    held.pop()()
    with pytest.raises(PeerLost):
        await reading


async def test_a_failed_get_ends_the_connection(reader: Lender, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's memory is gone: UCX says so, and what it says of the connection then is not to be relied on."""
    gone = np.zeros(1 << 16, np.uint8)
    monkeypatch.setattr(Exports, "keys", lambda exports, lent: table)
    exports = reader.harness.source.exports  # type: ignore[attr-defined]
    pair = await reader.connect()
    key = exports()._entries[0]
    address, _, length = _loans._KEY.unpack_from(key)
    assert address == reader.memory.ctypes.data
    table = np.frombuffer(_loans._KEY.pack(0, 1 << 20, length) + key[_loans._KEY.size :], np.uint8)
    generation = pair.source.connection.lend(0, Lent(np.array([4096], np.uint64), 4096))
    with pytest.raises(PeerLost):
        await borrow(pair, generation, runs(gone, [0], 4096))
    await pair.destination.until_lost()
    assert not gone.any()


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
