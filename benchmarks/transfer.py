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
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, size

TOTAL = 256 << 20
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = 3
ROUNDS = 5

Contender = Callable[[int], Rounds]


def _contenders(transport: str, rounds: int) -> dict[str, Contender]:
    lane, transports = ("put", nixl.TCP_ONLY) if transport == "tcp" else ("auto", None)
    return {
        "kvstream": lambda size: kvstream.measure(size, TOTAL, rounds, lane=lane),
        "nixl": lambda size: nixl.measure(size, TOTAL, rounds, transports=transports),
        "nixl_prepared": lambda size: nixl.measure(size, TOTAL, rounds, prepared=True, transports=transports),
    }


def _rate(seconds: list[float]) -> float:
    return TOTAL / statistics.median(seconds) / 1e9


def _row(size: int, contenders: dict[str, Contender], turns: int) -> dict[str, Any]:
    results: dict[str, list[Rounds]] = {name: [] for name in contenders}
    errors: dict[str, str] = {}
    gathers: list[float] = []
    copies: list[float] = []
    for _ in range(turns):
        copies.append(machine.copy_gbps(TOTAL, 3))
        gathers.append(machine.gather_gbps(size, TOTAL, 3))
        for name, measure in contenders.items():
            try:
                results[name].append(measure(size))
            except RuntimeError as error:
                errors[name] = str(error)
    seconds = {name: [s for turn in took for s in turn.seconds] for name, took in results.items() if took}
    rates = {name: _rate(values) for name, values in seconds.items()}
    best = max((name for name in rates if name.startswith("nixl")), key=lambda name: rates[name], default=None)
    copy, gather, ours = statistics.median(copies), statistics.median(gathers), rates["kvstream"]
    per_gb = {name: statistics.median(t.cpu for t in took) / (TOTAL / 1e9) for name, took in results.items() if took}
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


def run(options: Options) -> dict[str, Any]:
    """Every block size; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad()
    sizes, turns, rounds = (SIZES[::4], 1, 2) if options.quick else (SIZES, TURNS, ROUNDS)
    contenders = _contenders(options.transport, rounds)
    rows = [_row(size, contenders, turns) for size in sizes]
    return {
        "loaded": load.seen(),
        "transport": options.transport,
        "machine": machine.describe(),
        "rows": rows,
    }


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


def figure(result: dict[str, Any]) -> Figure:
    """Rates by block size."""
    rows = result["rows"]
    way = "TCP only" if result["transport"] == "tcp" else "one host"
    panel = Panel(
        title="GB/s by KV block size",
        groups=tuple(size(row["block_bytes"]) for row in rows),
        series=(
            ("kvstream, end to end", tuple(row["kvstream_gbps"] for row in rows)),
            ("NIXL", tuple(row["nixl_gbps"] for row in rows)),
            ("gather alone, one thread", tuple(row["gather_gbps"] for row in rows)),
            ("memcpy alone, one thread", tuple(row["memcpy_gbps"] for row in rows)),
        ),
        colors=(0, 1, 3, 4),
    )
    title = f"{TOTAL >> 20} MiB between two processes ({way}), shuffled block tables"
    return Figure(title=title, subtitle=machine.summary(result), panels=(panel,))
