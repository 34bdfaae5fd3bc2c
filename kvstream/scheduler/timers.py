"""Timers of the scheduler core: at most one per kind and reference, cancelled for good, without a clock.

A cancelled or replaced timer leaves a dead entry in the heap; these are dropped when they reach its top, or all
together before they outnumber the live ones, so that memory follows what is live.
"""

from __future__ import annotations

import enum
import heapq
import math

__all__ = ["Timer", "Timers"]

_SLACK = 64


class Timer(enum.Enum):
    """What a timer is for; its reference is the id of a stream, an offer or a link."""

    OUTBOUND = "outbound"
    """A source's stream has reached its deadline."""
    INBOUND = "inbound"
    """A destination's stream has reached its deadline or, once it is decided, the end of its wait for an answer."""
    RESERVATION = "reservation"
    """Nothing has come of a destination's stream for long enough."""
    RESUME = "resume"
    """A destination's stream has waited long enough for its source to come back."""
    RETRY = "retry"
    """A source's stream that was refused everywhere tries again."""
    OFFER = "offer"
    """An offer has waited long enough."""
    BEAT = "beat"
    """Time to speak on a link and to judge its silence."""
    IDLE = "idle"
    """A link has had no stream for long enough."""


class Timers:
    """`len` counts the live ones."""

    def __init__(self) -> None:
        self._live: dict[tuple[Timer, int], int] = {}
        self._heap: list[tuple[float, int, Timer, int]] = []
        self._count = 0

    def __len__(self) -> int:
        return len(self._live)

    def arm(self, when: float, kind: Timer, ref: int) -> None:
        """Set, or set anew, the one timer of this kind and reference. One at infinity never fires."""
        if when == math.inf:
            self.cancel(kind, ref)
            return
        self._count += 1
        self._live[kind, ref] = self._count
        heapq.heappush(self._heap, (when, self._count, kind, ref))
        if len(self._heap) > 2 * len(self._live) + _SLACK:
            self._heap = [entry for entry in self._heap if self._is_live(entry)]
            heapq.heapify(self._heap)

    def cancel(self, kind: Timer, ref: int) -> None:
        self._live.pop((kind, ref), None)

    def next(self) -> float | None:
        """When the earliest is due."""
        while self._heap and not self._is_live(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop(self, now: float) -> tuple[Timer, int] | None:
        """Take the earliest that is due, if any; of several due at one time, that which was armed first."""
        due = self.next()
        if due is None or due > now:
            return None
        _, _, kind, ref = heapq.heappop(self._heap)
        del self._live[kind, ref]
        return kind, ref

    def _is_live(self, entry: tuple[float, int, Timer, int]) -> bool:
        _, count, kind, ref = entry
        return self._live.get((kind, ref)) == count
