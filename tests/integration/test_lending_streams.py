"""A stream whose blocks are lent: what its source takes back while it is being read is never an arrival, and its user
is never told of the end while something may still be written into its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec
import numpy as np
import pytest

from kvstream import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    KVLayout,
    KVPool,
    PeerLost,
    ReceiveStream,
    Runtime,
    RuntimeConfig,
    SendStream,
)
from kvstream.discovery import EmbeddedServer
from kvstream.transport._loans import Get
from kvstream.transport._ucp import CANCELED
from kvstream.transport._worker import Endpoint, Region, UcpWorker
from kvstream.transport.base import Lent, Slab
from kvstream.transport.ucx import UcxConnection
from tests.integration.worker import LAYOUT, WAYS


class Workers:
    """A source and a destination of 8 blocks each, the source's all ones."""

    def __init__(self, source: Runtime, target: Runtime) -> None:
        self.source = source
        self.target = target

    def send(self, **kwargs: object) -> SendStream:
        return self.source.send("r", blocks=[3, 4], tokens=32, to="decode-0", **kwargs)  # type: ignore[arg-type]

    def receive(self, stream: str = "r", **kwargs: object) -> ReceiveStream:
        return self.target.receive(stream, blocks=[0, 1], tokens=32, **kwargs)  # type: ignore[arg-type]


async def started(way: str, **changes: float) -> AsyncIterator[Workers]:
    lane, config = WAYS[way]
    config = msgspec.structs.replace(config, **changes)
    pools = [KVPool.allocate(LAYOUT, blocks=8) for _ in range(2)]
    for layer in range(LAYOUT.layers):
        pools[0].layer(layer).view(np.uint8)[...] = 1
    async with (
        EmbeddedServer() as server,
        Runtime("prefill-0", pool=pools[0], nats=server.url, lanes=lane, config=config) as source,
        Runtime("decode-0", pool=pools[1], nats=server.url, lanes=lane, config=config) as target,
    ):
        yield Workers(source, target)


@pytest.fixture(params=["lent", "lent-get"])
async def workers(request: pytest.FixtureRequest) -> AsyncIterator[Workers]:
    async for workers in started(request.param):
        yield workers


@pytest.fixture
async def readers() -> AsyncIterator[Workers]:
    """On the lane `get`. The wait before a connection is cut off is long."""
    async for workers in started("lent-get", end_wait=60):
        yield workers


