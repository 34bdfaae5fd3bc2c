"""Admission through whole runtimes: overload is queued, refused with advice, asked again; nothing stays reserved."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from kvstream import ConfigError, DeadlineExceeded, KVStreamError, Offer, PeerLost, Refused, Runtime, RuntimeConfig
from kvstream.transport.inproc import InprocConnection
from tests.conftest import LAYOUT, Cluster

TOKENS = LAYOUT.block_tokens


def config(**more: object) -> RuntimeConfig:
    values: dict[str, object] = {"slots": 4, "slot_bytes": 1024} | more
    return RuntimeConfig(**values)  # type: ignore[arg-type]


async def send(source: Runtime, name: str, *, to: str = "decode-0", retry: bool = False, block: int = 0) -> None:
    async with source.send(name, blocks=[block], tokens=TOKENS, to=to, retry=retry, deadline=20.0) as tx:
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done()


class Blocks:
    """A decode worker's allocator: one block a stream, and a handler that takes whatever has one."""

    def __init__(self, runtime: Runtime, count: int) -> None:
        self.free = list(range(count))
        self.most = self.now = 0

        @runtime.on_offer
        async def _(offer: Offer) -> None:
            if not self.free:
                offer.refuse("no blocks", retry_after=0.01)
                return
            block = self.free.pop()
            self.now += 1
            self.most = max(self.most, self.now)
            try:
                async with offer.accept(blocks=[block]) as rx:
                    await rx.done()
            finally:
                self.now -= 1
                self.free.append(block)


async def test_overload_is_queued_and_all_are_served(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0", config=config(max_receiving=4))
    blocks = Blocks(destination, 4)
    async with asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(send(source, f"s{number}"))
    assert blocks.most == 4
    assert destination.stats().ended == (("done", 64),)
    assert destination.stats().offers_refused == 0


async def test_overload_beyond_the_queue_is_refused_and_asked_again_until_all_are_served(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0", config=config(max_receiving=2, max_pending_offers=4))
    Blocks(destination, 2)
    async with asyncio.TaskGroup() as group:
        for number in range(40):
            group.create_task(send(source, f"s{number}", retry=True))
    stats = destination.stats()
    assert stats.offers_refused > 0
    assert stats.ended == (("done", 40),)
    assert (stats.offers_waiting, stats.tokens_waiting) == (0, 0)


async def test_without_retry_every_refusal_is_typed_and_advises(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0", config=config(max_receiving=2, max_pending_offers=4))
    Blocks(destination, 2)
    ends = await asyncio.gather(*(send(source, f"s{number}") for number in range(40)), return_exceptions=True)
    refused = [end for end in ends if end is not None]
    assert 0 < len(refused) < 40
    for error in refused:
        assert isinstance(error, Refused)
        assert error.retry_after is not None
        assert error.retry_after > 0
    await send(source, "afterwards")


async def test_a_receivers_own_refusal_is_asked_again_too(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0")
    Blocks(destination, 1)
    async with asyncio.TaskGroup() as group:
        for number in range(8):
            group.create_task(send(source, f"s{number}", retry=True))
    assert dict(destination.stats().ended)["done"] == 8


async def test_blocks_of_a_receive_that_nothing_comes_of_are_given_back(cluster: Cluster) -> None:
    destination = await cluster.worker("decode-0", config=config(reservation_timeout=0.02))
    async with destination.receive("r", blocks=[1], tokens=TOKENS, deadline=1000.0) as rx:
        with pytest.raises(DeadlineExceeded, match="reservation_timeout"):
            await rx.done()
        async with destination.receive("other", blocks=[1], tokens=TOKENS) as again:  # else: block 1 is being written
            again.cancel()


async def test_64_streams_through_a_receiver_of_two_slots_all_end_though_one_source_freezes(cluster: Cluster) -> None:
    """LMCache 1215, 1990: prefill, decode and proxy wait for one another."""
    settings = config(slots=2, beat_interval=0.02, stall_timeout=0.2, moves=2, peer_moves=2, max_receiving=64)
    destination = await cluster.worker("decode-0", config=settings, blocks=64)
    sources = [await cluster.worker(f"prefill-{n}", roles=("prefill",), config=settings, blocks=64) for n in range(8)]
    ends: Counter[str] = Counter()

    async def one(number: int) -> None:
        source, name = sources[number % 8], f"s{number}"
        try:
            async with destination.receive(name, blocks=[number], tokens=TOKENS) as rx:
                await send(source, name, block=number)
                await rx.done()
        except KVStreamError as error:
            ends[error.code] += 1
        else:
            ends["done"] += 1

    async with asyncio.TaskGroup() as group:
        for number in range(64):
            group.create_task(one(number))
        while not (connected := [source for source in sources if source.stats().peers]):
            await asyncio.sleep(0)
        links = connected[0]._streams.links
        connection = links.connection(next(iter(links._links)))
        assert isinstance(connection, InprocConnection)
        cluster.network.freeze(connection)
    assert ends.total() == 64
    assert ends["done"] == 56
    assert ends[PeerLost.code] == 8
    assert destination.stats().streams == ()


async def test_retry_is_a_flag(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0")
    with pytest.raises(ConfigError) as caught:
        source.send("r", blocks=[1], tokens=TOKENS, to="decode-0", retry=3)  # type: ignore[arg-type]
    assert caught.value.field == "retry"
