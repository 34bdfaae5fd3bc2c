"""The control service of a worker: requests from the broker, each done by a call of the runtime's.

Owns the table of operations, their subjects, and what the NATS tools see of the service. It decides nothing about
streams and is never in their way: a request is a task of its own, bounded by the broker contract. Who may ask is the
broker's to say (its users and permissions); everybody who can reach these subjects may drain the worker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self

import msgspec

from kvstream._version import __version__
from kvstream.discovery.broker import Broker
from kvstream.discovery.control import (
    ALL,
    OPERATIONS,
    CancelReply,
    DrainReport,
    LevelReply,
    NoArguments,
    OperationType,
    PeerStats,
    PushReply,
    RerouteReply,
    StateReply,
    StreamRecord,
    StreamsReply,
    ToBudget,
    ToLevel,
    ToPush,
    ToReroute,
    ToStream,
    ToStreams,
    WorkerInfo,
    WorkerStats,
    decode_request,
)
from kvstream.discovery.micro import Endpoint, MicroService
from kvstream.discovery.records import worker_subject
from kvstream.errors import ConfigError, KVStreamError
from kvstream.log import get_logger

if TYPE_CHECKING:
    from kvstream.runtime.events import Events
    from kvstream.runtime.runtime import Runtime

__all__ = ["Control", "holders"]

_LISTED = 1000
"""Streams that one answer lists: it has to fit into a message."""


class Control:
    """`async with`: while inside, the worker can be steered. `malformed` counts requests that made no sense."""

    def __init__(self, runtime: Runtime, broker: Broker, events: Events) -> None:
        self._runtime = runtime
        self._broker = broker
        self._events = events
        self._stack = AsyncExitStack()
        self._log = get_logger("control", worker=runtime.worker)
        self.malformed = 0
        self._calls: dict[str, Callable[[Any], Awaitable[msgspec.Struct]]] = {
            "info": self._info,
            "stats": self._stats,
            "streams": self._streams,
            "drain": self._drain,
            "resume": self._resume,
            "cancel": self._cancel,
            "reroute": self._reroute,
            "fetch": self._fetch,
            "log_level": self._log_level,
        }
        self._kinds: dict[str, OperationType] = {kind.name: kind for kind in OPERATIONS}
        self._endpoints = {kind.name: Endpoint(kind.name, self._subject(kind.name), kind.about) for kind in OPERATIONS}

    async def __aenter__(self) -> Self:
        record = self._runtime.record
        service = MicroService(
            self._broker,
            name="kvstream",
            id=record.incarnation,
            version=__version__,
            description="a kvstream worker",
            started=f"{datetime.fromtimestamp(record.started, UTC):%Y-%m-%dT%H:%M:%S.%f}Z",
            metadata={"worker": record.id, "roles": ",".join(record.roles), "host": record.host},
            endpoints=list(self._endpoints.values()),
        )
        try:
            for subject in (self._subject("*"), f"{ALL}.*"):
                await self._stack.enter_async_context(await self._broker.serve(subject, self._answer))
            await self._stack.enter_async_context(service)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def _subject(self, operation: str) -> str:
        name, _, rank = self._runtime.worker.partition("/")
        return worker_subject(name, int(rank), operation)

    async def _answer(self, subject: str, data: bytes) -> bytes:
        operation = subject.rpartition(".")[2]
        kind = self._kinds.get(operation)
        if kind is None:
            self.malformed += 1
            raise ConfigError("operation", f"{operation[:64]!r} is none of {', '.join(self._kinds)}")
        clock = asyncio.get_running_loop().time
        begun, failure = clock(), None
        try:
            try:
                request = decode_request(data, kind.request)
            except ConfigError:
                self.malformed += 1
                raise
            return msgspec.json.encode(await self._calls[operation](request))
        except KVStreamError as error:
            failure = error
            self._log.info("control request failed", operation=operation, why=str(error))
            raise
        finally:
            self._endpoints[operation].count(clock() - begun, failure)

    # ------------------------------------------------------------------ the operations

    async def _info(self, _: NoArguments) -> WorkerInfo:
        runtime, record = self._runtime, self._runtime.record
        return WorkerInfo(
            name=record.name,
            rank=record.rank,
            incarnation=record.incarnation,
            roles=record.roles,
            state=runtime.state,
            host=record.host,
            pid=record.pid,
            address=f"{record.address.host}:{record.address.port}",
            version=__version__,
            protocol=record.protocol,
            fingerprint=record.fingerprint,
            load=runtime.load,
            started=record.started,
        )

    async def _stats(self, _: NoArguments) -> WorkerStats:
        stats = self._runtime.stats()
        return WorkerStats(
            worker=self._runtime.worker,
            streams=len(stats.streams),
            peers=tuple(msgspec.convert(peer, PeerStats, from_attributes=True) for peer in stats.peers[:_LISTED]),
            offers_waiting=stats.offers_waiting,
            tokens_waiting=stats.tokens_waiting,
            staging_used=stats.staging_used,
            staging_limit=stats.staging_limit,
            staging_quarantined=stats.staging_quarantined,
            offers_refused=stats.offers_refused,
            stalls=stats.stalls,
            stale_frames=stats.stale_frames,
            protocol_errors=stats.protocol_errors,
            ended=dict(stats.ended),
            malformed=self.malformed,
            events_dropped=self._events.dropped,
        )

    async def _streams(self, request: ToStreams) -> StreamsReply:
        runtime = self._runtime
        found = [state for state in runtime.stats().streams if request.stream is None or state.stream == request.stream]
        records = [
            StreamRecord(
                worker=runtime.worker,
                stream=state.stream,
                role="source" if state.direction == "send" else "destination",
                peer=state.peer,
                epoch=state.epoch,
                state=state.waits_for,
                waited=state.waited,
                layers=runtime.pool.layout.layers,
                layers_done=state.layers,
                share_class=state.share_class,
            )
            for state in found[:_LISTED]
        ]
        held = [
            hold
            for hold in runtime.stats().holds
            if not hold.leaving and (request.stream is None or hold.stream == request.stream)
        ]
        records += [
            StreamRecord(
                worker=runtime.worker,
                stream=hold.stream,
                role="holder",
                peer="",
                epoch=0,
                state="held",
                waited=0.0,
                layers=runtime.pool.layout.layers,
                layers_done=runtime.pool.layout.layers,
            )
            for hold in held[: _LISTED - len(records)]
        ]
        return StreamsReply(worker=runtime.worker, streams=tuple(records), total=len(found) + len(held))

    async def _drain(self, request: ToBudget) -> DrainReport:
        return await self._runtime.drain(request.budget)

    async def _resume(self, _: NoArguments) -> StateReply:
        await self._runtime.resume()
        return StateReply(state=self._runtime.state)

    async def _cancel(self, request: ToStream) -> CancelReply:
        return CancelReply(cancelled=self._runtime.cancel(request.stream, "cancelled by an order"))

    async def _reroute(self, request: ToReroute) -> RerouteReply:
        self._runtime.reroute(request.stream, request.to)
        return RerouteReply(stream=request.stream)

    async def _fetch(self, request: ToPush) -> PushReply:
        report = await self._runtime.push(request.stream, request.to)
        return PushReply(stream=report.stream, peer=report.peer, bytes=report.bytes, lane=report.lane)

    async def _log_level(self, request: ToLevel) -> LevelReply:
        logging.getLogger("kvstream").setLevel(request.level.upper())
        return LevelReply(level=request.level)


async def holders(broker: Broker, stream: str, *, timeout: float, expected: int) -> list[str]:
    """The workers that say within `timeout` seconds that they hold a stream; `expected`: how many there are to ask.

    Raises BrokerUnavailable.
    """
    request = msgspec.json.encode(ToStreams(stream=stream))
    answers = await broker.gather(f"{ALL}.streams", request, timeout=timeout, expected=expected)
    found: dict[str, None] = {}
    for answer in answers:
        try:
            reply = msgspec.json.decode(answer, type=StreamsReply)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue  # anybody may answer
        if any(record.role == "holder" and record.stream == stream for record in reply.streams):
            found[reply.worker] = None
    return list(found)
