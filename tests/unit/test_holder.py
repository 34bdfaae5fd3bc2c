"""The holder engine on in-memory parts: what it keeps, what it lets go, what it refuses, and what it lends."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from kvstream import ConfigError, DeadlineExceeded, KVStreamError, Missed, Refused, Runtime, RuntimeConfig
from kvstream.holder import Holder
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes
from tests.unit.test_holds import until, withhold

STREAMS = int(os.environ.get("KVSTREAM_TEST_STREAMS", "2000"))
BLOCK = LAYOUT.layers * LAYOUT.block_bytes
"""Bytes of a block in all layers."""


async def trio(cluster: Cluster, *, blocks: int = 8, **options: object) -> tuple[Runtime, Runtime, Holder]:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    fill(source.pool, 1)
    keeper = await cluster.worker("cache-0", roles=("cache",), blocks=blocks)
    holder = Holder(**options)  # type: ignore[arg-type]
    await holder.start(keeper)
    return source, keeper, holder


async def put(source: Runtime, stream: str, blocks: list[int], **options: object) -> None:
    tokens = len(blocks) * LAYOUT.block_tokens
    async with source.send(stream, blocks=blocks, tokens=tokens, to="cache-0", **options) as tx:  # type: ignore[arg-type]
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done({"of": stream})


async def get(asker: Runtime, stream: str, blocks: list[int]) -> object:
    async with asker.fetch(stream, blocks=blocks, source="cache-0") as rx:
        await rx.done()
    return rx.payload


def kept(keeper: Runtime) -> list[str]:
    return [hold.stream for hold in keeper.holds]


async def settled(holder: Holder) -> None:
    """The source may hear of a stream's end before the holder's handler has gone on."""
    await until(lambda: holder.stats().promised == 0)


async def test_what_was_sent_to_it_is_fetched_from_it(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    decode = await cluster.worker("decode-0")
    await put(source, "a", [4, 2, 9])
    # At once: who was told that the stream is there can rely on that.
    assert await get(decode, "a", [1, 3, 5]) == {"of": "a"}
    for layer in range(LAYOUT.layers):
        assert kv_bytes(decode.pool, layer, [1, 3, 5]) == kv_bytes(source.pool, layer, [4, 2, 9])
    stats = holder.stats()
    assert (stats.streams, stats.used, stats.budget) == (1, 3 * BLOCK, 8 * BLOCK)
    assert keeper.pool.free_blocks == 5


async def test_the_least_recently_used_goes_first(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    for stream in "abcd":
        await put(source, stream, [0, 1])
        await settled(holder)
    await get(source, "a", [2, 3])
    await put(source, "e", [0, 1, 2])
    await settled(holder)
    assert kept(keeper) == ["d", "a", "e"]
    with pytest.raises(Missed, match="evicted"):
        await get(source, "b", [2, 3])
    assert holder.stats().evicted == 2


async def test_what_is_pinned_or_being_read_stays(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    reader = await cluster.worker("decode-0")
    await put(source, "pinned", [0, 1, 2], metadata={"pinned": True, "ttl": 0.01})
    await put(source, "read", [0, 1, 2])
    await settled(holder)
    go = withhold(reader)
    reading = asyncio.ensure_future(get(reader, "read", [0, 1, 2]))
    await until(lambda: any(hold.reads for hold in keeper.holds))
    with pytest.raises(Refused, match=r"no room for .* 0 of these by streams on their way") as refused:
        await put(source, "new", [0, 1, 2])
    assert refused.value.retry_after == 0.5
    assert kept(keeper) == ["pinned", "read"]
    go.set()
    await reading
    await until(lambda: not any(hold.reads for hold in keeper.holds))
    await put(source, "new", [0, 1, 2])
    await settled(holder)
    assert kept(keeper) == ["pinned", "new"]
    holder.unpin("pinned")
    await until(lambda: kept(keeper) == ["new"])
    with pytest.raises(ConfigError, match="not kept here"):
        holder.unpin("pinned")


async def test_what_is_on_its_way_counts(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    async with source.send("slow", blocks=[0, 1, 2, 3, 4], tokens=20, to="cache-0") as tx:
        await until(lambda: bool(tx.peer))
        assert holder.stats().promised == 5 * BLOCK
        with pytest.raises(Refused, match=f"{5 * BLOCK} of these by streams on their way"):
            await put(source, "other", [0, 1, 2, 3])
        tx.cancel()
    await settled(holder)
    assert holder.stats().used == 0
    assert keeper.pool.free_blocks == 8
    await put(source, "other", [0, 1, 2, 3])


async def test_a_promise_ends_with_the_deadline_of_a_silent_source(cluster: Cluster) -> None:
    """vllm 46283: the sender stays silent, and the blocks come back by the deadline."""
    source, keeper, holder = await trio(cluster)
    with pytest.raises(DeadlineExceeded):
        async with source.send("silent", blocks=[0, 1], tokens=8, to="cache-0", deadline=0.1) as tx:
            await tx._report()
    await settled(holder)
    assert keeper.pool.free_blocks == 8
    assert keeper.holds == ()


async def test_what_never_fits_is_refused_for_good(cluster: Cluster) -> None:
    source, _, holder = await trio(cluster, budget=2 * BLOCK)
    with pytest.raises(Refused, match="in all") as refused:
        await put(source, "large", [0, 1, 2])
    assert refused.value.retry_after is None
    assert holder.stats().refused == 1


async def test_a_newer_one_replaces_the_older_when_it_is_whole(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    await put(source, "a", [4, 2], metadata={"pinned": True})
    await settled(holder)
    (older,) = keeper.holds
    async with source.send("a", blocks=[7, 8], tokens=8, to="cache-0") as tx:
        tx.layer_ready(0)
        await until(lambda: bool(tx.peer))
    await settled(holder)
    assert keeper.holds == (older,), "one that broke replaces nothing"
    await put(source, "a", [7, 8])
    await settled(holder)
    assert older.over
    await get(source, "a", [20, 21])
    for layer in range(LAYOUT.layers):
        assert kv_bytes(source.pool, layer, [20, 21]) == kv_bytes(source.pool, layer, [7, 8])
    assert (keeper.pool.free_blocks, holder.stats().used) == (6, 2 * BLOCK)


async def test_streams_expire(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster, ttl=0.02)
    await put(source, "a", [0])
    await until(lambda: holder.stats().kept == 1)
    async with asyncio.timeout(5):
        for hold in keeper.holds:
            await hold.released()
    with pytest.raises(Missed, match="expired"):
        await get(source, "a", [1])
    assert keeper.pool.free_blocks == 8
    assert holder.stats().used == 0


@pytest.mark.parametrize("metadata", [{"ttl": -1}, {"ttl": "x"}, {"pinned": 1}])
async def test_wishes_that_make_no_sense_are_refused(cluster: Cluster, metadata: object) -> None:
    source, keeper, _ = await trio(cluster)
    with pytest.raises(Refused, match=r"ttl|pinned"):
        await put(source, "a", [0], metadata=metadata)
    assert keeper.pool.free_blocks == 8


async def test_other_metadata_is_passed_on(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    await put(source, "a", [0], metadata=["whatever"])
    await settled(holder)
    assert keeper.holds[0].metadata


async def test_options_that_make_no_sense(cluster: Cluster) -> None:
    for options, field in (
        ({"budget": 0}, "budget"),
        ({"ttl": 0}, "ttl"),
        ({"ttl": 10, "max_ttl": 5}, "ttl"),
        ({"retry_after": -1}, "retry_after"),
    ):
        with pytest.raises(ConfigError) as caught:
            Holder(**options)  # type: ignore[arg-type]
        assert caught.value.field == field
    with pytest.raises(ConfigError, match="more than the pool has"):
        await trio(cluster, budget=9 * BLOCK)


async def test_closing_in_mid_stream_gives_everything_back(cluster: Cluster) -> None:
    source, keeper, holder = await trio(cluster)
    await put(source, "a", [0, 1])
    async with source.send("b", blocks=[0, 1], tokens=8, to="cache-0") as tx:
        await until(lambda: bool(tx.peer))
        await holder.close()
        await keeper.aclose()
        with pytest.raises(KVStreamError):
            await tx._report()
    assert keeper.pool.free_blocks == 8
    assert (holder.stats().used, holder.stats().promised) == (0, 0)


@pytest.mark.timeout(120)
async def test_thousands_of_streams_of_random_size_stay_within_the_budget(cluster: Cluster) -> None:
    """Counts are exact after all of them, whether they were kept, pinned, refused, broken or fetched."""
    blocks, budget = 64, 60 * BLOCK
    rng = random.Random(5)
    source = await cluster.worker("prefill-0", config=RuntimeConfig(slots=8, slot_bytes=64 << 10))
    keeper = await cluster.worker("cache-0", blocks=blocks, config=RuntimeConfig(slots=8, slot_bytes=64 << 10))
    holder = Holder(budget=budget, ttl=60.0)
    await holder.start(keeper)
    outcomes = {"done": 0, "refused": 0, "cancelled": 0, "missed": 0, "fetched": 0}
    highest = 0
    pinned: list[str] = []

    async def one(number: int, mine: list[int]) -> None:
        nonlocal highest
        size = rng.choice([1, 1, 1, 2, 3, 5, 8])
        try:
            if rng.random() < 0.2:
                await get(source, f"s{rng.randrange(max(1, number - 60), number + 1)}", mine)
                outcomes["fetched"] += 1
            else:
                name, pin = f"s{number}", rng.random() < 0.2
                async with source.send(
                    name, blocks=mine[:size], tokens=size * 4, to="cache-0", metadata={"pinned": pin}
                ) as tx:
                    for layer in range(LAYOUT.layers):
                        tx.layer_ready(layer)
                    if rng.random() < 0.05:
                        tx.cancel()
                    await tx.done()
                outcomes["done"] += 1
                if pin:
                    await until(lambda: keeper.held(name) is not None)
                    pinned.append(name)
                if len(pinned) > 12:
                    holder.unpin(pinned.pop(0))
        except ConfigError:
            outcomes["missed"] += 1  # fetched by another worker of this test at the same time
        except KVStreamError as error:
            outcomes[error.code] += 1
        stats = holder.stats()
        highest = max(highest, stats.used)
        assert stats.used <= budget
        assert (blocks - keeper.pool.free_blocks) * BLOCK == stats.used

    async def worker(number: int) -> None:
        for turn in range(STREAMS // 4):
            await one(turn * 4 + number, list(range(number * 8, number * 8 + 8)))

    await asyncio.gather(*(worker(number) for number in range(4)))
    await settled(holder)
    assert sum(outcomes.values()) == STREAMS
    assert min(outcomes.values()) > STREAMS // 100, outcomes
    assert highest == budget
    assert holder.stats().used == sum(len(hold.ids) for hold in keeper.holds) * BLOCK
    for name in pinned:
        holder.unpin(name)
    for hold in keeper.holds:
        hold.release()
    assert (keeper.pool.free_blocks, holder.stats().used) == (blocks, 0)
    assert (keeper._streams.holds._held == 0).all()
