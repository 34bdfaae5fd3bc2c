"""The NATS broker, and the registry on it, keep their contracts, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from broker_suite import BrokerSuite
from clusters import NatsCluster
from registry_suite import RegistrySuite

from kvstream.discovery.server import EmbeddedServer


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[NatsCluster]:
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        yield NatsCluster(server)


class TestNatsBroker(BrokerSuite):
    pass


class TestRegistryOnNats(RegistrySuite):
    pass
