"""Holds, fetches and pushes on in-memory parts: what is lent, to whom, until when, and what each side hears."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest

from kvstream import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Hold,
    KVStreamError,
    Missed,
    Offer,
    PeerLost,
    ProtocolError,
    Refused,
    Runtime,
    RuntimeConfig,
    UnknownWorker,
    wire,
)
from kvstream.runtime.links import Links
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes

HELD = [5, 2, 9, 30, 1]
ASKED = [0, 31, 7, 3, 12]
TOKENS = 18
WHOLE = LAYOUT.layers * 5 * LAYOUT.block_bytes


async def pair(cluster: Cluster) -> tuple[Runtime, Runtime]:
    """A worker that holds, and one that asks."""
    holder = await cluster.worker("cache-0", roles=("cache",))
    asker = await cluster.worker("decode-0")
    fill(holder.pool, 1)
    return holder, asker


def same(holder: Runtime, asker: Runtime, held: list[int] = HELD, asked: list[int] = ASKED) -> bool:
    return all(kv_bytes(asker.pool, n, asked) == kv_bytes(holder.pool, n, held) for n in range(LAYOUT.layers))


def idle(*runtimes: Runtime) -> bool:
    cores = [runtime._streams.core for runtime in runtimes]
    return all(core.idle and core.slots_in_use == 0 for core in cores)


def reads(runtime: Runtime) -> list[int]:
    return [hold.reads for hold in runtime.stats().holds]


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until that is so."""
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0)


def withhold(runtime: Runtime) -> asyncio.Event:
    """Keep the bytes of what this worker reads from coming until the event is set."""
    streams = runtime._streams
    move, go = streams.move, asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    def later(command: object) -> None:
        async def wait() -> None:
            await go.wait()
            move(command)  # type: ignore[arg-type]

        tasks.append(asyncio.get_running_loop().create_task(wait()))

    streams.move = later  # type: ignore[method-assign]
    return go


# ---------------------------------------------------------------------- fetch


