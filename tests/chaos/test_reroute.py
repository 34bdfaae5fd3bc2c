"""A destination in a process of its own is killed, stopped or cut off at a random moment of a stream: the stream goes
on, at another worker or at the same, byte for byte, and who was only stopped ends typed and serves again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvstream import KVPool, Runtime, SendStream, StreamReport
from kvstream.discovery import EmbeddedServer
from tests.integration.worker import BLOCKS, LAYOUT, WAYS, Worker, checksum, worker
from tests.timing import Death, in_time, timed

pytestmark = pytest.mark.chaos
ROUNDS = int(os.environ.get("KVSTREAM_CHAOS_ROUNDS", "6"))
TOKENS = 2000
DETECTION = 0.2
"""Of the median, as in test_kill.py."""


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


def fill(pool: KVPool, blocks: list[int], rng: random.Random) -> None:
    for layer in range(LAYOUT.layers):
        view = pool.layer(layer).view("uint8")
        view[blocks] = rng.randrange(256)
        view[blocks[rng.randrange(len(blocks))]] = layer


async def prefill(
    tx: SendStream, pool: KVPool, blocks: list[int], pause: float, last: asyncio.Event | None = None
) -> StreamReport:
    """The last layer waits for `last`: the stream can't be done before."""
    for layer in range(LAYOUT.layers):
        if last is not None and layer == LAYOUT.layers - 1:
            await last.wait()
        tx.layer_ready(layer)
        await asyncio.sleep(pause)
    return await tx.done({"sum": checksum(pool, blocks)})


async def accepted(tx: SendStream) -> None:
    async with asyncio.timeout(20):
        while not tx.peer:
            await asyncio.sleep(0.001)


async def said(other: Worker, **expected: Any) -> None:
    """What a worker has seen of its streams, once they have ended."""
    stats = await other.ask("stats")
    found = {key: stats[key] for key in expected}
    assert found == expected
    assert not stats["wrong_bytes"]
    assert not stats["twice"]
    assert (stats["free_blocks"], stats["streams"]) == (BLOCKS, 0)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", list(WAYS))
async def test_destination_killed(server: EmbeddedServer, way: str) -> None:
    lane, config = WAYS[way]
    rng = random.Random(way)
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    detected: list[float] = []
    resumed: list[float] = []
    async with (
        Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source,
        worker("decode-after", server.url, way) as other,
    ):
        for number in range(ROUNDS):
            blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
            fill(pool, blocks, rng)
            async with worker(f"decode-{number}", server.url, way) as first:
                to = [f"decode-{number}", "decode-after"]
                async with source.send(f"r{number}", blocks=blocks, tokens=TOKENS, to=to) as tx:
                    killed = asyncio.Event()
                    running = asyncio.create_task(prefill(tx, pool, blocks, 0.004, killed))
                    await accepted(tx)
                    await asyncio.sleep(rng.random() * 0.04)
                    death = Death(first.pid)
                    seen = await death.seen()
                    killed.set()
                    report = await running
            pool.release(blocks)
            lost, last = report.epochs
            assert (lost.peer, lost.why) == (f"decode-{number}/0", "peer_lost")
            assert (last.peer, last.why, last.epoch) == ("decode-after/0", "done", report.epoch)
            detected.append(lost.ended - seen)
            resumed.append(last.began - lost.ended)
        await said(other, ended={"done": ROUNDS})
        assert source.stats().reroutes == ROUNDS
        assert source._streams.core.idle
    print(f"{way}: detected {statistics.median(detected) * 1e3:.1f} ms, max {max(detected) * 1e3:.1f};", end=" ")
    print(f"accepted {statistics.median(resumed) * 1e3:.1f} ms later, max {max(resumed) * 1e3:.1f}")
    assert statistics.median(detected) < DETECTION, detected


@timed
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", list(WAYS))
async def test_destination_stopped(server: EmbeddedServer, way: str) -> None:
    lane, config = WAYS[way]
    rng = random.Random(way)
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
    fill(pool, blocks, rng)
    loop = asyncio.get_running_loop()
    async with (
        Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source,
        worker("decode-0", server.url, way) as first,
        worker("decode-1", server.url, way) as second,
    ):
        async with source.send("r", blocks=blocks, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
            tx.layer_ready(0)
            await accepted(tx)
            await asyncio.sleep(rng.random() * 0.02)
            first.signal(signal.SIGSTOP)
            stopped = loop.time()
            try:
                report = await prefill(tx, pool, blocks, 0.004)
            finally:
                first.signal(signal.SIGCONT)
        lost, last = report.epochs
        assert (lost.peer, lost.why, last.peer) == ("decode-0/0", "peer_lost", "decode-1/0")
        await said(second, ended={"done": 1})
        await said(first, ended={"fenced": 1})
        # It lives, and serves.
        async with source.send("again", blocks=blocks, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx, pool, blocks, 0.0)
        await said(first, ended={"fenced": 1, "done": 1})
    limit = config.reroute_timeout + config.beat_interval
    assert lost.ended - stopped > config.reroute_timeout - config.beat_interval
    in_time(lost.ended - stopped, limit + 0.1, "seeing that a destination has stopped")
    in_time(last.began - lost.ended, 0.1, "going on elsewhere")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", list(WAYS))
async def test_connection_broken(server: EmbeddedServer, way: str) -> None:
    """At a random moment, again and again: the same destination goes on where it was."""
    lane, config = WAYS[way]
    rng = random.Random(way)
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
    breaks = 3
    async with (
        Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source,
        worker("decode-0", server.url, way) as other,
    ):
        for number in range(ROUNDS):
            fill(pool, blocks, rng)
            async with source.send(f"r{number}", blocks=blocks, tokens=TOKENS, to="decode-0") as tx:
                tx.layer_ready(0)
                await accepted(tx)
                running = asyncio.create_task(prefill(tx, pool, blocks, 0.008))
                for _ in range(breaks):
                    await asyncio.sleep(rng.random() * 0.02)
                    for link in list(source._streams.links._links.values()):
                        if link.up:
                            link.connection.close()
                report = await running
            assert report.peer == "decode-0/0"
            assert {epoch.peer for epoch in report.epochs} == {"decode-0/0"}
            assert report.epochs[-1].epoch == report.epoch
            assert report.in_doubt == ()
        await said(other, ended={"done": ROUNDS})
        assert source.stats().resumes > 0
        assert source.stats().reroutes == 0
