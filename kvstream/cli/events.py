"""`kvstream events`: what happens in the cluster, a line each, until it is interrupted.

Lines are written as they come; a reader that goes away ends it.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from typing import cast

import msgspec

from kvstream.cli.loop import run_loop, until_signalled
from kvstream.cli.steering import add_common_arguments, client, print_json, printable
from kvstream.discovery.control import KINDS, Event, kind_of

__all__ = ["add_arguments", "run"]

_COMMON = ("worker", "incarnation", "time", "seq")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, "each event as a JSON object, one a line")
    parser.add_argument("--kind", action="append", choices=KINDS, default=[], help="only these (may be repeated)")
    parser.add_argument("--worker", metavar="NAME", help="only those of this worker (name, or name/rank)")
    parser.add_argument("--count", type=int, default=0, metavar="N", help="end after so many (default: never)")


def run(args: argparse.Namespace) -> int:
    return run_loop(_follow(args))


async def _follow(args: argparse.Namespace) -> int:
    await until_signalled(_print(args.nats, args.kind, args.worker, args.count, as_json=args.json))
    return 0


async def _print(nats: str | None, kinds: list[str], worker: str | None, count: int, *, as_json: bool) -> None:
    async with client(nats) as control, control.events(*kinds, worker=worker) as events:
        async for event in events:
            if as_json:
                print_json(event)
            else:
                print(line(event), flush=True)
            count -= 1
            if not count:
                return


def line(event: Event) -> str:
    """The event as one line of text: time of day (UTC), kind, worker, the rest as key=value."""
    when = datetime.fromtimestamp(event.time, UTC).strftime("%H:%M:%S.%f")[:-3]
    rest = " ".join(
        f"{field}={_shown(value)}" for field, value in msgspec.structs.asdict(event).items() if field not in _COMMON
    )
    return printable(f"{when} {kind_of(type(event)):<12} {event.worker:<16} {rest}".rstrip())


def _shown(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(str, cast("tuple[object, ...]", value))) or "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    text = str(value)
    return f'"{text}"' if " " in text else text or "-"
