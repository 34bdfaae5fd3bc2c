"""Registry and in-memory broker on a virtual-time loop: leases of minutes pass in milliseconds, exactly."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from kvstream.discovery import (
    Changed,
    DataAddress,
    Joined,
    LeaseEvent,
    Left,
    MemoryBroker,
    MemoryBrokerServer,
    Registry,
    Suspect,
    Synced,
    WorkerRecord,
)
from kvstream.discovery.records import encode_record
from kvstream.errors import Fenced


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the clock."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise RuntimeError("nothing is scheduled: the test would wait for ever")
        self.now += max(timeout, 0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.jump = _Jump()
        super().__init__(self.jump)

    def time(self) -> float:
        return self.jump.now


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


def record(name: str, incarnation: int = 1) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        incarnation=f"{incarnation:032x}",
        key="00",
        address=DataAddress(transport="sim", host="h", port=1, host_id="h"),
        pid=1,
        host="h",
        started=0.0,
    )


def test_a_killed_worker_leaves_when_its_lease_ends() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        dying, watching = hub.connect(), hub.connect()
        async with Registry(watching, rng=random.Random(1), ttl=90) as viewer:
            async with Registry(dying, rng=random.Random(2), ttl=90) as registry:
                await registry.register(record("a"))
                await asyncio.sleep(3600)
                assert [worker.id for worker in viewer.workers()] == ["a/0"]
                async with viewer.watch() as changes:
                    assert isinstance(await anext(changes), Joined)
                    died = asyncio.get_running_loop().time()
                    await dying.aclose()
                    assert isinstance(await anext(changes), Suspect)
                    assert isinstance(await anext(changes), Left)
                    # It renews every third of a lease.
                    assert 60 <= asyncio.get_running_loop().time() - died <= 90.5
        await watching.aclose()

    run(main)


def test_renewal_is_relative_to_expiry() -> None:
    """dynamo PR 4363: renewal was scheduled from the last response and missed expiry after slow answers."""

    async def main() -> None:
        hub = MemoryBrokerServer()
        broker = hub.connect()
        slow_put = broker.put

        async def put(key: str, value: bytes, *, ttl: float, revision: int) -> int:
            done = await slow_put(key, value, ttl=ttl, revision=revision)
            await asyncio.sleep(ttl * 0.8)  # the answer comes late
            return done

        broker.put = put  # type: ignore[method-assign]
        other = hub.connect()
        async with Registry(other, rng=random.Random(1), ttl=30) as viewer, viewer.watch() as changes:
            registry = Registry(broker, rng=random.Random(2), ttl=30)
            await registry.start()
            await registry.register(record("a"))
            assert isinstance(await anext(changes), Joined)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3600):
                    change = await anext(changes)
                    raise AssertionError(change)
            await registry.aclose()

    run(main)


def test_an_outage_of_half_a_minute_loses_nobody() -> None:
    """dynamo 3493: a short broker outage expired every lease and restarted the fleet."""

    async def main() -> None:
        hub = MemoryBrokerServer()
        brokers = [hub.connect() for _ in range(20)]
        registries = [Registry(broker, rng=random.Random(i), ttl=3) for i, broker in enumerate(brokers)]
        for i, registry in enumerate(registries):
            await registry.start()
            await registry.register(record(f"w{i}"))
        await asyncio.sleep(1)
        async with registries[0].watch() as changes:
            for _ in range(20):
                assert isinstance(await anext(changes), Joined)
            for wipe in (False, True):
                hub.stop()
                await asyncio.sleep(30)
                assert len(registries[0].workers()) == 20
                hub.start(wipe=wipe)
                await asyncio.sleep(0.5)
                assert len(hub.snapshot()) == 20
                await asyncio.sleep(20)
                assert all(len(registry.workers()) == 20 for registry in registries)
            for registry in registries:
                await registry.aclose()
            seen = [change async for change in changes]
            # Those that left did so by unregistering; our own watch ends with its registry.
            assert not [change for change in seen if isinstance(change, Left) and change.reason != "unregistered"]

    run(main)


@pytest.mark.parametrize("away", ["viewer lost it too", "viewer saw a silence"])
def test_a_lease_that_ends_before_its_worker_is_back_after_an_outage_is_no_death(away: str) -> None:
    """A broker that keeps its leases lets them run out as soon as it is back, while workers are still reconnecting."""

    async def main() -> None:
        hub = MemoryBrokerServer()
        loop = asyncio.get_running_loop()
        late, gone = hub.connect(), hub.connect()
        async with (
            Registry(hub.connect(), rng=random.Random(1), ttl=10) as viewer,
            Registry(late, rng=random.Random(2), ttl=10) as living,
            Registry(gone, rng=random.Random(3), ttl=10) as dying,
            viewer.watch() as changes,
        ):
            await living.register(record("living"))
            await dying.register(record("dying", 2))
            assert {(await anext(changes)).record.name for _ in range(2)} == {"living", "dying"}
            await asyncio.sleep(100)
            if away == "viewer lost it too":
                hub.stop()
            for broker in (late, gone):
                hub.detach(broker)
                broker.connection_lost()
            await asyncio.sleep(6)
            hub.start()
            if away != "viewer lost it too":
                viewer._broker._interrupted()
            back = loop.time()
            assert set(hub.snapshot()) == {"w.living.0", "w.dying.0"}
            await asyncio.sleep(6)
            assert hub.snapshot() == {}
            hub.attach(late)
            late.connection_made()
            await asyncio.sleep(2)
            assert living.registered and set(hub.snapshot()) == {"w.living.0"}
            seen: list[object] = []
            while not isinstance(change := await anext(changes), Left):
                seen.append(change)
            assert change.record.name == "dying" and 10 <= loop.time() - back <= 10.5
            assert [worker.id for worker in viewer.workers()] == ["living/0"]
            assert all(isinstance(other, Suspect | Changed) for other in seen)

    run(main)


def test_a_fleet_rejoins_with_jitter_and_within_a_tenth_of_a_lease() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        loop = asyncio.get_running_loop()
        registries = [Registry(hub.connect(), rng=random.Random(i), ttl=100) for i in range(50)]
        for i, registry in enumerate(registries):
            await registry.start()
            await registry.register(record(f"w{i}"))
        await asyncio.sleep(10)
        hub.stop()
        await asyncio.sleep(1000)
        hub.start(wipe=True)
        back = loop.time()
        times: list[float] = []
        async with hub.connect().watch() as events:
            while len(times) < 50:
                if not isinstance(await anext(events), Synced):
                    times.append(loop.time() - back)
        assert max(times) <= 10
        # Over a twentieth of a lease: in any twentieth of that there are a few only.
        assert all(sum(start <= time < start + 0.25 for time in times) < 15 for start in times)
        for registry in registries:
            await registry.aclose()

    run(main)


async def freeze(broker: MemoryBroker, registry: Registry, name: str) -> None:
    """What a SIGSTOP does: the connection stands, pings hang, nothing is renewed."""

    async def hang(_subject: str, _data: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    for service in list(broker.services):
        await service.aclose()
    await broker.serve(f"kvstream.w.{name}.0.>", hang)
    assert registry._own is not None and registry._own.task is not None
    registry._own.task.cancel()


def test_a_frozen_holder_of_a_name_is_waited_out() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        frozen, fresh = hub.connect(), hub.connect()
        registry = Registry(frozen, rng=random.Random(1), ttl=10)
        await registry.start()
        await registry.register(record("a"))
        await freeze(frozen, registry, "a")
        async with Registry(fresh, rng=random.Random(2), ttl=10) as second:
            started = asyncio.get_running_loop().time()
            await second.register(record("a", 2))
            assert 0 < asyncio.get_running_loop().time() - started <= 11.5
            assert second.registered
        await registry.aclose()
        await frozen.aclose()

    run(main)


def test_a_frozen_worker_leaves_when_its_lease_ends() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        broker = hub.connect()
        registry = Registry(broker, rng=random.Random(1), ttl=10)
        await registry.start()
        await registry.register(record("a"))
        async with Registry(hub.connect(), rng=random.Random(2), ttl=10) as viewer, viewer.watch() as changes:
            assert isinstance(await anext(changes), Joined)
            await freeze(broker, registry, "a")
            frozen = asyncio.get_running_loop().time()
            assert not viewer.is_suspect("a/0")
            assert isinstance(await anext(changes), Suspect)
            assert viewer.is_suspect("a/0")
            assert [worker.id for worker in viewer.records()] == ["a/0"]
            left = await anext(changes)
            assert isinstance(left, Left) and left.reason == "lost"
            assert not viewer.is_suspect("a/0")
            assert viewer.records() == []
            assert asyncio.get_running_loop().time() - frozen <= 10.5
        await registry.aclose()

    run(main)


def test_a_worker_answers_at_once_when_something_happens_to_its_lease() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        loop = asyncio.get_running_loop()
        async with (
            Registry(hub.connect(), rng=random.Random(1), ttl=600) as owner,
            Registry(hub.connect(), rng=random.Random(2), ttl=600) as viewer,
            viewer.watch() as changes,
        ):
            fenced: asyncio.Future[Fenced] = loop.create_future()
            await owner.register(record("a"), on_fenced=fenced.set_result)
            assert isinstance(await anext(changes), Joined)
            await asyncio.sleep(1)
            started = loop.time()
            hub.put("w.a.0", b"garbage", 600, hub.snapshot()["w.a.0"].revision)
            assert isinstance(await anext(changes), Suspect | Changed)
            await asyncio.sleep(1)
            assert hub.snapshot()["w.a.0"].value == encode_record(record("a"))
            hub.put("w.a.0", encode_record(record("a", 2)), 600, hub.snapshot()["w.a.0"].revision)
            assert "0002" in str(await fenced)
            assert loop.time() - started < 2

    run(main)


def test_a_broker_that_counts_anew_does_not_make_two_owners() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        async with Registry(hub.connect(), rng=random.Random(1), ttl=600) as owner:
            fenced: asyncio.Future[Fenced] = asyncio.get_running_loop().create_future()
            await owner.register(record("a"), on_fenced=fenced.set_result)
            held = hub.snapshot()["w.a.0"].revision
            hub.stop()
            hub.start(wipe=True)
            # Another incarnation is quicker, and stands at the very revision that was ours.
            assert hub.put("w.a.0", encode_record(record("a", 2)), 600, 0) == held
            async with asyncio.timeout(100):
                await fenced
            assert hub.snapshot()["w.a.0"].value == encode_record(record("a", 2))

    run(main)


def test_the_hub_keeps_leases_over_a_restart_and_they_expire_in_time() -> None:
    async def main() -> None:
        hub = MemoryBrokerServer()
        broker = hub.connect()
        async with broker.watch() as events:
            assert isinstance(await anext(events), Synced)
            await broker.put("a", b"", ttl=60, revision=0)
            await broker.put("b", b"", ttl=20, revision=0)
            await anext(events)
            await anext(events)
            hub.stop()
            await asyncio.sleep(30)
            hub.start()
            assert await anext(events) == LeaseEvent("b", None, 0, "missing")
            assert isinstance(await anext(events), Synced)
            assert list(hub.snapshot()) == ["a"]
            gone = await anext(events)
            assert isinstance(gone, LeaseEvent) and gone.reason == "expired"
            assert asyncio.get_running_loop().time() == pytest.approx(60)

    run(main)
