"""Streams make no blocking call on the loop: connect, send over each lane, end, close, with blockbuster watching."""

from __future__ import annotations

import pytest
from blockbuster import blockbuster_ctx

from kvstream import KVPool, Runtime
from kvstream.discovery import EmbeddedServer
from tests.integration.worker import LAYOUT, WAYS


@pytest.mark.parametrize("way", list(WAYS))
async def test_nothing_blocks_the_loop(way: str) -> None:
    lane, config = WAYS[way]
    pools = [KVPool.allocate(LAYOUT, blocks=64) for _ in range(2)]
    async with EmbeddedServer() as server:
        with blockbuster_ctx(scanned_modules=["kvstream"]):
            async with (
                Runtime("prefill-0", pool=pools[0], nats=server.url, lanes=lane, config=config) as source,
                Runtime("decode-0", pool=pools[1], nats=server.url, lanes=lane, config=config) as target,
                target.receive("r", blocks=list(range(40)), tokens=640) as rx,
                source.send("r", blocks=list(range(40)), tokens=640, to="decode-0") as tx,
            ):
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done()
                await rx.done()
