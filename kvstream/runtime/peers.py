"""How our own streams fared with other workers: since when each is known, and who is better left alone for a while.

Bookkeeping for routing, nothing else: it decides nothing, and forgets a worker as soon as the registry does.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvstream.discovery.records import WorkerRecord
from kvstream.errors import Fenced, KVStreamError, PeerLost, Refused

__all__ = ["Peers"]

_FIRST_BACKOFF = 0.1
_MAX_BACKOFF = 5.0
"""Seconds for which a worker is left alone after one failure; doubled by each further one, up to this."""


@dataclass(slots=True)
class _Peer:
    incarnation: str
    since: float
    failures: int = 0
    until: float = 0.0


class Peers:
    """Times are seconds on one monotonic clock, which the caller reads."""

    def __init__(self) -> None:
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def seen(self, record: WorkerRecord, now: float) -> None:
        """The registry knows this worker. Another incarnation is another worker."""
        peer = self._peers.get(record.id)
        if peer is None or peer.incarnation != record.incarnation:
            self._peers[record.id] = _Peer(record.incarnation, now)

    def left(self, worker: str) -> None:
        self._peers.pop(worker, None)

    def took(self, worker: str) -> None:
        """It has accepted a stream of ours."""
        peer = self._peers.get(worker)
        if peer is not None:
            peer.failures, peer.until = 0, 0.0

    def failed(self, worker: str, error: KVStreamError, now: float) -> None:
        """A stream of ours had to go elsewhere, or end. What is wrong with the stream itself does not count, and what
        many streams run into at the same time counts once."""
        peer = self._peers.get(worker)
        if peer is None or not isinstance(error, Refused | PeerLost | Fenced):
            return
        if now >= peer.until:
            peer.failures += 1
        wait = min(_FIRST_BACKOFF * 2 ** (peer.failures - 1), _MAX_BACKOFF)
        if isinstance(error, Refused) and error.retry_after is not None:
            wait = min(max(wait, error.retry_after), _MAX_BACKOFF)
        peer.until = max(peer.until, now + wait)

    def age(self, record: WorkerRecord, now: float, wall: float) -> float:
        """Seconds since the worker joined, as far as can be told: since we have seen it, or since it says that it was
        started. `wall` is Unix time; clocks of hosts may differ."""
        self.seen(record, now)
        return max(now - self._peers[record.id].since, wall - record.started, 0.0)

    def backoff(self, worker: str, now: float) -> tuple[int, float]:
        """Failures in a row, and for how many seconds more it is better left alone."""
        peer = self._peers.get(worker)
        return (peer.failures, max(0.0, peer.until - now)) if peer is not None else (0, 0.0)
