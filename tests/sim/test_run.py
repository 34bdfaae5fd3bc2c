"""Runs: no violation in the production code, the same log everywhere, pictures, and small failing scenarios."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest

from kvstream.cli.main import main
from kvstream.discovery.broker import LeaseEvent
from kvstream.discovery.registry import LOADS_PER_SECOND
from kvstream.runtime.copies import Copies
from kvstream.runtime.streams import Streams
from kvstream.scheduler.source import Source
from kvstream.sim.broker import SimBrokerServer
from kvstream.sim.cluster import Cluster
from kvstream.sim.plan import Fault, Profile, Scenario, Schedule, generate
from kvstream.sim.run import Result, run
from kvstream.sim.shrink import shrink
from kvstream.sim.timeline import Timeline
from kvstream.sim.transport import SimConnection

ROOT = Path(__file__).parent.parent.parent
SEEDS = (0, 1, 2, 3)


def play(seed: int, faults: Profile, *, workers: int = 8, streams: int = 40) -> Result:
    return run(generate(seed, workers=workers, streams=streams, faults=faults))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("faults", ["none", "mild", "harsh"])
def test_nothing_is_violated(seed: int, faults: Profile) -> None:
    result = play(seed, faults)
    assert result.violations == []
    assert result.ends["done"] > 10


def test_the_workload_reaches_every_way_of_moving_bytes() -> None:
    """Chunks of several layers, loans on both lanes, reads that outlast their stream, withdrawn puts, second offers."""
    reached: Counter[str] = Counter()

    def count(stack: ExitStack, owner: type, name: str, what: Callable[..., str]) -> None:
        original = getattr(owner, name)

        def counting(self: object, *args: Any, **named: Any) -> Any:
            answer = original(self, *args, **named)
            reached[what(self, *args, answer)] += 1
            return answer

        stack.enter_context(patch.object(owner, name, counting))

    with ExitStack() as stack:
        count(stack, Copies, "_land", lambda _, __, ___, move, *____: "group" if move.layers > 1 else "layer")
        count(stack, SimConnection, "lend", lambda connection, *_: f"lent by {connection.lane}")
        count(stack, SimConnection, "withdraw", lambda connection, *_: f"withdrawn from {connection.lane}")
        count(stack, Copies, "put_off", lambda _, __, put_off: "put off" if put_off else "told")
        count(stack, Source, "ask_again", lambda *_: "asked again")
        count(stack, Streams, "accept_offer", lambda _, offer, *__: f"class {offer.share_class}")
        for seed in (0, 5, 6, 14, 21):
            play(seed, "harsh")
    wanted = {"group", "layer", "lent by shared", "lent by get", "withdrawn from put", "put off", "told", "asked again"}
    assert reached.keys() >= wanted | {"class ", "class gold", "class iron"}


@pytest.mark.parametrize("seed", range(10, 14))
def test_a_small_cluster(seed: int) -> None:
    assert play(seed, "harsh", workers=2, streams=10).violations == []


def test_the_log_is_the_same_in_every_process() -> None:
    script = (
        "import sys; from kvstream.sim.plan import generate; from kvstream.sim.run import run\n"
        "for seed in map(int, sys.argv[1:]):\n"
        "    print(seed, run(generate(seed, workers=8, streams=40, faults='harsh')).log_hash)"
    )
    logs: list[list[str]] = []
    for hash_seed, seeds in (("1", SEEDS), ("2", SEEDS[::-1])):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, seeds)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        logs.append(sorted(done.stdout.split("\n")))
    here = [f"{seed} {play(seed, 'harsh').log_hash}" for seed in SEEDS]
    assert logs[0] == logs[1] == ["", *here]


def test_a_name_that_was_taken_over_stays_taken_also_when_a_third_process_fails_to_take_it() -> None:
    """Such a worker's later lives do not come up, and that is no violation."""
    faults = (
        Fault(kind="clash", at=3.5, who=("w1",), value=3.0),
        Fault(kind="clash", at=4.4, who=("w1",), lasts=3.8),
        Fault(kind="kill", at=9.0, who=("w1",), lasts=0.06),
    )
    scenario = generate(5029, workers=3, streams=8, faults=Schedule(faults=faults))
    assert run(scenario).violations == []


