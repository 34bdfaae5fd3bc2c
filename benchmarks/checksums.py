"""What `RuntimeConfig(checksums=True)` costs, by KV block size: kvstream end to end with and without, in turns.

Every chunk is hashed (XXH3) by the source after it is gathered and by the destination before it is scattered. What the
source lends it does not touch, so that checksums also turn lending off: the third contender, without checksums and
without lending, tells the two costs apart. Where blocks are too small to be lent it equals the first.
"""

from __future__ import annotations

from typing import Any

from benchmarks import machine
from benchmarks.contenders import kvstream
from benchmarks.lanes import NEVER
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, size
from benchmarks.turns import take_turns
from kvstream import RuntimeConfig

TOTAL = 256 << 20
SIZES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
TURNS = 3
ROUNDS = 5

CONFIGS = {
    "off": RuntimeConfig(),
    "on": RuntimeConfig(checksums=True),
    "off_unlent": RuntimeConfig(lend_bytes=NEVER),
}


def _row(block_bytes: int, total: int, turns: int, rounds: int) -> dict[str, Any]:
    results = take_turns(
        {
            name: lambda config=config: kvstream.measure(block_bytes, total, rounds, config=config)
            for name, config in CONFIGS.items()
        },
        turns,
    )
    if errors := [result.error for result in results.values() if result.error]:
        raise RuntimeError(errors[0])
    rates = {name: result.gbps(total) or 0.0 for name, result in results.items()}
    return {
        "block_bytes": block_bytes,
        **{f"{name}_gbps": rate for name, rate in rates.items()},
        "slowdown": round(1 - rates["on"] / rates["off"], 3),
        "slowdown_of_hashing": round(1 - rates["on"] / rates["off_unlent"], 3),
        **{f"{name}_cpu_s_per_gb": result.cpu_s_per_gb(total) for name, result in results.items()},
        **{f"{name}_spread": result.spread(total) for name, result in results.items()},
    }


def run(options: Options) -> dict[str, Any]:
    """Every block size; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    sizes = options.pick(SIZES, SIZES[::4], SIZES[1:2])
    total, turns, rounds = options.pick((TOTAL, TURNS, ROUNDS), (TOTAL, 1, 2), (TOTAL >> 6, 1, 1))
    rows = [_row(block_bytes, total, turns, rounds) for block_bytes in sizes]
    return {"loaded": load.seen(), "total_bytes": total, "machine": machine.describe(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'block':>8} {'off':>6} {'on':>6} {'off, unlent':>12} {'slower by':>10} {'by hashing':>11} "
        f"{'cpu s/GB off':>13} {'on':>6}"
    ]
    lines += [
        f"{row['block_bytes'] >> 10:5d}KiB {row['off_gbps']:6.2f} {row['on_gbps']:6.2f} {row['off_unlent_gbps']:12.2f}"
        f" {row['slowdown']:10.1%} {row['slowdown_of_hashing']:11.1%} {row['off_cpu_s_per_gb']:13.3f}"
        f" {row['on_cpu_s_per_gb']:6.3f}"
        for row in result["rows"]
    ]
    lines.append("GB/s end to end, medians, in turns. Checksums turn lending off; off, unlent: neither of the two.")
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: compare ratios, not rates.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Rates with and without."""
    rows = result["rows"]
    panel = Panel(
        title="GB/s end to end by KV block size",
        groups=tuple(size(row["block_bytes"]) for row in rows),
        series=(
            ("without checksums", tuple(row["off_gbps"] for row in rows)),
            ("with checksums", tuple(row["on_gbps"] for row in rows)),
            ("without checksums, nothing lent", tuple(row["off_unlent_gbps"] for row in rows)),
        ),
        colors=(0, 5, 3),
    )
    return Figure(title="What checksums of every chunk cost", subtitle=machine.summary(result), panels=(panel,))