async def test_blocks_reused_in_the_middle_of_a_read_do_not_count(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the destination's decision to read and its read, the source cancels and its user overwrites the blocks,
    as it may. The wrong bytes that are read then must not be announced, and the end is the source's word."""
    borrow = UcxConnection.borrow
    reads: list[int] = []
    async with workers.receive() as rx, workers.send() as tx:

        def interrupted(connection: UcxConnection, lent: Lent, local: Lent) -> asyncio.Future[None]:
            if not reads:
                tx.cancel("while it is read")
                workers.source.pool.layer(0).view(np.uint8)[...] = 0xEE
            reads.append(lent.nbytes)
            return borrow(connection, lent, local)

        monkeypatch.setattr(UcxConnection, "borrow", interrupted)
        tx.layer_ready(0)
        async with asyncio.timeout(20):
            with pytest.raises(Cancelled, match="while it is read"):
                await rx.done()
        assert reads == [2 * LAYOUT.block_bytes]
        assert rx.layers_arrived == 0
        with pytest.raises(Cancelled):
            await tx.done()


@pytest.mark.parametrize(("blocks", "lent"), [(list(range(8)), [8]), ([0, 2, 1, 3, 5, 4, 7, 6], [])])
async def test_small_blocks_are_lent_where_the_table_has_them_in_long_stretches(
    blocks: list[int], lent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the table here, the bytes are the same; only the way is another."""
    lend = UcxConnection.lend
    loans: list[int] = []

    def note(connection: UcxConnection, slot: int, runs: Lent) -> int:
        loans.append(len(runs.addresses))
        return lend(connection, slot, runs)

    monkeypatch.setattr(UcxConnection, "lend", note)
    async for workers in started("shared", lend_bytes=4 * LAYOUT.block_bytes):
        source, target = workers.source.pool, workers.target.pool
        source.layer(0).view(np.uint8)[...] = np.arange(8, dtype=np.uint8).reshape(8, *[1] * (source.layer(0).ndim - 1))
        tokens = 8 * LAYOUT.block_tokens
        async with workers.target.receive("t", blocks=[5, 1, 2, 3, 7, 0, 4, 6], tokens=tokens) as rx:
            async with workers.source.send("t", blocks=blocks, tokens=tokens, to="decode-0") as tx:
                tx.layer_ready(0)
                assert await anext(aiter(rx)) == 0
                tx.cancel()
        assert np.array_equal(target.layer(0)[[5, 1, 2, 3, 7, 0, 4, 6]], source.layer(0)[blocks])
    assert loans == lent


class Held:
    """Gets of the destination that are posted to nobody: under way, for as long as the test likes."""

    def __init__(self) -> None:
        self.gets: list[tuple[Endpoint, list[Get], Callable[[int], None]]] = []
        self.came = asyncio.Event()

    def hold(self, endpoint: Endpoint, gets: list[Get], done: Callable[[int], None]) -> None:
        self.gets.append((endpoint, gets, done))
        self.came.set()

    async def first(self) -> None:
        async with asyncio.timeout(5):
            await self.came.wait()

    def release(self) -> None:
        """They happen now, or never where the connection has been closed."""
        gets, self.gets = self.gets, []
        for endpoint, batch, done in gets:
            if endpoint.open:
                GET_ALL(endpoint, batch, done)
            else:
                done(CANCELED)


GET_ALL = Endpoint.get_all


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    held = Held()

    def get_all(endpoint: Endpoint, gets: list[Get], done: Callable[[int], None]) -> None:
        held.hold(endpoint, gets, done)

    monkeypatch.setattr(Endpoint, "get_all", get_all)
    return held


async def until_ended(stream: ReceiveStream) -> None:
    async with asyncio.timeout(5):
        await stream._ended.wait()


def untouched(workers: Workers) -> bool:
    pool = workers.target.pool
    return not any(pool.layer(layer).view(np.uint8).any() for layer in range(LAYOUT.layers))


@pytest.mark.parametrize("how", ["cancel", "deadline", "source"])
async def test_the_end_waits_for_what_is_on_its_way_into_the_blocks(readers: Workers, held: Held, how: str) -> None:
    async with readers.receive(deadline=30) as rx, readers.send() as tx:
        tx.layer_ready(0)
        await held.first()
        core, driver = readers.target._streams.core, readers.target._streams.driver
        assert core.streams == 1
        if how == "cancel":
            rx.cancel("changed its mind")
        elif how == "source":
            tx.cancel("changed its mind")
        else:
            core.tick(driver.now() + 31)
            driver.pump()
        async with asyncio.timeout(5):
            while core.streams:  # the scheduler is done with it
                await asyncio.sleep(0.001)
        assert not rx.ended
        with pytest.raises(ConfigError, match="another stream that is still live"):
            async with readers.receive("other"):
                pass
        held.release()
        await until_ended(rx)
        with pytest.raises(DeadlineExceeded if how == "deadline" else Cancelled):
            await rx.done()
        # The end is told once, and from here on the blocks are free.
        assert rx.layers_arrived == 0
        assert not readers.target._streams._written.any()
        readers.target.pool.layer(0).view(np.uint8)[...] = 0
        await asyncio.sleep(0)
        assert untouched(readers)


async def test_a_chunk_found_after_the_end_is_not_read(
    readers: Workers, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two chunks: one is on its way into the blocks, of the other only the table, when the stream ends."""
    take = UcxConnection.take
    found = asyncio.Event()
    go_on = asyncio.Event()

    async def late(taking: asyncio.Future[object]) -> object:
        lent = await taking
        found.set()
        await go_on.wait()
        return lent

    def later(connection: UcxConnection, slot: int, generation: int, nbytes: int) -> asyncio.Future[object]:
        return asyncio.ensure_future(late(take(connection, slot, generation, nbytes)))

    async with readers.receive() as rx, readers.send() as tx:
        tx.layer_ready(0)
        await held.first()
        monkeypatch.setattr(UcxConnection, "take", later)
        tx.layer_ready(1)
        async with asyncio.timeout(5):
            await found.wait()
        rx.cancel("changed its mind")
        go_on.set()
        async with asyncio.timeout(5):
            (link,) = readers.target._streams.core._shared.links.values()
            while link.announced > 1:
                await asyncio.sleep(0.001)
        assert len(held.gets) == 1
        assert not rx.ended
        held.release()
        await until_ended(rx)
    assert not readers.target.pool.layer(1).view(np.uint8).any()


async def test_leaving_the_context_waits_too_even_when_cancelled(readers: Workers, held: Held) -> None:
    entered = asyncio.Event()

    async def receive() -> None:
        async with readers.receive():
            entered.set()
            await asyncio.Event().wait()

    receiving = asyncio.create_task(receive())
    await entered.wait()
    async with readers.send() as tx:
        tx.layer_ready(0)
        await held.first()
        for _ in range(3):
            receiving.cancel()
            done, _ = await asyncio.wait([receiving], timeout=0.02)
            assert not done
        held.release()
        async with asyncio.timeout(5):
            with pytest.raises(asyncio.CancelledError):
                await receiving
        assert not readers.target._streams._written.any()


async def test_reads_that_do_not_end_cost_the_connection(held: Held) -> None:
    async for workers in started("lent-get", end_wait=0.05):
        async with workers.receive() as rx, workers.send() as tx:
            tx.layer_ready(0)
            await held.first()
            rx.cancel("changed its mind")
            links = workers.target._streams.links._links
            (link,) = links
            assert not rx.ended
            async with asyncio.timeout(5):
                with pytest.raises(PeerLost):
                    await tx._report()
            assert link not in links  # there may be another: the source came back for its stream, which has ended here
            assert not rx.ended  # cutting off is not yet the end of what is under way: its final status is
            held.release()
            await until_ended(rx)
            with pytest.raises(Cancelled, match="changed its mind"):
                await rx.done()


async def test_a_lost_connection_waits_too(readers: Workers, held: Held) -> None:
    async with readers.receive() as rx, readers.send() as tx:
        tx.layer_ready(0)
        await held.first()
        readers.source._streams.drop_links(PeerLost("for the test"))
        async with asyncio.timeout(5):
            while readers.target._streams.core.streams:
                await asyncio.sleep(0.001)
        assert not rx.ended
        held.release()
        await until_ended(rx)
        with pytest.raises(PeerLost):
            await rx.done()
    assert untouched(readers)


async def test_a_runtime_that_closes_waits_for_its_reads(held: Held) -> None:
    async for workers in started("lent-get", end_wait=60, close_wait=1):
        async with workers.receive() as rx, workers.send() as tx:
            tx.layer_ready(0)
            await held.first()
            closing = asyncio.create_task(workers.target.aclose())
            done, _ = await asyncio.wait([closing], timeout=0.05)
            assert not done
            assert not rx.ended
            held.release()
            async with asyncio.timeout(5):
                await until_ended(rx)
                await closing


async def test_streams_go_on_while_the_end_of_one_waits(readers: Workers, held: Held) -> None:
    async with readers.receive() as rx, readers.send() as tx:
        tx.layer_ready(0)
        await held.first()
        rx.cancel("changed its mind")
        waiting, held.gets = held.gets, []
        blocks = [5, 6]
        async with (
            readers.target.receive("next", blocks=blocks, tokens=32) as second,
            readers.source.send("next", blocks=blocks, tokens=32, to="decode-0") as sending,
        ):
            for layer in range(LAYOUT.layers):
                sending.layer_ready(layer)
            done = asyncio.create_task(sending.done())
            async with asyncio.timeout(5):
                while not done.done():
                    await asyncio.sleep(0.001)
                    held.release()
            await done
            await second.done()
        assert not rx.ended
        held.gets = waiting
        held.release()
        await until_ended(rx)
        for layer in range(LAYOUT.layers):
            assert (readers.target.pool.layer(layer).view(np.uint8)[blocks] == 1).all()


@pytest.mark.parametrize(
    ("changes", "lends"), [({}, True), ({"get_lend_bytes": 1 << 20}, False), ({"checksums": True}, False)]
)
async def test_memory_is_registered_only_where_it_is_lent(changes: dict[str, float], lends: bool) -> None:
    async for workers in started("lent-get", **changes):
        async with workers.receive() as rx, workers.send() as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
            await rx.done()
        (link,) = workers.source._streams.links._links.values()
        assert link.connection.lends == lends
        for layer in range(LAYOUT.layers):
            assert (workers.target.pool.layer(layer).view(np.uint8)[[0, 1]] == 1).all()


async def exchange(source: KVPool, target: KVPool, config: RuntimeConfig, rounds: int = 1) -> list[str]:
    """Everything from one pool to the other over `get`, in reverse order. Returns the streams' lanes."""
    ids = list(range(source.blocks))
    tokens = source.blocks * source.layout.block_tokens
    lanes: list[str] = []
    async with (
        EmbeddedServer() as server,
        Runtime("prefill-0", pool=source, nats=server.url, lanes="get", config=config) as sender,
        Runtime("decode-0", pool=target, nats=server.url, lanes="get", config=config) as receiver,
    ):
        for n in range(rounds):
            async with receiver.receive(f"r{n}", blocks=ids[::-1], tokens=tokens) as rx:
                async with sender.send(f"r{n}", blocks=ids, tokens=tokens, to="decode-0", deadline=30) as tx:
                    for layer in range(source.layout.layers):
                        tx.layer_ready(layer)
                    lanes.append((await tx.done()).lane)
                await rx.done()
        for layer in range(source.layout.layers):
            assert np.array_equal(target.layer(layer)[::-1], source.layer(layer))
        assert sender._streams.core.slots_in_use == 0
    return lanes


async def test_memory_of_which_a_part_can_not_be_registered_goes_by_way_of_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layout = msgspec.structs.replace(LAYOUT, layers=4)
    pools = [
        KVPool.wrap(layout, [np.full((9, *layout.block_shape), n + 1, layout.np_dtype)[:8] for n in range(4)])
        for _ in range(2)
    ]
    register = UcpWorker.register
    tried: list[int] = []

    def limited(worker: UcpWorker, slab: Slab, *, writable: bool = False) -> Region:
        if slab.owner is pools[0]:
            tried.append(slab.nbytes)
            if len(tried) == 3:
                raise ConfigError("staging", "UCX can't register: Input/output error")
        return register(worker, slab, writable=writable)

    monkeypatch.setattr(UcpWorker, "register", limited)
    config = RuntimeConfig(get_lend_bytes=64, group_bytes=1)
    assert await exchange(pools[0], pools[1], config, rounds=3) == ["get"] * 3
    assert len(tried) == 3


@pytest.mark.parametrize("slot_bytes", [64, 4192, 4200, 4256, 5000])
async def test_chunks_are_no_larger_than_a_slot_can_name_runs(slot_bytes: int) -> None:
    layout = KVLayout(layers=2, kv_heads=1, head_dim=64, block_tokens=1, dtype="uint8", parts="latent")
    pools = [KVPool.allocate(layout, blocks=128) for _ in range(2)]
    for layer in range(2):
        pools[0].layer(layer)[...] = layer + 1
    config = RuntimeConfig(slot_bytes=slot_bytes, get_lend_bytes=64, group_bytes=1)
    assert await exchange(pools[0], pools[1], config, rounds=2) == ["get"] * 2


async def test_nothing_is_lent_to_who_has_no_runs_to_read_it_into() -> None:
    """Blocks in pieces: a loan would have to go by way of a buffer."""
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
    padded = np.zeros((8, *layout.block_shape[:-1], 16), np.float16)
    async with (
        EmbeddedServer() as server,
        Runtime("prefill-0", pool=KVPool.allocate(layout, blocks=8), nats=server.url, lanes="shared") as source,
        Runtime("decode-0", pool=KVPool.wrap(layout, [padded[..., :8]]), nats=server.url, lanes="shared") as target,
    ):
        async with target.receive("r", blocks=[1], tokens=4) as rx:
            async with source.send("r", blocks=[2], tokens=4, to="decode-0") as tx:
                tx.layer_ready(0)
                await tx.done()
            await rx.done()
        (link,) = source._streams.links._links.values()
        assert not link.connection.lends
