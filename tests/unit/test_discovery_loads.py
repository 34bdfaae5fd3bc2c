"""When loads are published: at once among few workers, rarer among many, slight changes with renewals, and the newest
always in the end. On a virtual-time loop."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import pairwise

import msgspec
import pytest

from kvstream.discovery import Broker, Changed, Joined, LeaseEvent, Load, MemoryBrokerServer, Registry
from kvstream.discovery.records import decode_record, encode_record, lease_key
from kvstream.discovery.registry import LOADS_PER_SECOND
from tests.unit.test_discovery_virtual_time import record, run

TTL = 30.0


class Fleet:
    """A registered worker with a load, a watcher that notes when it heard of which, and `others` beside."""

    def __init__(self, others: int = 0) -> None:
        self.hub = MemoryBrokerServer()
        self.others = others
        self.load = Load(1, 100, 100)
        self.heard: list[tuple[float, Load]] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Fleet:
        broker = self.hub.connect()
        for n in range(self.others):
            other = record(f"other-{n}")
            await broker.put(lease_key(other.name, 0), encode_record(other), ttl=86000, revision=0)
        self.registry = await self._stack.enter_async_context(Registry(broker, rng=random.Random(1), ttl=TTL))
        self._stack.push_async_callback(self._listen(self.hub.connect()))
        await self.registry.register(record("a"), load=lambda: self.load)
        await asyncio.sleep(1)
        self.heard.clear()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _listen(self, broker: Broker) -> Callable[[], Awaitable[None]]:
        async def listen() -> None:
            async with broker.watch() as events:
                async for event in events:
                    if isinstance(event, LeaseEvent) and event.key == "w.a.0" and event.value is not None:
                        told = decode_record(event.key, event.value)
                        assert told is not None
                        self.heard.append((asyncio.get_running_loop().time(), told.load))

        task = asyncio.create_task(listen())

        async def end() -> None:
            task.cancel()
            await asyncio.wait({task})

        return end

    def change(self, streams: int, free: int = 100) -> float:
        self.load = Load(streams, free, 100)
        self.registry.load_changed()
        return asyncio.get_running_loop().time()


def test_among_few_workers_a_load_is_told_at_once_and_ten_times_a_second() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            changed = fleet.change(2)
            await asyncio.sleep(0.01)
            assert fleet.heard == [(changed, Load(2, 100, 100))]
            for n in range(100):
                fleet.change(3 + n % 3)
                await asyncio.sleep(0.01)
            assert 9 <= len(fleet.heard) - 1 <= 11
            await asyncio.sleep(0.1)
            assert fleet.heard[-1][1] == fleet.load

    run(main)


def test_the_loads_of_all_workers_together_are_bounded() -> None:
    """Each worker's are rarer, the more there are, whatever else is published; the newest one is told in the end."""

    async def main() -> None:
        others = 2 * LOADS_PER_SECOND
        async with Fleet(others) as fleet:
            for n in range(5000):
                fleet.change(2 + n % 7)
                await asyncio.sleep(0.01)
                if n % 100 == 0:
                    await fleet.registry.update(state=("draining", "ready")[n // 100 % 2])
            loads = [load for _, load in fleet.heard]
            told = 1 + sum(load != before for before, load in pairwise(loads))
            assert 20 <= told <= 50 / ((others + 1) / LOADS_PER_SECOND) + 2
            await asyncio.sleep(3)
            assert fleet.heard[-1][1] == fleet.load

    run(main)


def test_a_slight_change_waits_for_a_renewal_and_does_not_hold_up_a_great_one() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            fleet.change(40)
            await asyncio.sleep(1)
            fleet.heard.clear()
            slight = fleet.change(41)
            await asyncio.sleep(1)
            assert fleet.heard == []
            great = fleet.change(60)
            await asyncio.sleep(0.1)
            assert fleet.heard == [(great, Load(60, 100, 100))]
            fleet.change(59)
            await asyncio.sleep(TTL / 3)
            assert fleet.heard[-1][1] == Load(59, 100, 100)
            assert fleet.heard[-1][0] - slight < TTL / 3 + 2
            fleet.heard.clear()
            # Without a free block nothing can be sent there, however slight the change.
            fleet.change(59, free=1)
            await asyncio.sleep(1)
            gone = fleet.change(59, free=0)
            await asyncio.sleep(0.1)
            assert fleet.heard[-1] == (gone, Load(59, 0, 100))

    run(main)


def test_a_load_that_changes_back_while_it_is_on_its_way_is_corrected() -> None:
    async def main() -> None:
        async with Fleet() as fleet:
            first = fleet.load
            fleet.change(9)
            await asyncio.sleep(0)  # the new one is being published
            fleet.load = first
            fleet.registry.load_changed()
            await asyncio.sleep(0.3)
            assert fleet.heard[-1][1] == first

    run(main)


def test_a_state_is_told_at_once_also_among_many_and_brings_no_load_before_its_turn() -> None:
    async def main() -> None:
        async with Fleet(2 * LOADS_PER_SECOND) as fleet:
            await asyncio.sleep(5)
            fleet.change(5)
            await asyncio.sleep(0.5)
            assert [load.streams for _, load in fleet.heard] == [5]
            fleet.change(6)
            asked = asyncio.get_running_loop().time()
            await fleet.registry.update(state="draining")
            assert asyncio.get_running_loop().time() - asked < 0.2
            await asyncio.sleep(0)
            assert [load.streams for _, load in fleet.heard] == [5, 5]
            await asyncio.sleep(2)
            assert [load.streams for _, load in fleet.heard] == [5, 5, 6]

    run(main)


def test_a_worker_that_has_left_or_was_never_registered_publishes_nothing() -> None:
    async def main() -> None:
        async with Fleet(2 * LOADS_PER_SECOND) as fleet:
            await asyncio.sleep(5)
            fleet.change(5)
            await asyncio.sleep(0.1)
            fleet.change(6)  # its turn comes later
            await fleet.registry.unregister()
            fleet.change(7)
            await asyncio.sleep(5)
            assert [load.streams for _, load in fleet.heard] == [5]

    run(main)


def test_a_watch_without_loads_tells_all_but_loads() -> None:
    async def main() -> None:
        async with (
            Fleet() as fleet,
            fleet.registry.watch(loads=False) as changes,
            fleet.registry.watch() as all_changes,
        ):
            for watch in (changes, all_changes):
                assert isinstance(await anext(watch), Joined)
            fleet.change(2)
            change = await anext(all_changes)
            assert isinstance(change, Changed) and change.record.load.streams == 2
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1):
                    await anext(changes)
            await fleet.registry.update(state="draining")
            change = await anext(changes)
            assert isinstance(change, Changed)
            assert (change.record.state, change.record.load.streams) == ("draining", 2)
            # Another life of the worker.
            table = fleet.hub.snapshot()["w.a.0"]
            again = msgspec.structs.replace(record("a", 2), state="draining")
            await fleet.hub.connect().put("w.a.0", encode_record(again), ttl=TTL, revision=table.revision)
            change = await anext(changes)
            assert isinstance(change, Changed) and change.record.incarnation == again.incarnation

    run(main)
