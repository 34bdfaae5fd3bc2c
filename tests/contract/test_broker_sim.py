"""The simulated broker, and the registry on it, keep their contracts, also when events are late and come twice."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import cast

import pytest
from broker_suite import BrokerSuite
from registry_suite import RegistrySuite

from kvstream.discovery.broker import Broker, LeaseEvent, NobodyServes
from kvstream.sim.broker import SimBroker, SimBrokerServer
from kvstream.sim.loop import Process
from kvstream.sim.network import Network


class SimCluster:
    ttl = 0.4

    def __init__(self, seed: int) -> None:
        self.process = cast("Process", asyncio.get_running_loop())
        self.network = Network(self.process.world)
        self.server = SimBrokerServer(self.network, seed)
        if seed % 2:
            self.server.duplicates = 0.5

    async def connect(self) -> Broker:
        return await SimBroker.connect(self.server, self.network.node(self.process, "test"))

    async def stop(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start(wipe=True)


@pytest.fixture(params=range(4))
async def cluster(request: pytest.FixtureRequest) -> SimCluster:
    return SimCluster(request.param)


class TestSimBroker(BrokerSuite):
    pass


class TestRegistryOnSim(RegistrySuite):
    pass


async def test_a_server_with_many_sessions_gathers_what_changes() -> None:
    """A burst of changes is one message to each, and each sees how it ends, also one that comes in the middle."""
    cluster = SimCluster(0)
    world = cluster.process.world

    async def client(number: int) -> SimBroker:
        return await SimBroker.connect(cluster.server, cluster.network.node(cluster.process, f"host {number}"))

    async def seen(broker: SimBroker) -> dict[str, bytes | None]:
        """What its watch has told one virtual second later."""
        found: dict[str, bytes | None] = {}
        with suppress(TimeoutError):
            async with asyncio.timeout(1), broker.watch() as events:
                async for event in events:
                    if isinstance(event, LeaseEvent):
                        found[event.key] = event.value
        return found

    brokers = [await client(number) for number in range(80)]
    watching = [asyncio.create_task(seen(broker)) for broker in brokers]
    await asyncio.sleep(0.1)
    told, began = cluster.server.told, world.now
    revision = await brokers[0].put("w.a.0", b"1", ttl=60, revision=0)
    await brokers[0].put("w.b.0", b"2", ttl=60, revision=0)
    watching.append(asyncio.create_task(seen(await client(80))))
    await brokers[0].delete("w.a.0", revision=revision)
    await brokers[0].put("w.c.0", b"3", ttl=60, revision=0)
    assert world.now - began < 0.04
    tables = [{key: value for key, value in (await watch).items() if value is not None} for watch in watching]
    assert tables == [{"w.b.0": b"2", "w.c.0": b"3"}] * 81
    assert cluster.server.told - told == 81
    for broker in brokers:
        await broker.aclose()


@pytest.mark.parametrize("subject", ["kvstream.w.a.0.ping", "kvstream.w.*.0.ping", "kvstream.>"])
async def test_who_serves_a_subject_twice_and_ends_one_serves_it_still(subject: str) -> None:
    cluster = SimCluster(0)
    broker = await cluster.connect()

    async def answer(_: str, data: bytes) -> bytes:
        return data

    services = [await broker.serve(subject, answer) for _ in range(2)]
    for service in services:
        assert await broker.request("kvstream.w.a.0.ping", b"x", timeout=1) == b"x"
        await service.aclose()
    with pytest.raises(NobodyServes):
        await broker.request("kvstream.w.a.0.ping", b"x", timeout=1)
    await broker.aclose()
