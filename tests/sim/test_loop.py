"""The virtual-time world: order, time, and processes that are stopped, slowed and killed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator

import pytest

from kvstream.sim.loop import Livelock, Process, Quiet, World


def process() -> Process:
    return World().process("test")


def test_time_jumps_and_timers_fire_by_time_then_by_creation() -> None:
    loop, fired = process(), list[str]()

    async def main() -> float:
        for when, name in ((5.0, "late"), (2.0, "a"), (2.0, "b"), (0.0, "now")):
            loop.call_later(when, fired.append, name)
        loop.call_soon(fired.append, "soon")
        await asyncio.sleep(3600)
        return loop.time()

    assert loop.run_until_complete(main()) == 3600
    assert fired == ["soon", "now", "a", "b", "late"]


def test_timeouts_and_cancellation_are_asyncios() -> None:
    loop = process()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2):
                await asyncio.Event().wait()
        assert loop.time() == 2
        task = asyncio.create_task(asyncio.sleep(10))
        await asyncio.sleep(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        assert loop.time() == 3

    loop.run_until_complete(main())


def test_what_can_not_happen_is_noticed() -> None:
    loop = process()
    with pytest.raises(Quiet):
        loop.run_until_complete(loop.create_future())

    def again() -> None:
        loop.call_soon(again)

    loop.call_soon(again)
    with pytest.raises(Livelock):
        loop.run_until_complete(asyncio.sleep(1))


def test_time_that_hardly_moves_is_noticed() -> None:
    loop = process()
    loop.world.max_steps = 10_000

    def again(wait: float) -> None:
        loop.call_later(wait, again, wait / 2)

    loop.call_soon(again, 1.0)
    with pytest.raises(Livelock, match="no end at 2"):
        loop.run_until_complete(asyncio.sleep(3))


def test_burying_ends_whatever_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstream.sim.loop._MAX_AT_ONCE", 10_000)
    world = World()
    for at_once in (True, False):
        loop = world.process(f"at once: {at_once}")

        def again(loop: Process = loop, at_once: bool = at_once) -> None:
            if at_once:
                loop.call_soon(again)
            else:
                loop.call_later(1e-12, again)

        async def stubborn() -> None:
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(1)

        loop.call_soon(again)
        task = loop.create_task(stubborn())
        with pytest.raises(Livelock):
            world.max_steps = world.steps + 10_000
            world.run(lambda: False)
        assert task in world.bury()
        world = World()


def test_blocking_work_runs_inline_and_threads_are_refused() -> None:
    loop = process()

    async def main() -> None:
        assert await asyncio.to_thread(threading.get_ident) == threading.get_ident()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(lambda: 1 // 0)

    loop.run_until_complete(main())
    refused: list[Exception] = []

    def elsewhere() -> None:
        try:
            loop.call_soon_threadsafe(print)
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert len(refused) == 1


@pytest.mark.parametrize("timers_first", [False, True])
def test_a_stopped_process_goes_on_where_it_was_late(timers_first: bool) -> None:
    world = World()
    stopped, other = world.process("stopped"), world.process("other")
    seen: list[tuple[str, float]] = []

    def note(what: str) -> None:
        seen.append((what, world.now))

    stopped.call_later(1.5, note, "timer")
    world.fabric.call_later(1, stopped.hold)
    world.fabric.call_later(1.2, stopped.call_soon, note, "message")
    world.fabric.call_later(1.8, stopped.call_soon, note, "another")
    world.fabric.call_later(5, lambda: stopped.release(timers_first=timers_first))
    other.call_later(2, note, "elsewhere")
    world.run(lambda: False, until=10)
    woken = ["timer", "message", "another"] if timers_first else ["message", "timer", "another"]
    assert seen == [("elsewhere", 2.0), *((what, 5.0) for what in woken)]


def test_a_slow_process_takes_its_time_for_each_callback() -> None:
    world, seen = World(), list[float]()
    slow = world.process("slow")
    slow.pace = 0.25
    for _ in range(4):
        slow.call_soon(lambda: seen.append(world.now))
    world.run(lambda: False, until=10)
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_a_killed_process_does_not_even_clean_up_until_it_is_buried() -> None:
    world, seen = World(), list[str]()
    killed = world.process("killed")

    async def main() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("lived")
        finally:
            await asyncio.sleep(0.5)
            seen.append("cleaned up")

    task = killed.create_task(main())
    world.fabric.call_later(0.5, killed.kill)
    world.run(lambda: False, until=100)
    assert seen == []
    assert world.bury() == []
    assert seen == ["cleaned up"]
    assert task.cancelled()


def test_what_does_not_end_is_left_by_the_burial() -> None:
    world = World()

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                pass

    task = world.process("stubborn").create_task(stubborn())
    world.run(lambda: False, until=1)
    assert world.bury() == [task]
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_dropped_async_generator_is_closed_in_its_own_process() -> None:
    world, closed_in = World(), list[object]()
    loop = world.process("owner")

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            closed_in.append(asyncio.get_running_loop())

    async def main() -> None:
        async for _ in numbers():
            break
        gc.collect()
        await asyncio.sleep(0.1)

    loop.run_until_complete(main())
    assert closed_in == [loop]
