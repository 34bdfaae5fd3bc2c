"""Discovery: who is there, and how to ask them. A lease table with a watch and request/reply, on NATS or in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstream.discovery.broker import Broker, Conflict, LeaseEvent, NobodyServes, Service, Synced
from kvstream.discovery.credentials import NatsTarget, resolve_target
from kvstream.discovery.memory import MemoryBroker, MemoryBrokerServer
from kvstream.discovery.records import DataAddress, Load, WorkerRecord
from kvstream.discovery.registry import Change, Changed, Changes, Joined, Left, Registry, Suspect
from kvstream.discovery.server import EmbeddedServer, shared_server

if TYPE_CHECKING:
    from random import Random

    from kvstream.discovery.nats import NatsBroker as NatsBroker

__all__ = [
    "Broker",
    "Change",
    "Changed",
    "Changes",
    "Conflict",
    "DataAddress",
    "EmbeddedServer",
    "Joined",
    "LeaseEvent",
    "Left",
    "Load",
    "MemoryBroker",
    "MemoryBrokerServer",
    "NatsBroker",
    "NatsTarget",
    "NobodyServes",
    "Registry",
    "Service",
    "Suspect",
    "Synced",
    "WorkerRecord",
    "connect_broker",
    "resolve_target",
    "shared_server",
]


async def connect_broker(nats: str | None = None, *, rng: Random, name: str = "kvstream") -> Broker:
    """A broker on the NATS server at `nats`, or the one that `resolve_target` finds. `name` is shown by NATS.

    Raises ConfigError (no server known, credentials refused) or BrokerUnavailable (not reachable) within about two
    seconds; only a `kvstream server` that is still to be started is waited for longer.
    """
    from kvstream.discovery.nats import NatsBroker

    return await NatsBroker.connect(await resolve_target(nats), rng=rng, name=name)


def __getattr__(name: str) -> object:
    # nats-py takes a tenth of a second to import, and programs without a NATS server need none of it.
    if name == "NatsBroker":
        from kvstream.discovery.nats import NatsBroker

        return NatsBroker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
