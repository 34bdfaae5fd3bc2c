"""`kvstream streams`: the live streams, as a table or as JSON, each as its source and its destination have it."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec

from kvstream.cli.loop import run_loop
from kvstream.cli.steering import add_common_arguments, client, print_json, table
from kvstream.discovery.control import StreamRecord

__all__ = ["add_arguments", "run"]


class _Listing(msgspec.Struct, frozen=True):
    streams: list[StreamRecord]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, '{"streams": [...]} as one JSON object')
    parser.add_argument("--worker", metavar="NAME", help="only those of this worker (name, or name/rank)")
    parser.add_argument("stream", nargs="?", metavar="STREAM", help="only the one of this id")


def run(args: argparse.Namespace) -> int:
    found = run_loop(_fetch(args.nats, args.worker, args.stream))
    if args.json:
        print_json(_Listing(found))
    else:
        print(render(found))
    return 0


async def _fetch(nats: str | None, worker: str | None, stream: str | None) -> list[StreamRecord]:
    async with client(nats) as control:
        return await control.streams(worker, stream)


def render(streams: Sequence[StreamRecord]) -> str:
    """The streams as a table with aligned columns."""
    if not streams:
        return "no streams are live"
    rows = [("STREAM", "WORKER", "ROLE", "PEER", "EPOCH", "WAITS FOR", "SECONDS", "LAYERS", "COPIES")]
    rows += [
        (
            record.stream,
            record.worker,
            record.role,
            record.peer or "-",
            str(record.epoch),
            record.state,
            f"{record.waited:.1f}",
            f"{record.layers_done}/{record.layers}",
            ",".join(record.copies) or "-",
        )
        for record in sorted(streams, key=lambda record: (record.stream, record.role != "source", record.worker))
    ]
    return table(rows)
