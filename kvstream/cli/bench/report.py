"""What `kvstream bench` found, as data, as lines of text, and as what the doctor would say about it.

It knows no connection and measures nothing; it must never print bytes of another process that a terminal would obey.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvstream.cli.checks import Check, check_ptrace
from kvstream.cli.lane_probe import LaneResult
from kvstream.cli.trials import judge_lanes, try_ucx
from kvstream.transport.base import Lane

__all__ = [
    "Link",
    "Report",
    "Row",
    "Times",
    "advice",
    "judge_host",
    "judge_network",
    "link_lines",
    "row_header",
    "row_line",
]


class Times(msgspec.Struct, frozen=True):
    """Of `count` measurements, in the unit that the field's name says."""

    count: int
    median: float
    p99: float
    max: float


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """How the two workers are connected. `transports`: what carries the bytes, in UCX's names; `direct_reads`: whether
    the receiver can read the source's blocks where they are. `first_byte_ms`: from `send`, to a worker that has never
    been connected with, to its word that 4 KiB are in place. `round_trip_us`: of a message and its answer."""

    to: str
    host: str
    same_host: bool
    lane: str
    direct_reads: bool
    transports: str
    first_byte_ms: Times
    round_trip_us: Times


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Throughput with one block size, end to end, medians of `rounds`, in GB/s (1e9 bytes); block tables shuffled on
    both sides. `concurrent_gbps` is of several streams at a time, together."""

    block_bytes: int
    nbytes: int
    rounds: int
    gbps: float
    concurrent_gbps: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `verified`: that all bytes of each row were compared by checksum; a difference is an
    error, never a report. `checks`: what keeps the link from being faster."""

    link: Link
    concurrent: int
    verified: bool
    rows: list[Row]
    checks: list[Check]


# -- what the doctor would say


def judge_host(link: Link, lane: Lane | None) -> list[Check]:
    """Of two workers on one host: whether the lane could be a faster one (unless `lane` was asked for), and whether
    messages take longer than they should."""
    if not link.same_host:
        return []
    checks: list[Check] = []
    if lane is None:
        if link.lane != "shared":
            found = f"same host, but the lane is {link.lane}: the workers can't share memory"
            checks += judge_lanes([LaneResult(lane="shared", error=found)])[:1]
        elif not link.direct_reads:
            checks.append(_judge_reads(check_ptrace()))
    trip = link.round_trip_us.median
    trips = judge_lanes([LaneResult(lane=lane or "shared", carriers=link.lane, round_trip_us=trip)])
    return checks + [check for check in trips if check.name == "round trip" and check.status != "ok"]


def _judge_reads(ptrace: Check) -> Check:
    """Why the receiver copies through slots, where both processes are on this host."""
    found = "blocks of any size are copied twice: the workers may not read each other's memory"
    remedy = "run the workers as one user, and in containers with CAP_SYS_PTRACE and a common PID namespace"
    return Check("direct reads", "warn", f"{found} ({ptrace.found})", ptrace.remedy or remedy)


async def judge_network(link: Link, lane: Lane | None) -> list[Check]:
    """Of two hosts: whether an RDMA device of this one is left unused."""
    if link.same_host or link.lane != "put" or lane is not None:
        return []
    return [check for check in await try_ucx() if check.name in ("transports", "rdma") and check.status != "ok"]


# -- text


def link_lines(link: Link) -> str:
    """How the workers are connected."""
    where = "this host" if link.same_host else _printable(link.host)
    first, trip = link.first_byte_ms, link.round_trip_us
    return "\n".join(
        (
            f"{link.to} on {where}",
            f"lane         {link.lane} ({_printable(link.transports)})",
            f"first byte   {first.median:.2f} ms on a fresh connection (median of {first.count}, max {first.max:.2f})",
            f"round trip   {trip.median:.0f} us for a message and its answer (p99 {trip.p99:.0f}, of {trip.count})",
        )
    )


def row_header(concurrent: int) -> str:
    """The head of the table of rows."""
    return f"{'block':>10} {'1 stream':>12} {f'{concurrent} streams':>12}"


def row_line(row: Row) -> str:
    """One row of the table."""
    return f"{_size(row.block_bytes):>10} {row.gbps:7.2f} GB/s {row.concurrent_gbps:7.2f} GB/s"


def advice(checks: Sequence[Check]) -> str:
    """What the doctor would say, one paragraph each."""
    return "\n".join(f"{check.name}: {check.found}\n  -> {check.remedy}" for check in checks)


def _size(nbytes: int) -> str:
    for shift, unit in ((20, "MiB"), (10, "KiB")):
        if nbytes >= 1 << shift and not nbytes % (1 << shift):
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def _printable(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)
