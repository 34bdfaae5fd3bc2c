"""Held KV over the broker: who holds what is told, an order has it pushed, a fetch without a name finds its holder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvstream import BrokerUnavailable, ControlClient, Missed, Offer, Refused, Runtime, RuntimeConfig, UnknownStream
from kvstream.discovery import MemoryBroker
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes

HELD = [5, 2, 9]
ASKED = [0, 31, 7]
TOKENS = 3 * LAYOUT.block_tokens


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[ControlClient]:
    async with MemoryBroker(cluster.hub) as broker, ControlClient(broker, timeout=0.5) as client:
        yield client


async def known(client: ControlClient, count: int) -> None:
    async with asyncio.timeout(5):
        while len(await client.workers()) != count:
            await asyncio.sleep(0)


def same(holder: Runtime, asker: Runtime) -> bool:
    return all(kv_bytes(asker.pool, n, ASKED) == kv_bytes(holder.pool, n, HELD) for n in range(LAYOUT.layers))


async def three(cluster: Cluster) -> tuple[Runtime, Runtime, Runtime]:
    """Two caches and a decode worker; the second cache holds "r"."""
    empty = await cluster.worker("cache-0", roles=("cache",))
    holder = await cluster.worker("cache-1", roles=("cache",))
    asker = await cluster.worker("decode-0")
    fill(holder.pool, 1)
    holder.hold("r", blocks=HELD, tokens=TOKENS, ttl=60)
    return empty, holder, asker


async def test_holders_are_listed_and_are_the_copies_of_a_stream(cluster: Cluster, client: ControlClient) -> None:
    empty, _, _ = await three(cluster)
    await known(client, 3)
    hold = empty.hold("r", blocks=HELD, tokens=TOKENS, ttl=60)
    records = await client.streams(stream="r")
    assert sorted((record.worker, record.role, record.layers_done) for record in records) == [
        ("cache-0/0", "holder", LAYOUT.layers),
        ("cache-1/0", "holder", LAYOUT.layers),
    ]
    assert all(sorted(record.copies) == ["cache-0/0", "cache-1/0"] for record in records)
    hold.release()
    assert [record.worker for record in await client.streams()] == ["cache-1/0"]


async def test_an_order_has_what_is_held_pushed(cluster: Cluster, client: ControlClient) -> None:
    _, holder, asker = await three(cluster)
    await known(client, 3)

    @asker.on_offer
    async def _(offer: Offer) -> None:
        offer.accept(ASKED)

    reply = await client.fetch("r", "decode-0")
    assert (reply.stream, reply.peer) == ("r", "decode-0/0")
    assert same(holder, asker)
    with pytest.raises(Missed):
        await client.fetch("r", "decode-0", source="cache-0")
    with pytest.raises(UnknownStream, match="nothing to cancel"):
        await client.cancel("r")


async def test_a_fetch_that_names_nobody_finds_the_holder(cluster: Cluster) -> None:
    _, holder, asker = await three(cluster)
    report = await asker.fetch("r", blocks=ASKED)
    assert report.peer == "cache-1/0"
    assert same(holder, asker)


async def test_a_fetch_of_what_nobody_holds_is_missed(cluster: Cluster) -> None:
    _, _, asker = await three(cluster)
    # What the asker itself holds is no answer, and neither is a live stream.
    asker.hold("mine", blocks=[1], tokens=1, ttl=60)
    for stream in ("mine", "other"):
        with pytest.raises(Missed, match=f"{stream}: no worker of rank 0 says that it holds it; asked [0-9]"):
            await asker.fetch(stream, blocks=ASKED)


async def test_who_takes_no_control_is_waited_for_a_bounded_time(cluster: Cluster) -> None:
    await cluster.worker("mute-0", config=RuntimeConfig(control=False))
    asker = await cluster.worker("decode-0", config=RuntimeConfig(connect_timeout=0.2))
    async with asyncio.timeout(5):
        with pytest.raises(Missed):
            await asker.fetch("r", blocks=ASKED)


async def test_a_fetch_that_names_nobody_needs_the_broker(cluster: Cluster) -> None:
    _, holder, asker = await three(cluster)
    await asker.fetch("r", blocks=ASKED)
    cluster.hub.stop()
    with pytest.raises(BrokerUnavailable):
        await asker.fetch("r", blocks=ASKED)
    await asker.fetch("r", blocks=ASKED, source="cache-1")
    assert same(holder, asker)


async def test_a_holder_that_drains_sends_those_who_ask_elsewhere(cluster: Cluster) -> None:
    draining, other, asker = [await cluster.worker(name) for name in ("cache-0", "cache-1", "decode-0")]
    for holder in (draining, other):
        holder.hold("r", blocks=HELD, tokens=TOKENS)
    await draining.drain(0)
    assert (await asker.fetch("r", blocks=ASKED, source=["cache-0", "cache-1"])).peer == "cache-1/0"
    with pytest.raises(Refused, match="draining"):
        await asker.fetch("r", blocks=ASKED, source="cache-0")
    with pytest.raises(Refused, match="draining"):
        await draining.push("r", "cache-1")
    assert [hold.reads for hold in draining.stats().holds] == [0]
