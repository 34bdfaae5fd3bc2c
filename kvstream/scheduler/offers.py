"""Offers that wait on a destination for a `receive` or a handler's answer: a table by id and by stream id.

Bookkeeping only; destination.py decides how many may wait, how long, and what becomes of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstream.wire import Offer

if TYPE_CHECKING:
    from kvstream.scheduler.links import Link

__all__ = ["Offers", "PendingOffer"]


@dataclass(slots=True)
class PendingOffer:
    id: int
    link: Link
    frame: Offer
    stream_expires: float
    """The stream's deadline by this side's clock."""
    asked: bool = False
    """Whether the handler has been given it."""


class Offers:
    """At most one waits per stream id. Each is also listed by its number on its link."""

    def __init__(self) -> None:
        self._by_id: dict[int, PendingOffer] = {}
        self._by_name: dict[str, PendingOffer] = {}
        self.tokens = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[PendingOffer]:
        """Oldest first; the table may change meanwhile."""
        return iter(list(self._by_id.values()))

    def get(self, offer_id: int) -> PendingOffer | None:
        return self._by_id.get(offer_id)

    def named(self, stream: str) -> PendingOffer | None:
        return self._by_name.get(stream)

    def add(self, offer: PendingOffer) -> None:
        self._by_id[offer.id] = offer
        self._by_name[offer.frame.stream] = offer
        offer.link.offers[offer.frame.num] = offer
        self.tokens += offer.frame.tokens

    def remove(self, offer: PendingOffer) -> None:
        del self._by_id[offer.id]
        del self._by_name[offer.frame.stream]
        offer.link.offers.pop(offer.frame.num, None)
        self.tokens -= offer.frame.tokens
