"""The broker contract on NATS: a JetStream key-value bucket as lease table, core requests for the rest.

The only module that touches nats-py, and of nats-py it uses a connection's plain verbs alone. A client object serves
for exactly one connection: nats-py's own reconnect can wedge (full socket buffers), turn into a connected zombie (a
late PONG ends its read loop) or give up for good (an -ERR of the server), so a connection that is lost, or does not
answer a probe, is thrown away whole and a new one is built. JetStream is spoken in its JSON API, where error codes
decide. Nothing here calls `flush` or `rtt`: a cancelled one is what makes the zombie.

Watching goes by the bucket's republish subject, with a snapshot by direct get. The snapshot is read in
pages by sequence, since a `multi_last` request is refused beyond 1024 keys; with a history of one message per key both
say the same. In a cluster any replica answers, also one that is behind: there the snapshot has to reach what the leader
had when it was asked for.
"""

from __future__ import annotations

import asyncio
import base64
import math
import re
import ssl
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, cast

import msgspec
import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from kvstream.discovery.broker import (
    MAX_REPLIES,
    MAX_UNWRITTEN,
    Broker,
    Conflict,
    Handler,
    Lease,
    LeaseEvent,
    LeaseView,
    Message,
    Messages,
    NobodyServes,
    Reason,
    Reply,
    Responder,
    Service,
    Synced,
    check_lease,
    check_pattern,
    check_publish,
)
from kvstream.discovery.credentials import NatsTarget, refresh_target
from kvstream.errors import BrokerUnavailable, ConfigError, KVStreamError, PeerLost, Refused, from_code
from kvstream.log import get_logger

if TYPE_CHECKING:
    from random import Random

    from nats.aio.subscription import Subscription

__all__ = ["NatsBroker"]

_log = get_logger("discovery")

_T = TypeVar("_T")
Storage = Literal["memory", "file"]
Refresh = Callable[[NatsTarget], Awaitable[NatsTarget]]
"""Looks a target up again, before each reconnect. ConfigError and BrokerUnavailable mean: try later."""

PAGE = 500
"""Leases asked for in one direct get."""
RESYNC_SECONDS = 30.0
"""Republished messages come at most once, so even an undisturbed watch compares afresh this often."""
RECONNECT_SECONDS = 1.0
"""Longest pause between two tries to reconnect: well below a worker's lease, so that all are back within one."""
SILENCE = 1.5
"""A server that lives is silent for one probe's time and that of its answer; after more than this many it was away, and
its clients may have left it. Less than the probe and the time-out after which they do."""
CLUSTER_REPLICAS = 3
"""Copies of the lease table in a cluster: one server may be lost."""
LEAVE_SECONDS = 0.25
"""How long the end of a service waits until the server knows, and the end of a connection until all is written."""
MARKER_SECONDS = 2
"""How long the table remembers that a key expired; long enough for a watcher that is behind."""

ERROR_BYTES = 1024
"""What is sent of an error's text."""

_SEQUENCE = re.compile("[0-9]{1,19}")
_WRONG_REVISION = (10071, 10164)
_TOO_FEW_SERVERS = (10005, 10074)
_STREAM_NOT_FOUND = 10059
_STREAM_EXISTS = 10058
_ERROR_HEADER = "Kvstream-Error"
_RETRY_HEADER = "Kvstream-Retry-After"
_MICRO_ERROR = "Nats-Service-Error"
_MICRO_CODE = "Nats-Service-Error-Code"
"""How the clients of NATS services, in all languages, know an answer that is an error."""


# What is read of JetStream's JSON.


