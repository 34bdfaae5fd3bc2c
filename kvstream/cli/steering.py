"""What the commands that look at a cluster and steer it have in common: --nats, --json, the client, tables.

Owns the bounds on time of a command, and that nothing is printed that a terminal would obey: every text in the cluster
is another process's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec

from kvstream.discovery import NatsBroker, resolve_target
from kvstream.discovery.client import ControlClient
from kvstream.errors import BrokerUnavailable

__all__ = ["add_common_arguments", "client", "print_json", "printable", "table"]

_SERVER_WAIT = 0.5
"""Seconds to wait for this user's server: it starts in about that time, and somebody is watching."""
_CONNECT_SECONDS = 0.8
_SECONDS = 1.5
"""Bound on finding NATS, connecting to it, and the first look at the registry, together."""


def add_common_arguments(parser: argparse.ArgumentParser, as_json: str) -> None:
    """`--nats` and `--json`; `as_json` says what the latter prints."""
    parser.add_argument("--nats", metavar="URL", help="default: KVSTREAM_NATS_*, NATS_*, NATS context, kvstream server")
    parser.add_argument("--json", action="store_true", help=f"print {as_json}")


@asynccontextmanager
async def client(nats: str | None) -> AsyncGenerator[ControlClient]:
    """A connected client. Raises ConfigError or BrokerUnavailable in time."""
    async with AsyncExitStack() as stack:
        try:
            async with asyncio.timeout(_SECONDS):
                target = await resolve_target(nats, wait=_SERVER_WAIT)
                broker = await NatsBroker.connect(
                    target, rng=random.Random(), name="kvstream control", connect_timeout=_CONNECT_SECONDS
                )
                await stack.enter_async_context(broker)
                connected = await stack.enter_async_context(ControlClient(broker))
        except TimeoutError:
            raise BrokerUnavailable(
                f"no answer from NATS within {_SECONDS:g} s; `kvstream doctor` tells more"
            ) from None
        yield connected


def print_json(value: msgspec.Struct) -> None:
    """One object on one line, at once: somebody may be reading a pipe."""
    print(msgspec.json.encode(value).decode(), flush=True)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of texts as lines with aligned columns; the first row is the header."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def printable(text: str) -> str:
    """The text, without what a terminal would take for an order."""
    return "".join(character if character.isprintable() else "?" for character in text)
