"""The broker contract in memory: a hub (`MemoryBrokerServer`) that several brokers of one event loop share.

Leases expire by the loop's own timers, so it works under a virtual-time loop. The hub can be stopped and started,
with or without its leases, to stand for outages and restarts. It must not do anything that NATS would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

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
from kvstream.errors import BrokerUnavailable, PeerLost

__all__ = ["MemoryBroker", "MemoryBrokerServer"]


class _Held:
    """A lease in the hub. `expires` is in loop time; `timer` is None while the hub is stopped."""

    __slots__ = ("expires", "revision", "timer", "value")

    def __init__(self, revision: int, value: bytes, expires: float) -> None:
        self.revision = revision
        self.value = value
        self.expires = expires
        self.timer: asyncio.TimerHandle | None = None


class MemoryBrokerServer:
    """The lease table and the subjects that `MemoryBroker`s share."""

    def __init__(self) -> None:
        self._leases: dict[str, _Held] = {}
        self._revision = 0
        self._brokers: list[MemoryBroker] = []
        self.running = True

    def connect(self) -> MemoryBroker:
        """A new broker on this hub. Raises BrokerUnavailable while the hub is stopped."""
        return MemoryBroker(self)

    def stop(self) -> None:
        """Go down: every broker loses its connection, open requests fail, leases stop expiring."""
        self.running = False
        for held in self._leases.values():
            if held.timer is not None:
                held.timer.cancel()
                held.timer = None
        for broker in list(self._brokers):
            broker.connection_lost()

    def start(self, *, wipe: bool = False) -> None:
        """Come back, with the leases that have not expired meanwhile, or `wipe` them and begin at revision 1 again."""
        if self.running:
            return
        self.running = True
        if wipe:
            self._leases.clear()
            self._revision = 0
        now = asyncio.get_running_loop().time()
        for key, held in list(self._leases.items()):
            if held.expires <= now:
                del self._leases[key]
            else:
                self._arm(key, held)
        for broker in list(self._brokers):
            broker.connection_made()

    def attach(self, broker: MemoryBroker) -> None:
        """For MemoryBroker."""
        if not self.running:
            raise BrokerUnavailable("the in-memory broker is stopped")
        self._brokers.append(broker)

    def detach(self, broker: MemoryBroker) -> None:
        """For MemoryBroker."""
        if broker in self._brokers:
            self._brokers.remove(broker)

    def snapshot(self) -> dict[str, Lease]:
        """The leases that stand."""
        return {key: Lease(held.revision, held.value) for key, held in self._leases.items()}

    def put(self, key: str, value: bytes, ttl: float, revision: int) -> int:
        """Compare and set; for MemoryBroker."""
        held = self._check(key, revision)
        if held is not None and held.timer is not None:
            held.timer.cancel()
        self._revision += 1
        fresh = _Held(self._revision, value, asyncio.get_running_loop().time() + ttl)
        self._leases[key] = fresh
        self._arm(key, fresh)
        self._tell(key, value, "put")
        return self._revision

    def delete(self, key: str, revision: int) -> None:
        """Compare and delete; for MemoryBroker."""
        if key in self._leases:
            self._check(key, revision)
            self._remove(key, "deleted")

    def find(self, subject: str) -> list[_MemoryService]:
        """Who serves `subject`."""
        return [service for broker in self._brokers for service in broker.services if matches(service.subject, subject)]

    def publish(self, message: Message) -> None:
        """Deliver a message; for MemoryBroker."""
        for broker in self._brokers:
            for pattern, messages in broker.subscriptions:
                if matches(pattern, message.subject):
                    messages.put(message)

    def _check(self, key: str, revision: int) -> _Held | None:
        held = self._leases.get(key)
        if (held.revision if held else 0) != revision:
            raise Conflict(key, held.revision if held else 0, held.value if held else None)
        return held

    def _arm(self, key: str, held: _Held) -> None:
        held.timer = asyncio.get_running_loop().call_at(held.expires, self._remove, key, "expired")

    def _remove(self, key: str, reason: Reason) -> None:
        held = self._leases.pop(key)
        if held.timer is not None:
            held.timer.cancel()
        self._revision += 1
        self._tell(key, None, reason)

    def _tell(self, key: str, value: bytes | None, reason: Reason) -> None:
        event = LeaseEvent(key, value, self._revision, reason)
        for broker in self._brokers:
            for view in broker.views:
                view.apply(event)


class _MemoryService(Service):
    def __init__(self, broker: MemoryBroker, subject: str, handler: Handler) -> None:
        self.subject = subject
        self.responder = Responder(handler)
        self._broker = broker

    async def aclose(self) -> None:
        if self in self._broker.services:
            self._broker.services.remove(self)
        await self.responder.aclose()


class MemoryBroker(Broker):
    """One client of a `MemoryBrokerServer`. Closing it without deleting its leases is how a process dies here."""

    def __init__(self, server: MemoryBrokerServer) -> None:
        super().__init__()
        self._server = server
        self._open: dict[asyncio.Future[Reply], None] = {}
        self._closed = False
        self.views: list[LeaseView] = []
        self.services: list[_MemoryService] = []
        self.subscriptions: list[tuple[str, Messages]] = []
        server.attach(self)
        self._set_connected(True)

    def connection_lost(self) -> None:
        """For MemoryBrokerServer."""
        for view in self.views:
            view.begin()
        for future in self._open:
            _settle(future, Reply(error=BrokerUnavailable("the in-memory broker went down")))
        self._set_connected(False)

    def connection_made(self) -> None:
        """For MemoryBrokerServer."""
        for view in self.views:
            view.finish(self._server.snapshot())
        self._set_connected(True)

    async def put(self, key: str, value: bytes, *, ttl: float, revision: int) -> int:
        check_lease(key, value, ttl)
        await self._round_trip()
        return self._server.put(key, value, ttl, revision)

    async def delete(self, key: str, *, revision: int) -> None:
        check_lease(key, b"", 1.0)
        await self._round_trip()
        self._server.delete(key, revision)

    @asynccontextmanager
    async def watch(self) -> AsyncGenerator[AsyncIterator[LeaseEvent | Synced]]:
        self._check_open()
        view = LeaseView()
        self.views.append(view)
        if self.connected:
            view.finish(self._server.snapshot())
        try:
            yield view
        finally:
            self.views.remove(view)
            view.close()

    async def request(self, subject: str, data: bytes, *, timeout: float) -> bytes:
        await self._round_trip()
        services = self._server.find(subject)
        if not services:
            raise NobodyServes(f"nobody serves {subject}")
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        async def answer(reply: Reply) -> None:
            _settle(future, reply)

        self._open[future] = None
        services[0].responder.start(subject, data, answer)
        try:
            async with asyncio.timeout(timeout):
                reply = await future
        except TimeoutError:
            raise PeerLost(f"{subject}: no answer within {timeout:g} s") from None
        finally:
            del self._open[future]
        if reply.error is not None:
            raise reply.error
        return reply.data

    async def serve(self, subject: str, handler: Handler) -> Service:
        self._check_open()
        service = _MemoryService(self, subject, handler)
        self.services.append(service)
        return service

    def publish(self, subject: str, data: bytes) -> None:
        check_publish(subject, data)
        if self.connected:
            self._server.publish(Message(subject, data))
        else:
            self.unpublished += 1

    @asynccontextmanager
    async def subscribe(self, subject: str, *, limit: int = 1024) -> AsyncGenerator[Messages]:
        self._check_open()
        check_pattern(subject)
        entry = subject, Messages(limit)
        self.subscriptions.append(entry)
        try:
            yield entry[1]
        finally:
            self.subscriptions.remove(entry)
            entry[1].close()

    async def gather(self, subject: str, data: bytes, *, timeout: float, expected: int | None = None) -> list[bytes]:
        await self._round_trip()
        services = self._server.find(subject)
        missing = MAX_REPLIES if expected is None else min(expected, MAX_REPLIES)
        answers: list[bytes] = []
        ended: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()

        async def answer(reply: Reply) -> None:
            nonlocal missing
            if ended.done():
                return
            missing -= 1
            if reply.error is None:
                answers.append(reply.data)
            if not missing:
                _settle(ended, Reply())

        if not services or not missing:
            return answers
        self._open[ended] = None
        for service in services:
            service.responder.start(subject, data, answer)
        try:
            async with asyncio.timeout(timeout):
                lost = (await ended).error
        except TimeoutError:
            return answers
        finally:
            del self._open[ended]
            ended.cancel()
        if lost is not None:
            raise lost
        return answers

    async def aclose(self) -> None:
        self._closed = True
        self._server.detach(self)
        self.connection_lost()
        for view in self.views:
            view.close()
        for _, messages in self.subscriptions:
            messages.close()
        for service in list(self.services):
            await service.aclose()

    def _check_open(self) -> None:
        if self._closed:
            raise BrokerUnavailable("this broker has been closed")

    async def _round_trip(self) -> None:
        # One turn of the loop, as a real broker never answers within the call.
        self._check_open()
        await asyncio.sleep(0)
        if not self.connected:
            raise BrokerUnavailable("the in-memory broker is stopped")


def _settle(future: asyncio.Future[Reply], reply: Reply) -> None:
    if not future.done():
        future.set_result(reply)
