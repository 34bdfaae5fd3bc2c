"""ControlClient: a cluster as an orchestrator sees and steers it, over the broker alone.

Owns a registry of its own and the requests; it registers nothing and is in nobody's way. What a worker says is
validated before it is believed; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

import msgspec

from kvstream.discovery import connect_broker
from kvstream.discovery.broker import Message, Messages, NobodyServes
from kvstream.discovery.control import (
    ALL,
    KINDS,
    MAX_BUDGET,
    CancelReply,
    DrainReport,
    Event,
    Level,
    LevelReply,
    NoArguments,
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
    WorkerLost,
    WorkerStats,
    WorkerSuspect,
    decode_event,
    event_subject,
    kind_of,
)
from kvstream.discovery.records import WorkerRecord, parse_worker, worker_subject
from kvstream.discovery.registry import Change, Changes, Left, Registry, Suspect
from kvstream.errors import ConfigError, PeerLost, ProtocolError, UnknownStream, UnknownWorker

if TYPE_CHECKING:
    from kvstream.discovery.broker import Broker

__all__ = ["ControlClient", "Events"]

_T = TypeVar("_T", bound=msgspec.Struct)

_DRAIN_SLACK = 5.0
"""Seconds beyond the budget in which a worker has to answer a drain: it ends cancelled streams and tells its peers."""


class ControlClient:
    """Made by `connect`; an async context manager, or closed by `aclose`. For the loop that it was made on.

    A worker is named by `name/rank`, or by `name` alone where it has one rank. All calls raise UnknownWorker for one
    that is not registered, PeerLost for one that does not answer in time, BrokerUnavailable, and what the worker
    answers, typed: ConfigError for a bad argument, UnknownStream, Refused.
    """

    def __init__(self, broker: Broker, *, timeout: float = 2.0) -> None:
        """On a broker that is connected, which is not closed here; enter it, or use `connect`."""
        self._broker = broker
        self._timeout = timeout
        self._registry = Registry(broker, rng=random.Random())
        self._stack = AsyncExitStack()
        self._started = False
        self.malformed = 0
        """Answers that were none; ignored."""

    @classmethod
    async def connect(cls, nats: str | None = None, *, timeout: float = 2.0) -> ControlClient:
        """A client on the NATS server at this URL, or the one that a Runtime without one would use. `timeout` (seconds)
        bounds each request. Raises ConfigError, BrokerUnavailable."""
        broker = await connect_broker(nats, rng=random.Random(), name="kvstream control")
        client = cls(broker, timeout=timeout)
        client._stack.push_async_callback(broker.aclose)
        try:
            await client.start()
        except BaseException:
            await client.aclose()
            raise
        return client

    async def start(self) -> None:
        """Take a first look at who is there; done by `connect` and on entry."""
        if not self._started:
            self._started = True
            self._stack.push_async_callback(self._registry.aclose)
            await self._registry.start(self._timeout)

    async def aclose(self) -> None:
        """Disconnect; watches and events end. Idempotent."""
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    # ------------------------------------------------------------------ who is there

    async def workers(self) -> list[WorkerRecord]:
        """All registered workers, by name and rank. `WorkerRecord.key` is their secret: don't show it."""
        return self._registry.workers()

    def is_suspect(self, worker: str) -> bool:
        """Whether a worker's (`name/rank`) lease is gone and it is not known yet whether it lives."""
        return self._registry.is_suspect(worker)

    async def watch(self) -> AsyncIterator[Change]:
        """Joined for each worker that is there, then Joined, Changed, Suspect and Left as it happens; ends with the
        client. A slow reader is told fewer changes, never wrong ones."""
        async with self._registry.watch() as changes:
            async for change in changes:
                yield change

    def events(self, *kinds: str, worker: str | None = None) -> Events:
        """What workers tell as it happens, all of it or these kinds (docs/control.md lists them), of one worker or all:
        `async with client.events() as events: async for event in events`. "suspect" and "lost" are found out here."""
        return Events(self._registry, self._broker, frozenset(kinds), self._id(worker) if worker is not None else None)

    # ------------------------------------------------------------------ asking

    async def info(self, worker: str) -> WorkerInfo:
        """What a worker is, by its own word."""
        return await self._ask(worker, "info", NoArguments(), WorkerInfo)

    async def stats(self, worker: str) -> WorkerStats:
        """A worker's counters and connections."""
        return await self._ask(worker, "stats", NoArguments(), WorkerStats)

    async def streams(self, worker: str | None = None, stream: str | None = None) -> list[StreamRecord]:
        """The live streams, of one worker or all, of one id or all: a record for each side. Of all workers only those
        are in it that answer within the timeout. Records have `copies` as far as the streams asked for tell."""
        request = ToStreams(stream=stream)
        if worker is not None:
            replies = [await self._ask(worker, "streams", request, StreamsReply)]
        else:
            data = msgspec.json.encode(request)
            expected = len(self._registry.records())
            answers = await self._broker.gather(f"{ALL}.streams", data, timeout=self._timeout, expected=expected)
            replies = [reply for answer in answers if (reply := self._decoded(answer, StreamsReply)) is not None]
        return _with_copies(record for reply in replies for record in reply.streams)

    # ------------------------------------------------------------------ steering

    async def drain(self, worker: str, budget: float = 30.0) -> DrainReport:
        """Have a worker take nothing new and let what is live finish; after `budget` seconds the rest is cancelled.
        Returns when that is done. Cancelling this wait does not end the drain; `resume` does."""
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 <= budget <= MAX_BUDGET:  # pyright: ignore[reportUnnecessaryIsInstance] - callers need not be typed
            raise ConfigError("budget", f"must be 0 to {MAX_BUDGET} seconds, is {budget!r}")
        request = ToBudget(budget=budget)
        return await self._ask(worker, "drain", request, DrainReport, timeout=budget + _DRAIN_SLACK)

    async def resume(self, worker: str) -> None:
        """Have a drained worker take streams again."""
        await self._ask(worker, "resume", NoArguments(), StateReply, timeout=self._timeout + _DRAIN_SLACK)

    async def cancel(self, stream: str) -> int:
        """End a stream as cancelled, at its source, or where no source is known at its destination; how many ends of it
        were cancelled so."""
        records = [record for record in await self._records(stream) if record.role != "holder"]
        if not records:
            raise UnknownStream("stream", f"{stream!r} is held, and not on its way: there is nothing to cancel")
        sources = [record for record in records if record.role == "source"]
        cancelled = 0
        for record in sources or records:
            reply = await self._ask(record.worker, "cancel", ToStream(stream=stream), CancelReply)
            cancelled += reply.cancelled
        return cancelled

    async def reroute(self, stream: str, to: str | list[str] | None = None) -> None:
        """Have a stream's source send it to another worker (of several, the first that takes it; None: its routing
        decides). Where it went is told by the event "rerouted"."""
        wanted = [to] if isinstance(to, str) else to
        for name in wanted or []:
            self._id(name)
        source = next((record for record in await self._records(stream) if record.role == "source"), None)
        if source is None:
            raise UnknownStream("stream", f"no worker that answers is the source of {stream!r}")
        await self._ask(source.worker, "reroute", ToReroute(stream=stream, to=wanted), RerouteReply)

    async def fetch(self, stream: str, to: str, source: str | None = None, *, timeout: float = 60.0) -> PushReply:
        """Have a worker that holds a stream's KV, `source` or whoever does, push it to another one; returns when it is
        there."""
        target = self._id(to)
        if source is None:
            holders = [
                one.worker for one in await self._records(stream) if one.role == "holder" and one.worker != target
            ]
            if not holders:
                raise UnknownStream("stream", f"no worker that answers holds {stream!r}")
            source = holders[0]
        return await self._ask(source, "fetch", ToPush(stream=stream, to=target), PushReply, timeout=timeout)

    async def set_log_level(self, worker: str, level: Level) -> None:
        """How much a worker logs."""
        await self._ask(worker, "log_level", ToLevel(level=level), LevelReply)

    # ------------------------------------------------------------------ helpers

    def _id(self, worker: str) -> str:
        """The one registered worker of that name, as `name/rank`."""
        name, rank = parse_worker(worker)
        ranks = [record.rank for record in self._registry.workers() if record.name == name]
        if rank is None and len(ranks) > 1:
            raise ConfigError(
                "worker", f"{name} has the ranks {', '.join(map(str, ranks))}; name one: {name}/{ranks[0]}"
            )
        if not ranks or (rank is not None and rank not in ranks):
            known = ", ".join(record.id for record in self._registry.workers()[:20]) or "nobody"
            raise UnknownWorker("worker", f"{worker!r} is not registered; known: {known}")
        return f"{name}/{ranks[0] if rank is None else rank}"

    async def _records(self, stream: str) -> list[StreamRecord]:
        records = await self.streams(stream=stream)
        if not records:
            raise UnknownStream("stream", f"no worker that answers knows {stream!r}; it may have ended")
        return records

    async def _ask(
        self, worker: str, operation: str, request: msgspec.Struct, kind: type[_T], *, timeout: float | None = None
    ) -> _T:
        worker = self._id(worker)
        name, _, rank = worker.partition("/")
        data = msgspec.json.encode(request)
        try:
            answer = await self._broker.request(
                worker_subject(name, int(rank), operation), data, timeout=self._timeout if timeout is None else timeout
            )
        except NobodyServes:
            raise PeerLost(
                f"{worker} takes no control requests: it has just gone, or runs with control=False"
            ) from None
        reply = self._decoded(answer, kind)
        if reply is None:
            raise ProtocolError(f"{worker} answers {operation} with what is no {kind.__name__}")
        return reply

    def _decoded(self, answer: bytes, kind: type[_T]) -> _T | None:
        try:
            return msgspec.json.decode(answer, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self.malformed += 1
            return None


class Events:
    """What workers tell: an async context manager and iterator. Ends with the client, or its broker."""

    def __init__(self, registry: Registry, broker: Broker, kinds: frozenset[str], worker: str | None) -> None:
        unknown = sorted(kinds - KINDS.keys())
        if unknown:
            raise ConfigError("kinds", f"{unknown[0]!r} is none of {', '.join(KINDS)}")
        self._registry = registry
        self._broker = broker
        self._kinds = kinds or KINDS.keys()
        self._worker = worker
        self._stack = AsyncExitStack()
        self._messages: Messages | None = None
        self.malformed = 0
        """What was published on these subjects and is no event; ignored."""

    @property
    def dropped(self) -> int:
        """Events that were lost because the reader was more than a thousand behind."""
        return self._messages.dropped if self._messages is not None else 0

    async def __aenter__(self) -> Self:
        kind = next(iter(self._kinds)) if len(self._kinds) == 1 else "*"
        subject = event_subject(kind, self._worker or "*")
        try:
            self._messages = await self._stack.enter_async_context(self._broker.subscribe(subject))
            changes = await self._stack.enter_async_context(self._registry.watch())
            observing = asyncio.create_task(self._observe(changes, self._messages))
            self._stack.push_async_callback(_end, observing)
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._messages is None:
            raise ConfigError("events", "enter them first: `async with client.events() as events`")
        while True:
            message = await anext(self._messages)
            event = _own.decode(message.data) if not message.subject else decode_event(message.subject, message.data)
            if event is None:
                self.malformed += 1
            elif kind_of(type(event)) in self._kinds and self._worker in (None, event.worker):
                return event

    async def _observe(self, changes: Changes, messages: Messages) -> None:
        """What nobody publishes: that a worker is suspect, or gone without a word."""
        async for change in changes:
            if isinstance(change, Suspect):
                kind = WorkerSuspect
            elif isinstance(change, Left) and change.reason != "unregistered":
                kind = WorkerLost
            else:
                continue
            record = change.record
            event = kind(worker=record.id, incarnation=record.incarnation, time=time.time(), seq=0)
            # No subject: nothing that is published is without one, so it can't be taken for ours.
            messages.put(Message("", msgspec.json.encode(event)))


_own = msgspec.json.Decoder(WorkerSuspect | WorkerLost)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})


def _with_copies(records: Iterable[StreamRecord]) -> list[StreamRecord]:
    """The records, each with the workers that have all of its stream."""
    found = list(records)
    copies: dict[str, dict[str, None]] = {}
    for record in found:
        if record.layers_done == record.layers:
            copies.setdefault(record.stream, {})[record.worker] = None
    return [msgspec.structs.replace(record, copies=tuple(copies.get(record.stream, ()))) for record in found]
