"""Workers in processes of their own, as the registry tells of them: idle, busy, killed, started again, leaving."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvstream import ConfigError, Fenced, KVPool, Runtime
from kvstream.discovery import Changed, Changes, EmbeddedServer, Joined, Left, Registry, Suspect, connect_broker
from kvstream.discovery.registry import Change
from tests.integration.worker import BLOCKS, LAYOUT, WAYS, checksum, worker
from tests.timing import Late, in_time, timed

pytestmark = pytest.mark.chaos
LANE, CONFIG = WAYS["shared"]
LEASE = CONFIG.lease_ttl


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@asynccontextmanager
async def watching(server: EmbeddedServer) -> AsyncIterator[Changes]:
    async with await connect_broker(server.url, rng=random.Random(1)) as broker:
        async with Registry(broker, rng=random.Random(2), ttl=LEASE) as registry, registry.watch() as changes:
            yield changes


async def next_of(changes: Changes) -> Change:
    """The next change that is not merely one of load."""
    async with asyncio.timeout(30):
        while True:
            change = await anext(changes)
            if not isinstance(change, Changed) or change.record.incarnation != change.old.incarnation:
                return change


@timed
async def test_a_worker_stays_that_is_idle_or_whose_loop_is_blocked_for_half_a_lease(server: EmbeddedServer) -> None:
    """LMCache 4808: heartbeats were off by default and the reaper on. These are default settings, for three leases."""
    async with (
        watching(server) as changes,
        worker("idle", server.url, "shared") as idle,
        worker("blocked", server.url, "shared") as blocked,
    ):
        for _ in range(2):
            assert isinstance(await next_of(changes), Joined)
        loop = asyncio.get_running_loop()
        end = loop.time() + 3 * LEASE
        while loop.time() < end:
            # At another moment between two renewals each time, and the last one may have been nearly due.
            assert await blocked.ask("block", LEASE / 2) == "blocked"
            await asyncio.sleep(0.37 * LEASE)
        seen: list[Change] = []
        try:
            async with asyncio.timeout(0.5):
                while True:
                    seen.append(await anext(changes))
        except TimeoutError:
            pass
        assert not any(isinstance(change, Left) for change in seen)
        for one in (idle, blocked):
            assert (await one.ask("stats"))["left"] == []
        if any(isinstance(change, Suspect) for change in seen):
            raise Late(f"a renewal: {seen}")


@timed
async def test_a_killed_worker_is_gone_within_its_lease_and_one_that_leaves_at_once(server: EmbeddedServer) -> None:
    async with watching(server) as changes:
        loop = asyncio.get_running_loop()
        async with worker("killed", server.url, "shared") as victim:
            assert isinstance(await next_of(changes), Joined)
            await asyncio.sleep(LEASE / 2)
            killed = loop.time()
            victim.signal(signal.SIGKILL)
            assert isinstance(await next_of(changes), Suspect)
            gone = await next_of(changes)
            took = loop.time() - killed
            assert isinstance(gone, Left) and gone.reason == "lost"
        async with worker("leaving", server.url, "shared") as leaver:
            assert isinstance(await next_of(changes), Joined)
            asked = loop.time()
            leaver.tell("quit")
            gone = await next_of(changes)
            left = loop.time() - asked
            assert isinstance(gone, Left) and gone.reason == "unregistered"
        in_time(took, LEASE + 0.5, "the end of a killed worker")
        in_time(left, 0.5, "the end of one that leaves")


async def test_a_killed_worker_starts_again_under_its_name_at_once(server: EmbeddedServer) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    async with (
        watching(server) as changes,
        Runtime("prefill-0", roles={"prefill"}, pool=pool, nats=server.url, lanes=LANE, config=CONFIG) as source,
    ):
        assert isinstance(await next_of(changes), Joined)
        blocks = pool.acquire(4)

        async def stream(name: str) -> None:
            async with source.send(name, blocks=blocks, tokens=64, to="decode-0", deadline=20) as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done({"sum": checksum(pool, blocks)})

        async with worker("decode-0", server.url, "shared") as first:
            joined = await next_of(changes)
            await stream("before")
            first.signal(signal.SIGKILL)
            async with worker("decode-0", server.url, "shared") as second:
                again = await next_of(changes)
                assert isinstance(joined, Joined) and isinstance(again, Changed), "it was not told that it left"
                assert again.old.incarnation == joined.record.incarnation != again.record.incarnation
                assert again.record.pid == second.pid
                while source.registry.lookup("decode-0") != again.record:
                    await asyncio.sleep(0.01)
                await stream("after")
                stats = await second.ask("stats")
                assert (stats["ended"], stats["wrong_bytes"]) == ({"done": 1}, [])


@timed
async def test_a_runtime_that_may_not_start_says_why(server: EmbeddedServer) -> None:
    """nats.py 352, 997: wrong credentials were retried in silence."""
    pool = KVPool.allocate(LAYOUT, blocks=4)
    loop = asyncio.get_running_loop()
    started = loop.time()
    with pytest.raises(ConfigError, match=r"refuses the credentials of the given URL .*; correct them") as refused:
        async with Runtime("decode-0", pool=pool, nats=server.url.replace(server.password, "wrong"), lanes=LANE):
            raise AssertionError
    took = loop.time() - started
    assert "wrong" not in str(refused.value)
    async with worker("decode-0", server.url, "shared") as holder:
        with pytest.raises(Fenced, match=rf"decode-0/0 is held by .* pid {holder.pid}, incarnation [0-9a-f]{{32}}; "):
            async with Runtime("decode-0", pool=pool, nats=server.url, lanes=LANE):
                raise AssertionError
        assert (await holder.ask("stats"))["left"] == []
    in_time(took, 2.0, "the refusal")
