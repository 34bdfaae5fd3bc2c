"""The asker's half of a fetch: of which holders a stream is asked for, one after the other, until one offers it.

It owns that sequence and the Fetch frames. The stream itself is a destination's like any other: it waits in
destination.py for the offer, and its deadline is kept there. A holder's half is an ordinary send.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstream import wire
from kvstream.errors import ConfigError, KVStreamError, ProtocolError, from_code
from kvstream.scheduler.destination import Destination
from kvstream.scheduler.inbound import Fetching
from kvstream.scheduler.links import Link
from kvstream.scheduler.shared import Shared
from kvstream.scheduler.source import Source

__all__ = ["Fetches"]

_FIRST_VERSION = 2
"""The protocol version that brought Fetch."""


class Fetches:
    """Asks on connections that this side dials: those that `source` keeps."""

    def __init__(self, shared: Shared, source: Source, destination: Destination) -> None:
        self._shared = shared
        self._source = source
        self._destination = destination
        self._connecting: dict[str, list[Fetching]] = {}

    def fetch(
        self,
        now: float,
        name: str,
        *,
        tokens: int,
        exact: bool,
        sources: Sequence[str],
        token: bytes,
        deadline: float,
        first_token: int,
        priority: int,
        share: str,
    ) -> int:
        if not sources:
            raise ConfigError("source", "names no worker")
        fetching = self._destination.fetch(
            now,
            name,
            tokens=tokens,
            exact=exact,
            sources=sources,
            token=token,
            deadline=deadline,
            first_token=first_token,
            priority=priority,
            share=share,
        )
        key = fetching.stream.key
        self._next(now, fetching)
        return key

    # ------------------------------------------------------------------ links

    def link_up(self, now: float, link: Link) -> None:
        for fetching in self._connecting.pop(link.peer, []):
            if _waits(fetching):
                self._ask(now, fetching, link)

    def link_failed(self, now: float, peer: str, error: KVStreamError) -> None:
        for fetching in self._connecting.pop(peer, []):
            if _waits(fetching):
                self._next_or_end(now, fetching, error)

    def link_lost(self, now: float, link: Link, error: KVStreamError) -> None:
        for fetching in list(link.fetches.values()):
            fetching.answered()
            self._next_or_end(now, fetching, error)

    # ------------------------------------------------------------------ frames

    def on_refuse(self, now: float, link: Link, frame: wire.Refuse) -> None:
        """The holder says no to one of `link.fetches`."""
        fetching = link.fetches[frame.num]
        fetching.answered()
        error = from_code(frame.code, frame.message, retry_after=frame.retry_after)
        self._next_or_end(now, fetching, error)

    # ------------------------------------------------------------------ steps

    def _next(self, now: float, fetching: Fetching) -> None:
        peer = fetching.peer = fetching.sources.pop(0)
        link = self._source.connect(peer)
        if link is not None:
            self._ask(now, fetching, link)
        else:
            self._connecting.setdefault(peer, []).append(fetching)

    def _next_or_end(self, now: float, fetching: Fetching, error: KVStreamError) -> None:
        if fetching.sources:
            self._next(now, fetching)
        else:
            self._destination.fail(now, fetching.stream.key, error)

    def _ask(self, now: float, fetching: Fetching, link: Link) -> None:
        if link.version < _FIRST_VERSION:
            error = ProtocolError(f"{link.peer} speaks version {link.version} of the protocol, which has no fetch")
            self._next_or_end(now, fetching, error)
            return
        stream = fetching.stream
        link.last_num += 1
        fetching.link, fetching.num = link, link.last_num
        link.fetches[fetching.num] = fetching
        self._shared.watch(now, link)
        frame = wire.Fetch(
            fetching.num,
            stream.name,
            fetching.token,
            stream.tokens if fetching.exact else 0,
            min(max(0.0, stream.expires - now), wire.MAX_SECONDS),
            fetching.priority,
            fetching.share,
        )
        self._shared.transmit(link, frame)


def _waits(fetching: Fetching) -> bool:
    """Whether its stream still waits for it: it may have ended meanwhile."""
    return fetching.stream.fetching is fetching
