"""The broker contract: a lease table (compare-and-set, watch), request/reply and messages, whatever carries it.

`tests/contract/broker_suite.py` is this text as tests; the NATS broker and the in-memory one both pass it. The
broker knows nothing of workers: keys are names, values are bytes. It is never in the data path and never the only
truth: what it forgets, living workers put back.
"""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Literal, Self

import msgspec

from kvstream.errors import ConfigError, KVStreamError, PeerLost, Refused
from kvstream.log import get_logger

__all__ = [
    "MAX_VALUE",
    "Broker",
    "Conflict",
    "Handler",
    "Lease",
    "LeaseEvent",
    "LeaseView",
    "Message",
    "Messages",
    "NobodyServes",
    "Reason",
    "Reply",
    "Responder",
    "Service",
    "Synced",
    "check_lease",
    "check_pattern",
    "check_publish",
    "matches",
]

_log = get_logger("discovery")

MAX_VALUE = 16 * 1024
"""Largest value of a lease in bytes."""

MAX_REQUESTS = 64
"""Requests that one served subject works on at a time; beyond it a request is Refused."""

MAX_MESSAGE = 64 * 1024
"""Largest published message in bytes."""

MAX_UNWRITTEN = 1024
"""Published messages that wait to be written to the broker; beyond it they are dropped."""

MAX_REPLIES = 16 * 1024
"""Replies that one `gather` takes."""

Reason = Literal["put", "deleted", "expired", "missing"]
"""Why a lease changed. `missing`: it stood before the connection broke and does not stand in the snapshot after it."""

Handler = Callable[[str, bytes], Awaitable[bytes]]
"""Answers a request: gets its subject and data. A KVStreamError that it raises reaches the requester, typed."""

_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_SUBJECT = re.compile(r"[^\s.*>]+(\.[^\s.*>]+)*")
_PATTERN = re.compile(r"(>|(\*|[^\s.*>]+)(\.(\*|[^\s.*>]+))*(\.>)?)")


class Conflict(KVStreamError):
    """A compare-and-set found something else: `value` at `revision`, or nothing (None, 0)."""

    code = "conflict"

    def __init__(self, key: str, revision: int, value: bytes | None) -> None:
        standing = f"revision {revision} stands there" if value is not None else "nothing stands there"
        super().__init__(f"lease {key}: {standing}")
        self.revision = revision
        self.value = value


class NobodyServes(PeerLost):
    """Nobody serves the subject of a request: whoever did is gone, for certain."""


class Lease(msgspec.Struct, frozen=True):
    """What stands on a key."""

    revision: int
    value: bytes


class LeaseEvent(msgspec.Struct, frozen=True):
    """A key changed since this watch last told of it. `value` is None where the lease is gone."""

    key: str
    value: bytes | None
    revision: int
    reason: Reason


class Synced(msgspec.Struct, frozen=True):
    """Every lease that stood when the watch (re)connected has been told, and every one gone since has been ended."""


def check_lease(key: str, value: bytes, ttl: float) -> None:
    """Raise ConfigError for a key, value or time to live (seconds) that no broker takes."""
    if not _KEY.fullmatch(key):
        raise ConfigError("key", f"{key!r} is not a lease key; use words of A-Z a-z 0-9 _ - joined by dots")
    if len(value) > MAX_VALUE:
        raise ConfigError("value", f"{len(value)} bytes for {key}; at most {MAX_VALUE}")
    if not 0 < ttl < 86400:
        raise ConfigError("ttl", f"{ttl} s; must be above 0 and below one day")


def check_publish(subject: str, data: bytes) -> None:
    """Raise ConfigError for a subject or message that no broker takes."""
    if not _SUBJECT.fullmatch(subject):
        raise ConfigError("subject", f"{subject!r} is not a subject; use words joined by dots, without spaces, * and >")
    if len(data) > MAX_MESSAGE:
        raise ConfigError("data", f"{len(data)} bytes for {subject}; at most {MAX_MESSAGE}")


def check_pattern(pattern: str) -> None:
    """Raise ConfigError for what can't be subscribed to."""
    if not _PATTERN.fullmatch(pattern):
        raise ConfigError("subject", f"{pattern!r} is not a subject, with * for a word and a final > for any number")


def matches(pattern: str, subject: str) -> bool:
    """NATS's subject matching: `*` stands for one word, a final `>` for one or more."""
    wanted, words = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(words) <= len(wanted):
            return False
        words = words[: len(wanted)]
    return len(wanted) == len(words) and all(a in ("*", b) for a, b in zip(wanted, words, strict=True))


class Message(msgspec.Struct, frozen=True):
    """What was published."""

    subject: str
    data: bytes


