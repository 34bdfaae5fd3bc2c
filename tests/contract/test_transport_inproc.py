"""The in-process transport passes the contract, and its network's hooks do what tests of the runtime rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from transport_suite import Harness, TransportSuite, move, pattern, turns

from kvstream.errors import PeerLost
from kvstream.transport.base import LANES, StagingBudget
from kvstream.transport.inproc import InprocConnection, InprocNetwork, InprocTransport


@pytest.fixture
def network() -> InprocNetwork:
    return InprocNetwork()


@pytest.fixture
async def harness(network: InprocNetwork) -> AsyncIterator[Harness]:
    harness = Harness(
        InprocTransport(network, budget=StagingBudget(1 << 26)),
        InprocTransport(network, budget=StagingBudget(1 << 26)),
        "local",
    )
    await harness.start()
    yield harness
    await harness.aclose()


class TestContract(TransportSuite):
    pass


async def test_the_lane_stands_in_for_every_other(harness: Harness) -> None:
    pair = await harness.connect(open_lane=False)
    source, destination = pair.source.connection, pair.destination.connection
    source.open_lane(destination.accept_lane(source.offer_lanes(LANES, 2, 100), ("put",)))
    assert source.lane == destination.lane == "local"


async def test_a_broken_link_is_lost_on_both_sides_with_what_was_under_way(
    harness: Harness, network: InprocNetwork
) -> None:
    pair = await harness.connect()
    source = pair.source.connection
    assert isinstance(source, InprocConnection)
    generation = await move(pair, 0, pattern(0, 10))
    taking = pair.destination.connection.take(0, generation, 10)
    source.send(b"never")
    network.break_link(source)
    assert network.connections == ()
    with pytest.raises(PeerLost):
        await taking
    await pair.source.until_lost()
    await pair.destination.until_lost()
    assert pair.destination.messages == []


async def test_a_frozen_link_is_silent_until_it_thaws(harness: Harness, network: InprocNetwork) -> None:
    pair = await harness.connect()
    (connection,) = network.connections
    generation = await move(pair, 0, pattern(0, 10))
    network.freeze(connection)
    pair.source.connection.send(b"late")
    taking = pair.destination.connection.take(0, generation, 10)
    await turns()
    assert pair.destination.log == []
    assert not taking.done()
    network.thaw(connection)
    await pair.destination.until(lambda: pair.destination.log == [b"late"])
    await asyncio.wait_for(taking, 5)


async def test_a_port_is_listened_on_once_and_can_be_taken_again(network: InprocNetwork) -> None:
    first = InprocTransport(network, budget=StagingBudget(0))
    address = await first.start(lambda _: None)
    await first.aclose()
    again = InprocTransport(network, budget=StagingBudget(0), port=address.port)
    assert await again.start(lambda _: None) == address
    await again.aclose()
