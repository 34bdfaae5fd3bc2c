"""The brokers that the contract suites run on."""

from __future__ import annotations

import random

from kvstream.discovery.broker import Broker
from kvstream.discovery.credentials import NatsTarget
from kvstream.discovery.memory import MemoryBrokerServer
from kvstream.discovery.nats import NatsBroker
from kvstream.discovery.server import EmbeddedServer


class MemoryCluster:
    ttl = 0.4

    def __init__(self) -> None:
        self.server = MemoryBrokerServer()

    async def connect(self) -> Broker:
        return self.server.connect()

    async def stop(self) -> None:
        self.server.stop()

    async def start(self) -> None:
        self.server.start(wipe=True)


class NatsCluster:
    """MEMORY storage: a restart loses the leases."""

    ttl = 1.0  # NATS counts in whole seconds

    def __init__(self, server: EmbeddedServer) -> None:
        self.server = server

    async def connect(self) -> Broker:
        target = NatsTarget(urls=(self.server.url,), source="the test")
        return await NatsBroker.connect(target, rng=random.Random(1))

    async def stop(self) -> None:
        await self.server.kill()

    async def start(self) -> None:
        await self.server.start()