class Messages:
    """What comes on a subscription, in order: an iterator. A reader that is `limit` messages behind loses the oldest,
    which `dropped` counts."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ConfigError("limit", f"must be at least 1, is {limit}")
        self._waiting: deque[Message] = deque()
        self._limit = limit
        self._wake = asyncio.Event()
        self._closed = False
        self.dropped = 0

    def put(self, message: Message) -> None:
        """A message has come; for brokers."""
        if self._closed:
            return
        if len(self._waiting) == self._limit:
            self._waiting.popleft()
            self.dropped += 1
        self._waiting.append(message)
        self._wake.set()

    def close(self) -> None:
        """End the iteration after what is waiting; for brokers."""
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> AsyncIterator[Message]:
        return self

    async def __anext__(self) -> Message:
        # No await between taking a message and returning it: a cancelled wait loses nothing.
        while not self._waiting:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()


class LeaseView:
    """One watcher's picture of the lease table, and the difference to what the watcher was told.

    Not a queue: a key that changes often while its watcher is slow costs one entry and is told once, as it is then.
    So memory is bounded by the number of leases, and a slow watcher is never wrong, only late. Snapshot and live
    events are merged by revision; live events that come during a snapshot wait for it. Revisions of before a
    `begin` are forgotten, since a broker may restart its count.
    """

    def __init__(self) -> None:
        self._table: dict[str, Lease] = {}
        self._told: dict[str, bytes] = {}
        self._due: dict[str, tuple[Reason, int]] = {}  # oldest first; the key "" stands for Synced
        self._held: dict[str, LeaseEvent] | None = {}
        self._wake = asyncio.Event()
        self._closed = False

    def begin(self) -> None:
        """A snapshot is about to be taken, or the connection is lost: hold live events back until `finish`."""
        self._held = {}

    def apply(self, event: LeaseEvent) -> None:
        """Take a live event, in the order of the broker."""
        if self._held is not None:
            self._held[event.key] = event
            return
        current = self._table.get(event.key)
        if current is not None and current.revision >= event.revision:
            return
        if event.value is None:
            self._table.pop(event.key, None)
        else:
            self._table[event.key] = Lease(event.revision, event.value)
        self._mark(event.key, event.reason, event.revision)

    def finish(self, snapshot: Mapping[str, Lease]) -> None:
        """Replace the table by a snapshot plus the live events held since `begin`, and mark the difference."""
        held, self._held = self._held or {}, None
        before, self._table = self._table, dict(snapshot)
        gone: dict[str, LeaseEvent] = {}
        for key, event in held.items():
            current = self._table.get(key)
            if current is not None and current.revision >= event.revision:
                continue
            if event.value is None:
                self._table.pop(key, None)
                gone[key] = event
            else:
                self._table[key] = Lease(event.revision, event.value)
        for key in before:
            if key not in self._table:
                event = gone.get(key)
                self._mark(key, event.reason if event else "missing", event.revision if event else 0)
        for key, lease in self._table.items():
            self._mark(key, "put", lease.revision)
        self._due.pop("", None)
        self._due[""] = ("put", 0)
        self._wake.set()

    def close(self) -> None:
        """End the iteration, after what is still to be told."""
        self._closed = True
        self._wake.set()

    def _mark(self, key: str, reason: Reason, revision: int) -> None:
        lease = self._table.get(key)
        if (lease.value if lease else None) == self._told.get(key):
            self._due.pop(key, None)
        else:
            self._due[key] = (reason, revision)
            self._wake.set()

    def __aiter__(self) -> AsyncIterator[LeaseEvent | Synced]:
        return self

    async def __anext__(self) -> LeaseEvent | Synced:
        # No await between taking an item and returning it: a cancelled wait loses nothing.
        while not self._due:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        key = next(iter(self._due))
        reason, revision = self._due.pop(key)
        if not key:
            return Synced()
        lease = self._table.get(key)
        if lease is None:
            del self._told[key]
            return LeaseEvent(key, None, revision, reason)
        self._told[key] = lease.value
        return LeaseEvent(key, lease.value, lease.revision, "put")


class Reply(msgspec.Struct, frozen=True):
    """How a request ended: `data`, or the error that the handler raised."""

    data: bytes = b""
    error: KVStreamError | None = None


class Responder:
    """Runs the handler of one served subject: a task per request, bounded, every one of them owned and ended."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._closed = False

    def start(self, subject: str, data: bytes, answer: Callable[[Reply], Awaitable[None]]) -> None:
        """Work on a request and pass its end to `answer`, unless the responder is closed before."""
        if self._closed:
            return
        refused = len(self._tasks) >= MAX_REQUESTS
        task = asyncio.get_running_loop().create_task(self._run(subject, data, answer, refused))
        self._tasks[task] = None
        task.add_done_callback(lambda done: self._tasks.pop(done, None))

    async def _run(self, subject: str, data: bytes, answer: Callable[[Reply], Awaitable[None]], refused: bool) -> None:
        if refused:
            await answer(Reply(error=Refused(f"{subject}: {MAX_REQUESTS} requests are waiting here", 0.1)))
            return
        # A task of its own, so that whatever the handler raises becomes an answer and never ends the service.
        work = asyncio.ensure_future(self._handler(subject, data))
        try:
            await asyncio.wait({work})
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait({work})
            raise
        if work.cancelled():
            await answer(Reply(error=KVStreamError(f"{subject}: the handler was cancelled")))
            return
        error = work.exception()
        if error is None:
            await answer(Reply(work.result()))
        elif isinstance(error, KVStreamError):
            await answer(Reply(error=error))
        else:
            _log.error("request handler failed", subject=subject, exc_info=error)
            await answer(Reply(error=KVStreamError(f"{subject}: the handler failed with {type(error).__name__}")))

    async def aclose(self) -> None:
        """Cancel what runs and wait for it."""
        self._closed = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


