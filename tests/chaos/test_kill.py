"""A worker is killed at a random moment of a stream: the other one ends with PeerLost at once, lives on, and has its
blocks back. "At once" is after the kernel has told this process's loop of the death, whatever kept either waiting."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import AsyncIterator

import pytest
from msgspec.structs import replace

from kvstream import PeerLost, Runtime
from kvstream.discovery import EmbeddedServer
from tests.fake_cupy import FakeCupy
from tests.integration.worker import ALL_WAYS, BLOCKS, LAYOUT, allocate, worker
from tests.timing import Death

pytestmark = pytest.mark.chaos
ROUNDS = int(os.environ.get("KVSTREAM_CHAOS_ROUNDS", "6"))
TOKENS = 2000
LIMIT = 0.2
"""Of the median: how long after the kernel's word a stream may take to end."""
BOUND = 3.0
"""Of each. What would find the dead in place of the kill (beats, a time-out, UCX's keepalive) takes longer."""


def check_times(took: list[float]) -> None:
    assert statistics.median(took) < LIMIT, took
    assert max(took) < BOUND, took


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(ALL_WAYS))
async def test_destination_killed(server: EmbeddedServer, cupy: FakeCupy, way: str) -> None:
    lane, config = ALL_WAYS[way]
    rng = random.Random(way)
    took: list[float] = []
    pool = allocate(way)
    async with Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source:
        for number in range(ROUNDS):
            name = f"decode-{number}"
            async with worker(name, server.url, way) as other:
                blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
                async with source.send(f"r{number}", blocks=blocks, tokens=TOKENS, to=name) as tx:
                    moment = rng.random() * 0.03
                    started = time.monotonic()
                    death: Death | None = None
                    layer = 0
                    while not tx.ended:
                        if layer < LAYOUT.layers - 1:  # the last layer never comes: the stream can't be done before
                            tx.layer_ready(layer)
                            layer += 1
                        if death is None and tx.peer and time.monotonic() - started > moment:
                            death = Death(other.pid)
                        await asyncio.sleep(0.001)
                        assert time.monotonic() - started < 20, "the death was not noticed"
                    with pytest.raises(PeerLost):
                        await tx._report()
                    assert death is not None
                    took.append(tx._end_time - await death.seen())
                pool.release(blocks)
        assert pool.free_blocks == BLOCKS
        assert source._streams.core.idle
        assert source._streams.links._links == {}
        await _serves(source, server, way)
    check_times(took)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(ALL_WAYS))
async def test_source_killed(server: EmbeddedServer, cupy: FakeCupy, way: str) -> None:
    lane, config = ALL_WAYS[way]
    config = replace(config, resume_timeout=0.01)  # how long it waits for the source to come back
    rng = random.Random(way)
    took: list[float] = []
    pool = allocate(way)
    async with Runtime("decode-0", pool=pool, nats=server.url, lanes=lane, config=config) as target:
        for number in range(ROUNDS):
            async with worker(f"prefill-{number}", server.url, way) as other:
                blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
                async with target.receive(f"r{number}", blocks=blocks, tokens=TOKENS) as rx:
                    other.tell("send", f"r{number}", "decode-0", TOKENS, 0.005)
                    await rx._until(rng.randrange(LAYOUT.layers - 1))
                    await asyncio.sleep(rng.random() * 0.004)
                    death = Death(other.pid)
                    with pytest.raises(PeerLost) as lost:
                        await rx.done()
                    took.append(rx._end_time - await death.seen())
                    assert lost.value.valid_layers[: rx.layers_arrived] == tuple(range(rx.layers_arrived))
                pool.release(blocks)
        assert pool.free_blocks == BLOCKS
        assert target._streams.core.idle
        assert not target._streams._written.any()
    check_times(took)


async def _serves(source: Runtime, server: EmbeddedServer, way: str) -> None:
    """The survivor still works."""
    async with worker("decode-after", server.url, way):
        blocks = source.pool.acquire(4)
        async with source.send("after", blocks=blocks, tokens=64, to="decode-after") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done({"sum": ""})
        source.pool.release(blocks)
