"""Steering and watching workers: drain, resume, cancel, the control service and its client, events; in one process."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest

from kvstream import (
    BrokerUnavailable,
    Cancelled,
    ConfigError,
    ControlClient,
    KVPool,
    PeerLost,
    Refused,
    Runtime,
    RuntimeConfig,
    UnknownStream,
    UnknownWorker,
)
from kvstream.discovery import MemoryBroker
from kvstream.discovery.broker import Handler, Service
from kvstream.discovery.client import Events as Watched
from kvstream.discovery.control import (
    CreditStall,
    Event,
    StreamEnded,
    StreamRerouted,
    WorkerDraining,
    WorkerJoined,
    WorkerLeft,
    WorkerLost,
    WorkerResumed,
    WorkerSuspect,
)
from kvstream.discovery.records import encode_record
from kvstream.discovery.registry import Joined, Left
from kvstream.runtime.events import Events
from kvstream.scheduler.commands import Stalled
from kvstream.transport.base import StagingBudget
from kvstream.transport.inproc import InprocTransport
from tests.conftest import LAYOUT, Cluster

TOKENS = LAYOUT.block_tokens


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[ControlClient]:
    async with MemoryBroker(cluster.hub) as broker, ControlClient(broker, timeout=0.5) as client:
        yield client


async def pair(cluster: Cluster, config: RuntimeConfig | None = None) -> tuple[Runtime, Runtime]:
    source = await cluster.worker("prefill-0", roles=("prefill",), config=config)
    return source, await cluster.worker("decode-0", config=config)


async def seen(events: Watched) -> Event:
    async with asyncio.timeout(5):
        return await anext(events)


async def known(client: ControlClient, count: int) -> None:
    """Wait for the client to have seen so many workers."""
    async with asyncio.timeout(5):
        while len(await client.workers()) != count:
            await asyncio.sleep(0)


async def state_of(client: ControlClient, worker: str, state: str) -> None:
    async with asyncio.timeout(5):
        while next(one.state for one in await client.workers() if one.id == worker) != state:
            await asyncio.sleep(0)


class Stream:
    """A stream whose first layer is in place and that goes on when it is told to."""

    def __init__(self, source: Runtime, destination: Runtime, name: str = "r", block: int = 1) -> None:
        self._stack = AsyncExitStack()
        self._source, self._destination, self._name, self._block = source, destination, name, block

    async def __aenter__(self) -> Stream:
        receive = self._destination.receive(self._name, blocks=[self._block], tokens=TOKENS)
        send = self._source.send(self._name, blocks=[self._block], tokens=TOKENS, to=self._destination.worker)
        self.rx = await self._stack.enter_async_context(receive)
        self.tx = await self._stack.enter_async_context(send)
        self.tx.layer_ready(0)
        assert await anext(aiter(self.rx)) == 0
        return self

    async def __aexit__(self, *error: Any) -> None:
        if not self.rx.ended:
            self.rx.cancel()
        await self._stack.aclose()

    async def finish(self) -> None:
        for layer in range(1, LAYOUT.layers):
            self.tx.layer_ready(layer)
        await self.tx.done()
        async for _ in self.rx:
            pass
        await self.rx.done()


# -- drain


async def test_a_drain_lets_what_is_live_finish(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    await known(client, 2)
    async with Stream(source, destination) as stream:
        draining = asyncio.create_task(client.drain("decode-0", 20))
        await state_of(client, "decode-0/0", "draining")
        assert destination.state == "draining"
        assert not draining.done()
        await stream.finish()
        report = await draining
    assert (report.finished, report.cancelled) == (1, 0)
    assert report.seconds < 20


async def test_a_draining_worker_takes_nothing_new(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    other = await cluster.worker("decode-1")
    other.on_offer(take)
    destination.on_offer(take)
    await destination.drain(5)
    await state_of(client, "decode-0/0", "draining")
    with pytest.raises(Refused, match="decode-0/0 is draining") as refused:
        async with source.send("r", blocks=[1], tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
    assert refused.value.retry_after == 1.0
    with pytest.raises(Refused, match="is draining"):
        async with destination.receive("r", blocks=[1], tokens=TOKENS):
            pass
    with pytest.raises(Refused, match="is draining"):
        async with destination.send("r", blocks=[1], tokens=TOKENS, to="decode-1"):
            pass
    # The default policy leaves it alone, and who names several gets the next one.
    for to in (None, ["decode-0", "decode-1"]):
        async with source.send(f"to {to}", blocks=[1], tokens=TOKENS, to=to) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            assert (await tx.done()).peer == "decode-1/0"
    await destination.resume()
    assert destination.state == "ready"
    await state_of(client, "decode-0/0", "ready")
    async with source.send("again", blocks=[1], tokens=TOKENS, to="decode-0") as tx:
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done()


async def take(offer: Any) -> None:
    async with offer.accept(blocks=[7]) as rx:
        async for _ in rx:
            pass
        await rx.done()


async def test_offers_that_wait_are_refused_by_a_drain_and_receives_that_wait_are_served(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("promised", blocks=[1], tokens=TOKENS) as rx:
        tx = source.send("r", blocks=[1], tokens=TOKENS, to="decode-0")
        await tx.__aenter__()
        while not destination.stats().offers_waiting:
            await asyncio.sleep(0)
        draining = asyncio.create_task(destination.drain(20))
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        with pytest.raises(Refused, match="draining"):
            await tx.done()
        async with source.send("promised", blocks=[1], tokens=TOKENS, to="decode-0") as promised:
            for layer in range(LAYOUT.layers):
                promised.layer_ready(layer)
            await promised.done()
        async for _ in rx:
            pass
    assert (await draining).finished == 1


async def test_at_the_end_of_the_budget_the_rest_is_cancelled(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with Stream(source, destination) as stream:
        report = await destination.drain(0.05)
        assert (report.finished, report.cancelled) == (0, 1)
        assert stream.rx.ended
        for end in (stream.rx.done(), stream.tx._report()):
            with pytest.raises(Refused, match="draining, and the time for that is over"):
                await end
    async with Stream(source, await cluster.worker("decode-1")) as stream:
        assert (await source.drain(0)).cancelled == 1
        with pytest.raises(Cancelled, match="draining"):
            await stream.tx._report()


async def test_a_cancelled_drain_cancels_no_stream_and_can_be_resumed(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with Stream(source, destination) as stream:
        for _ in range(3):
            draining = asyncio.create_task(destination.drain(20))
            while destination.state != "draining":
                await asyncio.sleep(0)
            draining.cancel()
            await asyncio.wait({draining})
            assert draining.cancelled()
            assert destination.state == "draining"
        await destination.resume()
        assert destination.registry.lookup("decode-0").state == "ready"  # type: ignore[union-attr]
        await stream.finish()


async def test_resume_ends_a_drain_under_way(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with Stream(source, destination) as stream:
        draining = asyncio.create_task(destination.drain(60))
        while destination.state != "draining":
            await asyncio.sleep(0)
        await destination.resume()
        report = await asyncio.wait_for(draining, 5)
        assert (report.finished, report.cancelled) == (0, 0)
        assert not stream.rx.ended
        await stream.finish()


async def test_a_drain_without_a_broker_keeps_its_budget(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with Stream(source, destination):
        cluster.hub.stop()
        report = await asyncio.wait_for(destination.drain(0.05), 2)
        assert report.cancelled == 1
    assert destination.state == "draining"
    cluster.hub.start()
    async with asyncio.timeout(5):
        while source.registry.lookup("decode-0").state != "draining":  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


async def test_two_drains_at_once(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with Stream(source, destination):
        long, short = await asyncio.gather(destination.drain(20), destination.drain(0.05))
        assert short.cancelled == 1
        assert long.cancelled == 0


@pytest.mark.parametrize("budget", [-1, float("nan"), float("inf"), "1", None])
async def test_a_drains_budget_is_checked(cluster: Cluster, budget: Any) -> None:
    runtime = await cluster.worker("decode-0")
    with pytest.raises(ConfigError, match="budget"):
        await runtime.drain(budget)
    assert runtime.state == "ready"


# -- the client


async def test_workers_and_changes_of_them(cluster: Cluster, client: ControlClient) -> None:
    watching = client.watch()
    source, _ = await pair(cluster)
    changes = [await asyncio.wait_for(anext(watching), 5) for _ in range(2)]
    assert [(type(change), change.record.id) for change in changes] == [(Joined, "prefill-0/0"), (Joined, "decode-0/0")]
    assert [record.id for record in await client.workers()] == ["decode-0/0", "prefill-0/0"]
    await source.aclose()
    left = await asyncio.wait_for(anext(watching), 5)
    assert (type(left), left.record.id) == (Left, "prefill-0/0")
    await watching.aclose()


async def test_a_worker_about_itself(cluster: Cluster, client: ControlClient) -> None:
    _, destination = await pair(cluster)
    await known(client, 2)
    info = await client.info("decode-0")
    assert (info.name, info.rank, info.incarnation) == ("decode-0", 0, destination.incarnation)
    assert (info.state, info.roles, info.load.blocks) == ("ready", ("decode",), 32)
    stats = await client.stats("decode-0/0")
    assert (stats.worker, stats.streams, stats.ended) == ("decode-0/0", 0, {})
    assert (stats.malformed, stats.events_dropped) == (0, 0)
    assert destination.record.key not in repr(info)


async def test_streams_are_seen_from_both_sides_with_their_copies(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    await known(client, 2)
    async with Stream(source, destination) as stream, Stream(source, destination, "other", 2):
        records = {(one.stream, one.role): one for one in await client.streams()}
        assert len(records) == 4
        sent = records["r", "source"]
        assert (sent.worker, sent.peer, sent.epoch) == ("prefill-0/0", "decode-0/0", 1)
        assert (sent.layers, sent.layers_done, sent.state, sent.copies) == (4, 1, "engine", ())
        received = records["r", "destination"]
        assert (received.worker, received.peer, received.layers_done) == ("decode-0/0", "prefill-0/0", 1)
        for layer in range(1, LAYOUT.layers):
            stream.tx.layer_ready(layer)
        async for _ in stream.rx:
            pass
        found = await client.streams(stream="r")
        assert {one.copies for one in found} == {("prefill-0/0", "decode-0/0")} or {one.copies for one in found} == {
            ("decode-0/0", "prefill-0/0")
        }
        assert [one.stream for one in await client.streams("decode-0")] == ["r", "other"]
        assert await client.streams(stream="nonesuch") == []
        await stream.tx.done()


async def test_a_stream_is_cancelled_by_its_name(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    await known(client, 2)
    async with Stream(source, destination) as stream:
        assert await client.cancel("r") == 1
        with pytest.raises(Cancelled, match="cancelled by an order"):
            await stream.rx.done()
        with pytest.raises(UnknownStream, match="'r'"):
            await client.cancel("r")
    # One that has no source yet.
    async with destination.receive("waits", blocks=[1], tokens=TOKENS) as rx:
        assert await client.cancel("waits") == 1
        with pytest.raises(Cancelled):
            await rx.done()
    with pytest.raises(UnknownStream, match="'nonesuch' is not live on this worker"):
        source.cancel("nonesuch")


async def test_who_and_what_is_unknown_is_typed(cluster: Cluster, client: ControlClient) -> None:
    await pair(cluster)
    await known(client, 2)
    for call in (client.info, client.stats, client.drain, client.resume, client.streams):
        with pytest.raises(UnknownWorker, match="'decode-9' is not registered; known: decode-0/0, prefill-0/0"):
            await call("decode-9")
    with pytest.raises(ConfigError, match="worker: 'a b' is not a name"):
        await client.info("a b")
    for order in (client.cancel("r"), client.reroute("r", "decode-0"), client.fetch("r", "decode-0")):
        with pytest.raises(UnknownStream, match="'r'"):
            await order
    with pytest.raises(UnknownWorker):
        await client.reroute("r", ["decode-0", "decode-9"])
    with pytest.raises(ConfigError, match=r"request: .*level"):
        await client.set_log_level("decode-0", "loud")  # type: ignore[arg-type]
    for budget in (-1, float("nan"), "1"):
        with pytest.raises(ConfigError, match="budget: must be 0 to 86400 seconds"):
            await client.drain("decode-0", budget)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kinds: 'nonsense'"):
        client.events("nonsense")


async def test_a_name_with_several_ranks_needs_one(cluster: Cluster, client: ControlClient) -> None:
    _, destination = await pair(cluster)
    record = destination.record
    twin = msgspec.structs.replace(record, rank=1, incarnation="0" * 32)
    async with MemoryBroker(cluster.hub) as broker:
        await broker.put("w.decode-0.1", encode_record(twin), ttl=60, revision=0)
        await known(client, 3)
        with pytest.raises(ConfigError, match="decode-0 has the ranks 0, 1; name one: decode-0/0"):
            await client.info("decode-0")
        assert (await client.info("decode-0/0")).rank == 0
        with pytest.raises(PeerLost, match="decode-0/1 takes no control requests"):
            await client.info("decode-0/1")


async def test_log_level(cluster: Cluster, client: ControlClient) -> None:
    await pair(cluster)
    await known(client, 2)
    logger = logging.getLogger("kvstream")
    before = logger.level
    try:
        await client.set_log_level("decode-0", "debug")
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)


async def test_control_can_be_left_out(cluster: Cluster, client: ControlClient) -> None:
    async with client.events() as events:
        await cluster.worker("decode-0", config=RuntimeConfig(control=False))
        await known(client, 1)
        with pytest.raises(PeerLost, match="control=False"):
            await client.info("decode-0")
        await cluster.worker("decode-1")
        assert (await seen(events)).worker == "decode-1/0"


async def test_a_silent_worker_is_left_out_in_time(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)

    async def silent(_subject: str, _data: bytes) -> bytes:
        await asyncio.Event().wait()
        raise AssertionError

    async with MemoryBroker(cluster.hub) as broker:
        async with Stream(source, destination), await broker.serve("kvstream.all.streams", silent):
            await known(client, 2)
            assert len(await client.streams()) == 2


# -- garbage


async def test_garbage_is_counted_and_answered_typed(cluster: Cluster, client: ControlClient) -> None:
    await pair(cluster)
    await known(client, 2)
    cases = [
        ("info", b"\xff"),
        ("drain", b'{"budget": -1}'),
        ("drain", b'{"budgett": 1}'),
        ("drain", b'{"budget": 1e999}'),
        ("cancel", b"{}"),
        ("cancel", b"[]"),
        ("cancel", b'{"stream": ""}'),
        ("streams", b"[" * 50_000),
        ("stats", b"x" * 100_000),
        ("nonsense", b""),
    ]
    async with MemoryBroker(cluster.hub) as broker:
        for operation, data in cases:
            with pytest.raises(ConfigError):
                await broker.request(f"kvstream.w.decode-0.0.{operation}", data, timeout=5)
        assert (await client.stats("decode-0")).malformed == len(cases)
        # No arguments at all are as good as an empty object.
        assert json.loads(await broker.request("kvstream.w.decode-0.0.info", b"", timeout=5))["name"] == "decode-0"


async def test_garbage_for_the_client_is_counted_and_dropped(cluster: Cluster, client: ControlClient) -> None:
    async with MemoryBroker(cluster.hub) as broker, client.events() as events:
        broker.publish("kvstream.event.joined.decode-9.0", b"\x00garbage")
        broker.publish("kvstream.event.lost.decode-9.0", b'{"event": "lost", "worker": "decode-9/0"}')
        await cluster.worker("decode-0")
        joined = await seen(events)
        assert (type(joined), joined.worker) == (WorkerJoined, "decode-0/0")
        assert events.malformed == 2
        # An event on somebody else's subject.
        data = json.dumps({"event": "left", "worker": "x/0", "incarnation": "", "time": 0, "seq": 1, "drained": True})
        broker.publish("kvstream.event.left.decode-0.0", data.encode())
        broker.publish("kvstream.event.left.x.0", data.encode())
        assert (await seen(events)).worker == "x/0"
        assert events.malformed == 3

        async def nonsense(_subject: str, _data: bytes) -> bytes:
            return b"nonsense"

        await known(client, 1)
        async with await broker.serve("kvstream.all.streams", nonsense):
            assert await client.streams() == []
        assert client.malformed == 1


# -- events


async def test_the_life_of_workers_and_streams_is_told(cluster: Cluster, client: ControlClient) -> None:
    async with client.events() as events, client.events("stream-ended", worker=None) as ends:
        source, destination = await pair(cluster)
        assert [(type(event), event.worker) for event in (await seen(events), await seen(events))] == [
            (WorkerJoined, "prefill-0/0"),
            (WorkerJoined, "decode-0/0"),
        ]
        async with Stream(source, destination) as stream:
            await stream.finish()
        told = {(event.role): event for event in (await seen(ends), await seen(ends)) if isinstance(event, StreamEnded)}
        assert {role: (one.worker, one.peer, one.code, one.why) for role, one in told.items()} == {
            "source": ("prefill-0/0", "decode-0/0", "done", ""),
            "destination": ("decode-0/0", "prefill-0/0", "done", ""),
        }
        assert {(one.stream, one.tokens, one.bytes, one.epoch) for one in told.values()} == {
            ("r", TOKENS, LAYOUT.layers * LAYOUT.block_bytes, 1)
        }
        for _ in range(2):
            await seen(events)
        await known(client, 2)
        async with client.events(worker="decode-0") as of_one:
            await destination.drain(0)
            await destination.resume()
            await destination.drain(0)
            await destination.aclose()
            kinds = [type(await seen(of_one)) for _ in range(4)]
            assert kinds == [WorkerDraining, WorkerResumed, WorkerDraining, WorkerLeft]
        sequence = [event.seq for event in [await seen(events) for _ in range(4)]]
        assert sequence == list(range(sequence[0], sequence[0] + 4))


async def test_who_leaves_is_not_lost(cluster: Cluster, client: ControlClient) -> None:
    _, destination = await pair(cluster)
    await known(client, 2)
    async with client.events() as events:
        await destination.aclose()
        await known(client, 1)
        await cluster.worker("decode-1")
        kinds = [type(await seen(events)) for _ in range(2)]
    assert kinds == [WorkerLeft, WorkerJoined]


async def test_a_stream_that_goes_elsewhere_is_told(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    other = await cluster.worker("decode-1")
    other.on_offer(take)
    await destination.drain(0)
    async with client.events("rerouted") as events:
        async with source.send("r", blocks=[1], tokens=TOKENS, to=["decode-0", "decode-1"]):
            event = await seen(events)
    assert isinstance(event, StreamRerouted)
    assert (event.worker, event.stream, event.peer, event.epoch) == ("prefill-0/0", "r", "decode-1/0", 2)


async def test_a_worker_that_dies_is_told_by_those_who_watch(cluster: Cluster, client: ControlClient) -> None:
    config = RuntimeConfig(lease_ttl=1)
    runtime = await cluster.worker("decode-0", config=config)
    await known(client, 1)
    async with client.events("suspect", "lost") as events:
        # Its process is gone: nothing is said, nothing is renewed.
        await runtime._broker.aclose()  # type: ignore[union-attr]
        assert [type(await seen(events)) for _ in range(2)] == [WorkerSuspect, WorkerLost]


async def test_events_end_with_the_client(cluster: Cluster) -> None:
    async with MemoryBroker(cluster.hub) as broker, ControlClient(broker) as client, client.events() as events:
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting})
        await cluster.worker("decode-0")
        assert isinstance(await seen(events), WorkerJoined)
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        await broker.aclose()
        await asyncio.wait({waiting}, timeout=5)
        assert isinstance(waiting.exception(), StopAsyncIteration)


async def test_a_storm_of_events_is_cut_off_and_counted(cluster: Cluster) -> None:
    now = 0.0
    async with MemoryBroker(cluster.hub) as broker, broker.subscribe("kvstream.event.>") as messages:
        events = Events(broker, "w/0", "0" * 32, rate=10, clock=lambda: now, wall=lambda: 5.0)
        for _ in range(50):
            events.stalled(Stalled("p/0", True, 1.5, 3, 2, "r"))
        now = 0.5
        for _ in range(50):
            events.joined(())
        told = [json.loads((await anext(messages)).data) for _ in range(15)]
    assert events.dropped == 85
    assert [event["seq"] for event in told] == [*range(1, 10), *range(51, 57)]  # one is kept for the worker's own
    assert told[0] == {
        "event": "credit-stall", "worker": "w/0", "incarnation": "0" * 32, "time": 5.0, "seq": 1, "peer": "p/0",
        "role": "source", "stream": "r", "streams": 2, "chunks": 3, "seconds": 1.5,
    }  # fmt: skip
    assert CreditStall.__struct_config__.tag == "credit-stall"


# -- the service, as the tools of NATS see it


async def test_the_service_can_be_found_and_counts(cluster: Cluster, client: ControlClient) -> None:
    _, destination = await pair(cluster)
    await known(client, 2)
    async with MemoryBroker(cluster.hub) as broker:
        for subject in ("$SRV.PING", "$SRV.PING.kvstream"):
            answers = [json.loads(one) for one in await broker.gather(subject, b"", timeout=5, expected=2)]
            assert {one["metadata"]["worker"] for one in answers} == {"prefill-0/0", "decode-0/0"}
            assert {one["type"] for one in answers} == {"io.nats.micro.v1.ping_response"}
        one = f"kvstream.{destination.incarnation}"
        info = json.loads(await broker.request(f"$SRV.INFO.{one}", b"", timeout=5))
        assert (info["name"], info["id"]) == ("kvstream", destination.incarnation)
        assert {"drain": "kvstream.w.decode-0.0.drain"}.items() <= {
            endpoint["name"]: endpoint["subject"] for endpoint in info["endpoints"]
        }.items()
        await client.info("decode-0")
        with pytest.raises(UnknownStream):
            await broker.request("kvstream.w.decode-0.0.cancel", b'{"stream": "r"}', timeout=5)
        stats = json.loads(await broker.request(f"$SRV.STATS.{one}", b"", timeout=5))
        counted = {endpoint["name"]: endpoint for endpoint in stats["endpoints"]}
        assert (counted["info"]["num_requests"], counted["info"]["num_errors"]) == (1, 0)
        assert (counted["cancel"]["num_requests"], counted["cancel"]["num_errors"]) == (1, 1)
        assert "'r' is not live" in counted["cancel"]["last_error"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", stats["started"])
        with pytest.raises(ConfigError, match="verb"):
            await broker.request("$SRV.NONSENSE.kvstream", b"", timeout=5)


# -- cancellation, outages


class SlowBroker(MemoryBroker):
    """Serving takes time, as on a real one."""

    async def serve(self, subject: str, handler: Handler) -> Service:
        service = await super().serve(subject, handler)
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await service.aclose()
            raise
        return service


async def test_a_start_that_is_cancelled_anywhere_leaves_nothing_served(cluster: Cluster) -> None:
    """Also the control service: what it began to serve is taken back."""
    steps = 0
    while True:
        async with SlowBroker(cluster.hub) as broker:
            transport = InprocTransport(cluster.network, budget=StagingBudget(1 << 20))
            pool = KVPool.allocate(LAYOUT, blocks=4)
            runtime = Runtime("w", pool=pool, lanes="local", broker=broker, transport=transport)
            starting = asyncio.create_task(runtime.__aenter__())
            for _ in range(steps):
                await asyncio.sleep(0)
            started = starting.done()
            if not started:
                starting.cancel()
                await asyncio.wait({starting})
                assert starting.cancelled()
            await runtime.aclose()
            assert broker.services == []
            await transport.aclose()
        if started:
            break
        steps += 1
    assert steps > 10


async def test_events_of_an_outage_are_counted_and_hold_nothing_up(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    await known(client, 2)
    cluster.hub.stop()
    async with Stream(source, destination) as stream:
        await stream.finish()
    cluster.hub.start()
    async with asyncio.timeout(5):
        assert (await client.stats("decode-0")).events_dropped == 1
    with pytest.raises(BrokerUnavailable):
        cluster.hub.stop()
        await client.info("decode-0")


async def test_a_stream_is_rerouted_by_its_name(cluster: Cluster, client: ControlClient) -> None:
    source, destination = await pair(cluster)
    other = await cluster.worker("decode-1")
    other.on_offer(take)
    await known(client, 3)
    async with client.events("rerouted") as events, Stream(source, destination) as stream:
        await client.reroute("r", "decode-1")
        event = await seen(events)
        assert isinstance(event, StreamRerouted)
        assert (event.peer, event.epoch) == ("decode-1/0", 2)
        for layer in range(1, LAYOUT.layers):
            stream.tx.layer_ready(layer)
        assert (await stream.tx.done()).peer == "decode-1/0"


async def test_a_drain_at_its_end_sends_streams_elsewhere(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    other = await cluster.worker("decode-1")
    other.on_offer(take)
    destination.on_offer(take)
    async with source.send("r", blocks=[1], tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
        tx.layer_ready(0)
        while not tx.peer:
            await asyncio.sleep(0)
        assert (await destination.drain(0)).cancelled == 1
        for layer in range(1, LAYOUT.layers):
            tx.layer_ready(layer)
        assert (await tx.done()).peer == "decode-1/0"
