"""A worker is killed at a random moment of a stream: the other one ends with PeerLost at once, lives on, and has its
blocks back."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator

import pytest

from kvstream import KVPool, PeerLost, Runtime
from kvstream.discovery import EmbeddedServer
from tests.integration.worker import BLOCKS, LAYOUT, WAYS, worker

pytestmark = pytest.mark.chaos
ROUNDS = int(os.environ.get("KVSTREAM_CHAOS_ROUNDS", "6"))
TOKENS = 2000
LIMIT = 0.2


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(WAYS))
async def test_destination_killed(server: EmbeddedServer, way: str) -> None:
    lane, config = WAYS[way]
    rng = random.Random(way)
    took: list[float] = []
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    async with Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source:
        for number in range(ROUNDS):
            name = f"decode-{number}"
            async with worker(name, server.url, way) as other:
                blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
                async with source.send(f"r{number}", blocks=blocks, tokens=TOKENS, to=name) as tx:
                    moment = rng.random() * 0.03
                    started = time.monotonic()
                    killed = 0.0
                    layer = 0
                    while not tx.ended:
                        if layer < LAYOUT.layers - 1:  # the last layer never comes: the stream can't be done before
                            tx.layer_ready(layer)
                            layer += 1
                        if not killed and tx.peer and time.monotonic() - started > moment:
                            other.signal(signal.SIGKILL)
                            killed = time.monotonic()
                        await asyncio.sleep(0.001)
                        assert time.monotonic() - started < 10, "the death was not noticed"
                    with pytest.raises(PeerLost):
                        await tx._report()
                    took.append(tx._end_time - killed)
                pool.release(blocks)
        assert pool.free_blocks == BLOCKS
        assert source._streams.core.idle
        assert source._streams.links._links == {}
        await _serves(source, server, way)
    assert max(took) < LIMIT, took


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(WAYS))
async def test_source_killed(server: EmbeddedServer, way: str) -> None:
    lane, config = WAYS[way]
    rng = random.Random(way)
    took: list[float] = []
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    async with Runtime("decode-0", pool=pool, nats=server.url, lanes=lane, config=config) as target:
        for number in range(ROUNDS):
            async with worker(f"prefill-{number}", server.url, way) as other:
                blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
                async with target.receive(f"r{number}", blocks=blocks, tokens=TOKENS) as rx:
                    other.tell("send", f"r{number}", "decode-0", TOKENS, 0.005)
                    await rx._until(rng.randrange(LAYOUT.layers - 1))
                    await asyncio.sleep(rng.random() * 0.004)
                    other.signal(signal.SIGKILL)
                    killed = time.monotonic()
                    with pytest.raises(PeerLost) as lost:
                        await rx.done()
                    took.append(rx._end_time - killed)
                    assert lost.value.valid_layers[: rx.layers_arrived] == tuple(range(rx.layers_arrived))
                pool.release(blocks)
        assert pool.free_blocks == BLOCKS
        assert target._streams.core.idle
        assert not target._streams._written.any()
    assert max(took) < LIMIT, took


async def _serves(source: Runtime, server: EmbeddedServer, way: str) -> None:
    """The survivor still works."""
    async with worker("decode-after", server.url, way):
        blocks = source.pool.acquire(4)
        async with source.send("after", blocks=blocks, tokens=64, to="decode-after") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done({"sum": ""})
        source.pool.release(blocks)
