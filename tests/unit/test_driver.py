"""The pump: commands in order and never recursively, one bulk copy per turn of the loop, one timer, a final stop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import KVStreamError, PeerLost
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Command,
    Dial,
    Drop,
    Ended,
    Move,
    Offered,
    Stage,
    Transmit,
    Withdrawn,
)
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.driver import Driver


class Script:
    """Stands in for the core: gives the commands that the test puts in, and notes its ticks."""

    def __init__(self) -> None:
        self.commands: deque[Command] = deque()
        self.due: float | None = None
        self.ticks: list[float] = []
        self.begun: list[int] = []
        self.on_tick: Callable[[float], None] = lambda now: None

    def take(self) -> deque[Command]:
        commands, self.commands = self.commands, deque()
        return commands

    def next_timer(self) -> float | None:
        return self.due

    def staging(self, command: Stage) -> None:
        self.begun.append(command.stream)

    def moving(self, command: Move) -> None:
        self.begun.append(command.stream)

    def tick(self, now: float) -> None:
        self.ticks.append(now)
        self.due = None
        self.on_tick(now)


class Recorder:
    """Notes what it is asked to do; `on` lets a test act from within an effect."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.on: Callable[[Any], None] = lambda entry: None

    def _note(self, entry: Any) -> None:
        self.log.append(entry)
        self.on(entry)

    def transmit(self, link: int, frames: list[wire.Frame]) -> None:
        self._note(("transmit", link, [frame.chunks for frame in frames if isinstance(frame, wire.Confirm)]))

    def dial(self, peer: str) -> None:
        self._note(("dial", peer))

    def drop(self, link: int, error: KVStreamError) -> None:
        self._note(("drop", link))

    def stage(self, command: Stage) -> None:
        self._note(("stage", command.stream))

    def move(self, command: Move) -> None:
        self._note(("move", command.stream))

    def pumped(self) -> None:
        pass

    def notify(self, command: Offered | Withdrawn | Accepted | Arrived | Ended) -> None:
        self._note(("notify", type(command).__name__))


def say(number: int, link: int = 1) -> Transmit:
    return Transmit(link, wire.Confirm(1, 1, number))


def stage(stream: int, deadline: float) -> Stage:
    return Stage(1, stream, 1, 0, 0, 0, 1, 0, (deadline, stream, 0))


def move(stream: int, deadline: float) -> Move:
    return Move(1, stream, 1, 0, 0, 0, 1, 0, 1, 0, (deadline, stream, 0))


class Pump:
    def __init__(self) -> None:
        self.core = Script()
        self.effects = Recorder()
        self.driver = Driver(self.core, self.effects, asyncio.get_running_loop())  # type: ignore[arg-type]

    def give(self, *commands: Command) -> None:
        self.core.commands.extend(commands)

    def log(self) -> list[Any]:
        log, self.effects.log = self.effects.log, []
        return log


@pytest.fixture
async def pump() -> AsyncIterator[Pump]:
    pump = Pump()
    yield pump
    pump.driver.stop()


async def turn() -> None:
    """One turn of the loop."""
    await asyncio.sleep(0)


# ---------------------------------------------------------------------- commands


async def test_frames_of_a_link_go_out_together_in_order_after_the_other_commands(pump: Pump) -> None:
    pump.give(say(1), say(7, link=2), Dial("d"), say(2), Arrived(1, 0), say(8, link=2))
    pump.driver.pump()
    assert pump.log() == [
        ("dial", "d"),
        ("notify", "Arrived"),
        ("transmit", 1, [1, 2]),
        ("transmit", 2, [7, 8]),
    ]


async def test_what_was_said_before_a_drop_goes_out_before_it(pump: Pump) -> None:
    pump.give(say(1), say(7, link=2), Drop(1, PeerLost("gone")))
    pump.driver.pump()
    assert pump.log() == [("transmit", 1, [1]), ("drop", 1), ("transmit", 2, [7])]


async def test_events_from_within_an_effect_are_pumped_by_the_same_call(pump: Pump) -> None:
    depth, deepest = 0, 0

    def reenter(entry: Any) -> None:
        nonlocal depth, deepest
        depth += 1
        deepest = max(deepest, depth)
        if entry == ("dial", "d"):
            pump.give(say(2), Dial("e"))
            pump.driver.pump()
            assert pump.log() == [("dial", "d")], "performed within an effect"
        depth -= 1

    pump.effects.on = reenter
    pump.give(say(1), Dial("d"), say(3))
    pump.driver.pump()
    assert deepest == 1
    # The frames of the first event come before those that it led to.
    assert pump.log() == [("dial", "e"), ("transmit", 1, [1, 3, 2])]


