"""The simulated transport passes the contract on each of its lanes, in virtual time, however its chances fall."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import numpy as np
import pytest
from transport_suite import Harness, TransportSuite, move, pattern, turns

from kvstream.errors import Cancelled, Corrupted, PeerLost, Recalled
from kvstream.sim.loop import Process
from kvstream.sim.network import Network
from kvstream.sim.transport import SimConnection, SimTransport, Switchboard
from kvstream.transport.base import Lane, Lent, StagingBudget


def harness_of(lane: Lane, seed: int) -> Harness:
    process = cast("Process", asyncio.get_running_loop())
    board = Switchboard(Network(process.world), seed)
    hosts = ("one", "one" if lane == "shared" else "two")
    nodes = [board.network.node(process, host) for host in hosts]
    source, destination = (SimTransport(board, node, budget=StagingBudget(1 << 26)) for node in nodes)
    return Harness(source, destination, lane)


@pytest.fixture(params=[(lane, seed) for lane in ("shared", "get", "put") for seed in (1, 2, 3)], ids=str)
async def harness(request: pytest.FixtureRequest) -> AsyncIterator[Harness]:
    lane, seed = request.param
    harness = harness_of(lane, seed)
    await harness.start()
    yield harness
    await harness.aclose()
    harness.assert_budgets_returned()


class TestContract(TransportSuite):
    pass


# -- what is particular to the simulation: it must be as hard as the real thing


async def two_processes(seed: int, lane: Lane = "put") -> tuple[Process, Process, Harness]:
    """Source and destination in processes of their own, beside the test's."""
    test = cast("Process", asyncio.get_running_loop())
    board = Switchboard(Network(test.world), seed)
    processes = [test.world.process(name) for name in ("source", "destination")]
    nodes = [board.network.node(process, host) for process, host in zip(processes, ("one", "two"), strict=True)]
    source, destination = (SimTransport(board, node, budget=StagingBudget(1 << 26)) for node in nodes)
    return processes[0], processes[1], Harness(source, destination, lane)


async def settle(seconds: float = 1.0) -> None:
    await asyncio.sleep(seconds)


@pytest.mark.parametrize("seed", range(10))
async def test_a_write_of_a_closed_connection_lands_until_the_fence_of_its_target(seed: int) -> None:
    """Whatever was under way when the source closed may land; nothing does once the destination's fence is reached."""
    landed_late = 0
    for run in range(20):
        harness = harness_of("put", 100 * seed + run)
        await harness.start()
        late: list[str] = []

        def observe(kind: str, *fields: object, late: list[str] = late) -> None:
            if kind in ("fenced", "landed"):
                late.append(kind if kind == "landed" else f"fenced {fields[1]}")

        cast("SimTransport", harness.source).board.network.observe = observe
        pair = await harness.connect()
        for slot in range(4):
            pair.source.connection.write_view(slot)[:] = 7
            pair.source.connection.publish(slot, 70_000)
        pair.source.connection.close()
        await pair.source.connection.fence()
        await pair.destination.until_lost()
        await pair.destination.connection.fence()
        assert "landed" not in late[late.index("fenced False") :]
        await settle()
        assert "landed" not in late[late.index("fenced False") :]
        landed_late += late[late.index("fenced True") :].count("landed")
        await harness.aclose()
    assert landed_late


async def test_a_stopped_source_writes_when_it_goes_on() -> None:
    found = 0
    for seed in range(20):
        source, destination, harness = await two_processes(seed)
        links: list[SimConnection] = []

        async def open_both(harness: Harness = harness, links: list[SimConnection] = links) -> None:
            assert harness.address is not None
            links.append(cast("SimConnection", await harness.source.dial(harness.address, ("put",))))

        started = destination.create_task(harness.destination.start(lambda _: None))
        await settle()
        harness.address = started.result()
        source.create_task(open_both())
        await settle()
        (dialed,) = links
        accepted = dialed.peer
        dialed.open_lane(accepted.accept_lane(dialed.offer_lanes(("put",), 2, 100), ("put",)))
        dialed.write_view(0)[:] = 9
        dialed.publish(0, 100)
        source.hold()
        await settle(10)
        assert accepted.staging is not None
        early = bool(accepted.staging.memory[0].any())
        source.release()
        await settle()
        assert accepted.staging.memory[0].all()
        found += not early
    assert 0 < found < 20


async def test_a_read_that_takes_time_is_torn_and_found_out() -> None:
    torn = 0
    for seed in range(20):
        harness = harness_of("shared", seed)
        await harness.start()
        pair = await harness.connect()
        source, destination = pair.source.connection, pair.destination.connection
        source.write_view(0)[:] = 1
        generation = await source.publish(0, 1000)
        taking = destination.take(0, generation, 1000)
        source.write_view(0)[:] = 2
        view = await taking
        assert not destination.check(0, generation)
        torn += len(set(view.tolist())) == 2
        await harness.aclose()
    assert torn


def runs(memory: np.ndarray, order: list[int], run: int) -> Lent:
    return Lent((memory.ctypes.data + np.array(order) * run).astype(np.uint64), run)


