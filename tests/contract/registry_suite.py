"""What the registry does, on any broker. The classes in test_registry_*.py give the `cluster` fixture."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec
import pytest
from broker_suite import Cluster, connected

from kvstream.discovery.broker import Broker
from kvstream.discovery.records import DataAddress, Load, WorkerRecord, encode_record, lease_key, worker_subject
from kvstream.discovery.registry import Change, Changed, Changes, Joined, Left, Registry, Suspect
from kvstream.errors import ConfigError, Fenced, PeerLost, UnknownWorker
from tests.timing import Late, in_time, timed


def record(name: str, incarnation: int = 1, *, rank: int = 0, **fields: Any) -> WorkerRecord:
    base = WorkerRecord(
        name=name,
        rank=rank,
        incarnation=f"{incarnation:032x}",
        key="00ff",
        roles=("decode",),
        address=DataAddress(transport="inproc", host="127.0.0.1", port=4000 + incarnation, host_id="h"),
        pid=100 + incarnation,
        host="host-a",
        started=1.5,
    )
    return msgspec.structs.replace(base, **fields)


class Member:
    """A registry with its broker; `die` is a SIGKILL: the connection closes, the lease stays."""

    def __init__(self, broker: Broker, registry: Registry) -> None:
        self.broker = broker
        self.registry = registry

    async def die(self) -> None:
        await self.broker.aclose()
        await self.registry.aclose()


@asynccontextmanager
async def member(cluster: Cluster, *, ttl: float | None = None, seed: int = 0) -> AsyncIterator[Member]:
    async with await cluster.connect() as broker:
        async with Registry(broker, rng=random.Random(seed), ttl=ttl or cluster.ttl) as registry:
            yield Member(broker, registry)


async def next_of(changes: Changes, timeout: float = 20.0) -> Change:
    async with asyncio.timeout(timeout):
        return await anext(changes)


async def until(changes: Changes, good: Callable[[Change], bool], timeout: float = 20.0) -> list[Change]:
    seen: list[Change] = []
    async with asyncio.timeout(timeout):
        while not seen or not good(seen[-1]):
            seen.append(await anext(changes))
    return seen


async def quiet(changes: Changes, seconds: float) -> list[Change]:
    """The changes within some time; what must *not* happen can only be waited for."""
    seen: list[Change] = []
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            async for change in changes:
                seen.append(change)
    return seen


class RegistrySuite:
    async def test_join_is_seen_with_everything_it_says(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            mine = record("decode-0", load=Load(1, 2, 3), fingerprint="f", shard=(1, 2, 0, 1))
            await a.registry.register(mine)
            assert await next_of(changes) == Joined(mine)
            assert b.registry.workers() == [mine]
            assert b.registry.lookup("decode-0") == b.registry.lookup("decode-0/0") == mine
            assert b.registry.lookup("decode-0/1") is None
            assert b.registry.lookup("decode") is None
            # A watch that begins later, and a registry that starts later, know it too.
            async with b.registry.watch() as late:
                assert await next_of(late) == Joined(mine)
            async with member(cluster) as c:
                assert c.registry.lookup("decode-0") == mine

    async def test_lookup_by_name_finds_the_lowest_rank_and_workers_are_sorted(self, cluster: Cluster) -> None:
        async with member(cluster) as viewer:
            async with member(cluster) as a, member(cluster) as b, member(cluster) as c:
                await a.registry.register(record("w", 1, rank=10))
                await b.registry.register(record("w", 2, rank=2))
                await c.registry.register(record("a", 3))
                for name in ("w/10", "w/2", "a"):
                    await viewer.registry.wait_for(name, 5)
                assert [worker.id for worker in viewer.registry.workers()] == ["a/0", "w/2", "w/10"]
                found = viewer.registry.lookup("w")
                assert found is not None and found.rank == 2
            with pytest.raises(ConfigError, match="worker"):
                viewer.registry.lookup("no such name")

    async def test_unregistering_is_seen_at_once(self, cluster: Cluster) -> None:
        async with member(cluster, ttl=60) as a, member(cluster, ttl=60) as b, b.registry.watch() as changes:
            mine = record("decode-0")
            await a.registry.register(mine)
            assert await next_of(changes) == Joined(mine)
            await a.registry.unregister()
            assert await next_of(changes, 15) == Left(mine, "unregistered")
            assert b.registry.workers() == []
            # The name is free, also for the same registry.
            again = record("decode-0", 2)
            await a.registry.register(again)
            assert await next_of(changes) == Joined(again)

    @timed
    async def test_a_killed_worker_is_gone_within_its_lease(self, cluster: Cluster) -> None:
        """nixl PR 1010: a crashed agent's metadata lived for ever."""
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            mine = record("decode-0")
            await a.registry.register(mine)
            await next_of(changes)
            await asyncio.sleep(cluster.ttl)
            killed = asyncio.get_running_loop().time()
            await a.die()
            assert b.registry.lookup("decode-0") == mine
            seen = await until(changes, lambda change: isinstance(change, Left))
            took = asyncio.get_running_loop().time() - killed
            assert seen == [Suspect(mine), Left(mine, "lost")]
            assert b.registry.lookup("decode-0") is None
            in_time(took, cluster.ttl + 0.5, "the end of a killed worker")

    @timed
    async def test_an_idle_worker_stays(self, cluster: Cluster) -> None:
        """LMCache 4808: heartbeats were off by default and the reaper on."""
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            mine = record("decode-0")
            await a.registry.register(mine)
            seen = await quiet(changes, cluster.ttl * 3)
            assert b.registry.lookup("decode-0") == mine
            if any(isinstance(change, Suspect) for change in seen):
                raise Late(f"a renewal: {seen}")
            assert seen == [Joined(mine)]

    async def test_a_worker_that_is_seen_answers(self, cluster: Cluster) -> None:
        """It is published only once its handlers are live, and unregistered before they go."""
        async with member(cluster, ttl=60) as a, member(cluster, ttl=60) as b, b.registry.watch() as changes:
            for number in range(10):
                mine = record("decode-0", number)
                register = asyncio.ensure_future(a.registry.register(mine))
                seen = await next_of(changes)
                assert seen == Joined(mine)
                ping = worker_subject("decode-0", 0, f"ping.{mine.incarnation}")
                assert await b.broker.request(ping, b"", timeout=20) == mine.incarnation.encode()
                await register
                leave = asyncio.ensure_future(a.registry.unregister())
                # Whoever gets no answer any more, or an end to it, finds that it has left, not that it died.
                try:
                    while True:
                        await b.broker.request(ping, b"", timeout=0.5)
                except PeerLost:
                    assert await next_of(changes) == Left(mine, "unregistered")
                await leave

    async def test_the_same_name_at_the_same_address_is_taken_by_the_next_start(self, cluster: Cluster) -> None:
        """A restart that gets its old port again: all but the incarnation is as it was."""
        async with member(cluster, ttl=60) as a, member(cluster, ttl=60) as b, b.registry.watch() as changes:
            dead = record("decode-0", 1)
            await a.registry.register(dead)
            await next_of(changes)
            await a.die()
            fresh = msgspec.structs.replace(dead, incarnation=f"{2:032x}")
            async with member(cluster, ttl=60) as c:
                await c.registry.register(fresh)
                assert await next_of(changes) == Changed(fresh, dead)
                assert b.registry.lookup("decode-0") == fresh

    async def test_a_changed_value_is_a_change(self, cluster: Cluster) -> None:
        """dynamo 12566: discovery compared keys only and missed a changed address."""
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            mine = record("decode-0")
            await a.registry.register(mine)
            await next_of(changes)
            await a.registry.update(load=Load(5, 6, 7))
            busy = msgspec.structs.replace(mine, load=Load(5, 6, 7))
            assert await next_of(changes) == Changed(busy, mine)
            await a.registry.update(state="draining")
            draining = msgspec.structs.replace(busy, state="draining")
            assert await next_of(changes) == Changed(draining, busy)
            assert b.registry.lookup("decode-0") == draining
            # Another address under the same key, written by whoever has the name next.
            await a.die()
            moved = record("decode-0", 2)
            await b.registry.register(moved)
            assert (await until(changes, lambda change: isinstance(change, Changed)))[-1] == Changed(moved, draining)

    async def test_updates_are_coalesced(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            await a.registry.register(record("decode-0"))
            await next_of(changes)
            async with asyncio.TaskGroup() as group:
                for i in range(1, 101):
                    group.create_task(a.registry.update(load=Load(streams=i)))
            seen = await until(changes, lambda change: change.record.load.streams == 100)
            assert len(seen) <= 2

    async def test_a_cancelled_update_is_published_all_the_same(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            await a.registry.register(record("decode-0"))
            await next_of(changes)
            update = asyncio.ensure_future(a.registry.update(load=Load(streams=3)))
            await asyncio.sleep(0)
            update.cancel()
            await asyncio.wait({update})
            assert (await next_of(changes)).record.load.streams == 3
            await a.registry.update(load=Load(streams=4))

    async def test_a_living_workers_name_is_refused_naming_it(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b:
            await a.registry.register(record("decode-0", 1))
            with pytest.raises(Fenced, match=r"decode-0/0.*host host-a, pid 101, incarnation 0{31}1;"):
                await b.registry.register(record("decode-0", 2))
            assert not b.registry.registered
            await b.registry.register(record("decode-1", 2))
            await a.registry.update(load=Load(1, 1, 1))

    async def test_a_dead_workers_name_is_taken_at_once(self, cluster: Cluster) -> None:
        async with member(cluster, ttl=60) as a, member(cluster, ttl=60) as b, b.registry.watch() as changes:
            dead = record("decode-0", 1)
            await a.registry.register(dead)
            await next_of(changes)
            await a.die()
            started = asyncio.get_running_loop().time()
            fresh = record("decode-0", 2)
            await b.registry.register(fresh)
            assert asyncio.get_running_loop().time() - started < 20
            assert await next_of(changes) == Changed(fresh, dead)

    async def test_a_worker_whose_name_was_taken_is_told(self, cluster: Cluster) -> None:
        """By the table, long before its next renewal is due."""
        async with member(cluster, ttl=120) as a, member(cluster, ttl=120) as b:
            fenced: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
            await a.registry.register(record("decode-0", 1), on_fenced=fenced.set_result)
            thief = record("decode-0", 2)
            for _ in range(50):  # against the owner's renewals
                held = await self._revision(b.broker, "decode-0")
                with suppress(Exception):
                    await b.broker.put(lease_key("decode-0", 0), encode_record(thief), ttl=60, revision=held)
                    break
            async with asyncio.timeout(20):
                error = await fenced
            assert thief.incarnation in str(error)
            assert not a.registry.registered
            with pytest.raises(Fenced):
                await a.registry.update(load=Load(1, 1, 1))
            await a.registry.unregister()
            # Not deleted by the one that lost it.
            assert await self._revision(b.broker, "decode-0") > 0

    async def _revision(self, broker: Broker, name: str) -> int:
        from kvstream.discovery.broker import Conflict

        with pytest.raises(Conflict) as caught:
            await broker.put(lease_key(name, 0), b"", ttl=1, revision=1 << 40)
        return caught.value.revision

    async def test_registering_can_be_cancelled(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b:
            for turns in range(6):
                task = asyncio.ensure_future(a.registry.register(record("decode-0", 1)))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait({task})
                assert not a.registry.registered or not task.cancelled()
                await a.registry.unregister()
            # Whatever was left there belongs to nobody that answers.
            await b.registry.register(record("decode-0", 2))

    async def test_wait_for(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b:
            waiting = asyncio.ensure_future(b.registry.wait_for("decode-0", 5))
            other = asyncio.ensure_future(b.registry.wait_for("decode-1/1", 5))
            await a.registry.register(record("decode-0"))
            assert (await waiting).id == "decode-0/0"
            other.cancel()
            with pytest.raises(UnknownWorker, match=r"'decode-7' is not registered .*known: decode-0/0"):
                await b.registry.wait_for("decode-7", 0.05)

    async def test_garbage_is_counted_and_ignored(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as b, b.registry.watch() as changes:
            stranger = encode_record(record("someone-else"))
            for i, value in enumerate((b"", b"\xff\xfe", b"{}", b"null", b"[" * 5000, stranger, b"x" * 16384)):
                await a.broker.put(f"w.garbage.{i}", value, ttl=60, revision=0)
            await a.broker.put("other.things", b"{}", ttl=60, revision=0)
            mine = record("decode-0")
            await a.registry.register(mine)
            assert await next_of(changes) == Joined(mine)
            assert b.registry.garbage == 7
            assert b.registry.workers() == [mine]

    async def test_garbage_on_a_living_workers_key_is_overwritten(self, cluster: Cluster) -> None:
        async with member(cluster, ttl=120) as a, member(cluster, ttl=120) as b, b.registry.watch() as changes:
            mine = record("decode-0")
            await a.registry.register(mine)
            await next_of(changes)
            held = await self._revision(b.broker, "decode-0")
            await b.broker.put(lease_key("decode-0", 0), b"garbage", ttl=60, revision=held)
            seen = await until(changes, lambda change: isinstance(change, Changed))
            assert seen in ([Suspect(mine), Changed(mine, mine)], [Changed(mine, mine)])
            assert a.registry.registered

    @timed
    async def test_broker_restart_forgets_nobody(self, cluster: Cluster) -> None:
        """Mooncake 2246: a restart of the metadata server lost the descriptors of its peers."""
        async with member(cluster, seed=1) as a, member(cluster, seed=2) as b, member(cluster, seed=3) as viewer:
            await a.registry.register(record("a", 1))
            await b.registry.register(record("b", 2))
            async with viewer.registry.watch() as changes:
                for _ in range(2):
                    assert isinstance(await next_of(changes), Joined)
                await cluster.stop()
                await connected(viewer.broker, False)
                # Nobody is forgotten while the broker is down, for longer than a lease.
                seen = await quiet(changes, cluster.ttl * 1.3)
                assert [worker.id for worker in viewer.registry.workers()] == ["a/0", "b/0"]
                await cluster.start()
                await connected(viewer.broker)
                seen += await quiet(changes, cluster.ttl * 2.5)
                if any(isinstance(change, Left | Joined) for change in seen):
                    raise Late(f"an answer or a renewal: {seen}")
                assert [worker.id for worker in viewer.registry.workers()] == ["a/0", "b/0"]
                assert a.registry.registered and b.registry.registered
                await a.registry.update(load=Load(9, 9, 9))
                assert (await next_of(changes)).record.load == Load(9, 9, 9)

    async def test_a_worker_that_died_while_the_broker_was_down_is_gone_after_a_lease(self, cluster: Cluster) -> None:
        async with member(cluster) as a, member(cluster) as viewer:
            mine = record("a")
            await a.registry.register(mine)
            async with viewer.registry.watch() as changes:
                assert isinstance(await next_of(changes), Joined)
                await cluster.stop()
                await connected(viewer.broker, False)
                await a.die()
                await cluster.start()
                assert await next_of(changes, 10) == Suspect(mine)
                assert viewer.registry.lookup("a") == mine
                doubted = asyncio.get_running_loop().time()
                assert await next_of(changes) == Left(mine, "missing")
                assert asyncio.get_running_loop().time() - doubted >= cluster.ttl * 0.5

    async def test_closing_ends_watches_and_unregisters(self, cluster: Cluster) -> None:
        async with member(cluster) as b:
            async with await cluster.connect() as broker:
                registry = Registry(broker, rng=random.Random(0), ttl=60)
                await registry.start()
                await registry.register(record("a"))
                await b.registry.wait_for("a", 5)
                async with b.registry.watch() as theirs, registry.watch() as ours:
                    await next_of(theirs)
                    await next_of(ours)
                    await registry.aclose()
                    await registry.aclose()
                    async with asyncio.timeout(20):
                        assert all(isinstance(change, Left) for change in [change async for change in ours])
                    assert await next_of(theirs) == Left(record("a"), "unregistered")