@pytest.mark.parametrize("link", [1, 2])
async def test_what_a_transmit_leads_to_is_not_left_behind(pump: Pump, link: int) -> None:
    """A link may be lost while a frame is handed to it: what the core says to that must not wait for another event."""

    def lost(entry: Any) -> None:
        if entry == ("transmit", 1, [1]):
            pump.give(say(2, link), Dial("e"))
            pump.driver.pump()

    pump.effects.on = lost
    pump.give(say(1), say(9, link=3))
    pump.driver.pump()
    assert pump.log() == [("transmit", 1, [1]), ("transmit", 3, [9]), ("dial", "e"), ("transmit", link, [2])]


@pytest.mark.parametrize("culprit", [("dial", "bad"), ("transmit", 1, [1])])
async def test_an_effect_that_raises_costs_nobody_else_anything(pump: Pump, culprit: Any) -> None:
    def fail(entry: Any) -> None:
        if entry == culprit:
            raise RuntimeError("an effect failed")

    pump.effects.on = fail
    pump.give(say(1), Dial("bad"), Dial("good"), say(5, link=2))
    with pytest.raises(RuntimeError):
        pump.driver.pump()
    await turn()
    log = pump.log()
    for entry in (("dial", "bad"), ("dial", "good"), ("transmit", 1, [1]), ("transmit", 2, [5])):
        assert log.count(entry) == 1


# ---------------------------------------------------------------------- bulk


async def test_bulk_is_done_one_a_turn_the_most_urgent_first(pump: Pump) -> None:
    pump.give(stage(1, 9.0), move(2, 5.0), stage(3, 7.0))
    pump.driver.pump()
    assert pump.log() == []
    seen: list[list[Any]] = []
    for _ in range(4):
        await turn()
        seen.append(pump.log())
        if len(seen) == 1:
            pump.give(move(4, 1.0))  # more urgent than what waits
            pump.driver.pump()
    assert seen == [[("move", 2)], [("move", 4)], [("stage", 3)], [("stage", 1)]]
    await turn()
    assert pump.log() == []


async def test_a_deferred_pump_takes_what_came_until_then_in_one_message(pump: Pump) -> None:
    pump.give(say(1))
    pump.driver.pump_soon()
    pump.give(say(2))
    pump.driver.pump_soon()
    assert pump.log() == []
    await turn()
    assert pump.log() == [("transmit", 1, [1, 2])]
    pump.driver.pump_soon()
    pump.give(say(3))
    pump.driver.pump()
    assert pump.log() == [("transmit", 1, [3])]
    await turn()
    assert pump.log() == []


async def test_the_core_hears_of_a_gather_before_it_is_performed(pump: Pump) -> None:
    begun: list[list[int]] = []
    pump.effects.on = lambda entry: begun.append(list(pump.core.begun))
    pump.give(stage(1, 1.0), stage(2, 2.0))
    pump.driver.pump()
    for _ in range(3):
        await turn()
    assert begun == [[1], [1, 2]]


async def test_the_core_hears_of_a_read_before_it_is_performed_and_may_give_the_next(pump: Pump) -> None:
    """The read itself may report much later: what the core gives when it begins must not wait for that."""

    def begin(entry: Any) -> None:
        assert pump.core.begun[-1] == entry[1]
        if entry == ("move", 1):
            pump.give(move(2, 2.0))

    pump.effects.on = begin
    pump.give(move(1, 1.0))
    pump.driver.pump()
    for _ in range(3):
        await turn()
    assert pump.log() == [("move", 1), ("move", 2)]


async def test_frames_and_timers_do_not_wait_behind_bulk(pump: Pump) -> None:
    for stream in range(1, 6):
        pump.give(stage(stream, 1.0))
    pump.driver.pump()
    await turn()
    pump.core.due = 0.0  # due at once
    pump.give(say(1))
    pump.driver.pump()
    assert pump.log() == [("stage", 1), ("transmit", 1, [1])]
    await turn()
    await turn()
    assert pump.core.ticks
    assert len(pump.log()) <= 2
    for _ in range(5):
        await turn()


