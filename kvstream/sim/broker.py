"""The broker contract in simulation: a server in a process of its own, and clients that reach it over the network.

Owns the lease table, the subjects and the sessions. Everything between client and server takes time and may be cut off:
answers get lost with their session although what was asked has been done, events come late and more than once, a server
forgets its leases. It must not do anything that NATS would not: events of one session keep their order, and of the
operations on one key one comes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import TracebackType

from kvstream.discovery.broker import (
    MAX_REPLIES,
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
    matches,
)
from kvstream.errors import BrokerUnavailable, KVStreamError, PeerLost, Refused, from_code
from kvstream.sim.loop import Process
from kvstream.sim.network import Channel, Network, Node
from kvstream.sim.rng import derive

__all__ = ["SimBroker", "SimBrokerServer"]

_ANSWER_SECONDS = 2.0
"""How long a client waits for the answer to an operation."""
_PING_SECONDS = 1.0
"""A client asks for a sign of life this often, and gives its session up when the one before was not answered."""
_RETRY_SECONDS = 0.25
"""About this long after a loss, or a failed attempt, a client connects again."""
_FEW = 64
_ROUND_SECONDS = 0.05
"""A server with more than so many sessions is kept busy by telling them all of a change: it gathers changes for so long
and writes to each once."""


class _Held:
    """A lease in the table; `expires` in virtual time, `timer` None while the server is down."""

    __slots__ = ("expires", "revision", "timer", "value")

    def __init__(self, revision: int, value: bytes, expires: float) -> None:
        self.revision = revision
        self.value = value
        self.expires = expires
        self.timer: asyncio.TimerHandle | None = None


class _Session:
    """One connection of a client, with a channel each way. `subjects`: what it serves, by number; `patterns`: what it
    has subscribed to."""

    __slots__ = ("client", "down", "patterns", "subjects", "up")

    def __init__(self, client: SimBroker, up: Channel, down: Channel) -> None:
        self.client = client
        self.up = up
        self.down = down
        self.subjects: dict[int, str] = {}
        self.patterns: dict[int, str] = {}


class SimBrokerServer:
    """The server: `stop` and `start` for outages, `lateness` (seconds, at most) and `duplicates` (share) of events."""

    def __init__(self, network: Network, seed: int, *, name: str = "broker") -> None:
        self.network = network
        self.seed = seed
        self.process: Process = network.world.process(name)
        self.node = network.node(self.process, name)
        self.running = True
        self.lateness = 0.0
        self.duplicates = 0.0
        self._rng = derive(seed, "broker server", name)
        self._leases: dict[str, _Held] = {}
        self._snapshot: dict[str, Lease] | None = None
        """Made when it is asked for, and the same until the table changes."""
        self._revision = 0
        self._sessions: dict[_Session, None] = {}
        self._served: dict[str, dict[tuple[_Session, int], None]] = {}
        self._wildcards: dict[str, dict[str, dict[tuple[_Session, int], None]]] = {}
        """Who serves what, by subject, or by pattern: sessions and their numbers for it, in order of arrival."""
        self._round: list[LeaseEvent] = []
        self.told = 0
        """Messages with changes of leases that were sent."""

    # -- faults

    def stop(self) -> None:
        """Go down: sessions end, leases stop expiring."""
        self.running = False
        for held in self._leases.values():
            if held.timer is not None:
                held.timer.cancel()
                held.timer = None
        sessions, self._sessions = self._sessions, {}
        self._served.clear()
        self._wildcards.clear()
        self._round.clear()
        for session in sessions:
            self._hang_up(session)

    def start(self, *, wipe: bool = False) -> None:
        """Come back with the leases that have not expired meanwhile, or without any and counting from 1 again."""
        if self.running:
            return
        self.running = True
        if wipe:
            self._leases.clear()
            self._revision = 0
        self._snapshot = None
        for key, held in list(self._leases.items()):
            if held.expires <= self.network.world.now:
                del self._leases[key]
            else:
                self._arm(key, held)

    def reset(self, node: Node) -> None:
        """Break the session of a client; both sides are told."""
        for session in self._of(node):
            self.close(session)
            self._hang_up(session)

    def kill(self, node: Node) -> None:
        """The process of a client is gone; its kernel says so, if it can."""
        self.network.after(0.005, partial(self.network.cross, node, self.node, partial(self._forget, node)))

    def snapshot(self) -> dict[str, Lease]:
        """The leases that stand; not to be changed."""
        if self._snapshot is None:
            self._snapshot = {key: Lease(held.revision, held.value) for key, held in self._leases.items()}
        return self._snapshot

    def _hang_up(self, session: _Session) -> None:
        session.up.cut()
        session.down.cut_short()
        session.down.put(partial(session.client.deliver, partial(session.client.session_lost, session)))

    def _of(self, node: Node) -> list[_Session]:
        return [session for session in self._sessions if session.client.node is node]

    def _forget(self, node: Node) -> None:
        for session in self._of(node):
            self.close(session)

    # -- what clients send; called by the network

    def receive(self, session: _Session, work: Callable[[_Session], None]) -> None:
        """Something arrived; done when this process gets to it."""
        self.process.call_soon(self._work, session, work)

    def _work(self, session: _Session, work: Callable[[_Session], None]) -> None:
        if self.running and session in self._sessions:
            work(session)

    def knock(self, session: _Session, subjects: dict[int, str]) -> None:
        """A client wants to connect."""
        if not self.running:
            session.down.put(partial(session.client.deliver, partial(session.client.session_lost, session)))
        else:
            self.process.call_soon(self._connected, session, subjects)

    def _connected(self, session: _Session, subjects: dict[int, str]) -> None:
        if not self.running:
            return
        self._forget(session.client.node)
        self._sessions[session] = None
        for number, subject in subjects.items():
            self._serve(session, number, subject)
        session.down.put(partial(session.client.deliver, partial(session.client.session_up, session, self.snapshot())))

    def close(self, session: _Session) -> None:
        self._sessions.pop(session, None)
        for number in list(session.subjects):
            self._unserve(session, number)

    def _serve(self, session: _Session, number: int, subject: str) -> None:
        session.subjects[number] = subject
        self._table_of(subject).setdefault(subject, {})[session, number] = None

    def _unserve(self, session: _Session, number: int) -> None:
        subject = session.subjects.pop(number, None)
        if subject is None:
            return
        table = self._table_of(subject)
        serving = table.get(subject, {})
        serving.pop((session, number), None)
        if not serving:
            table.pop(subject, None)

    def _table_of(self, subject: str) -> dict[str, dict[tuple[_Session, int], None]]:
        """Who serves what; subjects with wildcards by the words before the first one, so that none is searched for."""
        words = subject.split(".")
        plain = next((i for i, word in enumerate(words) if word in ("*", ">")), None)
        return self._served if plain is None else self._wildcards.setdefault(".".join(words[:plain]), {})

    def _serving(self, subject: str) -> list[tuple[_Session, int]]:
        """All who serve this subject."""
        found = list(self._served.get(subject, ()))
        words = subject.split(".")
        for end in range(len(words)):
            for pattern, them in self._wildcards.get(".".join(words[:end]), {}).items():
                if matches(pattern, subject):
                    found += them
        return found

    def put(self, key: str, value: bytes, ttl: float, revision: int, operation: int, session: _Session) -> None:
        held = self._leases.get(key)
        if (held.revision if held else 0) != revision:
            self._answer(session, operation, _conflict(key, held))
            return
        if held is not None and held.timer is not None:
            held.timer.cancel()
        self._revision += 1
        fresh = _Held(self._revision, value, self.network.world.now + ttl)
        self._leases[key] = fresh
        self._snapshot = None
        self._arm(key, fresh)
        # A renewal changes nothing for those who watch.
        if held is None or held.value != value:
            self._tell(key, value, "put")
        self._answer(session, operation, self._revision)

    def delete(self, key: str, revision: int, operation: int, session: _Session) -> None:
        held = self._leases.get(key)
        if held is not None and held.revision != revision:
            self._answer(session, operation, _conflict(key, held))
            return
        if held is not None:
            self._remove(key, "deleted")
        self._answer(session, operation, 0)

    def look(self, view: LeaseView, operation: int, session: _Session) -> None:
        snapshot = self.snapshot()
        session.down.put(partial(session.client.deliver, partial(session.client.seen, session, view, snapshot)))
        self._answer(session, operation, 0)

    def subscribe(self, number: int, subject: str, operation: int, session: _Session) -> None:
        self._serve(session, number, subject)
        self._answer(session, operation, 0)

    def unsubscribe(self, number: int, operation: int, session: _Session) -> None:
        self._unserve(session, number)
        self._answer(session, operation, 0)

    def listen(self, number: int, pattern: str, operation: int, session: _Session) -> None:
        session.patterns[number] = pattern
        self._answer(session, operation, 0)

    def unlisten(self, number: int, session: _Session) -> None:
        session.patterns.pop(number, None)

    def publish(self, message: Message, _: _Session) -> None:
        for session in self._sessions:
            for number, pattern in session.patterns.items():
                if matches(pattern, message.subject):
                    told = partial(session.client.published, session, number, message)
                    session.down.put(partial(session.client.deliver, told))

    def ask(self, subject: str, data: bytes, everybody: bool, operation: int, session: _Session) -> None:
        found = self._serving(subject)
        if not found:
            self._answer(session, operation, NobodyServes(f"nobody serves {subject}"))
        for serving, number in found if everybody else found[:1]:
            client = serving.client
            asked = partial(client.asked, serving, number, subject, data, session, operation)
            serving.down.put(partial(client.deliver, asked))

    def replied(self, asker: _Session, operation: int, reply: Reply, _: _Session) -> None:
        self._answer(asker, operation, reply)

    def ping(self, operation: int, session: _Session) -> None:
        self._answer(session, operation, 0)

    def _answer(self, session: _Session, operation: int, outcome: int | Reply | KVStreamError) -> None:
        session.down.put(partial(session.client.deliver, partial(session.client.answered, session, operation, outcome)))

    # -- the table

    def _arm(self, key: str, held: _Held) -> None:
        held.timer = self.process.call_at(held.expires, self._remove, key, "expired")

    def _remove(self, key: str, reason: Reason) -> None:
        held = self._leases.pop(key)
        self._snapshot = None
        if held.timer is not None:
            held.timer.cancel()
        self._revision += 1
        self._tell(key, None, reason)

    def _tell(self, key: str, value: bytes | None, reason: Reason) -> None:
        event = LeaseEvent(key, value, self._revision, reason)
        self.network.observe("lease", key, reason, self._revision)
        if len(self._sessions) <= _FEW:
            self._write((event,))
            return
        self._round.append(event)
        if len(self._round) == 1:
            self.process.call_later(_ROUND_SECONDS, self._end_round)

    def _end_round(self) -> None:
        events, self._round = tuple(self._round), []
        if events:
            self._write(events)

    def _write(self, events: tuple[LeaseEvent, ...]) -> None:
        """Tell every session of changes, in order."""
        for session in self._sessions:
            again = 1 + (self._rng.random() < self.duplicates)
            late = self._rng.uniform(0, self.lateness) if self.lateness else 0.0
            told = partial(session.client.deliver, partial(session.client.changed, session, events))
            for _ in range(again):
                self.told += 1
                session.down.put(told, extra=late)


def _conflict(key: str, held: _Held | None) -> Conflict:
    return Conflict(key, held.revision if held else 0, held.value if held else None)


class _Watch:
    """The context of `watch`."""

    def __init__(self, broker: SimBroker) -> None:
        self._broker = broker
        self._view = LeaseView()

    async def __aenter__(self) -> AsyncIterator[LeaseEvent | Synced]:
        self._broker.follow(self._view)
        return self._view

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.unfollow(self._view)


class _Subscription:
    """The context of `subscribe`."""

    def __init__(self, broker: SimBroker, pattern: str, messages: Messages) -> None:
        self.pattern = pattern
        self.messages = messages
        self._broker = broker

    async def __aenter__(self) -> Messages:
        await self._broker.listen(self)
        return self.messages

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._broker.unlisten(self)


class _Gathering:
    """The answers to one `gather`. `missing`: how many more are wanted."""

    __slots__ = ("answers", "missing")

    def __init__(self, wanted: int) -> None:
        self.answers: list[bytes] = []
        self.missing = wanted

    def take(self, outcome: int | Reply | KVStreamError) -> bool:
        """Another answer; whether it was the last one."""
        if isinstance(outcome, Reply):
            self.missing -= 1
            if outcome.error is None:
                self.answers.append(outcome.data)
        return not self.missing or isinstance(outcome, KVStreamError)


class _SimService(Service):
    def __init__(self, broker: SimBroker, number: int, handler: Handler) -> None:
        self.number = number
        self.responder = Responder(handler)
        self._broker = broker

    async def aclose(self) -> None:
        await self._broker.unserve(self.number)
        await self.responder.aclose()


class SimBroker(Broker):
    """A client in a simulated process. Made by `connect`."""

    def __init__(self, server: SimBrokerServer, node: Node) -> None:
        super().__init__()
        self.node = node
        self._server = server
        self._network = server.network
        self._rng = derive(server.seed, "broker client", node.name)
        self._session: _Session | None = None
        self._count = 0
        self._open: dict[int, asyncio.Future[int | Reply]] = {}
        self._views: dict[LeaseView, None] = {}
        self._services: dict[int, tuple[str, _SimService]] = {}
        self._subscriptions: dict[int, _Subscription] = {}
        self._gathering: dict[int, _Gathering] = {}
        self._pinged: asyncio.Future[int | Reply] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    @classmethod
    async def connect(cls, server: SimBrokerServer, node: Node, *, timeout: float = _ANSWER_SECONDS) -> SimBroker:
        """A connected client in this process. Raises BrokerUnavailable."""
        broker = cls(server, node)
        broker._dial()
        try:
            async with asyncio.timeout(timeout):
                await broker.wait_connected()
        except TimeoutError:
            await broker.aclose()
            raise BrokerUnavailable(f"no answer from the simulated broker within {timeout:g} s") from None
        except asyncio.CancelledError:
            await broker.aclose()
            raise
        return broker

    # -- the session

    def deliver(self, work: Callable[[], None]) -> None:
        """For the network: something arrived for this process."""
        process = self.node.process
        if process.alive:
            process.call_soon(work)

    def _dial(self) -> None:
        if self._closed:
            return
        up = Channel(self._network, self.node, self._server.node, self._rng)
        down = Channel(self._network, self._server.node, self.node, self._rng)
        session = self._session = _Session(self, up, down)
        subjects = {number: subject for number, (subject, _) in self._services.items()}
        up.put(partial(self._server.knock, session, subjects))
        self._timer = self.node.process.call_later(_ANSWER_SECONDS, self.session_lost, session)

    def session_up(self, session: _Session, snapshot: dict[str, Lease]) -> None:
        """The server has taken the session."""
        if session is not self._session or self._closed:
            return
        for view in self._views:
            view.finish(snapshot)
        # What was served, or not any more, since the session was asked for.
        subjects = {number: subject for number, (subject, _) in self._services.items()}
        for number, subject in subjects.items():
            self._send(partial(self._server.subscribe, number, subject, 0))
        for number, subscription in self._subscriptions.items():
            self._send(partial(self._server.listen, number, subscription.pattern, 0))
        self._rearm(_PING_SECONDS * self._rng.uniform(0.8, 1.2), self._ping)
        self._set_connected(True)

    def session_lost(self, session: _Session) -> None:
        """The session has ended, or did not come about."""
        if session is not self._session or self._closed:
            return
        session.up.cut()
        self._session = None
        self._pinged = None
        for view in self._views:
            view.begin()
        for future in list(self._open.values()):
            _settle(future, BrokerUnavailable("the connection to the simulated broker was lost"))
        self._rearm(_RETRY_SECONDS * self._rng.uniform(0.4, 1.6), self._dial)
        self._set_connected(False)

    def _ping(self) -> None:
        session = self._session
        if session is None:
            return
        if self._pinged is not None and not self._pinged.done():
            self._pinged.cancel()
            self.session_lost(session)
            return
        number, self._pinged = self._operation()
        self._send(partial(self._server.ping, number))
        self._rearm(_PING_SECONDS, self._ping)

    def _rearm(self, delay: float, call: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.node.process.call_later(delay, call)

    def _send(self, work: Callable[[_Session], None]) -> None:
        session = self._session
        if session is not None:
            session.up.put(partial(self._server.receive, session, work))

    def _operation(self) -> tuple[int, asyncio.Future[int | Reply]]:
        self._count += 1
        number = self._count
        future: asyncio.Future[int | Reply] = self.node.process.create_future()
        self._open[number] = future
        future.add_done_callback(lambda done: self._over(number, done))
        return number, future

    def _over(self, number: int, future: asyncio.Future[int | Reply]) -> None:
        self._open.pop(number, None)
        if not future.cancelled():
            future.exception()  # a ping's is of no interest

    async def _do(self, work: Callable[[int, _Session], None], timeout: float = _ANSWER_SECONDS) -> int | Reply:
        """Have the server do something and wait for its answer. Raises BrokerUnavailable, and what it answers."""
        self._check_open()
        if not self.connected:
            raise BrokerUnavailable("the simulated broker can't be reached")
        number, future = self._operation()
        self._send(partial(work, number))
        try:
            async with asyncio.timeout(timeout):
                return await future
        except TimeoutError:
            raise BrokerUnavailable(f"no answer from the simulated broker within {timeout:g} s") from None

    def answered(self, session: _Session, operation: int, outcome: int | Reply | KVStreamError) -> None:
        """The server's answer to an operation."""
        future, gathering = self._open.get(operation), self._gathering.get(operation)
        if session is not self._session or future is None:
            return
        if gathering is None:
            _settle(future, outcome)
        elif gathering.take(outcome):
            _settle(future, 0)

    def changed(self, session: _Session, events: tuple[LeaseEvent, ...]) -> None:
        """Leases changed."""
        if session is self._session:
            for view in self._views:
                for event in events:
                    view.apply(event)

    def seen(self, session: _Session, view: LeaseView, snapshot: dict[str, Lease]) -> None:
        """The snapshot that a new watch asked for."""
        if session is self._session and view in self._views:
            view.finish(snapshot)

    def asked(self, session: _Session, number: int, subject: str, data: bytes, asker: _Session, operation: int) -> None:
        """A request for something that we serve."""
        if session is not self._session or number not in self._services:
            return

        async def answer(reply: Reply) -> None:
            if session is self._session:
                copied = Reply(reply.data, _copied(reply.error))
                self._send(partial(self._server.replied, asker, operation, copied))

        self._services[number][1].responder.start(subject, data, answer)

    # -- the contract

    async def put(self, key: str, value: bytes, *, ttl: float, revision: int) -> int:
        check_lease(key, value, ttl)
        done = await self._do(partial(self._server.put, key, value, ttl, revision))
        assert isinstance(done, int)
        return done

    async def delete(self, key: str, *, revision: int) -> None:
        check_lease(key, b"", 1.0)
        await self._do(partial(self._server.delete, key, revision))

    def watch(self) -> _Watch:
        return _Watch(self)

    def follow(self, view: LeaseView) -> None:
        """For a watch that begins."""
        self._check_open()
        self._views[view] = None
        if self.connected:
            number, _ = self._operation()
            self._send(partial(self._server.look, view, number))

    def unfollow(self, view: LeaseView) -> None:
        """For a watch that ends."""
        self._views.pop(view, None)
        view.close()

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        self._check_open()
        if not self.connected:
            raise BrokerUnavailable("the simulated broker can't be reached")
        number, future = self._operation()
        self._send(partial(self._server.ask, subject, data, False, number))
        try:
            async with asyncio.timeout(timeout):
                reply = await future
        except TimeoutError:
            raise PeerLost(f"{subject}: no answer within {timeout:g} s") from None
        assert isinstance(reply, Reply)
        if reply.error is not None:
            raise reply.error
        return reply.data

    async def serve(self, subject: str, handler: Handler) -> Service:
        self._check_open()
        self._count += 1
        service = _SimService(self, self._count, handler)
        self._services[service.number] = subject, service
        try:
            await self._do(partial(self._server.subscribe, service.number, subject))
        except BrokerUnavailable:
            pass  # it is served from the next connection on
        except asyncio.CancelledError:
            self._services.pop(service.number, None)
            raise
        return service

    async def unserve(self, number: int) -> None:
        """For a service that ends."""
        if self._services.pop(number, None) is None:
            return
        try:
            await self._do(partial(self._server.unsubscribe, number))
        except BrokerUnavailable:
            pass  # the next session begins without it

    def publish(self, subject: str, data: bytes) -> None:
        check_publish(subject, data)
        if self.connected:
            self._send(partial(self._server.publish, Message(subject, data)))
        else:
            self.unpublished += 1

    def published(self, session: _Session, number: int, message: Message) -> None:
        """A message for one of our subscriptions."""
        subscription = self._subscriptions.get(number)
        if session is self._session and subscription is not None:
            subscription.messages.put(message)

    def subscribe(self, subject: str, *, limit: int = 1024) -> _Subscription:
        check_pattern(subject)
        return _Subscription(self, subject, Messages(limit))

    async def listen(self, subscription: _Subscription) -> None:
        """For a subscription that begins."""
        self._check_open()
        self._count += 1
        number = self._count
        self._subscriptions[number] = subscription
        try:
            await self._do(partial(self._server.listen, number, subscription.pattern))
        except BrokerUnavailable:
            pass  # it begins with the next connection
        except asyncio.CancelledError:
            self.unlisten(subscription)
            raise

    def unlisten(self, subscription: _Subscription) -> None:
        """For a subscription that ends."""
        for number in [number for number, one in self._subscriptions.items() if one is subscription]:
            del self._subscriptions[number]
            self._send(partial(self._server.unlisten, number))
        subscription.messages.close()

    async def gather(self, subject: str, data: bytes, *, timeout: float, expected: int | None = None) -> list[bytes]:
        self._check_open()
        if not self.connected:
            raise BrokerUnavailable("the simulated broker can't be reached")
        gathering = _Gathering(MAX_REPLIES if expected is None else min(expected, MAX_REPLIES))
        if not gathering.missing:
            return []
        number, future = self._operation()
        self._gathering[number] = gathering
        self._send(partial(self._server.ask, subject, data, True, number))
        try:
            async with asyncio.timeout(timeout):
                await future
        except TimeoutError:
            pass
        finally:
            del self._gathering[number]
        return gathering.answers

    async def aclose(self) -> None:
        if self._closed:
            return
        self._closed = True
        session, self._session = self._session, None
        if session is not None:
            session.up.put(partial(self._server.receive, session, self._server.close))
        if self._timer is not None:
            self._timer.cancel()
        for future in list(self._open.values()):
            _settle(future, BrokerUnavailable("this broker has been closed"))
        self._set_connected(False)
        for view in list(self._views):
            view.close()
        for subscription in self._subscriptions.values():
            subscription.messages.close()
        for _, service in list(self._services.values()):
            await service.responder.aclose()
        self._services.clear()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerUnavailable("this broker has been closed")


def _settle(future: asyncio.Future[int | Reply], outcome: int | Reply | KVStreamError) -> None:
    if future.done():
        return
    if isinstance(outcome, KVStreamError):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


def _copied(error: KVStreamError | None) -> KVStreamError | None:
    """An error as it crosses from one process to another: by its code and text."""
    if error is None:
        return None
    return from_code(error.code, str(error), retry_after=error.retry_after if isinstance(error, Refused) else None)
