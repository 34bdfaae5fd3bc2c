"""How fast work is being finished, and how long it will take until there is room for more.

An estimate from what was seen, without clock or I/O. Time without work is not counted, so that a pause does not make a
fast worker look slow.
"""

from __future__ import annotations

import math

__all__ = ["MAX_RETRY_AFTER", "MIN_RETRY_AFTER", "DrainRate"]

MIN_RETRY_AFTER = 0.01
MAX_RETRY_AFTER = 5.0
"""Bounds of what is advised, in seconds: a guess is not worth waiting for longer."""
_FIRST_GUESS = 0.1
_MEMORY = 2.0
"""Seconds of work after which a measurement counts a third."""


class DrainRate:
    """Work done per second of work, exponentially weighted: what was done lately counts most."""

    def __init__(self) -> None:
        self._amount = 0.0
        self._seconds = 0.0
        self._since: float | None = None

    def begun(self, now: float) -> None:
        """There is work from now on; nothing happens when there was some already."""
        if self._since is None:
            self._since = now

    def finished(self, now: float, amount: float, *, more: bool) -> None:
        """So much was finished; `more`: there is work left."""
        interval = max(0.0, now - self._since) if self._since is not None else 0.0
        keep = math.exp(-interval / _MEMORY)
        self._amount = self._amount * keep + amount
        self._seconds = self._seconds * keep + interval
        self._since = now if more else None

    def time_for(self, amount: float) -> float:
        """How long so much work will take, in seconds, within the bounds of what is worth advising."""
        if self._amount <= 0.0 or self._seconds <= 0.0:
            return _FIRST_GUESS
        return min(max(amount * self._seconds / self._amount, MIN_RETRY_AFTER), MAX_RETRY_AFTER)
