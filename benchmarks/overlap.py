"""How much of a KV cache's transfer is left when prefill has computed its last layer.

A prefill computes its layers one after the other, each for a given time: waited for, as a GPU's work is; by NumPy on a
thread of the same process; or in pure Python there, which holds the GIL. kvstream is told of each layer as it is done.
NIXL writes everything after prefill, or in 2 and 4 chunks as soon as their layers are there (the better one counts).
Exposed is what the transfer added to the computing; contenders take turns, medians are reported. One layer's own
transfer is measured in the same processes, on a stream that leaves time between its layers.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from benchmarks import machine
from benchmarks.compute import KINDS
from benchmarks.contenders.prefill import KVStreamPair, NixlPair, Prefill, Shape
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel, size

LAYERS = (16, 32, 80)
LAYER_BYTES = (256 << 10, 4 << 20, 16 << 20)
BLOCK_BYTES = 64 << 10
COMPUTE_MS = 2
"""Of a layer; the largest layers get what their own transfer takes, and a tenth: as much as the link carries."""
ROUNDS = 5
ROW_SECONDS = 5.0
"""After that a row gets no further round, once it has three."""


def _limit(one_layer_ms: float) -> float:
    return 1.3 * one_layer_ms + 0.5


def _ms(seconds: list[float]) -> float:
    return round(statistics.median(seconds) * 1e3, 3)


class _Row:
    """Rounds of one row."""

    def __init__(self, ways: dict[str, Callable[[], Prefill]]) -> None:
        self._ways = dict(ways)
        self.results: dict[str, list[Prefill]] = {name: [] for name in ways}
        self.errors: dict[str, str] = {}

    def run(self, rounds: int) -> None:
        stop = time.monotonic() + ROW_SECONDS
        for number in range(rounds):
            if number >= 3 and time.monotonic() > stop:
                return
            for name, prefill in list(self._ways.items()):
                try:
                    self.results[name].append(prefill())
                except RuntimeError as error:
                    self.errors[name] = str(error)
                    del self._ways[name]

    def exposed(self) -> dict[str, float | None]:
        found = {
            name: _ms([prefill.exposed for prefill in prefills]) if prefills else None
            for name, prefills in self.results.items()
        }
        chunked = [value for name, value in found.items() if name.endswith("chunks") and value is not None]
        return {"nixl_after": None, **found, "nixl_chunked": min(chunked, default=None)}


def _rows(shape: Shape, heaviest: bool, rounds: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        ours = stack.enter_context(KVStreamPair(shape))
        theirs = stack.enter_context(NixlPair(shape))
        # As long as 2 GB/s would take, and 4 ms: each layer has gone when the next one is ready.
        spacing = 0.004 + shape.layer_bytes / 2e9
        one_layer = [ours.one_layer(spacing) for _ in range(2)][-1]
        compute_ms = max(COMPUTE_MS, math.ceil(one_layer * 1.1e3)) if heaviest else COMPUTE_MS
        seconds = compute_ms / 1e3
        for compute in KINDS:
            ways: dict[str, Callable[[], Prefill]] = {
                "kvstream": lambda kind=compute: ours.prefill(kind, seconds),
                "nixl_after": lambda kind=compute: theirs.prefill(kind, seconds, 1),
                "nixl_2_chunks": lambda kind=compute: theirs.prefill(kind, seconds, 2),
                "nixl_4_chunks": lambda kind=compute: theirs.prefill(kind, seconds, 4),
            }
            again = ours.one_layer(spacing)
            row = _Row(ways)
            row.run(rounds)
            mine = row.results["kvstream"]
            if not mine:
                raise RuntimeError(row.errors["kvstream"])
            one_layer_ms = _ms([one_layer, again])
            exposed = row.exposed()
            moved = shape.layers * shape.layer_bytes
            rows.append(
                {
                    "layers": shape.layers,
                    "compute": compute,
                    "compute_ms": compute_ms,
                    "layer_bytes": shape.layer_bytes,
                    "block_bytes": shape.block_bytes,
                    "one_layer_ms": one_layer_ms,
                    "exposed_ms": exposed,
                    "exposed_spread_ms": [
                        round(1e3 * min(p.exposed for p in mine), 3),
                        round(1e3 * max(p.exposed for p in mine), 3),
                    ],
                    "limit_ms": round(_limit(one_layer_ms), 3),
                    "within": exposed["kvstream"] <= _limit(one_layer_ms),
                    "source_done_ms": _ms([p.done for p in mine]),
                    "prefill_ms": _ms([p.prefill for p in mine]),
                    "gbps": round(moved / statistics.median(p.computing + p.exposed for p in mine) / 1e9, 2),
                    "enter_us": round(statistics.median(p.enter for p in mine) * 1e6, 1),
                    "layer_ready_us": round(
                        statistics.median((p.calls - p.enter) / shape.layers for p in mine) * 1e6, 1
                    ),
                    "engine_share": round(statistics.median(p.calls / p.prefill for p in mine), 5),
                    "rounds": len(mine),
                    **({"errors": row.errors} if row.errors else {}),
                }
            )
    return rows


def run(options: Options) -> dict[str, Any]:
    """Every number of layers, size and kind of computing; `loaded`: see machine.ForeignLoad."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    # One thread computes: a BLAS that takes every core would measure itself.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    layers, sizes, rounds = options.pick(
        (LAYERS, LAYER_BYTES, ROUNDS), (LAYERS[:1], LAYER_BYTES[1:], 2), (LAYERS[:1], LAYER_BYTES[:1], 1)
    )
    rows = [
        row
        for count in layers
        for size in sizes
        for row in _rows(Shape(count, size, BLOCK_BYTES), size == sizes[-1], rounds)
    ]
    return {"loaded": load.seen(), "machine": machine.describe(), "rows": rows}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'compute':8} {'layers':>6} {'ms each':>7} {'KiB each':>8} {'one layer':>9} {'kvstream':>9} {'limit':>7}"
        f" {'nixl after':>10} {'2 chunks':>9} {'4 chunks':>9} {'GB/s':>6} {'engine':>7}"
    ]
    for row in sorted(result["rows"], key=lambda row: KINDS.index(row["compute"])):
        exposed = row["exposed_ms"]
        others = " ".join(
            f"{exposed.get(name) if exposed.get(name) is not None else '-':>{width}}"
            for name, width in (("nixl_after", 10), ("nixl_2_chunks", 9), ("nixl_4_chunks", 9))
        )
        over = " " if row["within"] or row["compute"] != "awaited" else "!"
        lines.append(
            f"{row['compute']:8} {row['layers']:6} {row['compute_ms']:7} {row['layer_bytes'] >> 10:8}"
            f" {row['one_layer_ms']:9.3f} {exposed['kvstream']:8.3f}{over} {row['limit_ms']:7.3f}"
            f" {others} {row['gbps']:6.2f} {row['engine_share']:7.2%}"
        )
        lines += [f"         {name}: {text}" for name, text in row.get("errors", {}).items()]
    lines.append(
        "ms exposed after computing, medians. limit: 1.3 times one layer's own transfer, and 0.5 ms; ! is over it."
        " GB/s: of kvstream, over prefill and what is exposed. engine: time in kvstream's calls on the engine's thread."
    )
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the figures as upper bounds.")
    return "\n".join(lines)


