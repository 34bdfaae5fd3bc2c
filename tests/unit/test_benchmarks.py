"""The benchmarks run, and print what they promise; their figures at this size mean nothing and are not looked at.

The peers may be absent, or fail: that is a null and a reason, never the end of a benchmark.
"""

from __future__ import annotations

import json
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.contenders import Rounds, ucx
from benchmarks.lanes import crossover
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, render
from benchmarks.turns import take_turns

ROOT = Path(__file__).parents[2]
SECONDS = 100.0

TRANSFER = {
    "block_bytes",
    "memcpy_gbps",
    "gather_gbps",
    "nixl_gbps",
    "kvstream_gbps",
    "vs_nixl",
    "vs_memcpy",
    "loop_lag_p99_ms",
    "cpu_s_per_gb",
    "nixl_cpu_s_per_gb",
}
OVERLAP = {"layers", "compute", "compute_ms", "layer_bytes", "one_layer_ms", "exposed_ms", "limit_ms", "within"}
CONNECT = {"first_byte", "first_byte_seasoned_peer_ms", "cost_of_all_peers", "registration", "cycles"}


NAMES = ("transfer", "checksums", "lanes", "overlap", "connect", "registry", "small")

Run = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The result of a benchmark. Two of them run at a time: most of what they do at this size is to start processes."""
    plots = tmp_path_factory.mktemp("plots")
    with ThreadPoolExecutor(2) as pool:
        runs = {name: pool.submit(run_benchmark, name, plots / f"{name}.svg") for name in NAMES}
        yield lambda name: runs[name].result()
        for started in runs.values():
            started.cancel()


def run_benchmark(name: str, plot: Path) -> dict[str, Any]:
    """Run a benchmark as a user does, check its plot, and return the object on its last line."""
    command = [sys.executable, "-m", "benchmarks", name, "--tiny", "--json", "--svg", str(plot)]
    done = subprocess.run(command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["loaded"] in (True, False)
    return result


def explained(row: dict[str, Any], column: str, contender: str) -> bool:
    """Whether there is a figure, or a reason why there is none."""
    return (row[column] or 0) > 0 or bool(row["errors"][contender])


def test_transfer(run: Run) -> None:
    result = run("transfer")
    (row,) = result["rows"]
    assert row.keys() >= TRANSFER
    assert row["kvstream_gbps"] > 0
    assert row["ucx_gbps"] > 0, row.get("errors")
    assert row["vs_ucx"] == pytest.approx(row["kvstream_gbps"] / row["ucx_gbps"], abs=0.01)
    assert explained(row, "mooncake_gbps", "mooncake")
    assert explained(row, "nixl_gbps", "nixl")


def test_over_tcp_ucx_puts_and_the_bytes_arrive() -> None:
    assert ucx.measure(4096, 1 << 20, 1, tcp=True).seconds[0] > 0


def test_checksums(run: Run) -> None:
    (row,) = run("checksums")["rows"]
    assert row["slowdown"] == pytest.approx(1 - row["on_gbps"] / row["off_gbps"], abs=0.01)
    assert row["off_unlent_gbps"] > 0


def test_lanes(run: Run) -> None:
    result = run("lanes")
    assert {"shared_slots", "shared_lent", "put"} <= set(result["ways"])
    (row,) = result["rows"]
    assert all(explained(row, f"{way}_gbps", way) for way in result["ways"])
    assert row["shared_slots_gbps"] > 0
    assert {"lane", "setting", "crossover_bytes", "configured_bytes"} == result["crossovers"][0].keys()


def test_overlap(run: Run) -> None:
    rows = run("overlap")["rows"]
    assert [row["compute"] for row in rows] == ["awaited", "numpy", "python"]
    for row in rows:
        assert row.keys() >= OVERLAP
        assert {"kvstream", "nixl_after", "nixl_chunked"} <= row["exposed_ms"].keys()


def test_connect(run: Run) -> None:
    result = run("connect")
    assert result.keys() >= CONNECT
    assert all(row["median_ms"] > 0 for row in result["first_byte"])


def test_registry(run: Run) -> None:
    rows = run("registry")["rows"]
    assert [row["watchers"] for row in rows] == [1, 2]
    for row in rows:
        times = ("seen_p50_ms", "seen_p99_ms", "burst_p50_ms", "burst_p99_ms", "snapshot_ms")
        assert all(row[name] > 0 for name in times)
        assert {"watcher_cores", "server_cores", "fleet_cores", "lost"} <= row.keys()


def test_small_and_with_it_notify(run: Run) -> None:
    result = run("small")
    (post,) = result["post"]
    assert post["post_ms"] > 0
    assert explained(post, "nixl_post_ms", "nixl")
    assert result["notify"][0].keys() == {"lane", "median_us", "p99_us"}
    assert [row["together"] for row in result["tiny"]] == [32]


# -- their parts


def test_contenders_take_turns_and_one_that_fails_is_not_asked_again() -> None:
    asked: list[str] = []

    def steady() -> Rounds:
        asked.append("steady")
        return Rounds([1.0, 3.0], cpu=0.5)

    def failing() -> Rounds:
        asked.append("failing")
        if asked.count("failing") == 2:
            raise RuntimeError("gone")
        return Rounds([2.0], cpu=1.0)

    results = take_turns({"steady": steady, "failing": failing}, 3, lambda: asked.append("-"))
    assert asked == ["-", "steady", "failing", "-", "steady", "failing", "-", "steady"]
    assert results["failing"].error == "gone"
    assert results["failing"].gbps(2 * 10**9) == 1.0
    assert results["steady"].error == ""
    assert results["steady"].gbps(2 * 10**9) == 1.0
    assert results["steady"].spread(3 * 10**9) == (1.0, 3.0)
    assert results["steady"].cpu_s_per_gb(10**9) == 0.5


def test_one_that_never_measured_has_no_figures() -> None:
    def absent() -> Rounds:
        raise RuntimeError("not installed")

    result = take_turns({"absent": absent}, 2)["absent"]
    assert result.error == "not installed"
    assert result.gbps(1) is result.spread(1) is result.cpu_s_per_gb(1) is result.lag_p99_ms() is None


@pytest.mark.parametrize(
    ("slots", "lent", "expected"),
    [
        ([5, 5, 5], [4, 5, 9], 8),
        ([5, 5, 5], [9, 4, 9], 16),  # from there on, not only there
        ([5, 5, 5], [9, 9, 4], None),
        ([5, 5, 5], [6, 6, 6], 4),
        ([5, 5, 5], [6, 6, None], None),
    ],
)
def test_crossover(slots: list[float], lent: list[float | None], expected: int | None) -> None:
    rows = [
        {"block_bytes": block, "shared_slots_gbps": one, "shared_lent_gbps": two}
        for block, one, two in zip([4, 8, 16], slots, lent, strict=True)
    ]
    assert crossover(rows, "shared") == expected


def test_scales() -> None:
    assert [Options(scale).pick(1, 2, 3) for scale in ("full", "quick", "tiny")] == [1, 2, 3]


def test_a_series_without_values_is_not_drawn() -> None:
    panel = Panel(
        title="rates", groups=("a", "b"), series=(("here", (1.0, 2.0)), ("absent", (None, None))), colors=(0, 1)
    )
    drawn = render(Figure(title="title", subtitle="subtitle", panels=(panel,)))
    assert "here" in drawn
    assert "absent" not in drawn
    assert drawn.count('class="bar1"') == 0
    assert drawn.count('class="bar0"') == 3  # two bars and the legend