class Service(ABC):
    """A subject that is being served, until `aclose`."""

    @abstractmethod
    async def aclose(self) -> None:
        """Stop serving: later requests find nobody, running handlers are cancelled and waited for. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


class Broker(ABC):
    """A connection to the broker. It reconnects by itself, for ever; `connected` says how it stands.

    Errors: BrokerUnavailable where the broker can't be reached or does not answer in time (the operation may have
    taken place all the same: a compare-and-set tells at the next try), ConfigError where it denies what is asked.
    """

    def __init__(self) -> None:
        self._connected = asyncio.Event()
        self._steady_since = 0.0
        self._listeners: list[Callable[[bool], None]] = []
        self.unpublished = 0
        """Messages given to `publish` that were dropped here."""

    @property
    def connected(self) -> bool:
        """False from the moment in which a loss is noticed until the connection works again."""
        return self._connected.is_set()

    @property
    def steady_since(self) -> float:
        """Since when, by the loop's clock, the broker has been there without a break. Shortly after one, a worker that
        is not there may still be on its way back."""
        return self._steady_since

    async def wait_connected(self) -> None:
        """Wait until `connected`. Bound it with asyncio.timeout."""
        await self._connected.wait()

    def on_connection(self, callback: Callable[[bool], None]) -> Callable[[], None]:
        """Call `callback(connected)` at every change. Returns a function that ends this."""
        self._listeners.append(callback)

        def remove() -> None:
            if callback in self._listeners:
                self._listeners.remove(callback)

        return remove

    def _set_connected(self, connected: bool) -> None:
        if connected == self.connected:
            return
        if connected:
            self._interrupted()
            self._connected.set()
        else:
            self._connected.clear()
        for callback in list(self._listeners):
            callback(connected)

    def _interrupted(self) -> None:
        """There has been a break, over now."""
        self._steady_since = asyncio.get_running_loop().time()

    @abstractmethod
    async def put(self, key: str, value: bytes, *, ttl: float, revision: int) -> int:
        """Put `value` on `key` for `ttl` seconds if `revision` stands there (0: if nothing does); the new revision.

        A broker may round `ttl` up to whole seconds. Raises Conflict with what stands there instead.
        """

    @abstractmethod
    async def delete(self, key: str, *, revision: int) -> None:
        """End the lease on `key` if `revision` stands there. Nothing there is fine; else raises Conflict."""

    @abstractmethod
    def watch(self) -> AbstractAsyncContextManager[AsyncIterator[LeaseEvent | Synced]]:
        """Follow all leases: first the ones that stand, then Synced, then every change.

        After each reconnect the watch compares afresh, tells the differences, and Synced again. A put that leaves
        the value as it was is no event. A slow reader is told fewer changes, never wrong ones, and never makes the
        watch grow beyond the number of leases. The iteration ends when the broker is closed.
        """

    @abstractmethod
    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        """Ask whoever serves `subject`; the answer.

        Raises NobodyServes at once when there is nobody, PeerLost when no answer comes in `timeout` seconds, and
        whatever KVStreamError the handler raised.
        """

    @abstractmethod
    async def serve(self, subject: str, handler: Handler) -> Service:
        """Answer requests on `subject` (`*` and a final `>` are wildcards), across reconnects, until closed.

        When this returns, and the broker is connected, requests reach the handler.
        """

    @abstractmethod
    def publish(self, subject: str, data: bytes) -> None:
        """Tell whoever subscribes to `subject`: at most once, without waiting and without an answer.

        What can't be sent, because the broker is down or MAX_UNWRITTEN messages are still to be written, is dropped and
        counted in `unpublished`. Raises ConfigError for a bad subject, and for more than MAX_MESSAGE bytes.
        """

    @abstractmethod
    def subscribe(self, subject: str, *, limit: int = 1024) -> AbstractAsyncContextManager[Messages]:
        """Receive what is published on `subject` (with wildcards), across reconnects; what comes while the broker is
        down is lost. `limit` bounds what waits for the reader. The iteration ends when the broker is closed.

        When it is entered, and the broker is connected, what is published from then on comes.
        """

    @abstractmethod
    async def gather(self, subject: str, data: bytes, *, timeout: float, expected: int | None = None) -> list[bytes]:
        """Ask all who serve `subject`; their answers, as they came.

        Ends after `timeout` seconds, or as soon as `expected` have answered, or at once when nobody serves it. An error
        is an answer that is counted but not returned.
        """

    @abstractmethod
    async def aclose(self) -> None:
        """End watches, subscriptions and services and disconnect. Leases stay until they expire. Idempotent."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()
