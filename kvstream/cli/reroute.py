"""`kvstream reroute`: have a stream's source send it to another destination."""

from __future__ import annotations

import argparse

from kvstream.cli.loop import run_loop
from kvstream.cli.steering import add_common_arguments, client, print_json, printable
from kvstream.discovery.control import RerouteReply

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, '{"stream": ID} as one JSON object')
    parser.add_argument("stream", metavar="STREAM", help="its id")
    parser.add_argument(
        "--to",
        action="append",
        metavar="WORKER",
        help="name, or name/rank; several are tried in order (default: routing)",
    )


def run(args: argparse.Namespace) -> int:
    run_loop(_reroute(args.nats, args.stream, args.to))
    if args.json:
        print_json(RerouteReply(stream=args.stream))
    else:
        print(f"rerouting {printable(args.stream)}; `kvstream streams` shows where it went")
    return 0


async def _reroute(nats: str | None, stream: str, to: list[str] | None) -> None:
    async with client(nats) as control:
        await control.reroute(stream, to)
