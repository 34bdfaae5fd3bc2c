"""Fetches over real UCX, on each lane: exact bytes into shuffled blocks, and several at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from kvstream import KVPool, Runtime
from kvstream.discovery import EmbeddedServer
from tests.integration.worker import LAYOUT, WAYS, checksum

TOKENS = 333
NEEDED = LAYOUT.blocks_for(TOKENS)


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.mark.parametrize("way", list(WAYS))
async def test_fetch_and_push_on_each_lane(server: EmbeddedServer, way: str) -> None:
    lane, config = WAYS[way]
    pool, other = KVPool.allocate(LAYOUT, blocks=64), KVPool.allocate(LAYOUT, blocks=64)
    for layer in range(LAYOUT.layers):
        bits = pool.layer(layer).view(np.uint16)
        bits[...] = np.random.default_rng(layer).integers(0, 2**16, bits.shape, np.uint16)
    order = np.random.default_rng(5).permutation(64)
    held = [int(block) for block in order[:NEEDED]]
    asked = [[int(block) for block in order[::-1][n * NEEDED : (n + 1) * NEEDED]] for n in range(2)]
    async with (
        Runtime("cache-0", pool=pool, nats=server.url, lanes=lane, config=config) as holder,
        Runtime("decode-0", pool=other, nats=server.url, lanes=lane, config=config) as asker,
    ):
        hold = holder.hold("a", blocks=held, tokens=TOKENS, payload=[1, 2])
        again = holder.hold("b", blocks=held, tokens=TOKENS)
        reports = await asyncio.gather(
            asker.fetch("a", blocks=asked[0], source="cache-0"), asker.fetch("b", blocks=asked[1], source="cache-0")
        )
        expected = checksum(pool, held)
        assert [report.lane for report in reports] == [lane, lane]
        assert [checksum(other, blocks) for blocks in asked] == [expected, expected]
        again.release()
        other.layer(0).view(np.uint16)[...] = 0
        async with asker.receive("a", blocks=asked[0], tokens=TOKENS) as rx:
            await holder.push("a", "decode-0")
            await rx.done()
        assert rx.payload == [1, 2]
        assert checksum(other, asked[0]) == expected
        hold.release()
        assert hold.over