class _ApiError(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class _RePublish(msgspec.Struct):
    src: str = ""
    dest: str = ""


class _StreamConfig(msgspec.Struct, kw_only=True):
    name: str = ""
    subjects: list[str] = []
    retention: str = "limits"
    storage: str = "memory"
    num_replicas: int = 1
    max_msgs_per_subject: int = 1
    discard: str = "new"
    allow_rollup_hdrs: bool = False
    deny_delete: bool = False
    allow_direct: bool = False
    allow_msg_ttl: bool = False
    subject_delete_marker_ttl: int = 0
    republish: _RePublish | None = None


class _StreamReply(msgspec.Struct):
    error: _ApiError | None = None
    config: _StreamConfig | None = None


class _PubAck(msgspec.Struct):
    error: _ApiError | None = None
    seq: int = 0


class _StoredMessage(msgspec.Struct):
    seq: int = 0
    hdrs: str = ""
    data: str = ""


class _GetReply(msgspec.Struct):
    error: _ApiError | None = None
    message: _StoredMessage | None = None


class _Client(Client):
    """nats-py's client, which must not send credentials over a connection that should be encrypted and is not, and must
    not end with a message that it can't parse."""

    def __init__(self, require_tls: bool, on_garbage: Callable[[], None]) -> None:
        super().__init__()
        self._require_tls = require_tls
        self._on_garbage = on_garbage

    def _connect_command(self) -> bytes:
        # nats-py encrypts when the *server* says so, whatever the URL says.
        if self._require_tls and not self._server_info.get("tls_required"):
            raise nats.errors.SecureConnWantedError
        return super()._connect_command()

    async def _process_msg(self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes) -> None:
        # The server passes on header blocks and subjects of any bytes; what nats-py raises at them ends its read loop.
        try:
            await super()._process_msg(sid, subject, reply, data, headers)
        except (IndexError, UnicodeDecodeError):
            self._on_garbage()

    @staticmethod
    def _parse_header_lines(raw: bytes) -> dict[str, str]:
        # nats-py's own looks at every character of every name: over half of what each renewal costs each watcher.
        fields = (line.partition(b":") for line in raw.split(b"\r\n"))
        return {
            name.decode(errors="replace"): value.decode(errors="replace").strip()
            for name, colon, value in fields
            if colon
        }

    def on_read_loop_end(self, callback: Callable[[], None]) -> None:
        """Call back when nothing reads this connection any more: closed, or the connected zombie."""
        task = cast("asyncio.Task[None] | None", self._reading_task)
        if task is not None:
            task.add_done_callback(lambda _: callback())

    def abort(self) -> None:
        """Drop the socket without waiting for anything that is still to be written, and end what a `close` that did not
        come to its end has left running."""
        tasks: list[asyncio.Task[Any] | None] = [self._reading_task, self._ping_interval_task, self._flusher_task]
        tasks += [getattr(subscription, "_wait_for_msgs_task", None) for subscription in self._subs.values()]
        for task in tasks:
            if task is not None:
                task.cancel()
        writer = getattr(self._transport, "_io_writer", None)
        if writer is not None:
            writer.transport.abort()


class _Pending(msgspec.Struct):
    """A request. Ends with the first answer, or, where many are gathered, with the last one that is wanted."""

    subject: str
    future: asyncio.Future[Msg | KVStreamError]
    missing: int = 1
    answers: list[Msg] = []


class _Link:
    """One connection. `lost` gets its reason once; after that no callback runs and every request has ended."""

    def __init__(
        self,
        target: NatsTarget,
        name: str,
        *,
        probe: float,
        on_slow: Callable[[], None],
        on_garbage: Callable[[], None],
        on_silence: Callable[[], None],
    ) -> None:
        self._target = target
        self._name = name
        self._on_slow = on_slow
        self._on_silence = on_silence
        self._silence = SILENCE * probe
        self._client = _Client(target.tls, on_garbage)
        self._pending: dict[str, _Pending] = {}
        self._count = 0
        self._inbox = ""
        self._last_error = ""
        self._denied: dict[str, None] = {}
        self._loop = asyncio.get_running_loop()
        self.heard = self._loop.time()
        """When the last message came."""
        self.lost: asyncio.Future[str] = self._loop.create_future()

    async def open(self, timeout: float) -> None:
        """Connect and log in within `timeout` seconds. Raises ConfigError or BrokerUnavailable."""
        target = self._target
        options: dict[str, Any] = {
            "servers": list(target.urls),
            "name": self._name,
            "error_cb": self._on_error,
            "closed_cb": self._on_closed,
            "allow_reconnect": False,
            # Each server is tried at most twice, without a pause; one that is frozen leaves time for the others.
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": 0,
            "connect_timeout": timeout / len(target.urls),
            "inbox_prefix": target.inbox_prefix,
            "user": target.user or None,
            "password": target.password or None,
            "token": target.token or None,
            "user_credentials": target.creds or None,
            "nkeys_seed": target.nkey or None,
        }
        try:
            if target.tls:
                options["tls"] = await asyncio.to_thread(_tls_context, target)
            async with asyncio.timeout(timeout):
                await self._client.connect(**options)
                self._client.on_read_loop_end(lambda: self._lose(self._last_error or "the connection was closed"))
                self._inbox = self._client.new_inbox()
                await self.subscribe(f"{self._inbox}.*", self._on_reply)
        except (OSError, nats.errors.Error, ValueError, ImportError) as error:
            # TimeoutError is an OSError. ValueError: an unreadable seed or creds file. ImportError: nkeys.
            await self.abandon()
            self._explain(error, timeout)
        except BaseException:
            await self.abandon()
            raise

    def _explain(self, error: Exception, timeout: float) -> NoReturn:
        target = self._target
        text = str(error).removeprefix("nats: ").strip("'")
        low = text.lower()
        if isinstance(error, ImportError):
            raise ConfigError("nats.creds", "NATS key files need the nkeys package: pip install nkeys") from error
        if "authorization" in low or "authentication" in low or isinstance(error, nats.errors.AuthorizationError):
            raise ConfigError(
                "nats",
                f"{target.display} refuses the credentials of {target.source} ({text}); correct them there (user and "
                "password, token, key or creds file), or ask who runs that server",
            ) from error
        if isinstance(error, nats.errors.SecureConnWantedError):
            raise ConfigError(
                "nats", f"{target.display} does not offer TLS, and {target.source} asks for it"
            ) from error
        if isinstance(error, ssl.SSLCertVerificationError):
            raise ConfigError("nats.ca", f"{target.display}: {error.verify_message}") from error
        if isinstance(error, ValueError):
            raise ConfigError("nats", f"the key files of {target.source} can't be used: {text}") from error
        if isinstance(error, TimeoutError) and not isinstance(error, ConnectionError):
            text = f"no answer within {timeout:g} s"
        if isinstance(error, nats.errors.NoServersError) and self._last_error:
            text = self._last_error
        raise BrokerUnavailable(
            f"NATS at {target.display} (from {target.source}) can't be reached: {text}; {target.remedy}"
        ) from error

    async def publish(
        self, subject: str, data: bytes, *, reply: str = "", headers: dict[str, str] | None = None
    ) -> None:
        """Send a message. Raises BrokerUnavailable when the connection is lost."""
        if self.lost.done():
            raise BrokerUnavailable(f"the connection to NATS is lost: {self.lost.result()}")
        self._check_size(subject, data, headers)
        try:
            await self._client.publish(subject, data, reply=reply, headers=headers)
        except nats.errors.BadSubjectError:
            raise ConfigError("subject", f"{subject!r} is not a NATS subject") from None
        except (nats.errors.Error, OSError) as error:
            raise BrokerUnavailable(f"can't send to NATS: {error}") from error

    def _check_size(self, subject: str, data: bytes, headers: dict[str, str] | None) -> None:
        """The server ends the connection of who sends too much. It counts headers too, as nats-py does not."""
        block = 12 + sum(len(name) + len(value.encode()) + 4 for name, value in headers.items()) if headers else 0
        if len(data) + block > self._client.max_payload:
            raise ConfigError(
                "data",
                f"{len(data)} bytes, and {block} of headers, for {subject} are more than the "
                f"{self._client.max_payload} that the NATS server takes; send less, or raise its max_payload",
            )

    async def subscribe(self, subject: str, callback: Callable[[Msg], Awaitable[None]]) -> Subscription:
        """Deliver messages on `subject` to `callback`, in order, one at a time."""

        async def deliver(message: Msg) -> None:
            if not self.lost.done():
                self._hear()
                await callback(message)

        try:
            return await self._client.subscribe(subject, cb=deliver)
        except nats.errors.BadSubjectError:
            raise ConfigError("subject", f"{subject!r} is not a NATS subject") from None
        except (nats.errors.Error, OSError) as error:
            raise BrokerUnavailable(f"can't subscribe to {subject}: {error}") from error

    async def request(self, subject: str, data: bytes, *, timeout: float, headers: dict[str, str] | None = None) -> Msg:
        """The first answer. Raises TimeoutError, BrokerUnavailable (at once when the connection is lost) or
        ConfigError (at once when the server denies the subject)."""
        self._count += 1
        token = str(self._count)
        pending = _Pending(subject, asyncio.get_running_loop().create_future())
        self._pending[token] = pending
        try:
            async with asyncio.timeout(timeout):
                await self.publish(subject, data, reply=f"{self._inbox}.{token}", headers=headers)
                answer = await pending.future
        finally:
            del self._pending[token]
            pending.future.cancel()
        if isinstance(answer, KVStreamError):
            raise answer
        return answer

    @property
    def clustered(self) -> bool:
        """Whether the server is one of a cluster."""
        return bool(self._client._server_info.get("cluster"))  # pyright: ignore[reportPrivateUsage] - no public name

    async def gather(self, subject: str, data: bytes, *, timeout: float, wanted: int) -> list[Msg]:
        """Up to `wanted` answers, those that come within `timeout` seconds. Raises BrokerUnavailable, ConfigError."""
        self._count += 1
        token = str(self._count)
        pending = _Pending(subject, asyncio.get_running_loop().create_future(), wanted)
        self._pending[token] = pending
        try:
            async with asyncio.timeout(timeout):
                await self.publish(subject, data, reply=f"{self._inbox}.{token}")
                answer = await pending.future
        except TimeoutError:
            return pending.answers
        finally:
            del self._pending[token]
            pending.future.cancel()
        if isinstance(answer, KVStreamError):
            raise answer
        return pending.answers

    def new_inbox(self) -> str:
        """A subject for answers that nobody else uses."""
        return self._client.new_inbox()

    async def answers(self, subject: str, timeout: float) -> bool:
        """Whether the server answers at all; "nobody is there" is an answer too."""
        try:
            await self.request(subject, b"", timeout=timeout)
        except ConfigError:
            pass  # denied, and so answered
        except (TimeoutError, BrokerUnavailable):
            return False
        self._hear()
        return True

    async def abandon(self) -> None:
        """Close, without waiting for a peer that takes nothing any more."""
        self._lose("closed here")
        try:
            with suppress(OSError, nats.errors.Error):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._client.close()
        finally:
            self._client.abort()

    def _hear(self) -> None:
        now = self._loop.time()
        if now - self.heard > self._silence:
            self._on_silence()
        self.heard = now

    def _lose(self, reason: str) -> None:
        if self.lost.done():
            return
        self.lost.set_result(reason)
        for pending in self._pending.values():
            _settle(pending.future, BrokerUnavailable(f"the connection to NATS is lost: {reason}"))

    async def _on_closed(self) -> None:
        self._lose(self._last_error or "the connection was closed")

    async def _on_reply(self, message: Msg) -> None:
        pending = self._pending.get(message.subject.rpartition(".")[2])
        if pending is None or pending.future.done():
            return
        pending.answers.append(message)
        pending.missing -= 1
        if not pending.missing or (message.headers or {}).get("Status") == "503":
            _settle(pending.future, message)

    async def _on_error(self, error: Exception) -> None:
        text = str(error).removeprefix("nats: ") or type(error).__name__
        self._last_error = text
        if isinstance(error, nats.errors.SlowConsumerError):
            _log.warning("nats: messages were dropped, comparing afresh", subject=error.subject)
            self._on_slow()
            return
        low = text.lower()
        if "permissions violation" not in low:
            _log.info("nats", error=text)
            return
        if text not in self._denied and len(self._denied) < 100:
            # What is published all the time would be told all the time.
            self._denied[text] = None
            _log.error("nats: the server denies a subject; grant it to this user", error=text, user=self._target.source)
        # Such a request gets no answer, only this. The server quotes the subject, in lower case by the time it is here.
        for pending in self._pending.values():
            if f'"{pending.subject.lower()}"' in low:
                _settle(pending.future, ConfigError("nats", f"{self._target.source}: {text}"))


class _NatsService(Service):
    def __init__(self, broker: NatsBroker, subject: str, handler: Handler) -> None:
        self._broker = broker
        self._subject = subject
        self._responder = Responder(handler)
        self._link: _Link | None = None
        self._subscription: Subscription | None = None

    async def attach(self, link: _Link) -> None:
        """Serve on this connection; once per connection, whoever asks."""
        if self._link is link:
            return
        self._link = link
        self._subscription = await link.subscribe(self._subject, self._on_request)

    async def _on_request(self, message: Msg) -> None:
        link = self._link
        if link is None:
            return
        if not message.reply:
            self._broker.count_garbage()
            return

        async def answer(reply: Reply) -> None:
            # The requester's deadline covers an answer that is lost with the connection. ConfigError: the subject for
            # the answer is none.
            with suppress(BrokerUnavailable, ConfigError):
                error = reply.error
                if error is None:
                    try:
                        await link.publish(message.reply, reply.data)
                        return
                    except ConfigError as unfit:
                        error = KVStreamError(f"{message.subject}: its answer can't be sent: {unfit}")
                text = str(error).encode(errors="replace")[:ERROR_BYTES].decode(errors="ignore")
                headers = {
                    _ERROR_HEADER: error.code,
                    _MICRO_ERROR: " ".join(text[:256].split()),
                    _MICRO_CODE: "400" if isinstance(error, ConfigError) else "500",
                }
                if isinstance(error, Refused) and error.retry_after is not None:
                    headers[_RETRY_HEADER] = repr(error.retry_after)
                await link.publish(message.reply, text.encode(), headers=headers)

        self._responder.start(message.subject, message.data, answer)

    async def aclose(self) -> None:
        self._broker.forget_service(self)
        link, self._link = self._link, None
        try:
            if self._subscription is not None and link is not None and not link.lost.done():
                # TimeoutError is an OSError: a server that takes nothing any more is not waited for.
                with suppress(nats.errors.Error, OSError):
                    async with asyncio.timeout(LEAVE_SECONDS) as bound:
                        await self._subscription.unsubscribe()
                        # nats-py hides a cancellation while its buffer is full, so the bound may have passed already.
                        if not bound.expired():
                            # The server works in order: when it has answered this, later requests find nobody.
                            await link.answers(self._broker.probe_subject, LEAVE_SECONDS)
        finally:
            await self._responder.aclose()


class _NatsSubscription:
    """One `Broker.subscribe`: keeps it subscribed on whatever connection there is."""

    def __init__(self, subject: str, messages: Messages) -> None:
        self.messages = messages
        self._subject = subject
        self._link: _Link | None = None
        self._subscription: Subscription | None = None

    async def attach(self, link: _Link) -> None:
        """Subscribe on this connection; once per connection, whoever asks."""
        if self._link is link:
            return
        self._link = link
        self._subscription = await link.subscribe(self._subject, self._on_message)

    async def _on_message(self, message: Msg) -> None:
        self.messages.put(Message(message.subject, message.data))

    async def detach(self) -> None:
        """Unsubscribe; a server that takes nothing any more is not waited for."""
        link, self._link = self._link, None
        if self._subscription is not None and link is not None and not link.lost.done():
            with suppress(nats.errors.Error, OSError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await self._subscription.unsubscribe()


class _Watch:
    """One `Broker.watch`: keeps a view in step with the bucket."""

    def __init__(self, broker: NatsBroker, prefix: str, events: str, snapshot: str) -> None:
        self.view = LeaseView()
        self._broker = broker
        self._prefix = prefix
        self._events = events
        self._snapshot_subject = snapshot
        self._stale = asyncio.Event()
        self._stale.set()

    def stale(self) -> None:
        """The view may have missed something: compare afresh."""
        self.view.begin()
        self._stale.set()

    async def run(self) -> None:
        """Follow until cancelled."""
        attached: _Link | None = None
        pause = 0.05
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(RESYNC_SECONDS * self._broker.jitter(0.8, 1.2)):
                    await self._stale.wait()
            self._stale.clear()
            link = await self._broker.wait_link()
            self.view.begin()
            try:
                if attached is not link:
                    await link.subscribe(self._events, self._on_event)
                    attached = link
                snapshot = await self._read(link)
            except (BrokerUnavailable, TimeoutError) as error:
                # On a lost connection the next one is waited for above; otherwise the server is busy or starting.
                _log.info("nats: no snapshot of the lease table, trying again", error=str(error) or "no answer")
                self._stale.set()
                await asyncio.sleep(self._broker.jitter(pause / 2, pause))
                pause = min(pause * 2, 2.0)
                continue
            except ConfigError as error:
                _log.error("nats: the lease table can't be read", error=str(error))
                self._stale.set()
                await asyncio.sleep(2.0)
                continue
            pause = 0.05
            if not self._stale.is_set() and not link.lost.done():
                self.view.finish(snapshot)

    async def _on_event(self, message: Msg) -> None:
        event = _event(self._prefix, message)
        if event is None:
            self._broker.count_garbage()
        else:
            self.view.apply(event)

    async def _read(self, link: _Link) -> dict[str, Lease]:
        leases: dict[str, Lease] = {}
        due = await self._broker.last_revision(link) if self._broker.replicated else 0
        seen, more = 0, True
        while more:
            last, more = await self._read_page(link, seen + 1, leases)
            if more and last <= seen:
                raise BrokerUnavailable("the lease table is given out of order")
            seen = max(seen, last)
        if seen < due:
            # What is due may have gone meanwhile, without a trace; then the next try asks for less.
            raise BrokerUnavailable(f"a replica is behind: it has {seen} of {due}")
        return leases

    async def _read_page(self, link: _Link, start: int, leases: dict[str, Lease]) -> tuple[int, bool]:
        """Add one page; the last sequence in it, and whether there is more."""
        page: asyncio.Queue[Msg] = asyncio.Queue(PAGE + 1)

        async def take(message: Msg) -> None:
            with suppress(asyncio.QueueFull):
                page.put_nowait(message)

        inbox = link.new_inbox()
        subscription = await link.subscribe(inbox, take)
        query = {"seq": start, "next_by_subj": f"{self._prefix}>", "batch": PAGE}
        seen = 0
        try:
            async with asyncio.timeout(self._broker.timeout):
                await link.publish(self._snapshot_subject, msgspec.json.encode(query), reply=inbox)
                while True:
                    message = await page.get()
                    headers = message.headers or {}
                    status = headers.get("Status")
                    if status is None:
                        if _SEQUENCE.fullmatch(sequence := headers.get("Nats-Sequence", "")):
                            seen = int(sequence)  # also of what is no lease
                        event = _event(self._prefix, message)
                        if event is None:
                            self._broker.count_garbage()
                        elif event.value is not None:
                            leases[event.key] = Lease(event.revision, event.value)
                        else:
                            leases.pop(event.key, None)
                    elif status == "204":
                        return seen, headers.get("Nats-Num-Pending", "0") != "0"
                    elif status == "404":
                        return seen, False
                    elif status == "503":
                        if not await self._broker.make_bucket(link):
                            raise BrokerUnavailable("no server that holds the bucket answers")
                        return 0, False
                    else:
                        raise BrokerUnavailable(f"direct get answers {status} {headers.get('Description', '')}")
        finally:
            if not link.lost.done():
                with suppress(nats.errors.Error, OSError):
                    await subscription.unsubscribe()


class NatsBroker(Broker):
    """The broker contract on a NATS server (2.11 or newer, with JetStream).

    `storage` and `replicas` are used when the bucket does not exist yet; an existing one is taken as it is if it can
    serve. `replicas` None: what the target says, else three in a cluster, and one on a single server. `timeout`
    (seconds) bounds each operation; a server that is silent for `probe` seconds is asked something, and one that does
    not answer counts as lost. `rng` spreads reconnects of many workers. `refresh` finds a server again that moved.
    """

    def __init__(
        self,
        target: NatsTarget,
        *,
        rng: Random,
        refresh: Refresh = refresh_target,
        bucket: str = "kvstream",
        storage: Storage = "memory",
        replicas: int | None = None,
        name: str = "kvstream",
        connect_timeout: float = 1.5,
        timeout: float = 2.0,
        probe: float = 1.0,
    ) -> None:
        super().__init__()
        check_lease(bucket, b"", 1.0)
        if "." in bucket:
            raise ConfigError("bucket", f"{bucket!r}: no dots")
        self._target = target
        self._refresh = refresh
        self._rng = rng
        self._bucket = bucket
        self._storage: Storage = storage
        self._replicas = replicas or target.replicas or None
        self.replicated = False
        """Whether the bucket has replicas, of which one may be behind."""
        self._name = name
        self._connect_timeout = connect_timeout
        self._probe = probe
        self.timeout = timeout
        self._stream = f"KV_{bucket}"
        self._prefix = f"$KV.{bucket}."
        self._events = f"{bucket}.ev."
        self._link: _Link | None = None
        self._up = asyncio.Event()
        self._supervisor: asyncio.Task[None] | None = None
        self._watches: dict[_Watch, None] = {}
        self._services: dict[_NatsService, None] = {}
        self._subscriptions: dict[_NatsSubscription, None] = {}
        self._unwritten: deque[Message] = deque()
        self._writer: asyncio.Task[None] | None = None
        self._closed = False
        self.garbage = 0
        """Messages on the subjects that are listened to here that were not what belongs there; dropped."""

    @classmethod
    async def connect(cls, target: NatsTarget, *, rng: Random, **options: Any) -> NatsBroker:
        """A connected broker. Options: see the class.

        Raises ConfigError for refused credentials, a server without JetStream, or a bucket that can't serve, and
        BrokerUnavailable when the server can't be reached within `connect_timeout`; it does not try again.
        """
        broker = cls(target, rng=rng, **options)
        try:
            broker._use(await broker._open())
            broker._supervisor = asyncio.get_running_loop().create_task(broker._supervise())
        except BaseException:
            await broker.aclose()
            raise
        return broker

    def __repr__(self) -> str:
        return f"NatsBroker({self._target.display}, connected={self.connected})"

    # -- the contract

    async def put(self, key: str, value: bytes, *, ttl: float, revision: int) -> int:
        check_lease(key, value, ttl)
        async with self._operation(key) as link:
            return await self._put(link, key, value, math.ceil(ttl), revision)

    async def delete(self, key: str, *, revision: int) -> None:
        check_lease(key, b"", 1.0)
        async with self._operation(key) as link:
            await self._delete(link, key, revision)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[LeaseEvent | Synced]]:
        self._require()
        watch = _Watch(self, self._prefix, f"{self._events}>", f"$JS.API.DIRECT.GET.{self._stream}")
        self._watches[watch] = None
        task = asyncio.get_running_loop().create_task(watch.run())
        try:
            yield watch.view
        finally:
            self._watches.pop(watch, None)
            watch.view.close()
            task.cancel()
            await asyncio.wait({task})

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        link = self._require()
        try:
            message = await link.request(subject, data, timeout=timeout)
        except TimeoutError:
            raise PeerLost(f"{subject}: no answer within {timeout:g} s") from None
        headers = message.headers or {}
        if headers.get("Status") == "503":
            raise NobodyServes(f"nobody serves {subject}")
        code = headers.get(_ERROR_HEADER)
        if code is None:
            return message.data
        try:
            retry_after = float(headers[_RETRY_HEADER])
        except (KeyError, ValueError):
            retry_after = None
        else:
            retry_after = retry_after if 0 <= retry_after < math.inf else None
        raise from_code(code, message.data.decode(errors="replace"), retry_after=retry_after)

    async def serve(self, subject: str, handler: Handler) -> Service:
        if self._closed:
            raise BrokerUnavailable("this broker has been closed")
        service = _NatsService(self, subject, handler)
        self._services[service] = None
        try:
            link = self._link
            if link is not None:
                # Lost in between: the supervisor attaches it to the next connection.
                with suppress(BrokerUnavailable):
                    await service.attach(link)
                # The server works in order: when it has answered this, it has taken the subscription.
                await link.answers(self.probe_subject, self.timeout)
        except BaseException:
            await service.aclose()
            raise
        return service

    def publish(self, subject: str, data: bytes) -> None:
        check_publish(subject, data)
        if self._link is None or len(self._unwritten) >= MAX_UNWRITTEN:
            self.unpublished += 1
            return
        self._unwritten.append(Message(subject, data))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_published())

    async def _write_published(self) -> None:
        """Write what is to be published; ends when nothing is left."""
        try:
            while self._unwritten:
                message, link = self._unwritten.popleft(), self._link
                try:
                    if link is None:
                        raise BrokerUnavailable("the connection to NATS is down")
                    async with asyncio.timeout(self.timeout):
                        await link.publish(message.subject, message.data)
                except (BrokerUnavailable, ConfigError, TimeoutError):
                    self.unpublished += 1
        finally:
            self._writer = None

    @asynccontextmanager
    async def subscribe(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[Messages]:
        if self._closed:
            raise BrokerUnavailable("this broker has been closed")
        check_pattern(subject)
        subscription = _NatsSubscription(subject, Messages(limit))
        self._subscriptions[subscription] = None
        try:
            link = self._link
            if link is not None:
                # Lost in between: the supervisor attaches it to the next connection.
                with suppress(BrokerUnavailable):
                    await subscription.attach(link)
                # The server works in order: when it has answered this, it has taken the subscription.
                await link.answers(self.probe_subject, self.timeout)
            yield subscription.messages
        finally:
            self._subscriptions.pop(subscription, None)
            subscription.messages.close()
            await subscription.detach()

    async def gather(self, subject: str, data: bytes, *, timeout: float, expected: int | None = None) -> list[bytes]:
        wanted = MAX_REPLIES if expected is None else min(expected, MAX_REPLIES)
        link = self._require()
        if not wanted:
            return []
        answers = await link.gather(subject, data, timeout=timeout, wanted=wanted)
        return [answer.data for answer in answers if not {"Status", _ERROR_HEADER} & (answer.headers or {}).keys()]

    async def aclose(self) -> None:
        self._closed = True
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.wait({supervisor})
        writer = self._writer
        if writer is not None:
            # What was said last is still written, if the server takes it.
            await asyncio.wait({writer}, timeout=LEAVE_SECONDS)
            writer.cancel()
            await asyncio.wait({writer})
        for watch in self._watches:
            watch.view.close()
        for subscription in self._subscriptions:
            subscription.messages.close()
        link, self._link = self._link, None
        self._up.clear()
        try:
            # Ends every subscription at once, so the services have nothing left to take back, and nothing to wait for.
            if link is not None:
                await link.abandon()
        finally:
            for service in list(self._services):
                await service.aclose()
            self._set_connected(False)

    # -- for the parts of this module

    @property
    def probe_subject(self) -> str:
        """Answered by the bucket itself, or by the server when there is none. A worker needs the right to it anyway."""
        return f"$JS.API.DIRECT.GET.{self._stream}.{self._prefix}w.none"

    def jitter(self, low: float, high: float) -> float:
        return self._rng.uniform(low, high)

    def count_garbage(self) -> None:
        self.garbage += 1
        if self.garbage & (self.garbage - 1) == 0:  # not once for each: it may be a flood
            _log.warning("nats: dropped a message that is none of ours", dropped=self.garbage)

    def forget_service(self, service: _NatsService) -> None:
        self._services.pop(service, None)

    async def wait_link(self) -> _Link:
        while self._link is None:
            await self._up.wait()
        return self._link

    async def last_revision(self, link: _Link) -> int:
        """The newest message in the bucket, markers too, asked of its leader; 0 for none."""
        query = msgspec.json.encode({"last_by_subj": f"{self._prefix}>"})
        reply = await self._api(link, f"$JS.API.STREAM.MSG.GET.{self._stream}", query, _GetReply)
        if reply.error is not None and reply.error.code != 404:
            raise BrokerUnavailable(f"bucket {self._bucket!r}: {reply.error.description}")
        return reply.message.seq if reply.message is not None else 0

    async def make_bucket(self, link: _Link) -> bool:
        """Make the bucket, or check the one that is there; whether it was made. Raises ConfigError where it can't
        serve."""
        made = False
        wanted = self._replicas or (CLUSTER_REPLICAS if link.clustered else 1)
        info = f"$JS.API.STREAM.INFO.{self._stream}"
        reply = await self._api(link, info, b"", _StreamReply)
        if reply.error is not None and reply.error.err_code == _STREAM_NOT_FOUND:
            config = _StreamConfig(
                name=self._stream,
                subjects=[f"{self._prefix}>"],
                storage=self._storage,
                num_replicas=wanted,
                allow_rollup_hdrs=True,
                deny_delete=True,
                allow_direct=True,
                allow_msg_ttl=True,
                subject_delete_marker_ttl=MARKER_SECONDS * 1_000_000_000,
                republish=_RePublish(f"{self._prefix}>", f"{self._events}>"),
            )
            create = f"$JS.API.STREAM.CREATE.{self._stream}"
            reply = await self._api(link, create, msgspec.json.encode(config), _StreamReply)
            made = reply.error is None
            if reply.error is not None and reply.error.err_code == _STREAM_EXISTS:
                # Another worker was first, with other options.
                reply = await self._api(link, info, b"", _StreamReply)
        if reply.error is not None:
            text = f"bucket {self._bucket!r}: {reply.error.description}"
            if reply.error.err_code in _TOO_FEW_SERVERS:
                text += f" ({wanted} copies need as many servers; start them, or set KVSTREAM_NATS_REPLICAS to less)"
            raise BrokerUnavailable(text)
        found = reply.config or _StreamConfig()
        events = found.republish.dest if found.republish is not None else ""
        checks = {
            "direct get": found.allow_direct,
            "a TTL per message (NATS server 2.11)": found.allow_msg_ttl,
            "markers for expired keys": found.subject_delete_marker_ttl > 0,
            "a history of 1": found.max_msgs_per_subject == 1,
            f"republishing to {self._events}>": events == f"{self._events}>",
        }
        wrong = [text for text, good in checks.items() if not good]
        if wrong:
            raise ConfigError(
                "bucket", f"NATS bucket {self._bucket!r} lacks {', '.join(wrong)}; delete it or name another"
            )
        self.replicated = found.num_replicas > 1
        if found.num_replicas < wanted:
            _log.warning("nats: the bucket has fewer copies than it should", copies=found.num_replicas, wanted=wanted)
        return made

    # -- connection

    def _require(self) -> _Link:
        if self._closed:
            raise BrokerUnavailable("this broker has been closed")
        if self._link is None:
            raise BrokerUnavailable(
                f"the connection to NATS at {self._target.display} is down; it is made again when the server is back"
            )
        return self._link

    async def _open(self) -> _Link:
        link = _Link(
            self._target,
            self._name,
            probe=self._probe,
            on_slow=self._all_stale,
            on_garbage=self.count_garbage,
            on_silence=self._interrupted,
        )
        await link.open(self._connect_timeout)
        try:
            async with asyncio.timeout(self._connect_timeout):
                await self.make_bucket(link)
        except TimeoutError:
            await link.abandon()
            raise BrokerUnavailable(
                f"NATS at {self._target.display}: JetStream does not answer; look at that server's log"
            ) from None
        except BaseException:
            await link.abandon()
            raise
        return link

    def _use(self, link: _Link) -> None:
        self._link = link
        self._up.set()
        self._set_connected(True)

    def _all_stale(self) -> None:
        for watch in self._watches:
            watch.stale()

    async def _supervise(self) -> None:
        while True:
            link = self._link
            assert link is not None
            reason = await self._hold(link)
            self._link = None
            self._up.clear()
            self._all_stale()
            self._set_connected(False)
            _log.warning("nats: connection lost", server=self._target.display, reason=reason)
            await link.abandon()
            link = await self._reopen()
            self._use(link)
            _log.info("nats: connected again", server=self._target.display)
            for attached in [*self._services, *self._subscriptions]:
                with suppress(BrokerUnavailable):
                    await attached.attach(link)

    async def _hold(self, link: _Link) -> str:
        """Wait until the connection is lost, or is silent and does not answer; why."""
        loop = asyncio.get_running_loop()
        while not link.lost.done():
            wait = link.heard + self._probe - loop.time()
            if wait > 0:
                await asyncio.wait({link.lost}, timeout=wait)
                continue
            heard = link.heard
            # Whatever has come meanwhile is an answer: this one may be behind a great many messages.
            if (
                not await link.answers(self.probe_subject, self.timeout)
                and link.heard == heard
                and not link.lost.done()
            ):
                return "the server does not answer"
        return link.lost.result()

    async def _reopen(self) -> _Link:
        pause = 0.05
        told = ""
        while True:
            # The first try comes quickly: most losses are a restart. Full jitter spreads a fleet's.
            await asyncio.sleep(self.jitter(0.0, pause))
            pause = min(pause * 2, RECONNECT_SECONDS)
            try:
                self._target = await self._find_again()
                return await self._open()
            except (BrokerUnavailable, ConfigError) as error:
                text = str(error)
                if text == told:
                    continue
                told = text
                # Time mends what can't be reached; refused credentials or a spoilt file are somebody's to mend.
                if isinstance(error, ConfigError):
                    _log.warning("nats: the server can't be used, trying again", error=text)
                else:
                    _log.info("nats: still down", error=text)

    async def _find_again(self) -> NatsTarget:
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await self._refresh(self._target)
        except TimeoutError:
            source, seconds = self._target.source, self._connect_timeout
            raise BrokerUnavailable(f"{source} can't be read within {seconds:g} s") from None

    # -- lease table

    async def _put(self, link: _Link, key: str, value: bytes, ttl: int, revision: int) -> int:
        expected = revision
        for _ in range(4):
            headers = {"Nats-Expected-Last-Subject-Sequence": str(expected), "Nats-TTL": str(ttl)}
            ack = await self._write(link, key, value, headers)
            if ack is not None and ack.error is None:
                return ack.seq
            standing, lease = (0, None) if ack is None else await self._standing(link, key)
            if lease is not None or revision != 0:
                raise Conflict(key, standing if lease is not None else 0, lease)
            # A marker of an expired or deleted lease stands there (or nothing, by now): as good as free.
            expected = standing
        raise BrokerUnavailable(f"lease {key} changes faster than it can be written")

    async def _delete(self, link: _Link, key: str, revision: int) -> None:
        headers = {
            "Nats-Expected-Last-Subject-Sequence": str(revision),
            "KV-Operation": "PURGE",
            "Nats-Rollup": "sub",
            "Nats-TTL": str(MARKER_SECONDS),
        }
        ack = await self._write(link, key, b"", headers)
        if ack is None or ack.error is None:
            return
        standing, value = await self._standing(link, key)
        if value is not None:
            raise Conflict(key, standing, value)

    async def _write(self, link: _Link, key: str, value: bytes, headers: dict[str, str]) -> _PubAck | None:
        """Publish into the bucket. The answer has an error only where the revision was wrong; None where the bucket
        was not there: then it has been made."""
        message = await link.request(f"{self._prefix}{key}", value, headers=headers, timeout=self.timeout)
        if (message.headers or {}).get("Status") == "503":
            if not await self.make_bucket(link):
                raise BrokerUnavailable(f"lease {key}: the bucket has no leader at the moment, or was made just now")
            return None
        ack = _decode(message.data, _PubAck)
        if ack.error is not None and ack.error.err_code not in _WRONG_REVISION:
            raise BrokerUnavailable(f"lease {key}: {ack.error.description}")
        return ack

    async def _standing(self, link: _Link, key: str) -> tuple[int, bytes | None]:
        """What stands on a key, asked of the stream's leader: (0, None) for nothing, a value of None for a marker."""
        query = msgspec.json.encode({"last_by_subj": f"{self._prefix}{key}"})
        reply = await self._api(link, f"$JS.API.STREAM.MSG.GET.{self._stream}", query, _GetReply)
        if reply.error is not None and reply.error.code != 404:
            raise BrokerUnavailable(f"lease {key}: {reply.error.description}")
        message = reply.message
        if message is None:
            return 0, None
        headers = base64.b64decode(message.hdrs)
        if b"Nats-Marker-Reason:" in headers or b"KV-Operation:" in headers:
            return message.seq, None
        return message.seq, base64.b64decode(message.data)

    async def _api(self, link: _Link, subject: str, data: bytes, kind: type[_T]) -> _T:
        message = await link.request(subject, data, timeout=self.timeout)
        if (message.headers or {}).get("Status") == "503":
            raise ConfigError("nats", f"JetStream is not enabled on {self._target.display}; start nats-server with -js")
        return _decode(message.data, kind)

    @asynccontextmanager
    async def _operation(self, key: str) -> AsyncGenerator[_Link]:
        """The connection for one operation on a lease, bounded in time."""
        link = self._require()
        try:
            async with asyncio.timeout(self.timeout):
                yield link
        except TimeoutError:
            raise BrokerUnavailable(f"lease {key}: NATS does not answer within {self.timeout:g} s") from None


def _settle(future: asyncio.Future[Msg | KVStreamError], outcome: Msg | KVStreamError) -> None:
    if not future.done():
        future.set_result(outcome)


def _decode(data: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokerUnavailable(f"NATS gave an answer that is not JetStream's: {error}") from None


def _event(prefix: str, message: Msg) -> LeaseEvent | None:
    """The change that a republished or stored message stands for; None for anything else that comes that way."""
    headers = message.headers or {}
    subject, sequence = headers.get("Nats-Subject", ""), headers.get("Nats-Sequence", "")
    if not subject.startswith(prefix) or not _SEQUENCE.fullmatch(sequence):
        return None
    key, revision = subject[len(prefix) :], int(sequence)
    try:
        check_lease(key, message.data, 1.0)
    except ConfigError:
        return None
    reason: Reason = "put"
    if "Nats-Marker-Reason" in headers:
        reason = "expired"
    elif "KV-Operation" in headers:
        reason = "deleted"
    return LeaseEvent(key, message.data if reason == "put" else None, revision, reason)


def _tls_context(target: NatsTarget) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=target.ca or None)
    if target.cert:
        context.load_cert_chain(target.cert, target.key)
    return context
