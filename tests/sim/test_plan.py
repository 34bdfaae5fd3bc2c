"""Scenarios: pure functions of their seed, and fault schedules from files."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvstream.errors import ConfigError
from kvstream.sim.plan import Fault, Schedule, generate, read_schedule


def test_a_scenario_is_a_function_of_its_seed() -> None:
    assert generate(7, workers=8, streams=40, faults="harsh") == generate(7, workers=8, streams=40, faults="harsh")
    assert generate(7, workers=8, streams=40, faults="harsh") != generate(8, workers=8, streams=40, faults="harsh")


def test_what_is_left_out_does_not_change_the_rest() -> None:
    whole = generate(3, workers=8, streams=40, faults="harsh")
    part = generate(
        3, workers=8, streams=40, faults=Schedule(faults=whole.faults[1:3], streams=tuple(f"s{n}" for n in (4, 30)))
    )
    assert part.faults == whole.faults[1:3]
    assert part.streams == (whole.streams[4], whole.streams[30])
    assert (part.workers, part.config) == (whole.workers, whole.config)


def test_a_larger_cluster_has_more_at_a_time_and_still_one_broker() -> None:
    small = generate(0, workers=8, streams=80, faults="harsh")
    large = generate(0, workers=400, streams=4000, faults="harsh")
    assert max(stream.at for stream in large.streams) < 1.5 * max(stream.at for stream in small.streams)
    assert len(large.faults) > 20 * len(small.faults)
    assert sum(fault.who == () for fault in large.faults) < 20
    assert max(len(fault.who) for fault in large.faults) == 4


def test_schedules_come_from_toml_and_json(tmp_path: Path) -> None:
    toml, json = tmp_path / "a.toml", tmp_path / "a.json"
    toml.write_text('streams = ["s1"]\n[[faults]]\nkind = "freeze"\nat = 1\nwho = ["w1"]\nlasts = 0.5\n')
    expected = Schedule(faults=(Fault(kind="freeze", at=1.0, who=("w1",), lasts=0.5),), streams=("s1",))
    assert read_schedule(str(toml)) == expected
    json.write_bytes(msgspec.json.encode(expected))
    assert read_schedule(str(json)) == expected


@pytest.mark.parametrize(
    "text", ["", "[]", '{"faults": [{"kind": "flood", "at": 1}]}', '{"faults": [{"at": 1}]}', '{"fault": []}', "\xff"]
)
def test_what_is_no_schedule_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"faults: .*bad\.json"):
        read_schedule(str(path))
    with pytest.raises(ConfigError, match=r"faults: .*can't be read"):
        read_schedule(str(tmp_path / "none"))


@pytest.mark.parametrize(
    ("fault", "what"),
    [
        (Fault(kind="kill", at=1, who=("w9",)), "no worker 'w9'"),
        (Fault(kind="kill", at=1), "needs 1"),
        (Fault(kind="freeze", at=1, who=("broker",)), "needs 1"),
        (Fault(kind="broker_down", at=1, on="End"), "`on`"),
        (Fault(kind="kill", at=1, who=("w0",), on="Endd"), "`on`"),
    ],
)
def test_faults_that_make_no_sense(fault: Fault, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        generate(1, workers=2, streams=1, faults=Schedule(faults=(fault,)))


def test_numbers_that_make_no_scenario() -> None:
    with pytest.raises(ConfigError, match="workers"):
        generate(1, workers=1, streams=1, faults="none")
    with pytest.raises(ConfigError, match="streams"):
        generate(1, workers=2, streams=-1, faults="none")
    with pytest.raises(ConfigError, match="no stream 's5'"):
        generate(1, workers=2, streams=1, faults=Schedule(streams=("s5",)))
