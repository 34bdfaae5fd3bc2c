"""Fixtures for all tests: a cluster in this process on in-memory parts, and pools with known contents."""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer
from kvstream.runtime.routing import RoutingPolicy
from kvstream.transport.base import StagingBudget
from kvstream.transport.inproc import InprocNetwork, InprocTransport
from tests.fake_cupy import FakeCupy

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Interrupts reach the commands that tests start: a shell starts what it puts into the background with SIGINT
    ignored, and that is inherited over exec, by all children."""
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    if inherited is signal.SIG_IGN:
        signal.signal(signal.SIGINT, inherited)


def fill(pool: KVPool, seed: int) -> None:
    """Random bytes everywhere."""
    rng = np.random.default_rng(seed)
    for layer in range(pool.layout.layers):
        view = pool.layer(layer).view(np.uint8)
        view[...] = rng.integers(0, 256, view.shape, np.uint8)


def kv_bytes(pool: KVPool, layer: int, blocks: list[int]) -> bytes:
    """The bytes of these blocks of a layer, in table order."""
    return pool.layer(layer)[blocks].tobytes()


class Cluster:
    """Runtimes in this process that find each other over an in-memory broker and network."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.hub = MemoryBrokerServer()
        self.network = InprocNetwork()
        self.runtimes: list[Runtime] = []
        self.budgets: dict[str, StagingBudget] = {}

    async def worker(
        self,
        name: str,
        *,
        blocks: int = 32,
        layout: KVLayout = LAYOUT,
        roles: tuple[str, ...] = ("decode",),
        config: RuntimeConfig | None = None,
        pool: KVPool | None = None,
        routing: RoutingPolicy | None = None,
    ) -> Runtime:
        """Start a worker; it is closed with the test."""
        broker = await self._stack.enter_async_context(MemoryBroker(self.hub))
        budget = self.budgets[name] = StagingBudget(64 << 20)
        transport = InprocTransport(self.network, budget=budget)
        runtime = Runtime(
            name,
            roles=roles,
            pool=pool or KVPool.allocate(layout, blocks=blocks),
            lanes="local",
            config=config or RuntimeConfig(slots=4, slot_bytes=1024),
            routing=routing,
            broker=broker,
            transport=transport,
        )
        self._stack.push_async_callback(transport.aclose)
        await self._stack.enter_async_context(runtime)
        self.runtimes.append(runtime)
        return runtime

    def cut_off(self, runtime: Runtime) -> None:
        """From now on a worker can't be dialed, as if its process were gone."""
        transport = runtime._transport
        assert isinstance(transport, InprocTransport)
        self.network.unlisten(transport, runtime.record.address.port)


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        yield Cluster(stack)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCupy]:
    """The stand-in for CuPy, with two GPUs."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    yield fake
    fake.close()
