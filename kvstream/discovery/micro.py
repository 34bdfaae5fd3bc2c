"""The discovery half of the NATS services protocol (`nats micro ls | info | stats`): PING, INFO and STATS of a service.

It answers questions about a service, on any broker, and counts its requests; the service itself is served elsewhere.
The protocol is NATS's ADR-32; nats-py's own version of it is not used, since it belongs to one connection and flushes.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec

from kvstream.discovery.broker import Broker
from kvstream.errors import ConfigError

__all__ = ["Endpoint", "MicroService"]

_TYPE = "io.nats.micro.v1.{}_response"


@dataclass(slots=True)
class Endpoint:
    """One subject of a service, and what has become of the requests on it. `nanoseconds`: spent on them, in all."""

    name: str
    subject: str
    about: str
    requests: int = 0
    errors: int = 0
    last_error: str = ""
    nanoseconds: int = 0

    def count(self, seconds: float, error: Exception | None) -> None:
        """A request has been worked on."""
        self.requests += 1
        self.nanoseconds += int(seconds * 1e9)
        if error is not None:
            self.errors += 1
            self.last_error = str(error)


class _Info(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subject: str
    queue_group: str = ""
    metadata: dict[str, str]


class _Stats(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subject: str
    queue_group: str = ""
    num_requests: int
    num_errors: int
    last_error: str
    processing_time: int
    average_processing_time: int
    data: None = None


class _Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    type: str
    name: str
    id: str
    version: str
    metadata: dict[str, str]
    description: str = ""
    started: str = ""
    endpoints: list[_Info] | list[_Stats] | None = None


class MicroService:
    """A service as NATS tools see it. `started` is RFC 3339 text; `id` tells instances of one name apart.

    `async with`: it can be found inside of it.
    """

    def __init__(
        self,
        broker: Broker,
        *,
        name: str,
        id: str,
        version: str,
        description: str,
        started: str,
        metadata: dict[str, str],
        endpoints: list[Endpoint],
    ) -> None:
        self._broker = broker
        self._identity = _Answer(type="", name=name, id=id, version=version, metadata=metadata)
        self._description = description
        self._started = started
        self._endpoints = endpoints
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> MicroService:
        name, id = self._identity.name, self._identity.id
        try:
            for subject in ("$SRV.*", f"$SRV.*.{name}", f"$SRV.*.{name}.{id}"):
                await self._stack.enter_async_context(await self._broker.serve(subject, self._answer))
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def _answer(self, subject: str, _data: bytes) -> bytes:
        match subject.split(".")[1]:
            case "PING":
                answer = self._of("ping")
            case "INFO":
                endpoints = [
                    _Info(name=endpoint.name, subject=endpoint.subject, metadata={"about": endpoint.about})
                    for endpoint in self._endpoints
                ]
                answer = self._of("info", description=self._description, endpoints=endpoints)
            case "STATS":
                answer = self._of("stats", started=self._started, endpoints=[_stats(one) for one in self._endpoints])
            case verb:
                raise ConfigError("verb", f"{verb} is none of PING, INFO, STATS")
        return msgspec.json.encode(answer)

    def _of(
        self,
        kind: str,
        *,
        description: str = "",
        started: str = "",
        endpoints: list[_Info] | list[_Stats] | None = None,
    ) -> _Answer:
        return msgspec.structs.replace(
            self._identity,
            type=_TYPE.format(kind),
            description=description,
            started=started,
            endpoints=endpoints,
        )


def _stats(endpoint: Endpoint) -> _Stats:
    return _Stats(
        name=endpoint.name,
        subject=endpoint.subject,
        num_requests=endpoint.requests,
        num_errors=endpoint.errors,
        last_error=endpoint.last_error,
        processing_time=endpoint.nanoseconds,
        average_processing_time=endpoint.nanoseconds // max(1, endpoint.requests),
    )
