"""`kvstream bench`: what the way between two hosts can carry, measured between two workers started for it.

Owns the command's arguments and output. On one host `--serve NAME`, on the other `--to NAME`; both find each other over
NATS as workers do, and move bytes as workers do.
"""

from __future__ import annotations

import argparse
import os
import re

from kvstream.errors import ConfigError

__all__ = ["add_arguments", "run"]

_BYTES = 256 << 20
_BLOCK_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
_ROUNDS = 5
_NAME_LENGTH = 48
"""Longest name to serve under: workers that are opened for a measurement append to it."""
_SIGNALLED = 128
"""Exit code of a measurement that a signal ended, less the signal's number."""
_SIZE = re.compile(r"(\d{1,12})\s*(?:([KMG])(?:iB)?)?", re.ASCII)
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` takes."""
    ends = parser.add_mutually_exclusive_group(required=True)
    ends.add_argument("--serve", metavar="NAME", help="take measurements as the worker NAME, until SIGINT or SIGTERM")
    ends.add_argument("--to", metavar="WORKER", help="measure to a worker started with --serve")
    parser.add_argument(
        "--bytes",
        type=_size,
        default=_BYTES,
        metavar="N",
        help="what a round moves; with --serve the memory that measurements may use (default: 256MiB)",
    )
    parser.add_argument(
        "--block-bytes",
        type=_size,
        nargs="+",
        default=_BLOCK_BYTES,
        metavar="N",
        help="sizes of KV blocks (default: 4K 16K 64K 256K 1M)",
    )
    parser.add_argument("--rounds", type=_count, default=_ROUNDS, metavar="N", help=f"default: {_ROUNDS}")
    parser.add_argument(
        "--lane",
        choices=("auto", "shared", "get", "put"),
        default="auto",
        help="the only lane to allow (default: auto, the first that works)",
    )
    parser.add_argument("--nats", metavar="URL", help="default: KVSTREAM_NATS_*, NATS_*, NATS context, kvstream server")
    parser.add_argument(
        "--data-interface",
        metavar="NAME",
        help="interface or address on which bytes move (default: loopback, which reaches this host only)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object: the report, or with --serve who serves"
    )


def run(args: argparse.Namespace) -> int:
    """Serve or measure. Raises KVStreamError. A signal is how serving ends, and no success of a measurement."""
    from kvstream.cli.loop import run_loop, until_signalled

    if args.serve is not None:
        run_loop(until_signalled(_serve(args)))
        return 0
    signalled = run_loop(until_signalled(_measure(args)))
    return _SIGNALLED + signalled if signalled else 0


async def _serve(args: argparse.Namespace) -> None:
    import random

    import msgspec

    from kvstream.cli.bench.serving import BenchServer
    from kvstream.discovery import connect_broker
    from kvstream.runtime.runtime import Runtime

    if len(args.serve) > _NAME_LENGTH:
        raise ConfigError("--serve", f"the name must have at most {_NAME_LENGTH} characters, has {len(args.serve)}")

    def ready(runtime: Runtime) -> None:
        address = f"{runtime.record.address.host}:{runtime.record.address.port}"
        if args.json:
            here = {"name": runtime.worker, "address": address, "pid": os.getpid(), "bytes": args.bytes}
            print(msgspec.json.encode(here).decode(), flush=True)
        else:
            print(f"{runtime.worker} serves measurements at {address}; `kvstream bench --to {args.serve}`", flush=True)

    async with await connect_broker(args.nats, rng=random.Random(), name="kvstream bench") as broker:
        server = BenchServer(
            args.serve,
            broker,
            memory=args.bytes,
            lane=None if args.lane == "auto" else args.lane,
            data_interface=args.data_interface,
        )
        await server.run(ready)


async def _measure(args: argparse.Namespace) -> None:
    import random

    import msgspec

    from kvstream.cli.bench.measuring import Plan, measure
    from kvstream.cli.bench.protocol import Shape
    from kvstream.cli.bench.report import advice
    from kvstream.discovery import connect_broker

    plan = Plan(
        to=args.to,
        shapes=[Shape.fit(block_bytes, args.bytes) for block_bytes in args.block_bytes],
        rounds=args.rounds,
        lane=None if args.lane == "auto" else args.lane,
        data_interface=args.data_interface,
    )

    def tell(text: str) -> None:
        if not args.json:
            print(text, flush=True)

    async with await connect_broker(args.nats, rng=random.Random(), name="kvstream bench") as broker:
        report = await measure(plan, broker, tell)
    if args.json:
        print(msgspec.json.encode(report).decode())
        return
    print("\nEnd to end, medians; block tables shuffled on both sides; all bytes compared by checksum.")
    if report.checks:
        print(f"\n{advice(report.checks)}")


def _size(text: str) -> int:
    """Bytes, of "4096", "4K" or "4KiB"."""
    match = _SIZE.fullmatch(text)
    nbytes = int(match[1]) * _UNITS.get(match[2], 1) if match else 0
    if not nbytes:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 4096, 4K or 256MiB, for example")
    return nbytes


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1000):
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1 to 1000")
    return int(text)
