"""kvstream end to end by lane and way, over KV block sizes: what the lending thresholds of RuntimeConfig are set from.

A block's way is to be gathered into a slot and scattered out of it (two copies, few operations), or to be lent and
read where it is (one copy, an address a run). Which one wins depends on the lane and the block's size; the crossover
of a lane is the least size from which on lending is at least as fast at every size measured, and it is what the lane's
threshold (`lend_bytes` on the shared lane) should be on this machine. All ways take turns in each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks import machine
from benchmarks.contenders import kvstream
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, size
from benchmarks.turns import take_turns
from kvstream import RuntimeConfig
from kvstream.transport.base import LANES, MIN_LENT_RUN

__all__ = ["NEVER"]

TOTAL = 256 << 20
SIZES = (4 << 10, 8 << 10, 16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 1 << 20)
TURNS = 3
ROUNDS = 5

NEVER, ALWAYS = 1 << 40, MIN_LENT_RUN
"""Thresholds that settle the way whatever a block's size."""

THRESHOLDS = {"shared": "lend_bytes", "get": "get_lend_bytes"}
"""The setting that holds a lane's threshold; a lane without one always gathers."""


@dataclass(frozen=True, slots=True)
class Way:
    """How bytes move in one column."""

    name: str
    lane: str
    config: RuntimeConfig


def _ways() -> Iterator[Way]:
    for lane in LANES:
        threshold = THRESHOLDS.get(lane)
        if threshold not in RuntimeConfig.__struct_fields__:
            yield Way(lane, lane, RuntimeConfig())
            continue
        yield Way(f"{lane}_slots", lane, RuntimeConfig(**{threshold: NEVER}))
        yield Way(f"{lane}_lent", lane, RuntimeConfig(**{threshold: ALWAYS}))


def _row(block_bytes: int, ways: list[Way], total: int, turns: int, rounds: int) -> dict[str, Any]:
    results = take_turns(
        {
            way.name: lambda way=way: kvstream.measure(block_bytes, total, rounds, lane=way.lane, config=way.config)
            for way in ways
        },
        turns,
    )
    row: dict[str, Any] = {"block_bytes": block_bytes}
    for name, result in results.items():
        row[f"{name}_gbps"] = result.gbps(total)
        row[f"{name}_cpu_s_per_gb"] = result.cpu_s_per_gb(total)
        row[f"{name}_lag_p99_ms"] = result.lag_p99_ms()
    if errors := {name: result.error for name, result in results.items() if result.error}:
        row["errors"] = errors
    return row


def crossover(rows: list[dict[str, Any]], lane: str) -> int | None:
    """The least block size in bytes from which on lending is at least as fast as slots; None where it never is."""
    found: int | None = None
    for row in sorted(rows, key=lambda row: row["block_bytes"], reverse=True):
        slots, lent = row[f"{lane}_slots_gbps"], row[f"{lane}_lent_gbps"]
        if slots is None or lent is None or lent < slots:
            break
        found = row["block_bytes"]
    return found


def run(options: Options) -> dict[str, Any]:
    """Every block size; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    ways = list(_ways())
    names = [way.name for way in ways]
    sizes = options.pick(SIZES, (SIZES[0], SIZES[-1]), SIZES[2:3])
    total, turns, rounds = options.pick((TOTAL, TURNS, ROUNDS), (TOTAL, 1, 2), (TOTAL >> 6, 1, 1))
    rows = [_row(block_bytes, ways, total, turns, rounds) for block_bytes in sizes]
    crossovers = [
        {
            "lane": lane,
            "setting": setting,
            "crossover_bytes": crossover(rows, lane),
            "configured_bytes": getattr(RuntimeConfig(), setting),
        }
        for lane, setting in THRESHOLDS.items()
        if f"{lane}_lent" in names
    ]
    return {
        "loaded": load.seen(),
        "total_bytes": total,
        "machine": machine.describe(),
        "ways": names,
        "rows": rows,
        "crossovers": crossovers,
    }


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    ways = result["ways"]
    lines = [f"{'block':>8}" + "".join(f" {_words(way):>13}" for way in ways)]
    for row in result["rows"]:
        cells = (row[f"{way}_gbps"] for way in ways)
        lines.append(
            f"{row['block_bytes'] >> 10:5d}KiB"
            + "".join(f" {'-':>13}" if cell is None else f" {cell:13.2f}" for cell in cells)
        )
        lines += [f"         {name}: {text}" for name, text in row.get("errors", {}).items()]
    lines.append("GB/s end to end, medians, in turns.")
    for found in result["crossovers"]:
        at = found["crossover_bytes"]
        words = "is not faster at the largest size" if at is None else f"is at least as fast from {size(at)} on"
        lines.append(
            f"{found['lane']}: lending {words}; RuntimeConfig.{found['setting']}, which is set from this,"
            f" is {size(found['configured_bytes'])}."
        )
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: compare ratios, not rates.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Rates by way."""
    rows = result["rows"]
    panel = Panel(
        title="GB/s end to end by KV block size",
        groups=tuple(size(row["block_bytes"]) for row in rows),
        series=tuple((_words(way), tuple(row[f"{way}_gbps"] for row in rows)) for way in result["ways"]),
        colors=(5, 0, 2, 1, 6),
    )
    return Figure(
        title="Ways to move KV blocks between two processes of one host",
        subtitle=machine.summary(result),
        panels=(panel,),
    )


def _words(way: str) -> str:
    lane, _, how = way.partition("_")
    return f"{lane}, {how}" if how else lane