@pytest.mark.parametrize(
    ("seed", "streams"),
    [
        # Both ends have the same deadline, and what was lent is taken back just before the destination's passes.
        (6406, ("s7", "s8")),
        # A read of what was lent takes longer than `end_wait`, for which the destination gives the connection up.
        (6718, ("s2", "s21")),
    ],
)
def test_what_was_found_once(seed: int, streams: tuple[str, ...]) -> None:
    scenario = generate(seed, workers=8, streams=40, faults=Schedule(streams=streams))
    assert run(scenario).violations == []


def test_a_timeline_changes_nothing_and_has_every_stream() -> None:
    scenario = generate(1, workers=4, streams=12, faults="harsh")
    timeline = Timeline()
    assert run(scenario, timeline=timeline) == run(scenario)
    trace = msgspec.json.decode(timeline.encode())
    events = trace["traceEvents"]
    assert {event["ph"] for event in events} >= {"b", "e", "i", "M"}
    assert all(isinstance(event["pid"], int) and event["ts"] >= 0 for event in events)
    began = [event["id"] for event in events if event["ph"] == "b"]
    assert len(began) == len(set(began)) > 5


def test_a_run_that_would_never_end_is_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Something goes on in ever smaller steps: no fault's, no stream's and no instant's bound ends that."""
    monkeypatch.setattr("kvstream.sim.run._STEPS", 20_000)
    monkeypatch.setattr("kvstream.sim.run._STEPS_EACH", 0)
    scenario = generate(0, workers=2, streams=2, faults="none")
    assert run(scenario).violations == []
    start = Cluster.start

    async def spin() -> None:
        wait = 1.0
        while True:
            await asyncio.sleep(wait)
            wait = max(wait / 2, 1e-12)

    def start_and_spin(cluster: Cluster) -> None:
        start(cluster)
        life = cluster.lives["w0"]
        life.process.call_soon(life.spawn, spin())

    with patch.object(Cluster, "start", start_and_spin):
        (violation,) = run(scenario).violations
    assert "came to a stop" in violation and "no end at" in violation


def test_the_work_for_a_worker_does_not_grow_with_the_cluster() -> None:
    """Counts, not seconds: what is sent and what is run grow as the cluster does, and loads stay below their bound."""
    small, large = work(75), work(150)
    assert large.steps < 1.25 * small.steps
    assert large.loads < LOADS_PER_SECOND
    # A message to everybody for each change would be several times as many.
    assert large.messages < 25


@dataclass
class Work:
    messages: float
    """With changes of leases, to one worker, per virtual second."""
    loads: float
    """That workers have published, per virtual second."""
    steps: float
    """For one worker, with its share of the streams."""


def work(workers: int) -> Work:
    changes: Counter[str] = Counter()
    servers: dict[SimBrokerServer, None] = {}
    write = SimBrokerServer._write

    def counting(self: SimBrokerServer, events: tuple[LeaseEvent, ...]) -> None:
        servers[self] = None
        changes.update(event.reason for event in events)
        write(self, events)

    with patch.object(SimBrokerServer, "_write", counting):
        result = run(generate(1, workers=workers, streams=4 * workers, faults="harsh"))
    assert result.violations == []
    assert result.ends["done"] >= 2 * workers
    (server,) = servers
    per_second = 1 / result.virtual_s
    return Work(server.told / workers * per_second, changes["put"] * per_second, result.steps / workers)


def failing_with(needed: Callable[[Scenario], bool]) -> Callable[[Scenario], Result]:
    def attempt(scenario: Scenario) -> Result:
        violations = ["broken"] if needed(scenario) else []
        return Result(seed=0, log_hash="", violations=violations, streams=0, ends={}, virtual_s=0.0, steps=0)

    return attempt