def figure(result: dict[str, Any]) -> Figure:
    """Exposed time, a panel for each kind of computing."""
    words = {
        "awaited": "computing elsewhere, awaited (a GPU)",
        "numpy": "NumPy computes on a thread of the process",
        "python": "pure Python computes on a thread of the process and holds the GIL",
    }
    panels: list[Panel] = []
    for kind in KINDS:
        rows = [row for row in result["rows"] if row["compute"] == kind]
        panels.append(
            Panel(
                title=f"ms exposed after the last layer: {words[kind]}",
                groups=tuple(f"{row['layers']} × {size(row['layer_bytes'])}" for row in rows),
                series=(
                    ("kvstream", tuple(row["exposed_ms"]["kvstream"] for row in rows)),
                    ("NIXL, after prefill", tuple(row["exposed_ms"]["nixl_after"] for row in rows)),
                    ("NIXL, 2 or 4 chunks", tuple(row["exposed_ms"]["nixl_chunked"] for row in rows)),
                    ("one layer's own transfer", tuple(row["one_layer_ms"] for row in rows)),
                ),
                log=True,
            )
        )
    return Figure(
        title="What of the transfer is not hidden behind computing, by layers × KV per layer",
        subtitle=machine.summary(result),
        panels=tuple(panels),
    )
