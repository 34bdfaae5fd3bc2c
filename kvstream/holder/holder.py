"""The holder engine: it accepts the streams that it is offered, keeps them within a budget, and lends them.

It owns which streams stay and which go; serving them is the runtime's, by its holds. It keeps no stream that did not
come whole, writes into no block that a copy may still be read from, and never takes more memory than its budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from kvstream.errors import ConfigError, KVStreamError, Refused
from kvstream.holder.shelf import Place, Shelf
from kvstream.log import get_logger
from kvstream.runtime.checks import seconds, whole
from kvstream.runtime.holds import Hold
from kvstream.runtime.runtime import Runtime
from kvstream.runtime.sessions import Offer, ReceiveStream

__all__ = ["Holder", "HolderStats"]


class HolderStats(msgspec.Struct, frozen=True, kw_only=True):
    """A holder at one moment. Sizes in bytes; counts are totals since its start. `used` is what is kept and, as
    `promised`, what streams on their way will take."""

    streams: int
    budget: int
    used: int
    promised: int
    kept: int
    """Streams that came whole."""
    evicted: int
    refused: int


@dataclass(slots=True)
class _Kept:
    """A stream on the shelf."""

    hold: Hold
    place: Place

    @property
    def pins(self) -> int:
        return self.hold.pins

    @property
    def reads(self) -> int:
        return self.hold.reads

    @property
    def size(self) -> int:
        return self.place.size


@dataclass(slots=True)
class _Totals:
    kept: int = 0
    evicted: int = 0
    refused: int = 0


@dataclass(slots=True)
class _Wishes:
    """What the source of a stream wants of its holder."""

    ttl: float
    pinned: bool = False
    passed_on: Any = None


class Holder:
    """An Engine. `budget` is in bytes of KV in whole blocks (default: the whole pool), `ttl` how long a stream is kept
    that names no time, in seconds, and `max_ttl` the longest that one can name; `retry_after` is what a source is
    advised that was refused for want of room.

    The metadata of an offer may be a dict with `ttl` (seconds) and `pinned` (true: the stream neither expires nor is
    evicted until `unpin`); it is kept, and comes with each copy, as the payload does. Raises ConfigError.
    """

    def __init__(
        self,
        *,
        budget: int | None = None,
        ttl: float = 600.0,
        max_ttl: float = 86400.0,
        retry_after: float = 0.5,
    ) -> None:
        self._budget = None if budget is None else whole("budget", budget, 1, 2**63 - 1)
        self._max_ttl = seconds("max_ttl", max_ttl)
        self._ttl = seconds("ttl", ttl)
        if self._ttl > self._max_ttl:
            raise ConfigError("ttl", f"must be at most max_ttl ({self._max_ttl} s), is {self._ttl} s")
        self._retry_after = seconds("retry_after", retry_after)
        self._runtime_or_none: Runtime | None = None
        self._shelf = Shelf(0)
        self._kept: dict[Hold, _Kept] = {}
        """Everything on the shelf that is not promised, also what has been let go of and is still being read."""
        self._totals = _Totals()
        self._log = get_logger("holder")

    async def start(self, runtime: Runtime) -> None:
        """Begin to accept streams. Raises ConfigError when the budget is more than the pool has."""
        size = runtime.pool.layout.layers * runtime.pool.layout.block_bytes * runtime.pool.blocks
        if self._budget is not None and self._budget > size:
            raise ConfigError("budget", f"{self._budget} bytes are more than the pool has ({size})")
        self._shelf = Shelf(size if self._budget is None else self._budget)
        self._runtime_or_none = runtime
        runtime.on_offer(self._offered)

    async def close(self) -> None:
        """Nothing is left to do: the runtime ends the streams on their way and what is held."""

    def stats(self) -> HolderStats:
        shelf, totals = self._shelf, self._totals
        return HolderStats(
            streams=sum(not kept.hold.ended for kept in self._kept.values()),
            budget=shelf.budget,
            used=shelf.used,
            promised=shelf.promised,
            kept=totals.kept,
            evicted=totals.evicted,
            refused=totals.refused,
        )

    def pin(self, stream: str) -> None:
        """Keep a stream whatever comes, until `unpin`; counted. Raises ConfigError when it is not kept."""
        self._find(stream).pin()

    def unpin(self, stream: str) -> None:
        """Take one pin away. Raises ConfigError when the stream is not kept, or not pinned."""
        self._find(stream).unpin()

    # ------------------------------------------------------------------ helpers

    @property
    def _runtime(self) -> Runtime:
        if self._runtime_or_none is None:
            raise ConfigError("holder", "has not been started")
        return self._runtime_or_none

    def _find(self, stream: str) -> Hold:
        hold = self._runtime.held(stream)
        if hold is None:
            raise ConfigError("stream", f"{stream!r} is not kept here")
        return hold

    async def _offered(self, offer: Offer) -> None:
        pool = self._runtime.pool
        try:
            wishes = self._wishes(offer)
            place, blocks = self._make_room(offer)
        except KVStreamError as error:
            self._totals.refused += 1
            offer.refuse(str(error), retry_after=error.retry_after if isinstance(error, Refused) else None)
            return
        kept = False
        try:
            async with offer.accept(blocks=blocks) as rx:
                await rx.done()
            self._keep(rx, place, blocks, wishes)
            kept = True
        except KVStreamError as error:
            self._log.info("stream not kept", stream=offer.stream, code=error.code, why=str(error))
        finally:
            if not kept:
                # The stream has ended, so nothing is on its way into the blocks.
                pool.release(blocks)
                self._shelf.give_back(place)

    def _wishes(self, offer: Offer) -> _Wishes:
        given: object = offer.metadata
        named = cast("dict[object, object]", given) if isinstance(given, dict) else {}
        ttl = seconds("ttl", named["ttl"]) if "ttl" in named else self._ttl
        pinned = named.get("pinned", False)
        if not isinstance(pinned, bool):
            raise ConfigError("pinned", f"must be true or false, is {pinned!r}")
        return _Wishes(min(ttl, self._max_ttl), pinned, given)

    def _make_room(self, offer: Offer) -> tuple[Place, list[int]]:
        """A place for the stream and its blocks, for which others go where they must. Raises Refused."""
        pool = self._runtime.pool
        size = pool.layout.bytes(offer.tokens)
        for kept in self._shelf.victims(size, self._least_used_first(), self._retry_after):
            # Nothing reads it, so its blocks are back when this returns.
            kept.hold.release("evicted")
            self._totals.evicted += 1
        place = self._shelf.promise(size)
        try:
            return place, pool.acquire(pool.layout.blocks_for(offer.tokens))
        except Refused as error:
            # Others use the pool as well.
            self._shelf.give_back(place)
            raise Refused(str(error), self._retry_after) from error

    def _least_used_first(self) -> Iterator[_Kept]:
        for hold in self._runtime.holds:
            if (kept := self._kept.get(hold)) is not None:
                yield kept

    def _keep(self, rx: ReceiveStream, place: Place, blocks: list[int], wishes: _Wishes) -> None:
        """The stream is whole: it takes the place of what was kept under its name."""
        before = self._runtime.held(rx.stream)
        if before is not None:
            before.release("replaced")
        hold = self._runtime.hold(
            rx.stream,
            blocks=blocks,
            tokens=rx.tokens,
            ttl=wishes.ttl,
            pinned=wishes.pinned,
            payload=rx.payload,
            metadata=wishes.passed_on,
            on_release=self._gone,
        )
        self._kept[hold] = _Kept(hold, place)
        self._shelf.keep(place)
        self._totals.kept += 1

    def _gone(self, hold: Hold) -> None:
        """A hold is over: its blocks and its place are free."""
        kept = self._kept.pop(hold)
        self._runtime.pool.release(hold.ids)
        self._shelf.give_back(kept.place)
