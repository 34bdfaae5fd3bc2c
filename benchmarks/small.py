"""The fixed costs: posting many small blocks, control bytes, the round trip of a notification, tiny prompts.

15,000 KV blocks of 4 KiB are posted in two forms, one layer of a long table and thirty layers of a shorter one. Posting
is what the engine waits for: from `send` to the return of the last `layer_ready`. Announced is when the last chunk has
been announced, which the receiver's pace decides.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import machine, notify
from benchmarks.contenders.posting import Posted, post_kvstream, post_nixl, tiny_streams
from benchmarks.options import Options
from benchmarks.plot import Figure, Panel

BLOCK_BYTES = 4096
FORMS = ((1, 15_000), (30, 500))
"""(layers, blocks of the table)"""
ROUNDS = 7
TOGETHER = (1, 32)
TINY = 3200


def _median_ms(posted: list[Posted], field: str) -> float:
    return round(1e3 * statistics.median(getattr(one, field) for one in posted), 3)


def _post(layers: int, blocks: int, rounds: int) -> dict[str, Any]:
    ours = post_kvstream(layers, blocks, BLOCK_BYTES, rounds)
    most = max(ours, key=lambda one: one.control)
    row: dict[str, Any] = {
        "layers": layers,
        "table_blocks": blocks,
        "block_bytes": BLOCK_BYTES,
        "post_ms": _median_ms(ours, "post"),
        "post_max_ms": round(1e3 * max(one.post for one in ours), 3),
        "announced_ms": _median_ms(ours, "announced"),
        "done_ms": _median_ms(ours, "done"),
        "chunks": most.chunks,
        "control_bytes": most.control,
        "control_messages": most.messages,
        "control_bytes_per_chunk": round(most.chunk_bytes / most.chunks, 1),
        "control_bytes_per_block": round(most.control / blocks, 3),
        "nixl_post_ms": None,
        "nixl_done_ms": None,
    }
    try:
        theirs = post_nixl(layers, blocks, BLOCK_BYTES, rounds)
    except RuntimeError as error:
        row["errors"] = {"nixl": str(error)}
    else:
        row["nixl_post_ms"], row["nixl_done_ms"] = _median_ms(theirs, "post"), _median_ms(theirs, "done")
    return row


def run(options: Options) -> dict[str, Any]:
    """All of it; `loaded`: something else used the machine (see machine.ForeignLoad)."""
    load = machine.ForeignLoad(options.pick(0.5, 0.5, 0.0))
    rounds, tiny = options.pick((ROUNDS, TINY), (2, 320), (1, 64))
    lanes = options.pick(notify.LANES, notify.LANES[:1], notify.LANES[:1])
    trips = options.pick((notify.ROUNDS, notify.WARM_UP), (notify.ROUNDS, notify.WARM_UP), notify.TINY)
    numbers = options.pick(TOGETHER, TOGETHER, TOGETHER[1:])
    forms = options.pick(FORMS, FORMS, ((2, 50),))
    post = [_post(layers, blocks, rounds) for layers, blocks in forms]
    rows = [notify.measure(lane, *trips) for lane in lanes]
    rates = [{"together": together, "streams_per_s": round(tiny_streams(tiny, together), 1)} for together in numbers]
    return {"loaded": load.seen(), "machine": machine.describe(), "post": post, "notify": rows, "tiny": rates}


def table(result: dict[str, Any]) -> str:
    """The figures as text."""
    lines = [
        f"{'layers':>6} {'table':>7} {'post ms':>8} {'max':>7} {'announced':>9} {'done':>8} {'nixl post':>9}"
        f" {'nixl done':>9} {'chunks':>7} {'B/chunk':>8} {'control B':>9} {'messages':>8}"
    ]
    for row in result["post"]:
        post, done = (f"{row[name]:9.3f}" if row[name] is not None else f"{'-':>9}" for name in _NIXL)
        lines.append(
            f"{row['layers']:6} {row['table_blocks']:7} {row['post_ms']:8.3f} {row['post_max_ms']:7.3f}"
            f" {row['announced_ms']:9.3f} {row['done_ms']:8.3f} {post} {done} {row['chunks']:7}"
            f" {row['control_bytes_per_chunk']:8.1f} {row['control_bytes']:9} {row['control_messages']:8}"
        )
        lines += [f"         {name}: {text}" for name, text in row.get("errors", {}).items()]
    lines.append("")
    lines += [
        f"notification there and back, {row['lane']:8} {row['median_us']:8.1f} us median, {row['p99_us']:8.1f} us p99"
        for row in result["notify"]
    ]
    lines.append("")
    lines += [
        f"tiny streams (1 block of 4 KiB), {row['together']:3} at a time {row['streams_per_s']:10.0f} per second"
        for row in result["tiny"]
    ]
    if result["loaded"]:
        lines.append("THE MACHINE WAS BUSY with something else: take the times as upper bounds.")
    return "\n".join(lines)


_NIXL = ("nixl_post_ms", "nixl_done_ms")


def figure(result: dict[str, Any]) -> Figure:
    """Posting, notifications, tiny streams."""
    post = result["post"]
    return Figure(
        title="Fixed costs",
        subtitle=machine.summary(result),
        panels=(
            Panel(
                title="15,000 blocks of 4 KiB: ms until the engine has its thread back, and until all is in place",
                groups=tuple(f"{row['layers']} × {row['table_blocks']:,} blocks" for row in post),
                series=(
                    ("kvstream, posted", tuple(row["post_ms"] for row in post)),
                    ("kvstream, done", tuple(row["done_ms"] for row in post)),
                    ("NIXL, posted", tuple(row["nixl_post_ms"] for row in post)),
                    ("NIXL, done", tuple(row["nixl_done_ms"] for row in post)),
                ),
                colors=(0, 5, 1, 2),
                log=True,
            ),
            notify.panel(result["notify"]),
            Panel(
                title="Streams of one 4 KiB block per second",
                groups=tuple(f"{row['together']} at a time" for row in result["tiny"]),
                series=(("kvstream", tuple(row["streams_per_s"] for row in result["tiny"])),),
            ),
        ),
    )
