"""Offers that wait on a destination for a `receive` or a handler's answer: a table by id and by stream id, with its
bounds, and the order in which a handler is asked.

Bookkeeping only; destination.py decides how long an offer may wait, and what becomes of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstream.config import RuntimeConfig
from kvstream.scheduler.fairness import FairQueue, Group
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
    due: float
    group: Group
    asked: bool = False
    """Whether the handler has been given it."""
    gone: bool = False
    """Whether it has been answered or withdrawn."""


class Offers:
    """At most one waits per stream id. Each is also listed by its number on its link."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._config = config
        self._weights = dict(config.share_weights)
        self._by_id: dict[int, PendingOffer] = {}
        self._by_name: dict[str, PendingOffer] = {}
        self._by_class: Counter[str] = Counter()
        self._weight = 0.0
        """Of the classes that have offers here, together."""
        self._unasked = FairQueue[PendingOffer](self._weights, lambda offer: not offer.gone)
        self.asked = 0
        """Offers that a handler has been given and not answered."""
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

    def full(self, frame: Offer) -> str | None:
        """What leaves no room for this offer; None when there is room. Each class that has offers here may fill its
        share of the table, so that none is kept out by another's flood. A single offer may have any size."""
        config = self._config
        if len(self) >= config.max_pending_offers:
            return f"{len(self)} offers are waiting already (max_pending_offers)"
        if self.tokens + frame.tokens > config.max_pending_tokens and self._by_id:
            return f"offers of {self.tokens} tokens are waiting already (max_pending_tokens)"
        mine = self._by_class.get(frame.share, 0)
        weight = self._weight_of(frame.share)
        share = weight / (self._weight + (weight if not mine else 0.0))
        if mine >= math.ceil(config.max_pending_offers * min(1.0, share)):
            return f"{mine} offers of class {frame.share!r} are waiting already (its share of max_pending_offers)"
        return None

    def add(self, offer: PendingOffer) -> None:
        share = offer.frame.share
        self._by_id[offer.id] = offer
        self._by_name[offer.frame.stream] = offer
        offer.link.offers[offer.frame.num] = offer
        self.tokens += offer.frame.tokens
        if share not in self._by_class:
            self._weight += self._weight_of(share)
        self._by_class[share] += 1
        self._unasked.push(offer.group, (offer.due, offer.id, 0), offer)

    def next(self) -> PendingOffer | None:
        """The offer that the handler is to be asked about now. Of the classes each gets its share of tokens."""
        offer = self._unasked.pop()
        if offer is not None:
            self._unasked.charge(offer.group, offer.frame.tokens)
            offer.asked = True
            self.asked += 1
        return offer

    def remove(self, offer: PendingOffer) -> None:
        share = offer.frame.share
        offer.gone = True
        self.asked -= offer.asked
        del self._by_id[offer.id]
        del self._by_name[offer.frame.stream]
        offer.link.offers.pop(offer.frame.num, None)
        self.tokens -= offer.frame.tokens
        self._by_class[share] -= 1
        if not self._by_class[share]:
            del self._by_class[share]
            self._weight = self._weight - self._weight_of(share) if self._by_class else 0.0

    def _weight_of(self, share: str) -> float:
        return self._weights.get(share, 1.0)
