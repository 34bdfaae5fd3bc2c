"""256 MiB between two processes, by KV block size, with shuffled block tables on both sides.

kvstream is measured end to end: from `send` to the destination's decision that every byte is in place, announcements
and confirmations included. NIXL is measured from its descriptor lists to the end of its WRITE, the better of its two
ways of preparing them; UCX by itself from the first post to the end of its flush; Mooncake (TCP, whatever the machine
has) over its batches. Contenders take turns, so that a machine that changes its speed changes it for all; medians are
reported, with the spread. `vs_*` are ratios within this run; what is not installed, or fails, is null, and `errors`
says why.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import machine
from benchmarks.contenders import kvstream, mooncake, nixl, ucx
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, size
from benchmarks.turns import Contender, Measured, take_turns

TOTAL = 256 << 20
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = 3
ROUNDS = 5
NIXL = ("nixl", "nixl_prepared")


def _contenders(transport: str, block_bytes: int, total: int, rounds: int) -> dict[str, Contender]:
    tcp = transport == "tcp"
    lane, transports = ("put", nixl.TCP_ONLY) if tcp else ("auto", None)
    return {
        "kvstream": lambda: kvstream.measure(block_bytes, total, rounds, lane=lane),
        "nixl": lambda: nixl.measure(block_bytes, total, rounds, transports=transports),
        "nixl_prepared": lambda: nixl.measure(block_bytes, total, rounds, prepared=True, transports=transports),
        "ucx": lambda: ucx.measure(block_bytes, total, rounds, tcp=tcp),
        "mooncake": lambda: mooncake.measure(block_bytes, total, rounds),
    }


def _ratio(ours: float, theirs: float | None) -> float | None:
    return round(ours / theirs, 2) if theirs else None


def _row(block_bytes: int, transport: str, total: int, turns: int, rounds: int) -> dict[str, Any]:
    gathers: list[float] = []
    copies: list[float] = []

    def limits() -> None:
        copies.append(machine.copy_gbps(total, 3))
        gathers.append(machine.gather_gbps(block_bytes, total, 3))

    results = take_turns(_contenders(transport, block_bytes, total, rounds), turns, limits)
    rates = {name: result.gbps(total) for name, result in results.items()}
    mine, ours = results["kvstream"], rates["kvstream"]
    if ours is None:
        raise RuntimeError(f"kvstream: {mine.error}")
    best = max((name for name in NIXL if rates[name]), key=lambda name: rates[name] or 0.0, default=None)
    theirs = results[best] if best else Measured()
    copy, gather = statistics.median(copies), statistics.median(gathers)
    row: dict[str, Any] = {
        "block_bytes": block_bytes,
        "memcpy_gbps": round(copy, 2),
        "gather_gbps": round(gather, 2),
        "nixl_gbps": theirs.gbps(total),
        "kvstream_gbps": ours,
        "vs_nixl": _ratio(ours, theirs.gbps(total)),
        "vs_memcpy": round(ours / copy, 2),
        "loop_lag_p99_ms": mine.lag_p99_ms(),
        "cpu_s_per_gb": mine.cpu_s_per_gb(total),
        "nixl_cpu_s_per_gb": theirs.cpu_s_per_gb(total),
        "kvstream_spread": mine.spread(total),
        "nixl_variant": best,
        "vs_gather": round(ours / gather, 2),
    }
    for name in ("ucx", "mooncake"):
        row[f"{name}_gbps"] = rates[name]
        row[f"vs_{name}"] = _ratio(ours, rates[name])
        row[f"{name}_cpu_s_per_gb"] = results[name].cpu_s_per_gb(total)
    if errors := {name: result.error for name, result in results.items() if result.error}:
        row["errors"] = errors
    return row


def run(options: Options) -> dict[str, Any]:
    """Every block size; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    sizes = options.pick(SIZES, SIZES[::4], SIZES[1:2])
    total, turns, rounds = options.pick((TOTAL, TURNS, ROUNDS), (TOTAL, 1, 2), (TOTAL >> 6, 1, 1))
    rows = [_row(block_bytes, options.transport, total, turns, rounds) for block_bytes in sizes]
    return {
        "loaded": load.seen(),
        "transport": options.transport,
        "total_bytes": total,
        "machine": machine.describe(),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'block':>8} {'memcpy':>7} {'gather':>7} {'mooncake':>8} {'ucx':>6} {'nixl':>6} {'kvstream':>9}"
        f" {'vs nixl':>8} {'vs ucx':>7} {'vs memcpy':>10} {'lag p99':>8} {'cpu s/GB':>9} {'nixl cpu':>9}"
    ]
    for row in result["rows"]:
        lines.append(
            f"{row['block_bytes'] >> 10:5d}KiB {row['memcpy_gbps']:7.2f} {row['gather_gbps']:7.2f}"
            f" {_cell(row['mooncake_gbps'], 8)} {_cell(row['ucx_gbps'], 6)} {_cell(row['nixl_gbps'], 6)}"
            f" {row['kvstream_gbps']:9.2f} {_cell(row['vs_nixl'], 8)} {_cell(row['vs_ucx'], 7)}"
            f" {row['vs_memcpy']:10.2f} {row['loop_lag_p99_ms']:8.2f}"
            f" {row['cpu_s_per_gb']:9.3f} {_cell(row['nixl_cpu_s_per_gb'], 9, 3)}"
        )
        lines += [f"         {name}: {text}" for name, text in row.get("errors", {}).items()]
    lines.append(
        "GB/s, medians; ratios within this run. kvstream end to end; nixl: the better of its two variants;"
        f" ucx: {'put' if result['transport'] == 'tcp' else 'get'}, one operation a block; mooncake: TCP."
    )
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: compare ratios, not rates.")
    return "\n".join(lines)


def _cell(value: float | None, width: int, digits: int = 2) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"


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
            ("UCX itself", tuple(row["ucx_gbps"] for row in rows)),
            ("Mooncake (TCP)", tuple(row["mooncake_gbps"] for row in rows)),
            ("gather, one thread", tuple(row["gather_gbps"] for row in rows)),
            ("memcpy, one thread", tuple(row["memcpy_gbps"] for row in rows)),
        ),
        colors=(0, 1, 2, 6, 3, 4),
    )
    title = f"{result['total_bytes'] >> 20} MiB between two processes ({way}), shuffled block tables"
    mooncake_version = result["machine"]["mooncake-transfer-engine-non-cuda"]
    also = f", Mooncake {mooncake_version}" if any(row["mooncake_gbps"] for row in rows) else ""
    return Figure(title=title, subtitle=machine.summary(result) + also, panels=(panel,))
