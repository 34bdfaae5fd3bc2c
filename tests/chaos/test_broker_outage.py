"""The broker goes away under real workers in processes of their own: killed, with and without its memory, or frozen.

Streams go on, new ones start, also to a worker that was never dialed before; nobody is told that a living worker left;
and all are registered again, as the incarnations they were, within a lease. The long form: KVSTREAM_OUTAGE_SECONDS=30.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstream import BrokerUnavailable, KVPool, Runtime, UnknownWorker
from kvstream.discovery import EmbeddedServer, Left, NatsBroker, Registry, connect_broker
from kvstream.discovery.credentials import NatsTarget
from tests.integration.worker import BLOCKS, LAYOUT, WAYS, Worker, checksum, worker
from tests.timing import in_time, timed

pytestmark = pytest.mark.chaos
OUTAGE = float(os.environ.get("KVSTREAM_OUTAGE_SECONDS", "5"))
"""Longer than a lease."""
LANE, CONFIG = WAYS["shared"]
TOKENS = 200


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


class Traffic:
    """Streams from this process to a worker, one after the other, each a layer at a time."""

    def __init__(self, source: Runtime, to: str) -> None:
        self._source = source
        self._to = to
        self._stop = False
        self.done = 0

    async def one(self, stream: str, pause: float) -> None:
        pool = self._source.pool
        blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
        try:
            async with self._source.send(stream, blocks=blocks, tokens=TOKENS, to=self._to, deadline=60) as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                    await asyncio.sleep(pause)
                await tx.done({"sum": checksum(pool, blocks)})
        finally:
            pool.release(blocks)
        self.done += 1

    async def run(self) -> None:
        while not self._stop:
            await self.one(f"{self._to}-{self.done}", 0.01)

    def stop(self) -> None:
        self._stop = True


@asynccontextmanager
async def lefts(registry: Registry) -> AsyncIterator[list[Left]]:
    """The workers that this registry tells to have left, meanwhile."""
    seen: list[Left] = []

    async def follow() -> None:
        async for change in changes:
            if isinstance(change, Left):
                seen.append(change)

    async with registry.watch() as changes:
        task = asyncio.create_task(follow())
        yield seen
        task.cancel()
        await asyncio.wait({task})


async def outage(server: EmbeddedServer, how: str, began: asyncio.Event) -> None:
    if how == "frozen":
        server.pause()
        began.set()
        await asyncio.sleep(OUTAGE)
        server.resume()
    else:
        await server.kill()
        began.set()
        await asyncio.sleep(OUTAGE)
        await server.start()


async def incarnations(url: str, names: list[str], timeout: float) -> dict[str, str]:
    """What a newcomer finds in the table."""
    async with await connect_broker(url, rng=random.Random(1)) as broker:
        async with Registry(broker, rng=random.Random(2)) as registry:
            return {name: (await registry.wait_for(name, timeout)).incarnation for name in names}


@pytest.mark.timeout(120 + 6 * OUTAGE)
@pytest.mark.parametrize("how", ["killed, memory", "killed, file", "frozen"])
@timed
async def test_streams_go_on_and_nobody_is_lost(server: EmbeddedServer, how: str) -> None:
    """dynamo 3493: a short outage of the broker expired every lease and restarted the fleet."""
    if how == "killed, file":
        target = NatsTarget(urls=(server.url,), source="the test")
        await (await NatsBroker.connect(target, rng=random.Random(1), storage="file")).aclose()
    names = ["decode-0", "decode-1", "prefill-0"]
    loop = asyncio.get_running_loop()
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    async with (
        worker("decode-0", server.url, "shared") as first,
        worker("decode-1", server.url, "shared") as second,
        Runtime("prefill-0", roles={"prefill"}, pool=pool, nats=server.url, lanes=LANE, config=CONFIG) as source,
        lefts(source.registry) as left,
    ):
        for name in names:
            await source.registry.wait_for(name, 20)
        before = await incarnations(server.url, names, 20)
        traffic = Traffic(source, "decode-0")
        streams = asyncio.create_task(traffic.run())
        long = asyncio.create_task(Traffic(source, "decode-0").one("long", (OUTAGE + 2) / LAYOUT.layers))
        while not traffic.done:
            await asyncio.sleep(0.01)

        began = asyncio.Event()
        away = asyncio.create_task(outage(server, how, began))
        await began.wait()
        started = traffic.done
        await Traffic(source, "decode-1").one("never dialed before", 0.0)
        await _says_what_needs_the_broker(source, server)
        assert not away.done(), "nothing was tried during the outage"
        await away
        assert traffic.done > started
        returned = loop.time()

        assert await incarnations(server.url, names, 20) == before
        took = loop.time() - returned
        await long
        traffic.stop()
        await streams
        # A worker that did not come back would be given up after this time.
        await asyncio.sleep(CONFIG.lease_ttl * 1.2)
        assert left == []
        for other, count in ((first, traffic.done + 1), (second, 1)):
            await _ended_well(other, count)
        assert await incarnations(server.url, names, 20) == before
        in_time(took, CONFIG.lease_ttl, "the return of all workers")


async def _says_what_needs_the_broker(source: Runtime, server: EmbeddedServer) -> None:
    loop = asyncio.get_running_loop()
    asked = loop.time()
    with pytest.raises(UnknownWorker, match="no worker unknown/0 is registered"):
        async with source.send("to nobody", blocks=[0], tokens=1, to="unknown", deadline=60):
            raise AssertionError
    with pytest.raises(BrokerUnavailable, match=r"127\.0\.0\.1"):
        async with Runtime("late", pool=source.pool, nats=server.url, lanes=LANE):
            raise AssertionError
    assert loop.time() - asked < 20


async def _ended_well(other: Worker, count: int) -> None:
    stats = await other.ask("stats")
    assert stats["ended"] == {"done": count}
    assert (stats["twice"], stats["wrong_bytes"], stats["left"]) == ([], [], [])
