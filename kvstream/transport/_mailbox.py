"""Delivery of a connection's control messages and of its loss, on the event loop.

Owns the order: messages first, in order, then the loss, once, and nothing after it. It must never call the user from
within a `put` or `lose`: those run inside a transport's progress, or inside the user's own call.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

__all__ = ["Mailbox"]


class Mailbox:
    """Messages wait here, at most `bound` of them, until `start` has named the callbacks and the loop comes round."""

    __slots__ = ("_bound", "_loop", "_messages", "_on_lost", "_on_message", "_scheduled", "error")

    def __init__(self, loop: asyncio.AbstractEventLoop, bound: int) -> None:
        self._loop = loop
        self._bound = bound
        self._messages: deque[bytes] = deque()
        self._on_message: Callable[[bytes], None] | None = None
        self._on_lost: Callable[[Exception], None] | None = None
        self._scheduled = False
        self.error: Exception | None = None
        """Why the connection is lost; None while it lives."""

    def start(self, on_message: Callable[[bytes], None], on_lost: Callable[[Exception], None]) -> None:
        if self._on_message is not None:
            raise RuntimeError("delivery on this connection was started before")
        self._on_message = on_message
        self._on_lost = on_lost
        if self._messages or self.error is not None:
            self._schedule()

    def put(self, message: bytes) -> bool:
        """Queue a message. False when the queue is full: the caller ends the connection. Ignored once lost."""
        if self.error is not None:
            return True
        if len(self._messages) >= self._bound:
            return False
        self._messages.append(message)
        self._schedule()
        return True

    def lose(self, error: Exception, *, discard: bool) -> bool:
        """Record the loss; False when it was recorded before.

        `discard` drops what is not delivered yet (a local close: the user wants no more of this connection);
        without it what came before the loss is delivered first.
        """
        if self.error is not None:
            if discard:
                self._messages.clear()
            return False
        self.error = error
        if discard:
            self._messages.clear()
        self._schedule()
        return True

    def _schedule(self) -> None:
        if not self._scheduled and self._on_message is not None:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        on_message = self._on_message
        if on_message is None:
            return
        try:
            # Only what was there on entry: a callback whose peer answers at once must not keep the loop for itself.
            for _ in range(len(self._messages)):
                if not self._messages:  # a callback closed the connection
                    break
                on_message(self._messages.popleft())
            if self._messages:
                return
            if self.error is not None and self._on_lost is not None:
                on_lost, self._on_lost = self._on_lost, None
                on_lost(self.error)
        finally:
            # Also after a callback raised (the loop reports that): the rest and the loss are still owed.
            if self._messages or (self.error is not None and self._on_lost is not None):
                self._schedule()
