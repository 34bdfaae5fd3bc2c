"""Streams that lose their destination in mid-stream, as the users on all three workers see it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from kvstream import (
    Cancelled,
    ConfigError,
    Fenced,
    Offer,
    PeerLost,
    Refused,
    Runtime,
    RuntimeConfig,
    SendStream,
    Unreachable,
)
from kvstream.runtime.routing import Candidate, RouteRequest
from kvstream.transport.base import Connection
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes

SOURCE = [5, 2, 9, 30, 1]
FIRST = [0, 31, 7, 3, 12]
SECOND = [4, 8, 15, 16, 23]
TOKENS = 18


@pytest.fixture
async def three(cluster: Cluster) -> tuple[Runtime, Runtime, Runtime]:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    fill(source.pool, 1)
    return source, await cluster.worker("decode-0"), await cluster.worker("decode-1")


async def second_half(tx: SendStream, source: Runtime, other: Runtime) -> None:
    """The stream goes to the end at `other`, which takes it by its handler."""
    taken: asyncio.Queue[Offer] = asyncio.Queue()

    @other.on_offer
    async def handler(offer: Offer) -> None:
        offer.accept(SECOND)
        taken.put_nowait(offer)

    for layer in range(1, LAYOUT.layers):
        tx.layer_ready(layer)
    report = await tx.done("payload")
    offer = await taken.get()
    assert offer.epoch == report.epoch == 2
    assert offer.accepted is not None
    theirs = await offer.accepted.done()
    assert (theirs.epoch, offer.accepted.payload) == (2, "payload")
    assert report.peer == other.worker
    for layer in range(LAYOUT.layers):
        assert kv_bytes(other.pool, layer, SECOND) == kv_bytes(source.pool, layer, SOURCE)
    assert report.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes
    first, second = report.epochs
    assert (first.epoch, first.peer) == (1, "decode-0/0")
    assert first.began <= first.ended <= second.began <= second.ended
    assert (second.epoch, second.peer, second.why, second.resent) == (2, "decode-1/0", "done", 1)
    assert tx.epochs == (first,)
    assert source.stats().reroutes == 1


async def test_an_order_moves_a_stream_in_the_middle(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, second = three
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            source.reroute("r", "decode-1")
            with pytest.raises(Fenced, match="goes elsewhere") as caught:
                await rx.done()
            assert caught.value.valid_layers == (0,)
            assert kv_bytes(first.pool, 0, FIRST) == kv_bytes(source.pool, 0, SOURCE)
        await second_half(tx, source, second)
    with pytest.raises(ConfigError, match="not being sent"):
        source.reroute("r", "decode-0")


async def test_a_destination_that_leaves_hands_its_streams_over(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, second = three
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            await first.aclose()
            with pytest.raises(Cancelled):
                await rx.done()
        await second_half(tx, source, second)


async def test_a_connection_that_breaks_with_its_worker(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, second = three
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            await first._transport.aclose()  # type: ignore[union-attr]
            with pytest.raises(PeerLost):
                await rx.done()
        await second_half(tx, source, second)


@dataclass
class Listed:
    """A policy that names the first worker there is, and remembers whom it was shown."""

    shown: list[list[str]] = field(default_factory=list)
    fails: bool = False

    def route(
        self, request: RouteRequest, candidates: Sequence[Candidate], chance: Callable[[], float]
    ) -> Sequence[str]:
        self.shown.append([candidate.record.id for candidate in candidates])
        if self.fails and len(self.shown) > 1:
            raise ZeroDivisionError
        return self.shown[-1][:1]


async def test_a_policy_is_asked_anew_without_the_lost(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, second = three
    policy = Listed()
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=policy) as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            await first.aclose()
            with pytest.raises(Cancelled):
                await rx.done()
        await second_half(tx, source, second)
    assert policy.shown == [["decode-0/0", "decode-1/0"], ["decode-1/0"]]


async def test_a_policy_that_fails_ends_the_stream(
    three: tuple[Runtime, Runtime, Runtime], caplog: pytest.LogCaptureFixture
) -> None:
    source, first, _ = three
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=Listed(fails=True)) as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            await first.aclose()
            with pytest.raises(Refused, match="closing"):
                await tx._report()
    assert "routing policy failed" in caplog.text


async def test_a_cancel_while_the_policy_is_asked(cluster: Cluster) -> None:
    """It waits for a worker to turn up; the stream's end ends that."""
    source, first = await cluster.worker("prefill-0", roles=("prefill",)), await cluster.worker("decode-0")
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=Listed()) as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            await first.aclose()
        while not source._streams._route_tasks:
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        tx.cancel()
        with pytest.raises(Cancelled):
            await tx._report()
        while source._streams._route_tasks:
            await asyncio.sleep(0)
    assert source._streams.core.idle


