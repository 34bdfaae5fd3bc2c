"""The broker contract as tests. A broker passes by subclassing `BrokerSuite` and giving a `cluster` fixture."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import pytest

from kvstream.discovery.broker import (
    MAX_MESSAGE,
    MAX_VALUE,
    Broker,
    Conflict,
    LeaseEvent,
    Message,
    Messages,
    NobodyServes,
    Synced,
)
from kvstream.errors import BrokerUnavailable, ConfigError, Fenced, KVStreamError, PeerLost, Refused
from tests.timing import in_time, timed


class Cluster(Protocol):
    """A broker's server under test. `stop` and `start` stand for a restart that loses the leases."""

    ttl: float
    """The shortest lease that makes sense in a test, seconds."""

    async def connect(self) -> Broker: ...
    async def stop(self) -> None: ...
    async def start(self) -> None: ...


async def next_of(events: AsyncIterator[LeaseEvent | Synced], timeout: float = 20.0) -> LeaseEvent | Synced:
    async with asyncio.timeout(timeout):
        return await anext(events)


async def until_synced(events: AsyncIterator[LeaseEvent | Synced]) -> list[LeaseEvent]:
    seen: list[LeaseEvent] = []
    while not isinstance(event := await next_of(events), Synced):
        seen.append(event)
    return seen


async def connected(broker: Broker, wanted: bool = True) -> None:
    """Wait for the broker to be (dis)connected."""
    async with asyncio.timeout(30):
        if wanted:
            await broker.wait_connected()
            return
        lost = asyncio.Event()
        remove = broker.on_connection(lambda up: None if up else lost.set())
        if broker.connected:
            await lost.wait()
        remove()


async def next_message(messages: Messages, timeout: float = 20.0) -> Message:
    async with asyncio.timeout(timeout):
        return await anext(messages)


async def said(answer: bytes) -> bytes:
    return answer