def test_shrinking_leaves_what_is_needed() -> None:
    scenario = generate(5, workers=8, streams=40, faults="harsh")
    faults, streams = scenario.faults[2:7:2], scenario.streams[3:35:16]
    small = shrink(
        scenario,
        attempt=failing_with(lambda s: {*faults} <= {*s.faults} and {*streams} <= {*s.streams}),
        budget=10_000,
    )
    assert (small.faults, small.streams) == (faults, streams)
    assert shrink(scenario, attempt=failing_with(lambda _: False)) == scenario
    everything = shrink(scenario, attempt=failing_with(lambda _: True))
    assert (everything.faults, everything.streams) == ((), ())


def test_shrinking_is_bounded() -> None:
    scenario = generate(5, workers=8, streams=40, faults="harsh")
    runs: list[Scenario] = []

    def attempt(scenario: Scenario) -> Result:
        runs.append(scenario)
        return failing_with(lambda s: len(s.streams) > 20)(scenario)

    shrink(scenario, attempt=attempt, budget=7)
    assert len(runs) == 7


# -- the command


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["sim", "--seed", "2", "--workers", "4", "--streams", "8", "--faults", "mild", "--json"]
    assert main([*arguments, "--timeline", str(tmp_path / "t.json")]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert printed["seed"] == 2
    assert printed["violations"] == []
    assert printed["streams"] == 8
    assert printed["virtual_s"] > 1
    assert sum(printed["ends"].values()) >= 8
    assert (tmp_path / "t.json").stat().st_size > 1000
    assert main(arguments) == 0
    assert msgspec.json.decode(capsys.readouterr().out) == printed


def test_many_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--seeds", "0..5", "--workers", "3", "--streams", "4", "--json"]) == 0
    printed = msgspec.json.decode(capsys.readouterr().out)
    assert (printed["seeds"], printed["streams"], printed["failed"]) == (6, 24, [])


def test_a_violation_is_shrunk_to_a_schedule_that_still_has_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from tests.sim.mutants import MUTANTS

    (mutant,) = (mutant for mutant in MUTANTS if mutant.name == "decided with reads under way")
    small = tmp_path / "small.json"
    arguments = ["sim", "--seed", str(mutant.seeds[0]), "--workers", "8", "--streams", "40"]
    with mutant.planted():
        assert main([*arguments, "--shrink", str(small)]) == 1
        capsys.readouterr()
        schedule = msgspec.json.decode(small.read_bytes())
        assert len(schedule.get("faults", [])) <= 1
        assert len(schedule["streams"]) <= 2
        assert main([*arguments, "--faults", str(small), "--json"]) == 1
        assert msgspec.json.decode(capsys.readouterr().out)["violations"]
    assert main([*arguments, "--faults", str(small)]) == 0


@pytest.mark.parametrize("seeds", ["4", "5..4", "a..b", "0..9999999", "-1..3"])
def test_seeds_that_make_no_sense(capsys: pytest.CaptureFixture[str], seeds: str) -> None:
    assert main(["sim", f"--seeds={seeds}"]) == 2
    assert "kvstream: seeds: " in capsys.readouterr().err


def test_one_fault_on_each_frame_is_survived() -> None:
    """Whatever frame is the last that crosses, both sides come to an end that fits."""
    scenario = generate(0, workers=4, streams=10, faults="none")
    for on in ("Challenge", "Hello", "Welcome", "Offer", "Accept", "Ready", "Confirm", "End"):
        for late in (False, True):
            for kind in ("kill", "break"):
                faults = tuple(Fault(kind=kind, at=0.2, on=on, who=(f"w{n}",), late=late) for n in range(2))
                result = run(msgspec.structs.replace(scenario, faults=faults))
                assert result.violations == [], (on, late, kind)
