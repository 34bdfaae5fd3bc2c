"""The benchmarks of load and of scale run and say what they are meant to say; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run(name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_scale() -> None:
    result = run("scale")
    assert [row["streams"] for row in result["scheduler"]] == [10, 1000, 10_000]
    assert all(row["event_us"] > 0 for row in result["scheduler"])
    assert [row["workers"] for row in result["registry"]] == [10, 100, 1000]


def test_load() -> None:
    result = run("load")
    assert [row["load"] for row in result["rows"]] == [0.5, 1.0, 2.0]
    for row in result["rows"]:
        # Whatever is refused is refused with advice, and nothing else goes wrong.
        assert set(row["outcomes"]) <= {"done", "refused"}
        assert row["outcomes"]["done"] > 0
        assert sum(row["outcomes"].values()) == row["arrivals"]
        assert row["most_offers"] <= 64
    assert result["beside"]["beside_ms"] > 0
    assert [row["order"] for row in result["deadlines"]] == ["arrival", "deadline"]
    assert [sorted(row["streams"]) for row in result["shares"]] == [["gold", "plain"]] * 2
