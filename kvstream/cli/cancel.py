"""`kvstream cancel`: end a stream as cancelled, on both sides, by its id."""

from __future__ import annotations

import argparse

from kvstream.cli.loop import run_loop
from kvstream.cli.steering import add_common_arguments, client, print_json, printable
from kvstream.discovery.control import CancelReply

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, '{"cancelled": N} as one JSON object')
    parser.add_argument("stream", metavar="STREAM", help="its id")


def run(args: argparse.Namespace) -> int:
    cancelled = run_loop(_cancel(args.nats, args.stream))
    if args.json:
        print_json(CancelReply(cancelled=cancelled))
    else:
        print(f"cancelled {printable(args.stream)}")
    return 0


async def _cancel(nats: str | None, stream: str) -> int:
    async with client(nats) as control:
        return await control.cancel(stream)
