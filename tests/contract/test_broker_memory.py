"""The in-memory broker, and the registry on it, keep their contracts; in virtual time."""

from __future__ import annotations

import pytest
from broker_suite import BrokerSuite
from clusters import MemoryCluster
from registry_suite import RegistrySuite


@pytest.fixture
def cluster() -> MemoryCluster:
    return MemoryCluster()


class TestMemoryBroker(BrokerSuite):
    pass


class TestRegistryOnMemory(RegistrySuite):
    pass