async def test_an_order_that_is_wrong(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, _ = three
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS):
            tx.layer_ready(0)
            while not tx.peer:
                await asyncio.sleep(0)
            with pytest.raises(ConfigError, match="already"):
                source.reroute("r", "decode-0")
            with pytest.raises(Refused):
                source.reroute("r")
            with pytest.raises(ConfigError, match="to"):
                source.reroute("r", 7)  # type: ignore[arg-type]
            tx.cancel()


# ---------------------------------------------------------------------- broken paths


async def test_a_stream_goes_on_where_it_was_when_its_connection_breaks(cluster: Cluster) -> None:
    """At every layer anew: no layer arrives twice, none is lost, and what is in place is not sent again."""
    source, destination = await cluster.worker("prefill-0", roles=("prefill",)), await cluster.worker("decode-0")
    fill(source.pool, 1)
    seen: list[int] = []
    async with destination.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
                await rx._until(layer)
                seen.append(layer)
                for connection in cluster.network.connections:
                    cluster.network.break_link(connection)
                while destination._streams.core.peer_states():
                    await asyncio.sleep(0)
            report = await tx.done("payload")
        theirs = await rx.done()
    assert rx.payload == "payload"
    assert report.epoch == theirs.epoch == 1 + LAYOUT.layers
    assert report.bytes == theirs.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes
    assert [(e.epoch, e.peer, e.resent) for e in report.epochs] == [(n + 1, "decode-0/0", 0) for n in range(5)]
    assert report.in_doubt == ()
    assert (source.stats().resumes, source.stats().reroutes) == (LAYOUT.layers, 0)
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, FIRST) == kv_bytes(source.pool, layer, SOURCE)


async def test_an_end_that_was_lost_with_its_connection(cluster: Cluster) -> None:
    source, destination = await cluster.worker("prefill-0", roles=("prefill",)), await cluster.worker("decode-0")
    async with destination.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await rx._until(LAYOUT.layers - 1)
            done = asyncio.create_task(tx.done())
            while source._streams.core.stream_states(0.0)[0].waits_for != "end":
                await asyncio.sleep(0)
            cluster.network.break_link(cluster.network.connections[0])
            report = await done
        theirs = await rx.done()
    assert not theirs.provisional
    assert report.epoch == theirs.epoch == 2


async def test_a_way_that_is_down_is_tried_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = await cluster.worker("prefill-0", roles=("prefill",)), await cluster.worker("decode-0")
    transport = source._transport
    assert transport is not None
    dial, tried = transport.dial, 0

    async def down(*arguments: Any) -> Connection:
        nonlocal tried
        tried += 1
        if tried < 3:
            raise Unreachable("no route to host")
        return await dial(*arguments)

    async with destination.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            monkeypatch.setattr(transport, "dial", down)
            cluster.network.break_link(cluster.network.connections[0])
            for layer in range(1, LAYOUT.layers):
                tx.layer_ready(layer)
            report = await tx.done()
        await rx.done()
    assert tried == 3
    assert report.epoch == 2


async def test_who_waits_for_a_source_hears_that_it_has_left(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0", config=RuntimeConfig(resume_timeout=60.0))
    async with destination.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            while not rx.peer:
                await asyncio.sleep(0)
            cluster.cut_off(destination)
            cluster.network.break_link(cluster.network.connections[0])
            with pytest.raises(PeerLost):
                await tx._report()
        assert not rx.ended
        await source._registry.unregister()
        with pytest.raises(PeerLost):
            await rx.done()


async def test_what_is_being_put_for_the_old_destination_is_withdrawn(three: tuple[Runtime, Runtime, Runtime]) -> None:
    source, first, _ = three
    withdrawn: list[int] = []

    class Old:
        def withdraw(self, slot: int) -> None:
            withdrawn.append(slot)

    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        async with first.receive("r", blocks=FIRST, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            tx.publishing[cast("Connection", Old()), 3] = None
            source.reroute("r", "decode-1")
            assert withdrawn == [3]
            tx.publishing.clear()
        tx.cancel()
