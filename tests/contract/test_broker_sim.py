"""The simulated broker, and the registry on it, keep their contracts, also when events are late and come twice."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from broker_suite import BrokerSuite
from registry_suite import RegistrySuite

from kvstream.discovery.broker import Broker
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
