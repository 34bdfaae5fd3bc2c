"""Puts of whole slots, handed to UCX in pieces: control messages share the socket and must not queue behind megabytes.

Owns how many bytes of puts are under way on one endpoint, and their order. It must never post a piece of what was
withdrawn, nor anything on an endpoint that is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from kvstream.transport import _ucp
from kvstream.transport._worker import Endpoint

__all__ = ["WITHDRAWN", "Puts"]

WITHDRAWN = -1000
"""What `done` gets in place of a status (of which UCX has none there) when a slot was withdrawn."""


@dataclass(slots=True)
class _Transfer:
    slot: int
    local: int
    remote: int
    nbytes: int
    rkey: int
    done: Callable[[int], None]
    posted: int = 0
    failure: int = _ucp.OK


class Puts:
    """At most `window` bytes are posted and not completed at a time, as two pieces or more.

    A message sent meanwhile waits behind these, and behind what the kernel's socket buffer holds.
    """

    def __init__(self, endpoint: Endpoint, window: int) -> None:
        self.under_way = 0
        """Bytes that are posted and not completed."""
        self._endpoint = endpoint
        self._window = window
        self._piece = max(1, window // 2)
        self._queue: deque[_Transfer] = deque()
        self._posting = False

    def put(self, slot: int, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        """Put `nbytes`, lowest address first, after what was put before. `done` gets the final status once, when all
        of it is in the peer's memory; it gets none when the endpoint is closed before its last piece is posted."""
        self._queue.append(_Transfer(slot, local, remote, nbytes, rkey, done))
        self._post()

    def withdraw(self, slot: int) -> None:
        """Post no more of this slot. Its `done` gets WITHDRAWN, as soon as what is under way of it has arrived."""
        for transfer in self._queue:
            if transfer.slot == slot:
                transfer.failure = WITHDRAWN
        self._post()

    def _post(self) -> None:
        if self._posting:  # called by a post that has its final status at once
            return
        self._posting = True
        try:
            while self._queue and self._endpoint.open and self._post_next(self._queue[0]):
                pass
        finally:
            self._posting = False
        if not self._endpoint.open:
            self._queue.clear()

    def _post_next(self, transfer: _Transfer) -> bool:
        """Post the next piece, or the end, of a transfer; False when that has to wait."""
        if transfer.failure != _ucp.OK or transfer.posted == transfer.nbytes:
            self._queue.popleft()
            if transfer.posted:
                self._endpoint.flush(lambda status: transfer.done(status or transfer.failure))
            else:
                transfer.done(transfer.failure)
            return True
        # Pieces of one size, so that a slot of 2 MiB and its header are not two pieces and a crumb.
        count = -(-transfer.nbytes // self._piece)
        size = min(-(-transfer.nbytes // count), transfer.nbytes - transfer.posted)
        if self.under_way + size > self._window and self.under_way:
            return False
        local, remote = transfer.local + transfer.posted, transfer.remote + transfer.posted
        transfer.posted += size
        self.under_way += size
        self._endpoint.put(local, size, remote, transfer.rkey, lambda status: self._completed(transfer, size, status))
        return True

    def _completed(self, transfer: _Transfer, size: int, status: int) -> None:
        self.under_way -= size
        if status != _ucp.OK:
            transfer.failure = status
        self._post()
