"""256 MiB between two processes, by KV block size, with shuffled block tables on both sides.

kvstream is measured end to end: from `send` to the destination's decision that every byte is in place, announcements
and confirmations included. NIXL is measured from its descriptor lists to the end of its WRITE, the better of its two
ways of preparing them. Contenders take turns, so that a machine that changes its speed changes it for all; medians are
reported, with the spread. `vs_*` are ratios within this run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from benchmarks import machine
from benchmarks.contenders import Rounds, kvstream, nixl

TOTAL = 256 << 20
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = 3
ROUNDS = 5

Contender = Callable[[int], Rounds]

CONTENDERS: dict[str, Contender] = {
    "kvstream": lambda size: kvstream.measure(size, TOTAL, ROUNDS),
    "nixl": lambda size: nixl.measure(size, TOTAL, ROUNDS),
    "nixl_prepared": lambda size: nixl.measure(size, TOTAL, ROUNDS, prepared=True),
}


def _rate(seconds: list[float]) -> float:
    return TOTAL / statistics.median(seconds) / 1e9


def _row(size: int) -> dict[str, Any]:
    results: dict[str, list[Rounds]] = {name: [] for name in CONTENDERS}
    errors: dict[str, str] = {}
    gathers: list[float] = []
    copies: list[float] = []
    for _ in range(TURNS):
        copies.append(machine.copy_gbps(TOTAL, 3))
        gathers.append(machine.gather_gbps(size, TOTAL, 3))
        for name, measure in CONTENDERS.items():
            try:
                results[name].append(measure(size))
            except RuntimeError as error:
                errors[name] = str(error)
    seconds = {name: [s for turn in turns for s in turn.seconds] for name, turns in results.items() if turns}
    rates = {name: _rate(values) for name, values in seconds.items()}
    best = max((name for name in rates if name.startswith("nixl")), key=lambda name: rates[name], default=None)
    copy, gather, ours = statistics.median(copies), statistics.median(gathers), rates["kvstream"]
    per_gb = {name: statistics.median(t.cpu for t in turns) / (TOTAL / 1e9) for name, turns in results.items() if turns}
    row: dict[str, Any] = {
        "block_bytes": size,
        "memcpy_gbps": round(copy, 2),
        "gather_gbps": round(gather, 2),
        "kvstream_gbps": round(ours, 2),
        "kvstream_spread": [
            round(TOTAL / max(seconds["kvstream"]) / 1e9, 2),
            round(TOTAL / min(seconds["kvstream"]) / 1e9, 2),
        ],
        "nixl_gbps": round(rates[best], 2) if best else None,
        "nixl_variant": best,
        "vs_nixl": round(ours / rates[best], 2) if best else None,
        "vs_gather": round(ours / gather, 2),
        "vs_memcpy": round(ours / copy, 2),
        "loop_lag_p99_ms": round(max(turn.lag_p99 for turn in results["kvstream"]), 2),
        "cpu_s_per_gb": round(per_gb["kvstream"], 3),
        "nixl_cpu_s_per_gb": round(per_gb[best], 3) if best else None,
    }
    if errors:
        row["errors"] = errors
    return row


def run() -> dict[str, Any]:
    """Every block size; `loaded` says that something else used the machine before the run."""
    loaded = machine.is_loaded()
    return {"loaded": loaded, "machine": machine.describe(), "rows": [_row(size) for size in SIZES]}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'block':>8} {'memcpy':>7} {'gather':>7} {'nixl':>6} {'kvstream':>9} {'vs nixl':>8} {'vs memcpy':>10}"
        f" {'lag p99':>8} {'cpu s/GB':>9} {'nixl cpu':>9}"
    ]
    for row in result["rows"]:
        nixl_rate = f"{row['nixl_gbps']:6.2f}" if row["nixl_gbps"] else "     -"
        ratio = f"{row['vs_nixl']:8.2f}" if row["vs_nixl"] else "       -"
        cpu = f"{row['nixl_cpu_s_per_gb']:9.3f}" if row["nixl_cpu_s_per_gb"] else "        -"
        lines.append(
            f"{row['block_bytes'] >> 10:5d}KiB {row['memcpy_gbps']:7.2f} {row['gather_gbps']:7.2f} {nixl_rate}"
            f" {row['kvstream_gbps']:9.2f} {ratio} {row['vs_memcpy']:10.2f} {row['loop_lag_p99_ms']:8.2f}"
            f" {row['cpu_s_per_gb']:9.3f} {cpu}"
        )
        lines += [f"         {name}: {text}" for name, text in row.get("errors", {}).items()]
    lines.append("GB/s, medians; ratios within this run. kvstream end to end; nixl: the better of its two variants.")
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: compare ratios, not rates.")
    return "\n".join(lines)