@pytest.mark.parametrize("seed", range(4))
async def test_lending(seed: int) -> None:
    harness = harness_of("shared", seed)
    await harness.start()
    pair = await harness.connect()
    source, destination = pair.source.connection, pair.destination.connection
    assert source.lends
    assert destination.lends
    memory, target = pattern(1, 512), np.zeros(512, np.uint8)
    await move(pair, 0, pattern(2, 100))
    generation = source.lend(0, runs(memory, [3, 1], 128))
    lent = await destination.take(0, generation, 256)
    assert isinstance(lent, Lent)
    await destination.borrow(lent, runs(target, [5, 0, 7, 2], 64))
    assert destination.check(0, generation)
    expected = np.concatenate([memory[384:], memory[128:256]]).reshape(4, 64)
    assert np.array_equal(target.reshape(8, 64)[[5, 0, 7, 2]], expected)
    assert not target.reshape(8, 64)[[1, 3, 4, 6]].any()
    source.recall(0, generation)
    assert not destination.check(0, generation)
    with pytest.raises(Recalled):
        await destination.take(0, generation, 256)
    later = source.lend(0, runs(memory, [0], 128))
    source.recall(0, generation)
    assert destination.check(0, later)
    source.close()
    assert not destination.check(0, later)
    await destination.fence()
    with pytest.raises(Corrupted, match="closed"):
        await destination.borrow(lent, runs(target, [0], 256))
    await harness.aclose()
    harness.assert_budgets_returned()


@pytest.mark.parametrize("seed", range(6))
async def test_lending_by_reads_that_take_time(seed: int) -> None:
    """On `get` the bytes come in later: torn if the memory changes, and until the final status also after a close."""
    landed_late = 0
    for run in range(10):
        harness = harness_of("get", 10 * seed + run)
        await harness.start()
        pair = await harness.connect()
        source, destination = pair.source.connection, pair.destination.connection
        memory, target = pattern(1, 512), np.zeros(512, np.uint8)
        generation = source.lend(0, runs(memory, [3, 1], 128))
        lent = await destination.take(0, generation, 256)
        assert isinstance(lent, Lent)
        await destination.borrow(lent, runs(target, [0], 256))
        assert destination.check(0, generation)
        assert np.array_equal(target[:256], np.concatenate([memory[384:], memory[128:256]]))
        reading = destination.borrow(lent, runs(target, [1], 256))
        source.recall(0, generation)
        memory[:] = 0
        await reading
        assert not destination.check(0, generation)
        memory[:] = 1
        again = source.lend(1, runs(memory, [0], 128))
        lent = await destination.take(1, again, 128)
        assert isinstance(lent, Lent)
        target[:] = 0
        reading = destination.borrow(lent, runs(target, [0], 128))
        await turns(1)
        destination.close()
        assert not reading.done()
        before = int(target.sum())
        with pytest.raises(PeerLost):
            await reading
        after = int(target.sum())
        landed_late += after > before
        await destination.fence()
        await settle()
        assert int(target.sum()) == after
        with pytest.raises(PeerLost, match="closed"):
            await destination.borrow(lent, runs(target, [0], 128))
        await harness.aclose()
        harness.assert_budgets_returned()
    assert landed_late


async def test_what_is_withdrawn_lands_no_more() -> None:
    """What the kernel does not have yet does not go; the publish ends once the slot is no longer used."""
    ends: set[str] = set()
    for seed in range(20):
        harness = harness_of("put", seed)
        await harness.start()
        pair = await harness.connect()
        source, destination = pair.source.connection, cast("SimConnection", pair.destination.connection)
        await move(pair, 0, pattern(2, 1000))
        source.write_view(0)[:] = 9
        publishing = source.publish(0, 1000)
        source.withdraw(0)
        source.withdraw(1)
        try:
            await publishing
        except Cancelled:
            await settle()
            assert destination.staging is not None
            assert not (destination.staging.memory[0, :1000] == 9).all()
            ends.add("withdrawn")
        else:
            ends.add("gone")
        await move(pair, 0, pattern(3, 1000))
        await harness.aclose()
        harness.assert_budgets_returned()
    assert ends == {"withdrawn", "gone"}


async def test_a_killed_process_is_missed_within_milliseconds_and_a_stopped_or_cut_off_one_is_not() -> None:
    clock = asyncio.get_running_loop()
    for how in ("kill", "stop", "cut"):
        source, destination, harness = await two_processes(1)
        board = cast("SimTransport", harness.source).board
        lost: list[float] = []
        started = destination.create_task(harness.destination.start(lambda _: None))
        await settle()
        dialing = source.create_task(harness.source.dial(started.result(), ("put",)))
        await settle()
        dialing.result().start(lambda _: None, lambda _, lost=lost: lost.append(clock.time()))
        before = clock.time()
        if how == "kill":
            destination.kill()
            board.kill(cast("SimTransport", harness.destination).node)
        elif how == "stop":
            destination.hold()
        else:
            partition = board.network.cut(["source"])
        await settle()
        assert len(lost) == (how == "kill")
        assert all(0 < when - before < 0.01 for when in lost)
        if how == "cut":
            dialing.result().peer.close()
            await settle(10)
            assert not lost
            board.network.heal(partition)
            await settle()
            assert len(lost) == 1


async def test_a_stopped_listener_answers_a_dial_when_it_goes_on() -> None:
    source, destination, harness = await two_processes(3)
    started = destination.create_task(harness.destination.start(lambda _: None))
    await settle()
    destination.hold()
    dialing = source.create_task(harness.source.dial(started.result(), ("put",)))
    await settle(100)
    assert not dialing.done()
    destination.release()
    await settle()
    assert not dialing.result().lost
    destination.kill()
    cast("SimTransport", harness.destination).board.kill(cast("SimTransport", harness.destination).node)
    again = source.create_task(harness.source.dial(started.result(), ("put",)))
    await settle()
    assert isinstance(again.exception(), PeerLost)
    await turns()
