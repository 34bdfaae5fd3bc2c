"""The event loop of contract tests: UCX is tested on the one that production uses, the in-memory broker in virtual
time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from tests.unit.test_discovery_virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name.startswith("test_transport_ucx"):
        return {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_broker_memory.py":
        return {"virtual": VirtualLoop}
    return {"asyncio": asyncio.new_event_loop}
