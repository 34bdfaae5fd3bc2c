"""The asker's end of a fetch as the user holds it: a receiving stream that asks a holder for what it is to receive.

All else of it is a ReceiveStream's: where the bytes go, how layers are waited for, what leaving early means.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Self

from kvstream.errors import DeadlineExceeded
from kvstream.runtime.reports import StreamReport
from kvstream.runtime.sessions import BlockIds, ReceiveStream
from kvstream.scheduler.commands import Accepted

if TYPE_CHECKING:
    from kvstream.runtime.streams import Streams

__all__ = ["FetchStream"]


class FetchStream(ReceiveStream):
    """Await it for the report of the whole stream, or enter it to have its layers as they come. `tokens` is what there
    is room for until a holder has answered, from then on what it sends."""

    def __init__(
        self,
        streams: Streams,
        name: str,
        ids: BlockIds,
        tokens: int,
        first_token: int,
        *,
        exact: bool,
        find: Callable[[], Awaitable[Sequence[str]]],
        token: bytes,
        deadline: float,
        priority: int,
        share: str,
    ) -> None:
        super().__init__(streams, name, ids, tokens, first_token, deadline)
        self._exact = exact
        self._find = find
        self._token = token
        self._priority = priority
        self._share = share

    async def __aenter__(self) -> Self:
        self._enter()
        start = self._streams.driver.now()
        try:
            async with asyncio.timeout(self._deadline):
                sources = await self._find()
        except TimeoutError:
            raise DeadlineExceeded(
                f"stream {self._name}: the deadline passed while its holder was looked for"
            ) from None
        self._streams.open_fetch(
            self,
            self._first_token,
            sources,
            exact=self._exact,
            token=self._token,
            deadline=max(self._deadline - (self._streams.driver.now() - start), 0.0),
            priority=self._priority,
            share=self._share,
        )
        return self

    def __await__(self) -> Generator[Any, Any, StreamReport]:
        return self._whole().__await__()

    async def _whole(self) -> StreamReport:
        async with self:
            return await self.done()

    def on_accepted(self, command: Accepted, lane: str) -> None:
        """For Streams: a holder sends it."""
        super().on_accepted(command, lane)
        self._tokens = command.tokens
