"""The event loop of contract tests: UCX is tested on the one that production uses, the in-memory broker in virtual
time, the simulator on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest
import uvloop

from kvstream.sim.loop import World
from tests.unit.test_discovery_virtual_time import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    if item.path.name.startswith("test_transport_ucx"):
        return {"uvloop": uvloop.new_event_loop}
    if item.path.name == "test_broker_memory.py":
        return {"virtual": VirtualLoop}
    if item.path.name.endswith("_sim.py"):
        return {"virtual": lambda: World().process("test")}
    return {"asyncio": asyncio.new_event_loop}
