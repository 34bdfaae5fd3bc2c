"""The byte account of a holder: what is kept, what is promised to streams on their way in, and who has to go for more.

Pure bookkeeping: it takes no memory and ends no hold, and knows neither clock nor runtime. The sum of what it has given
never exceeds the budget, whatever is asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvstream.errors import ConfigError, Refused

__all__ = ["Kept", "Place", "Shelf"]


class Kept(Protocol):
    """What is kept, as the shelf sees it: who pins or reads it, and the room that it takes."""

    @property
    def pins(self) -> int: ...
    @property
    def reads(self) -> int: ...
    @property
    def size(self) -> int:
        """In bytes."""
        ...


_K = TypeVar("_K", bound=Kept)


@dataclass(slots=True, eq=False)
class Place:
    """Room on the shelf, in bytes: promised to a stream that is on its way, then taken by what is kept."""

    size: int
    promised: bool = True
    given_back: bool = False


class Shelf:
    """`budget` bytes. `used` is what is promised or taken."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self.promised = 0
        """Of these, what is promised to streams on their way."""

    def victims(self, size: int, kept: Iterable[_K], retry_after: float) -> list[_K]:
        """Who has to go so that `size` more bytes have room, out of `kept` in that order (least recently used first):
        none more than it takes, and nobody who is pinned or being read.

        Raises Refused where that does not make enough room; with `retry_after`, unless it never will.
        """
        if size > self.budget:
            raise Refused(f"{size} bytes are more than this holder keeps in all ({self.budget}, its budget)")
        short = self.used + size - self.budget
        found: list[_K] = []
        if short <= 0:
            return found
        for each in kept:
            if each.pins or each.reads:
                continue
            found.append(each)
            short -= each.size
            if short <= 0:
                return found
        raise Refused(
            f"no room for {size} bytes: of {self.budget} (budget) {self.used} are taken, {self.promised} of these by"
            f" streams on their way, and what could go leaves {short} bytes too few",
            retry_after,
        )

    def promise(self, size: int) -> Place:
        """Room for a stream that is on its way. Raises Refused when there is not enough: see `victims`."""
        if self.used + size > self.budget:
            raise Refused(f"no room for {size} bytes: of {self.budget} (budget) {self.used} are taken")
        self.used += size
        self.promised += size
        return Place(size)

    def keep(self, place: Place) -> None:
        """The stream is here. Raises ConfigError for a place that was not promised."""
        if place.given_back or not place.promised:
            raise ConfigError("place", "is not one that was promised and not used yet")
        place.promised = False
        self.promised -= place.size

    def give_back(self, place: Place) -> None:
        """What was promised is not needed, or what was kept has gone. Raises ConfigError the second time."""
        if place.given_back:
            raise ConfigError("place", "was given back before")
        place.given_back = True
        self.used -= place.size
        if place.promised:
            self.promised -= place.size