class BrokerSuite:
    # -- lease table

    async def test_put_is_compare_and_set(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            first = await a.put("w.x.0", b"one", ttl=60, revision=0)
            assert first > 0
            with pytest.raises(Conflict) as caught:
                await b.put("w.x.0", b"two", ttl=60, revision=0)
            assert (caught.value.revision, caught.value.value) == (first, b"one")
            second = await b.put("w.x.0", b"two", ttl=60, revision=first)
            assert second > first
            with pytest.raises(Conflict) as caught:
                await a.put("w.x.0", b"three", ttl=60, revision=first)
            assert (caught.value.revision, caught.value.value) == (second, b"two")

    async def test_put_on_a_revision_of_nothing_conflicts_with_nothing(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a:
            with pytest.raises(Conflict) as caught:
                await a.put("w.x.0", b"one", ttl=60, revision=7)
            assert (caught.value.revision, caught.value.value) == (0, None)

    async def test_delete_is_compare_and_set_and_frees_the_key(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a:
            await a.delete("w.x.0", revision=0)
            first = await a.put("w.x.0", b"one", ttl=60, revision=0)
            second = await a.put("w.x.0", b"two", ttl=60, revision=first)
            with pytest.raises(Conflict) as caught:
                await a.delete("w.x.0", revision=first)
            assert (caught.value.revision, caught.value.value) == (second, b"two")
            await a.delete("w.x.0", revision=second)
            await a.delete("w.x.0", revision=second)
            with pytest.raises(Conflict) as caught:
                await a.put("w.x.0", b"three", ttl=60, revision=second)
            assert (caught.value.revision, caught.value.value) == (0, None)
            assert await a.put("w.x.0", b"three", ttl=60, revision=0) > second

    @timed
    async def test_a_lease_expires_unless_renewed_and_frees_the_key(self, cluster: Cluster) -> None:
        loop = asyncio.get_running_loop()
        async with await cluster.connect() as a, a.watch() as events:
            await until_synced(events)
            revision = await a.put("w.x.0", b"one", ttl=cluster.ttl, revision=0)
            assert await next_of(events) == LeaseEvent("w.x.0", b"one", revision, "put")
            await asyncio.sleep(cluster.ttl * 0.6)
            renewed = loop.time()
            revision = await a.put("w.x.0", b"one", ttl=cluster.ttl, revision=revision)
            gone = await next_of(events)
            assert isinstance(gone, LeaseEvent)
            assert (gone.key, gone.value, gone.reason) == ("w.x.0", None, "expired")
            took = loop.time() - renewed
            assert took >= cluster.ttl - 0.05
            with pytest.raises(Conflict) as caught:
                await a.put("w.x.0", b"one", ttl=cluster.ttl, revision=revision)
            assert (caught.value.revision, caught.value.value) == (0, None)
            again = await a.put("w.x.0", b"one", ttl=cluster.ttl, revision=0)
            assert again > revision
            await a.delete("w.x.0", revision=again)
            in_time(took, cluster.ttl + 0.4, "the end of a lease")

    async def test_only_one_of_many_wins_a_key(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            results = await asyncio.gather(
                *((a if i % 2 else b).put("w.x.0", b"%d" % i, ttl=60, revision=0) for i in range(10)),
                return_exceptions=True,
            )
            assert sum(isinstance(result, int) for result in results) == 1
            assert sum(isinstance(result, Conflict) for result in results) == 9

    @pytest.mark.parametrize("key", ["", "a b", "a..b", ".a", "a.", "a.*", "a.>", "ä", "a\n"])
    async def test_keys_are_checked(self, cluster: Cluster, key: str) -> None:
        async with await cluster.connect() as a:
            with pytest.raises(ConfigError, match="key"):
                await a.put(key, b"", ttl=1, revision=0)
            with pytest.raises(ConfigError, match="key"):
                await a.delete(key, revision=0)

    async def test_values_and_times_are_bounded(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a:
            with pytest.raises(ConfigError, match="value"):
                await a.put("w.x.0", b"x" * (MAX_VALUE + 1), ttl=1, revision=0)
            with pytest.raises(ConfigError, match="ttl"):
                await a.put("w.x.0", b"x", ttl=0, revision=0)
            await a.put("w.x.0", bytes(range(256)) * (MAX_VALUE // 256), ttl=60, revision=0)

    # -- watch

    async def test_watch_starts_with_what_stands(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            for i in range(3):
                await a.put(f"w.x.{i}", b"%d" % i, ttl=60, revision=0)
            await a.delete("w.x.1", revision=(await self._revision(a, "w.x.1")))
            async with b.watch() as events:
                seen = await until_synced(events)
                assert {(event.key, event.value, event.reason) for event in seen} == {
                    ("w.x.0", b"0", "put"),
                    ("w.x.2", b"2", "put"),
                }

    async def _revision(self, broker: Broker, key: str) -> int:
        with pytest.raises(Conflict) as caught:
            await broker.put(key, b"", ttl=1, revision=0)
        return caught.value.revision

    async def test_watch_tells_changes_and_not_renewals(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b, b.watch() as events:
            await until_synced(events)
            first = await a.put("w.x.0", b"one", ttl=60, revision=0)
            assert await next_of(events) == LeaseEvent("w.x.0", b"one", first, "put")
            renewed = await a.put("w.x.0", b"one", ttl=60, revision=first)
            changed = await a.put("w.x.0", b"two", ttl=60, revision=renewed)
            assert await next_of(events) == LeaseEvent("w.x.0", b"two", changed, "put")
            await a.delete("w.x.0", revision=changed)
            gone = await next_of(events)
            assert isinstance(gone, LeaseEvent)
            assert (gone.key, gone.value, gone.reason) == ("w.x.0", None, "deleted")

    async def test_a_slow_watcher_is_told_the_latest_only(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, a.watch() as slow, a.watch() as quick:
            await until_synced(slow)
            await until_synced(quick)
            revision = 0
            for i in range(50):
                revision = await a.put("w.x.0", b"%d" % i, ttl=60, revision=revision)
            await a.put("w.end.0", b"", ttl=60, revision=0)
            while True:
                event = await next_of(quick)
                if isinstance(event, LeaseEvent) and event.key == "w.end.0":
                    break
            assert await next_of(slow) == LeaseEvent("w.x.0", b"49", revision, "put")

    async def test_a_cancelled_wait_loses_no_event(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, a.watch() as events:
            await until_synced(events)
            for i in range(5):
                waiting = asyncio.ensure_future(anext(events))
                await asyncio.sleep(0)
                waiting.cancel()
                await a.put(f"w.x.{i}", b"", ttl=60, revision=0)
                event = await next_of(events)
                assert isinstance(event, LeaseEvent)
                assert event.key == f"w.x.{i}"
                await asyncio.wait({waiting})

    async def test_close_ends_watches(self, cluster: Cluster) -> None:
        broker = await cluster.connect()
        async with broker.watch() as events:
            await until_synced(events)
            waiting = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            await broker.aclose()
            await asyncio.wait({waiting}, timeout=20)
            assert isinstance(waiting.exception(), StopAsyncIteration)
        await broker.aclose()
        with pytest.raises(BrokerUnavailable):
            await broker.put("w.x.0", b"", ttl=1, revision=0)
        with pytest.raises(BrokerUnavailable):
            await broker.request("a", b"", timeout=1)

    # -- requests

    async def test_request_and_reply(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:

            async def shout(subject: str, data: bytes) -> bytes:
                return subject.encode() + b" " + data.upper()

            async with await a.serve("kvstream.test.*", shout):
                assert await b.request("kvstream.test.x", b"hey", timeout=20) == b"kvstream.test.x HEY"
                assert await a.request("kvstream.test.y", b"", timeout=20) == b"kvstream.test.y "
                with pytest.raises(NobodyServes, match=r"kvstream\.other"):
                    await b.request("kvstream.other", b"", timeout=20)
            # At once, as soon as the service is closed: not a request that nobody answers.
            for _ in range(20):
                async with await a.serve("kvstream.test.*", shout):
                    await b.request("kvstream.test.x", b"", timeout=20)
                with pytest.raises(NobodyServes):
                    await b.request("kvstream.test.x", b"", timeout=20)

    async def test_requests_run_side_by_side(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            together = asyncio.Barrier(5)

            async def handler(_subject: str, data: bytes) -> bytes:
                await together.wait()
                return data

            async with await a.serve("kvstream.test", handler):
                answers = await asyncio.gather(*(b.request("kvstream.test", b"%d" % i, timeout=20) for i in range(5)))
                assert answers == [b"%d" % i for i in range(5)]

    async def test_errors_of_a_handler_arrive_typed(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:

            async def handler(_subject: str, data: bytes) -> bytes:
                match data:
                    case b"refuse":
                        raise Refused("full, come later", 0.25)
                    case b"fence":
                        raise Fenced("replaced")
                    case b"config":
                        raise ConfigError("to", "nobody")
                    case _:
                        raise ZeroDivisionError("a bug")

            async with await a.serve("kvstream.test", handler):
                with pytest.raises(Refused, match="full, come later") as refused:
                    await b.request("kvstream.test", b"refuse", timeout=20)
                assert refused.value.retry_after == 0.25
                with pytest.raises(Fenced, match="replaced"):
                    await b.request("kvstream.test", b"fence", timeout=20)
                with pytest.raises(ConfigError, match="to: nobody"):
                    await b.request("kvstream.test", b"config", timeout=20)
                with pytest.raises(KVStreamError, match="ZeroDivisionError"):
                    await b.request("kvstream.test", b"bug", timeout=20)

    async def test_a_handler_that_hangs_is_the_requesters_timeout_and_ends_with_the_service(
        self, cluster: Cluster
    ) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            started, ended = asyncio.Event(), asyncio.Event()

            async def handler(_subject: str, _data: bytes) -> bytes:
                started.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    ended.set()
                raise AssertionError

            async with await a.serve("kvstream.test", handler):
                ask = asyncio.ensure_future(b.request("kvstream.test", b"", timeout=0.1))
                await started.wait()
                with pytest.raises(PeerLost, match="no answer within"):
                    await ask
                assert not ended.is_set()
            assert ended.is_set()

    async def test_a_flood_of_requests_is_refused_not_queued(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            gate = asyncio.Event()

            async def handler(_subject: str, _data: bytes) -> bytes:
                await gate.wait()
                return b""

            async with await a.serve("kvstream.test", handler):
                asks = [asyncio.ensure_future(b.request("kvstream.test", b"", timeout=20)) for _ in range(70)]
                done, _ = await asyncio.wait(asks, timeout=20, return_when=asyncio.FIRST_COMPLETED)
                assert all(isinstance(task.exception(), Refused) for task in done)
                gate.set()
                results = await asyncio.gather(*asks, return_exceptions=True)
                assert results.count(b"") >= 64
                assert sum(isinstance(result, Refused) for result in results) == 70 - results.count(b"")

    async def test_cancelled_requests_leave_the_broker_usable(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            started = asyncio.Event()

            async def handler(_subject: str, data: bytes) -> bytes:
                started.set()
                if data == b"hang":
                    await asyncio.Event().wait()
                return data

            async with await a.serve("kvstream.test", handler):
                for _ in range(20):
                    started.clear()
                    ask = asyncio.ensure_future(b.request("kvstream.test", b"hang", timeout=20))
                    await started.wait()
                    ask.cancel()
                    await asyncio.wait({ask})
                    assert ask.cancelled()
                    put = asyncio.ensure_future(b.put("w.x.0", b"", ttl=60, revision=0))
                    await asyncio.sleep(0)
                    put.cancel()
                    await asyncio.wait({put})
                assert await b.request("kvstream.test", b"fine", timeout=20) == b"fine"
                await self._revision_or_put(b)

    async def _revision_or_put(self, broker: Broker) -> None:
        # A cancelled put may have taken place or not; either way the table says so.
        try:
            await broker.put("w.x.0", b"", ttl=60, revision=0)
        except Conflict as conflict:
            assert conflict.value == b""

    # -- messages

    async def test_published_messages_come_in_order_to_each_subscriber(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            async with (
                a.subscribe("kvstream.test.*.x") as mine,
                b.subscribe("kvstream.test.>") as all_of_it,
                b.subscribe("kvstream.test.1.x") as one,
            ):
                for i in range(20):
                    a.publish(f"kvstream.test.{i}.x", b"%d" % i)
                a.publish("kvstream.test.end", b"")
                a.publish("kvstream.test.end.x", b"")
                seen = [await next_message(all_of_it) for _ in range(22)]
                assert seen[:20] == [Message(f"kvstream.test.{i}.x", b"%d" % i) for i in range(20)]
                assert [await next_message(mine) for _ in range(21)] == [*seen[:20], seen[21]]
                assert await next_message(one) == Message("kvstream.test.1.x", b"1")
            assert a.unpublished == 0
            with pytest.raises(StopAsyncIteration):
                await anext(mine)

    async def test_a_slow_subscriber_loses_the_oldest_and_they_are_counted(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            async with b.subscribe("kvstream.test", limit=3) as slow, b.subscribe("kvstream.test") as quick:
                for i in range(10):
                    a.publish("kvstream.test", b"%d" % i)
                while (await next_message(quick)).data != b"9":
                    pass
                assert [(await next_message(slow)).data for _ in range(3)] == [b"7", b"8", b"9"]
                assert (slow.dropped, quick.dropped) == (7, 0)

    async def test_a_cancelled_wait_loses_no_message(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b, b.subscribe("kvstream.test") as messages:
            for i in range(5):
                waiting = asyncio.ensure_future(anext(messages))
                await asyncio.sleep(0)
                waiting.cancel()
                a.publish("kvstream.test", b"%d" % i)
                assert (await next_message(messages)).data == b"%d" % i
                await asyncio.wait({waiting})

    async def test_what_was_said_last_is_heard(self, cluster: Cluster) -> None:
        async with await cluster.connect() as b, b.subscribe("kvstream.test") as messages:
            async with await cluster.connect() as a:
                for _ in range(50):
                    a.publish("kvstream.test", b"last words")
            for _ in range(50):
                assert (await next_message(messages)).data == b"last words"

    async def test_messages_over_an_outage(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b, b.subscribe("kvstream.test") as messages:
            await cluster.stop()
            await connected(a, False)
            await connected(b, False)
            a.publish("kvstream.test", b"lost")
            assert a.unpublished == 1
            async with b.subscribe("kvstream.late") as late:
                await cluster.start()
                await connected(a)
                await connected(b)
                # Until the subscription stands again: being connected is told before it is.
                for word, heard in (("test", messages), ("late", late)):
                    while True:
                        a.publish(f"kvstream.{word}", b"again")
                        try:
                            assert (await next_message(heard, 0.2)).data == b"again"
                        except TimeoutError:
                            continue
                        break

    async def test_close_ends_subscriptions(self, cluster: Cluster) -> None:
        broker = await cluster.connect()
        async with broker.subscribe("kvstream.test") as messages:
            waiting = asyncio.ensure_future(anext(messages))
            await asyncio.sleep(0)
            await broker.aclose()
            await asyncio.wait({waiting}, timeout=20)
            assert isinstance(waiting.exception(), StopAsyncIteration)
        broker.publish("kvstream.test", b"")
        assert broker.unpublished == 1
        with pytest.raises(BrokerUnavailable):
            async with broker.subscribe("kvstream.test"):
                pass
        with pytest.raises(BrokerUnavailable):
            await broker.gather("kvstream.test", b"", timeout=1)

    @pytest.mark.parametrize("subject", ["", "a b", "a..b", ".a", "a.", "a.\n"])
    async def test_subjects_are_checked(self, cluster: Cluster, subject: str) -> None:
        async with await cluster.connect() as a:
            with pytest.raises(ConfigError, match="subject"):
                a.publish(subject, b"")
            with pytest.raises(ConfigError, match="subject"):
                async with a.subscribe(subject):
                    pass
            with pytest.raises(ConfigError, match="data"):
                a.publish("kvstream.test", b"x" * (MAX_MESSAGE + 1))
            for wild in ("a.*", "a.>"):
                with pytest.raises(ConfigError, match="subject"):
                    a.publish(wild, b"")
            with pytest.raises(ConfigError, match="subject"):
                async with a.subscribe("a.>.b"):
                    pass

    # -- many answers

    async def test_all_who_serve_a_subject_are_asked(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            assert await a.gather("kvstream.test", b"", timeout=20) == []
            async with (
                await a.serve("kvstream.test", lambda _, data: said(b"a " + data)),
                await b.serve("kvstream.test", lambda _, data: said(b"b " + data)),
                await b.serve("kvstream.*", lambda _, data: said(b"c " + data)),
            ):
                answers = await a.gather("kvstream.test", b"hey", timeout=20, expected=3)
                assert sorted(answers) == [b"a hey", b"b hey", b"c hey"]
                assert len(await b.gather("kvstream.test", b"hey", timeout=20, expected=1)) == 1
                assert await b.gather("kvstream.test", b"hey", timeout=20, expected=0) == []
                # A request has one answer all the same.
                assert (await a.request("kvstream.test", b"hey", timeout=20)).endswith(b" hey")

    async def test_gathering_ends_in_time_without_the_silent_and_the_failed(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:

            async def silent(_subject: str, _data: bytes) -> bytes:
                await asyncio.Event().wait()
                raise AssertionError

            async def broken(_subject: str, _data: bytes) -> bytes:
                raise Refused("no", 0.1)

            async with (
                await a.serve("kvstream.test", silent),
                await a.serve("kvstream.test", broken),
                await b.serve("kvstream.test", lambda _, data: said(data)),
            ):
                assert await b.gather("kvstream.test", b"x", timeout=0.3) == [b"x"]
                # The one that failed has answered too.
                assert await b.gather("kvstream.test", b"x", timeout=20, expected=2) == [b"x"]

    async def test_an_outage_fails_a_gathering(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            started = asyncio.Event()

            async def handler(_subject: str, _data: bytes) -> bytes:
                started.set()
                await asyncio.Event().wait()
                raise AssertionError

            await a.serve("kvstream.test", handler)
            ask = asyncio.ensure_future(b.gather("kvstream.test", b"", timeout=30))
            await started.wait()
            await cluster.stop()
            await asyncio.wait({ask}, timeout=10)
            assert isinstance(ask.exception(), BrokerUnavailable)

    async def test_a_cancelled_gathering_leaves_the_broker_usable(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a:
            started = asyncio.Event()

            async def handler(_subject: str, data: bytes) -> bytes:
                started.set()
                if data == b"hang":
                    await asyncio.Event().wait()
                return data

            async with await a.serve("kvstream.test", handler):
                ask = asyncio.ensure_future(a.gather("kvstream.test", b"hang", timeout=30))
                await started.wait()
                ask.cancel()
                await asyncio.wait({ask})
                assert ask.cancelled()
                assert await a.gather("kvstream.test", b"fine", timeout=20, expected=1) == [b"fine"]

    # -- outage

    async def test_outage(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b, b.watch() as events:
            await until_synced(events)
            states: list[bool] = []
            b.on_connection(states.append)

            async def echo(_subject: str, data: bytes) -> bytes:
                return data

            await a.serve("kvstream.test", echo)
            await a.put("w.gone.0", b"g", ttl=60, revision=0)
            old = await a.put("w.back.0", b"b", ttl=60, revision=0)
            assert {(await next_of(events)).key for _ in range(2)} == {"w.gone.0", "w.back.0"}  # type: ignore[union-attr]

            await cluster.stop()
            await connected(a, False)
            await connected(b, False)
            with pytest.raises(BrokerUnavailable):
                await a.put("w.back.0", b"b", ttl=60, revision=old)
            with pytest.raises(BrokerUnavailable):
                await a.request("kvstream.test", b"", timeout=20)

            now = asyncio.get_running_loop().time()
            await cluster.start()
            await connected(a)
            await connected(b)
            for broker in (a, b):
                assert now <= broker.steady_since <= asyncio.get_running_loop().time(), "the break is over since now"
            # What the restart lost is told as missing, with one Synced behind it.
            missing = await until_synced(events)
            assert {(event.key, event.value, event.reason) for event in missing} == {
                ("w.gone.0", None, "missing"),
                ("w.back.0", None, "missing"),
            }
            with pytest.raises(Conflict) as caught:
                await a.put("w.back.0", b"b", ttl=60, revision=old)
            assert caught.value.value is None
            fresh = await a.put("w.back.0", b"b", ttl=60, revision=0)
            assert await next_of(events) == LeaseEvent("w.back.0", b"b", fresh, "put")
            assert await b.request("kvstream.test", b"again", timeout=20) == b"again"
            assert states == [False, True]

    async def test_an_outage_fails_what_waits(self, cluster: Cluster) -> None:
        async with await cluster.connect() as a, await cluster.connect() as b:
            started = asyncio.Event()

            async def handler(_subject: str, _data: bytes) -> bytes:
                started.set()
                await asyncio.Event().wait()
                raise AssertionError

            await a.serve("kvstream.test", handler)
            ask = asyncio.ensure_future(b.request("kvstream.test", b"", timeout=30))
            await started.wait()
            await cluster.stop()
            await asyncio.wait({ask}, timeout=10)
            assert isinstance(ask.exception(), BrokerUnavailable)

    async def test_close_while_the_broker_is_down(self, cluster: Cluster) -> None:
        broker = await cluster.connect()
        async with broker.watch() as events:
            await until_synced(events)
            await cluster.stop()
            await connected(broker, False)
            async with asyncio.timeout(20):
                await broker.aclose()
