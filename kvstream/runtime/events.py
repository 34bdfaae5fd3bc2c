"""What a worker tells the cluster as it happens: its life, the ends of its streams, stalls. Published, never awaited.

Owns the rate at which events are told: a storm of them is cut off and counted, and costs the streams nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from kvstream.discovery.broker import Broker
from kvstream.discovery.control import (
    CreditStall,
    Event,
    StreamEnded,
    StreamRerouted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerResumed,
    event_subject,
    kind_of,
)
from kvstream.runtime.sessions import SendStream
from kvstream.scheduler.commands import Accepted, Ended, Stalled

if TYPE_CHECKING:
    from kvstream.runtime.sessions import ReceiveStream

__all__ = ["Events"]

_RESERVE = 0.1
"""The share of what may be told that is kept for the worker's own life: streams end by the thousand."""
_WHY = 500
"""Characters of an error's text that are told."""


class Events:
    """`rate` is how many events a second may be told, on average and at once (at least one, unless it is 0). `clock`
    gives seconds, `wall` Unix time."""

    def __init__(
        self,
        broker: Broker,
        worker: str,
        incarnation: str,
        *,
        rate: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._broker = broker
        self._worker = worker
        self._incarnation = incarnation
        self._rate = rate
        self._clock = clock
        self._wall = wall
        self._most = max(rate, 1.0) if rate else 0.0
        self._allowed = self._most
        self._since = clock()
        self._count = 0
        self._cut = 0

    @property
    def dropped(self) -> int:
        """Events that were not told: beyond the rate, or with the broker down."""
        return self._cut + self._broker.unpublished

    def joined(self, roles: tuple[str, ...]) -> None:
        self._tell(WorkerJoined, roles=roles)

    def left(self, *, drained: bool) -> None:
        self._tell(WorkerLeft, drained=drained)

    def draining(self, budget: float) -> None:
        self._tell(WorkerDraining, budget=budget)

    def resumed(self) -> None:
        self._tell(WorkerResumed)

    # -- for Streams

    def taken(self, session: SendStream | ReceiveStream, command: Accepted) -> None:
        """A stream has been agreed on."""
        if isinstance(session, SendStream) and command.epoch > 1:
            self._tell_of_streams(StreamRerouted, stream=session.stream, peer=command.peer, epoch=command.epoch)

    def ended(self, session: SendStream | ReceiveStream, command: Ended) -> None:
        """A stream has ended, and its session knows."""
        error = command.error
        self._tell_of_streams(
            StreamEnded,
            stream=session.stream,
            role="source" if isinstance(session, SendStream) else "destination",
            peer=command.peer or "",
            epoch=command.epoch,
            code="done" if error is None else error.code,
            why="" if error is None else str(error)[:_WHY].encode(errors="replace").decode(),
            tokens=session.tokens,
            bytes=session.moved_bytes,
            seconds=session.age,
        )

    def stalled(self, command: Stalled) -> None:
        """A peer makes no progress."""
        self._tell_of_streams(
            CreditStall,
            peer=command.peer,
            role="source" if command.outgoing else "destination",
            stream=command.example,
            streams=command.streams,
            chunks=command.chunks,
            seconds=command.seconds,
        )

    def _tell_of_streams(self, kind: type[Event], **fields: Any) -> None:
        self._tell(kind, self._most * _RESERVE, **fields)

    def _tell(self, kind: type[Event], kept: float = 0.0, **fields: Any) -> None:
        self._count += 1
        now = self._clock()
        self._allowed = min(self._most, self._allowed + (now - self._since) * self._rate)
        self._since = now
        if self._allowed < 1.0 + kept:
            self._cut += 1
            return
        self._allowed -= 1.0
        event = kind(worker=self._worker, incarnation=self._incarnation, time=self._wall(), seq=self._count, **fields)
        subject = event_subject(kind_of(kind), self._worker)
        self._broker.publish(subject, msgspec.json.encode(event))