async def test_a_fetch_brings_exact_bytes_and_the_payload(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("req-1", blocks=HELD, tokens=TOKENS, payload={"first": 42})
    async with asker.fetch("req-1", blocks=ASKED, source="cache-0") as rx:
        layers = [layer async for layer in rx]
        report = await rx.done()
    assert layers == [0, 1, 2, 3]
    assert rx.payload == {"first": 42}
    assert (report.peer, report.tokens, report.bytes) == ("cache-0/0", TOKENS, WHOLE)
    assert same(holder, asker)
    await until(lambda: idle(holder, asker))
    (state,) = holder.stats().holds
    assert (state.stream, state.tokens, state.bytes, state.reads, state.served) == ("req-1", TOKENS, WHOLE, 0, 1)
    assert not hold.ended


async def test_a_fetch_can_be_awaited(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    report = await asker.fetch("r", blocks=ASKED, source=["cache-0"], tokens=TOKENS, deadline=5.0)
    assert report.bytes == WHOLE
    assert same(holder, asker)


async def test_a_part_of_what_is_held_is_fetched(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    report = await asker.fetch("r", blocks=ASKED[:3], source="cache-0", tokens=9)
    assert (report.tokens, report.bytes) == (9, LAYOUT.layers * 3 * LAYOUT.block_bytes)
    assert same(holder, asker, HELD[:3], ASKED[:3])


@pytest.mark.parametrize(("first_token", "moved"), [(0, 5), (4, 4), (7, 4), (16, 1), (18, 0), (20, 0)])
async def test_what_the_asker_has_does_not_move(cluster: Cluster, first_token: int, moved: int) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    before = kv_bytes(asker.pool, 0, ASKED[: 5 - moved])
    report = await asker.fetch("r", blocks=ASKED, source="cache-0", first_token=first_token)
    assert report.bytes == LAYOUT.layers * moved * LAYOUT.block_bytes
    if moved:
        assert same(holder, asker, HELD[-moved:], ASKED[-moved:])
    assert kv_bytes(asker.pool, 0, ASKED[: 5 - moved]) == before


async def test_more_blocks_than_needed_stay_as_they_are(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    fill(asker.pool, 2)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    before = kv_bytes(asker.pool, 1, [20, 21])
    report = await asker.fetch("r", blocks=[*ASKED, 20, 21], source="cache-0")
    assert report.tokens == TOKENS
    assert same(holder, asker)
    assert kv_bytes(asker.pool, 1, [20, 21]) == before


async def test_too_few_blocks_for_what_is_held(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    with pytest.raises(ConfigError, match="blocks: cache-0/0 holds 18 tokens"):
        await asker.fetch("r", blocks=ASKED[:4], source="cache-0")
    await until(lambda: idle(holder, asker) and reads(holder) == [0])


async def test_misses_say_which(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    with pytest.raises(Missed, match="never was"):
        await asker.fetch("never", blocks=ASKED, source="cache-0")
    holder.hold("gone", blocks=HELD, tokens=TOKENS).release()
    with pytest.raises(Missed, match="released"):
        await asker.fetch("gone", blocks=ASKED, source="cache-0")
    holder.hold("out", blocks=HELD, tokens=TOKENS).release("evicted")
    with pytest.raises(Missed, match="evicted"):
        await asker.fetch("out", blocks=ASKED, source="cache-0")
    await holder.hold("late", blocks=HELD, tokens=TOKENS, ttl=0.01).released()
    with pytest.raises(Missed, match="expired"):
        await asker.fetch("late", blocks=ASKED, source="cache-0")
    holder.hold("short", blocks=HELD[:2], tokens=8)
    with pytest.raises(Missed, match="8 tokens, 18 were asked for"):
        await asker.fetch("short", blocks=ASKED, source="cache-0", tokens=TOKENS)
    assert idle(holder, asker)


async def test_holders_are_asked_in_order(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    await cluster.worker("cache-1")
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    report = await asker.fetch("r", blocks=ASKED, source=["cache-1", "nobody", "cache-0"])
    assert report.peer == "cache-0/0"
    assert same(holder, asker)


async def test_nobody_of_that_name(cluster: Cluster) -> None:
    asker = await cluster.worker("decode-0", config=RuntimeConfig(connect_timeout=0.1))
    with pytest.raises(UnknownWorker, match="source: no worker nobody/0 is registered; there are decode-0/0"):
        await asker.fetch("r", blocks=ASKED, source="nobody")


async def test_two_fetches_of_one_stream_at_a_time(cluster: Cluster) -> None:
    holder, first = await pair(cluster)
    second = await cluster.worker("decode-1")
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    go = withhold(first)
    one = asyncio.ensure_future(first.fetch("r", blocks=ASKED, source="cache-0"))
    await until(lambda: reads(holder) == [1])
    await second.fetch("r", blocks=HELD, source="cache-0")
    assert not one.done()
    go.set()
    await one
    assert same(holder, first)
    assert same(holder, second, HELD, HELD)


async def test_what_is_being_read_outlives_its_time(cluster: Cluster) -> None:
    """Eviction and expiry wait for the copies on their way, and nothing is reused before."""
    holder, asker = await pair(cluster)
    over: list[Hold] = []
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS, ttl=0.05, on_release=over.append)
    go = withhold(asker)
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source="cache-0"))
    await until(lambda: reads(holder) == [1])
    await until(lambda: hold.ended)
    assert not hold.over
    assert not over
    assert [(state.leaving, state.reads) for state in holder.stats().holds] == [(True, 1)]
    with pytest.raises(ConfigError, match="block 5 is held for stream 'r'"):
        async with holder.receive("other", blocks=HELD, tokens=TOKENS):
            pass
    with pytest.raises(Missed, match="expired"):
        await holder.push("r", "decode-0")
    go.set()
    await fetch
    await hold.released()
    assert over == [hold]
    assert same(holder, asker)
    assert holder.stats().holds == ()


async def test_an_offer_that_answers_no_fetch_is_not_taken(cluster: Cluster) -> None:
    """Only the holder that is asked, with the token it was asked with, can answer."""
    holder, asker = await pair(cluster)
    other = await cluster.worker("prefill-0")
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    serve = holder._streams.holds.serve
    caught: list[object] = []
    holder._streams.holds.serve = caught.append  # type: ignore[method-assign]
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source="cache-0"))
    await until(lambda: bool(caught))
    with pytest.raises(ConfigError, match="is being fetched from cache-0/0"):
        async with other.send("r", blocks=HELD, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
    command = caught[0]
    other.hold("r", blocks=HELD, tokens=TOKENS)
    other._streams.holds.serve(command)  # type: ignore[arg-type]
    await until(lambda: not other._streams.holds._tasks)
    assert not fetch.done()
    holder._streams.holds.serve = serve  # type: ignore[method-assign]
    holder._streams.holds.serve(command)  # type: ignore[arg-type]
    await fetch
    assert same(holder, asker)


async def test_a_fetch_takes_no_offer_that_waits(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    offers: list[Offer] = []

    @asker.on_offer
    async def handler(offer: Offer) -> None:
        offers.append(offer)

    async with holder.send("r", blocks=HELD, tokens=TOKENS, to="decode-0"):
        await until(lambda: bool(offers))
        with pytest.raises(ConfigError, match=r"is being offered by cache-0/0; take it by receive\(\)"):
            await asker.fetch("r", blocks=ASKED, source="cache-0")
    assert asker._streams._written.sum() == 0


async def test_a_stream_is_fetched_once_at_a_time_per_asker(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    go = withhold(asker)
    async with asker.fetch("r", blocks=ASKED, source="cache-0") as rx:
        with pytest.raises(ConfigError, match="already being received"):
            await asker.fetch("r", blocks=[20, 21, 22, 23, 24], source="cache-0")
        go.set()
        await rx.done()


async def test_bad_arguments(cluster: Cluster) -> None:
    _, asker = await pair(cluster)
    for arguments, field in (
        ({"blocks": []}, "blocks"),
        ({"blocks": [99]}, "blocks"),
        ({"blocks": ASKED, "tokens": 21}, "blocks"),
        ({"blocks": ASKED, "first_token": 21}, "first_token"),
        ({"blocks": ASKED, "source": []}, "source"),
        ({"blocks": ASKED, "source": ["a", "a"]}, "source"),
        ({"blocks": ASKED, "deadline": 0}, "deadline"),
        ({"blocks": ASKED, "priority": 1001}, "priority"),
    ):
        with pytest.raises(ConfigError) as caught:
            asker.fetch("r", **{"source": "cache-0", **arguments})  # type: ignore[arg-type]
        assert caught.value.field == field


async def test_a_peer_of_an_older_version_is_not_asked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    introduce = Links._introduce

    async def older(self: Links, link: object, record: object) -> None:
        await introduce(self, link, record)  # type: ignore[arg-type]
        link.version = 1  # type: ignore[attr-defined]

    monkeypatch.setattr(Links, "_introduce", older)
    with pytest.raises(ProtocolError, match="cache-0/0 speaks version 1"):
        await asker.fetch("r", blocks=ASKED, source="cache-0")


async def test_a_fetch_works_without_the_broker(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    await asker.registry.wait_for("cache-0/0", 5.0)
    await holder.registry.wait_for("decode-0/0", 5.0)
    cluster.hub.stop()
    await asker.fetch("r", blocks=ASKED, source="cache-0", deadline=5.0)
    assert same(holder, asker)
    cluster.hub.start()


async def test_a_fetch_of_what_is_on_its_way_waits_for_it(cluster: Cluster) -> None:
    source, holder = await pair(cluster)
    asker = await cluster.worker("decode-1")

    @holder.on_offer
    async def handler(offer: Offer) -> None:
        if offer.stream == "broken":
            offer.accept(blocks=[20])
            return
        async with offer.accept(blocks=ASKED) as rx:
            await rx.done()
        holder.hold(offer.stream, blocks=ASKED, tokens=offer.tokens)

    async with source.send("r", blocks=HELD, tokens=TOKENS, to="decode-0") as tx:
        fetch = asyncio.ensure_future(asker.fetch("r", blocks=HELD, source="decode-0"))
        await until(lambda: bool(tx.peer) and bool(holder._streams.holds._tasks))
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done()
    assert (await fetch).bytes == WHOLE
    assert same(source, asker, HELD, HELD)

    async with source.send("broken", blocks=[0], tokens=4, to="decode-0") as tx:
        await until(lambda: bool(tx.peer))
        with pytest.raises(DeadlineExceeded):
            await asker.fetch("broken", blocks=[0], source="decode-0", deadline=0.05)
        await until(lambda: not holder._streams.holds._tasks)
        fetch = asyncio.ensure_future(asker.fetch("broken", blocks=[0], source="decode-0"))
        await until(lambda: bool(holder._streams.holds._tasks))
    with pytest.raises(Missed):
        await fetch
    assert not holder._streams.holds._tasks


async def test_every_turn_between_the_end_of_a_stream_and_its_hold(cluster: Cluster) -> None:
    """A fetch that comes at any moment from the stream's acceptance on is served."""
    source, holder = await pair(cluster)
    asker = await cluster.worker("decode-1")

    @holder.on_offer
    async def handler(offer: Offer) -> None:
        async with offer.accept(blocks=[offer.metadata]) as rx:
            await rx.done()
        holder.hold(offer.stream, blocks=[offer.metadata], tokens=4)

    serve = holder._streams.holds.serve
    holder.hold("warm", blocks=[31], tokens=4)
    await asker.fetch("warm", blocks=[0], source="decode-0")
    for turns in range(30):
        name = f"r{turns}"
        caught: list[object] = []
        holder._streams.holds.serve = caught.append  # type: ignore[method-assign]
        async with source.send(name, blocks=[1], tokens=4, to="decode-0", metadata=turns) as tx:
            await until(lambda: bool(tx.peer))
            fetch = asyncio.ensure_future(asker.fetch(name, blocks=[0], source="decode-0", deadline=5.0))
            await until(lambda: bool(caught))  # noqa: B023
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            done = asyncio.ensure_future(tx.done())
            for _ in range(turns):
                await asyncio.sleep(0)
            serve(caught[0])  # type: ignore[arg-type]
            await done
        assert (await fetch).bytes == LAYOUT.layers * LAYOUT.block_bytes


# ---------------------------------------------------------------------- cancellation, deadlines, death


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_fetch_cancelled_at_any_step_leaves_nothing(cluster: Cluster, turns: int) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source="cache-0"))
    for _ in range(turns):
        await asyncio.sleep(0)
    fetch.cancel()
    await asyncio.wait([fetch])
    assert asker._streams._written.sum() == 0
    await until(lambda: idle(holder, asker) and hold.reads == 0)
    hold.release()
    assert hold.over
    await until(lambda: not asker._streams.core._fetches._connecting)


@pytest.mark.parametrize("turns", range(0, 60, 3))
async def test_a_push_cancelled_at_any_step_leaves_nothing(cluster: Cluster, turns: int) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    async with asker.receive("r", blocks=ASKED, tokens=TOKENS) as rx:
        push = asyncio.ensure_future(holder.push("r", "decode-0"))
        for _ in range(turns):
            await asyncio.sleep(0)
        push.cancel()
        await asyncio.wait([push])
        await until(lambda: hold.reads == 0)
        rx.cancel()
    await until(lambda: idle(holder, asker))
    # One that was cancelled as it ended may count as either.
    assert push.cancelled() or holder.stats().holds[0].served == 1


async def test_the_deadline_of_a_fetch_holds(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    go = withhold(asker)
    with pytest.raises(DeadlineExceeded):
        await asker.fetch("r", blocks=ASKED, source="cache-0", deadline=0.1)
    go.set()
    await until(lambda: idle(holder, asker) and hold.reads == 0)


async def test_the_holder_closes_in_mid_fetch(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    go = withhold(asker)
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source="cache-0"))
    await until(lambda: reads(holder) == [1])
    await until(lambda: fetch.done() or asker.stats().streams[0].waits_for == "bytes")
    closing = asyncio.create_task(holder.aclose())
    await until(lambda: hold.over)
    go.set()
    with pytest.raises((Cancelled, PeerLost)):
        await fetch
    await closing


async def test_the_connection_breaks_while_the_holder_is_asked(cluster: Cluster) -> None:
    """On to the next holder; and what the first one offers later is not taken."""
    holder, asker = await pair(cluster)
    second = await cluster.worker("cache-1")
    fill(second.pool, 1)
    for runtime in (holder, second):
        runtime.hold("r", blocks=HELD, tokens=TOKENS)
    caught: list[object] = []
    serve = holder._streams.holds.serve
    holder._streams.holds.serve = caught.append  # type: ignore[method-assign]
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source=["cache-0", "cache-1"]))
    await until(lambda: bool(caught))
    go = withhold(asker)
    asker._streams.drop_links(PeerLost("broken"))
    await until(lambda: reads(second) == [1])
    serve(caught[0])  # type: ignore[arg-type]
    await until(lambda: not holder._streams.holds._tasks)
    go.set()
    assert (await fetch).peer == "cache-1/0"
    assert same(second, asker)


async def test_the_asker_goes_away_while_it_is_served(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    withhold(asker)
    fetch = asyncio.ensure_future(asker.fetch("r", blocks=ASKED, source="cache-0"))
    await until(lambda: reads(holder) == [1])
    await asker.aclose()
    with pytest.raises(Cancelled):
        await fetch
    await until(lambda: hold.reads == 0 and idle(holder))
    assert not hold.ended


async def test_the_holder_says_so_when_it_can_not_reach_the_asker(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: no beat is needed to carry its word."""
    holder = await cluster.worker("cache-0", config=RuntimeConfig(beat_interval=10.0, stall_timeout=30.0))
    asker = await cluster.worker("decode-0", config=RuntimeConfig(beat_interval=10.0, stall_timeout=30.0))
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)

    async def unreachable(*_: object) -> None:
        raise PeerLost("no way there")

    monkeypatch.setattr(holder._streams.links, "_dial_transport", unreachable)
    with pytest.raises(PeerLost, match="no way there"):
        async with asyncio.timeout(5):
            await asker.fetch("r", blocks=ASKED, source="cache-0")
    assert hold.reads == 0
    assert idle(holder, asker)


async def test_the_number_of_fetches_that_are_served_is_bounded(cluster: Cluster) -> None:
    holder = await cluster.worker("cache-0", config=RuntimeConfig(max_streams=2))
    asker = await cluster.worker("decode-0")
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    holds = holder._streams.holds
    others = [asyncio.ensure_future(asyncio.Event().wait()) for _ in range(2)]
    holds._tasks.update((task, None) for task in others)  # type: ignore[misc]
    with pytest.raises(Refused, match="2 fetches are being served already"):
        await asker.fetch("r", blocks=ASKED, source="cache-0")
    holds._tasks.clear()
    for task in others:
        task.cancel()
    await asker.fetch("r", blocks=ASKED, source="cache-0")


async def test_a_fetch_that_a_closing_worker_gets_is_refused(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    await asker.fetch("r", blocks=ASKED, source="cache-0")
    streams = holder._streams
    streams.core.shut(streams.driver.now(), Cancelled("the runtime is closing"))
    with pytest.raises(Refused, match="closing"):
        await asker.fetch("r", blocks=ASKED, source="cache-0")


async def test_frames_of_a_fetch_that_make_no_sense(cluster: Cluster) -> None:
    """Repeated ones are counted; one from where none may come costs the connection."""
    holder, asker = await pair(cluster)
    holder.hold("r", blocks=HELD, tokens=TOKENS)
    await asker.fetch("r", blocks=ASKED, source="cache-0")
    core = holder._streams.core
    ids = {link.outgoing: link.id for link in core._shared.links.values()}
    core.frame(holder._streams.driver.now(), ids[False], wire.Fetch(1, "r", b"t" * 16))
    assert core.counters.stale_frames == 1
    core.frame(holder._streams.driver.now(), ids[True], wire.Fetch(9, "r", b"t" * 16))
    assert core.counters.protocol_errors == 1


# ---------------------------------------------------------------------- the hold itself


async def test_pins_keep_a_hold(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS, ttl=0.01, pinned=True)
    hold.pin()
    await asyncio.sleep(0.05)
    assert not hold.ended
    with pytest.raises(ConfigError, match="pinned by 2"):
        hold.release()
    hold.unpin()
    assert not hold.ended
    hold.unpin()
    assert hold.over
    with pytest.raises(ConfigError, match="is not pinned"):
        hold.unpin()
    with pytest.raises(ConfigError, match="is not held any more; it has expired"):
        hold.pin()
    with pytest.raises(ConfigError, match="is not held any more"):
        hold.extend(1.0)
    hold.release()
    with pytest.raises(ConfigError, match="released already"):
        hold.release()


async def test_a_pin_that_is_taken_away_in_time_changes_nothing(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS, ttl=30.0, pinned=True)
    hold.unpin()
    assert not hold.ended


async def test_a_hold_can_be_extended(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS, ttl=0.02)
    hold.extend(30.0)
    await asyncio.sleep(0.06)
    assert not hold.ended
    hold.extend(0.01)
    async with asyncio.timeout(5):
        await hold.released()


async def test_a_stream_is_held_once(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    assert holder.held("r") is hold
    with pytest.raises(ConfigError, match="held already"):
        holder.hold("r", blocks=ASKED, tokens=TOKENS)
    hold.release()
    assert holder.held("r") is None
    holder.hold("r", blocks=ASKED, tokens=TOKENS)


async def test_the_number_of_holds_is_bounded(cluster: Cluster) -> None:
    holder = await cluster.worker("cache-0", config=RuntimeConfig(max_holds=2))
    for number in range(2):
        holder.hold(f"r{number}", blocks=[number], tokens=4)
    with pytest.raises(Refused, match="max_holds"):
        holder.hold("r2", blocks=[2], tokens=4)


async def test_blocks_that_a_stream_writes_can_not_be_held(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    async with holder.receive("in", blocks=HELD, tokens=TOKENS) as rx:
        with pytest.raises(ConfigError, match="block 9 is being written"):
            holder.hold("r", blocks=[9, 4], tokens=8)
        rx.cancel()
    holder.hold("r", blocks=[9, 4], tokens=8)


async def test_blocks_may_be_shared_by_holds(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    first = holder.hold("a", blocks=HELD, tokens=TOKENS)
    second = holder.hold("b", blocks=HELD[:2], tokens=8)
    first.release()
    with pytest.raises(ConfigError, match="block 2 is held for stream 'b'"):
        async with holder.receive("in", blocks=[9, 2], tokens=8):
            pass
    second.release()
    async with holder.receive("in", blocks=[9, 2], tokens=8) as rx:
        rx.cancel()


async def test_closing_ends_every_hold(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    over: list[str] = []
    holds = [
        holder.hold(f"r{n}", blocks=[n], tokens=4, pinned=n == 1, on_release=lambda hold: over.append(hold.stream))
        for n in range(3)
    ]
    await holder.aclose()
    assert all(hold.over for hold in holds)
    assert over == ["r0", "r1", "r2"]


async def test_waiting_for_a_release_can_be_cancelled(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await hold.released()
    assert not hold.ended
    hold.release()
    await hold.released()


async def test_counts_are_exact_after_ten_thousand_random_operations(cluster: Cluster) -> None:
    holder = await cluster.worker("cache-0", blocks=16)
    holds, rng = holder._streams.holds, random.Random(3)
    live: dict[str, Hold] = {}
    reading: list[Hold] = []
    over: list[Hold] = []
    made = 0
    for number in range(10_000):
        hold = rng.choice(list(live.values())) if live else None
        match rng.randrange(10):
            case 0 | 1 if len(live) < 30:
                name = f"r{number}"
                blocks = rng.sample(range(16), rng.randint(1, 4))
                live[name] = holder.hold(name, blocks=blocks, tokens=len(blocks) * 4, on_release=over.append)
                made += 1
            case 2 if hold is not None and hold.pins < 2:
                hold.pin()
            case 3 | 8 | 9 if hold is not None and hold.pins:
                hold.unpin()
            case 4 if hold is not None:
                if hold.pins:
                    with pytest.raises(ConfigError, match=f"pinned by {hold.pins}"):
                        hold.release()
                else:
                    hold.release()
                    del live[hold.stream]
                    with pytest.raises(ConfigError, match="released already"):
                        hold.release()
            case 5 if hold is not None:
                hold.reads += 1
                reading.append(hold)
            case 6 | 7 if reading:
                holds.read(reading.pop(rng.randrange(len(reading))), sent=True)
            case _:
                pass
        kept = [*live.values(), *(dict.fromkeys(hold for hold in reading if hold.ended))]
        assert len(over) == made - len(kept)
        counts = np.zeros(16, int)
        for hold in kept:
            counts[hold.ids] += 1
        assert (holds._held == counts).all()
    assert made > 500
    assert len(holder.stats().holds) == len(kept)


# ---------------------------------------------------------------------- send(hold=), push


async def held_send(source: Runtime, destination: Runtime, **options: object) -> object:
    async with destination.receive("r", blocks=ASKED, tokens=TOKENS) as rx:
        async with source.send("r", blocks=HELD, tokens=TOKENS, to="decode-0", **options) as tx:  # type: ignore[arg-type]
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done("token")
        await rx.done()
    return tx


async def test_a_sent_stream_can_be_fetched_by_another(cluster: Cluster) -> None:
    source, first = await pair(cluster)
    second = await cluster.worker("decode-1")
    tx = await held_send(source, first, hold=30.0)
    assert tx.held  # type: ignore[attr-defined]
    async with second.fetch("r", blocks=ASKED, source="cache-0") as rx:
        await rx.done()
    assert rx.payload == "token"
    assert same(source, second)
    waiting = asyncio.ensure_future(tx.released())  # type: ignore[attr-defined]
    await asyncio.sleep(0)
    assert not waiting.done()
    tx.release()  # type: ignore[attr-defined]
    await waiting
    with pytest.raises(ConfigError, match="released already"):
        tx.release()  # type: ignore[attr-defined]


async def test_without_hold_nothing_is_held(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    tx = await held_send(source, destination)
    await tx.released()  # type: ignore[attr-defined]
    assert source.stats().holds == ()


async def test_the_hold_of_a_send_expires(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    tx = await held_send(source, destination, hold=0.02)
    async with asyncio.timeout(5):
        await tx.released()  # type: ignore[attr-defined]
    assert not tx.held  # type: ignore[attr-defined]


async def test_a_broken_stream_that_was_ready_is_held(cluster: Cluster) -> None:
    source, first = await pair(cluster)
    second = await cluster.worker("decode-1")
    with pytest.raises(Refused):
        async with source.send("r", blocks=HELD, tokens=TOKENS, to="decode-0", hold=30.0) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await until(lambda: bool(first.stats().offers_waiting))
            first._streams.core._destination.refuse_all(Refused("no"))
            first._streams.driver.pump()
            await tx.done("token")
    assert tx.held
    async with second.receive("r", blocks=ASKED, tokens=TOKENS) as rx:
        report = await source.push("r", "decode-1")
        await rx.done()
    assert report.peer == "decode-1/0"
    assert rx.payload == "token"
    assert same(source, second)


async def test_a_stream_that_was_not_ready_or_was_cancelled_is_not_held(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    for ready in (LAYOUT.layers - 1, LAYOUT.layers):
        async with destination.receive("r", blocks=ASKED, tokens=TOKENS) as rx:
            async with source.send("r", blocks=HELD, tokens=TOKENS, to="decode-0", hold=30.0) as tx:
                for layer in range(ready):
                    tx.layer_ready(layer)
                await rx._until(ready - 1)
                if ready < LAYOUT.layers:
                    rx.cancel()
                    await until(lambda: tx.ended)
                else:
                    tx.cancel()
            await until(lambda: rx.ended)
        assert not tx.held
        assert source.stats().holds == ()


async def test_a_release_before_the_end_means_no_hold(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=ASKED, tokens=TOKENS) as rx:
        async with source.send("r", blocks=HELD, tokens=TOKENS, to="decode-0", hold=30.0) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            tx.release()
            await tx.done()
        await rx.done()
    await tx.released()
    assert source.stats().holds == ()


async def test_a_send_of_the_same_name_replaces_what_is_held(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    first = await held_send(source, destination, hold=30.0)
    second = await held_send(source, destination, hold=30.0)
    assert not first.held  # type: ignore[attr-defined]
    assert second.held  # type: ignore[attr-defined]
    await first.released()  # type: ignore[attr-defined]


async def test_a_push_goes_to_a_handler_with_metadata(cluster: Cluster) -> None:
    holder, taker = await pair(cluster)
    metadata: list[object] = []

    @taker.on_offer
    async def handler(offer: Offer) -> None:
        metadata.append(offer.metadata)
        await offer.accept(blocks=ASKED[:2]).done()

    holder.hold("r", blocks=HELD, tokens=TOKENS, metadata={"user": 1})
    report = await holder.push("r", ["decode-0"], tokens=8)
    assert report.tokens == 8
    assert metadata == [{"user": 1}]
    assert same(holder, taker, HELD[:2], ASKED[:2])


async def test_a_push_of_what_is_not_held(cluster: Cluster) -> None:
    holder, _ = await pair(cluster)
    with pytest.raises(Missed):
        await holder.push("r", "decode-0")
    hold = holder.hold("r", blocks=HELD, tokens=TOKENS)
    with pytest.raises(Missed, match="19 were asked for"):
        await holder.push("r", "decode-0", tokens=19)
    with pytest.raises(KVStreamError):
        await holder.push("r", "nobody", deadline=0.05)
    assert hold.reads == 0


async def test_holds_are_listed_least_recently_used_first(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    for number in range(3):
        holder.hold(f"r{number}", blocks=[number], tokens=4)
    await asker.fetch("r0", blocks=[0], source="cache-0")
    assert [hold.stream for hold in holder.stats().holds] == ["r1", "r2", "r0"]
    assert len(holder._streams.holds) == 3


async def test_what_an_order_cancels_is_not_held(cluster: Cluster) -> None:
    holder, asker = await pair(cluster)
    async with asker.receive("r", blocks=ASKED, tokens=TOKENS):
        async with holder.send("r", blocks=HELD, tokens=TOKENS, to="decode-0", hold=30) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            assert holder.cancel("r") == 1
            with pytest.raises(Cancelled):
                await tx._report()
        assert holder.stats().holds == ()