async def test_bulk_that_reports_at_once_still_leaves_the_turn_to_others(pump: Pump) -> None:
    turns = 0

    def report(entry: Any) -> None:
        if entry[0] == "stage" and entry[1] < 4:
            pump.give(say(entry[1]), stage(entry[1] + 1, 1.0))
            pump.driver.pump()

    pump.effects.on = report
    pump.give(stage(1, 1.0))
    pump.driver.pump()
    while ("stage", 4) not in pump.effects.log:
        await turn()
        turns += 1
    assert turns >= 4
    assert [entry[0] for entry in pump.log()] == ["stage", "transmit"] * 3 + ["stage"]


async def test_bulk_that_raises_does_not_stop_the_rest(pump: Pump) -> None:
    errors: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: errors.append(context["exception"]))

    def fail(entry: Any) -> None:
        if entry == ("stage", 1):
            raise RuntimeError("a gather failed")

    pump.effects.on = fail
    pump.give(stage(1, 1.0), stage(2, 2.0))
    pump.driver.pump()
    for _ in range(3):
        await turn()
    assert pump.log() == [("stage", 1), ("stage", 2)]
    assert [str(error) for error in errors] == ["a gather failed"]


# ---------------------------------------------------------------------- timers


async def past(when: float) -> None:
    """Until the loop has called all that was due by that time: a timer a little later comes after it."""
    loop = asyncio.get_running_loop()
    passed: asyncio.Future[None] = loop.create_future()
    loop.call_at(when + 0.005, passed.set_result, None)
    await passed
    await turn()


async def test_the_core_is_ticked_when_its_timer_is_due_and_pumped(pump: Pump) -> None:
    start = pump.driver.now()
    pump.core.due = due = start + 0.02
    pump.core.on_tick = lambda now: pump.give(say(1))
    pump.driver.pump()
    await past(due)
    assert pump.core.ticks[0] >= due, "the core must find its timer due"
    assert pump.log() == [("transmit", 1, [1])]


async def test_an_earlier_timer_replaces_a_later_one_and_none_cancels_it(pump: Pump) -> None:
    now = pump.driver.now()
    pump.core.due = now + 1000.0
    pump.driver.pump()
    pump.core.due = now + 0.01
    pump.driver.pump()
    await past(now + 0.01)
    assert len(pump.core.ticks) == 1
    pump.core.due = due = pump.driver.now() + 0.01
    pump.driver.pump()
    pump.core.due = None
    pump.driver.pump()
    await past(due)
    assert len(pump.core.ticks) == 1


async def test_a_timer_that_stays_is_not_armed_again(pump: Pump, monkeypatch: pytest.MonkeyPatch) -> None:
    armed: list[float] = []

    class Loop:
        """The running loop, with an account of the timers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(asyncio.get_running_loop(), name)

        def call_at(self, when: float, call: Callable[[], None]) -> asyncio.TimerHandle:
            armed.append(when)
            return asyncio.get_running_loop().call_at(when, call)

    monkeypatch.setattr(pump.driver, "_loop", Loop())
    pump.core.due = pump.driver.now() + 1000.0
    for _ in range(10):
        pump.driver.pump()
    assert len(armed) == 1


# ---------------------------------------------------------------------- stop


async def test_after_stop_there_is_no_bulk_and_no_timer_but_the_last_words_go_out(pump: Pump) -> None:
    pump.core.due = pump.driver.now() + 0.01
    pump.give(stage(1, 1.0), stage(2, 1.0))
    pump.driver.pump()
    pump.driver.stop()
    pump.driver.stop()
    pump.core.due = due = pump.driver.now() + 0.01
    pump.give(stage(3, 1.0), say(1))
    pump.driver.pump()
    await past(due)
    assert pump.log() == [("transmit", 1, [1])]
    assert pump.core.ticks == []


async def test_stop_from_within_bulk(pump: Pump) -> None:
    pump.effects.on = lambda entry: pump.driver.stop()
    pump.give(stage(1, 1.0), stage(2, 1.0))
    pump.driver.pump()
    for _ in range(3):
        await turn()
    assert pump.log() == [("stage", 1)]


# ---------------------------------------------------------------------- with the core itself


async def test_a_core_behind_the_pump_expires_streams_by_the_loops_clock() -> None:
    effects = Recorder()
    core = Scheduler(RuntimeConfig(), layers=1, block_tokens=4)
    driver = Driver(core, effects, asyncio.get_running_loop())
    start = driver.now()
    core.send(start, "s", tokens=4, held=1, candidates=["d"], deadline=0.02)
    driver.pump()
    await past(start + 0.02)
    assert effects.log == [("dial", "d"), ("notify", "Ended")]
    driver.stop()
