"""`kvstream drain`: a worker takes nothing new, and what is live finishes, within a budget. Also the way back."""

from __future__ import annotations

import argparse

from kvstream.cli.loop import run_loop
from kvstream.cli.steering import add_common_arguments, client, print_json
from kvstream.discovery.control import MAX_BUDGET, DrainReport
from kvstream.errors import ConfigError

__all__ = ["add_arguments", "run"]

_OVER_BUDGET = 5
"""Exit code where streams had to be cancelled, as that of a worker that ends so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, 'the report, {"finished", "cancelled", "seconds"}, as one JSON object')
    parser.add_argument("worker", metavar="WORKER", help="name, or name/rank")
    parser.add_argument(
        "--budget", type=float, default=30.0, metavar="SECONDS", help="after which the rest is cancelled (default: 30)"
    )
    parser.add_argument("--undo", action="store_true", help="have the worker take streams again")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.budget <= MAX_BUDGET:
        raise ConfigError("--budget", f"must be 0 to {MAX_BUDGET} seconds, is {args.budget:g}")
    if args.undo:
        run_loop(_resume(args.nats, args.worker))
        report = DrainReport(finished=0, cancelled=0, seconds=0.0)
    else:
        report = run_loop(_drain(args.nats, args.worker, args.budget))
    if args.json:
        print_json(report)
    elif args.undo:
        print(f"{args.worker} takes streams again")
    else:
        print(f"drained in {report.seconds:.1f} s: {report.finished} streams finished, {report.cancelled} cancelled")
    return _OVER_BUDGET if report.cancelled else 0


async def _drain(nats: str | None, worker: str, budget: float) -> DrainReport:
    async with client(nats) as control:
        return await control.drain(worker, budget)


async def _resume(nats: str | None, worker: str) -> None:
    async with client(nats) as control:
        await control.resume(worker)
