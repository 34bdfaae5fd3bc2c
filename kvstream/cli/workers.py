"""`kvstream workers`: who is registered, as a table or as JSON.

Reads the registry and shows it. It must never print a worker's key, nor bytes that a terminal would obey: every text
in the registry is another process's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from typing import Literal

import msgspec

from kvstream.cli.loop import run_loop
from kvstream.cli.steering import add_common_arguments, print_json, table
from kvstream.discovery import NatsBroker, Registry, WorkerRecord, resolve_target
from kvstream.discovery.records import State
from kvstream.errors import BrokerUnavailable

__all__ = ["add_arguments", "run"]

_SERVER_WAIT = 0.5
"""Seconds to wait for this user's server: it starts in about that time, and somebody is watching."""
_CONNECT_SECONDS = 0.8
_SECONDS = 1.2
"""Bound on all of it: with the start of the interpreter, an answer or an error within two seconds."""


class _Worker(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    rank: int
    incarnation: str
    roles: tuple[str, ...]
    state: State | Literal["suspect"]
    host: str
    pid: int
    address: str
    streams: int
    free_blocks: int
    blocks: int


class _Listing(msgspec.Struct, frozen=True):
    workers: list[_Worker]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_common_arguments(parser, '{"workers": [...]} as one JSON object')


def run(args: argparse.Namespace) -> int:
    found = run_loop(_fetch(args.nats))
    if args.json:
        print_json(_Listing(found))
    else:
        print(render(found))
    return 0


async def _fetch(nats: str | None) -> list[_Worker]:
    rng = random.Random()
    try:
        async with asyncio.timeout(_SECONDS):
            target = await resolve_target(nats, wait=_SERVER_WAIT)
            async with await NatsBroker.connect(
                target, rng=rng, name="kvstream workers", connect_timeout=_CONNECT_SECONDS
            ) as broker:
                async with Registry(broker, rng=rng) as registry:
                    return [_describe(record, registry.is_suspect(record.id)) for record in registry.workers()]
    except TimeoutError:
        raise BrokerUnavailable(f"no answer from NATS within {_SECONDS:g} s; `kvstream doctor` tells more") from None


def _describe(record: WorkerRecord, suspect: bool) -> _Worker:
    return _Worker(
        name=record.name,
        rank=record.rank,
        incarnation=record.incarnation,
        roles=record.roles,
        state="suspect" if suspect else record.state,
        host=record.host,
        pid=record.pid,
        address=f"{record.address.host}:{record.address.port}",
        streams=record.load.streams,
        free_blocks=record.load.free_blocks,
        blocks=record.load.blocks,
    )


def render(workers: Sequence[_Worker]) -> str:
    """The workers as a table with aligned columns."""
    if not workers:
        return "no workers are registered"
    rows = [("WORKER", "ROLES", "STATE", "HOST", "PID", "ADDRESS", "STREAMS", "FREE BLOCKS")]
    rows += [
        (
            f"{worker.name}/{worker.rank}",
            ",".join(worker.roles) or "-",
            worker.state,
            worker.host,
            str(worker.pid),
            worker.address,
            str(worker.streams),
            f"{worker.free_blocks}/{worker.blocks}",
        )
        for worker in workers
    ]
    return table(rows)
