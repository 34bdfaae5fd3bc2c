"""Runtime, sessions and handshake on in-memory parts: what a user sees of a stream, good and bad."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np
import pytest

from kvstream import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Fenced,
    KVLayout,
    LayoutMismatch,
    Offer,
    PeerLost,
    ProtocolError,
    Refused,
    Runtime,
    RuntimeConfig,
    SendStream,
    UnknownWorker,
    wire,
)
from kvstream.runtime.links import Links
from kvstream.scheduler.commands import Move
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes

SOURCE = [5, 2, 9, 30, 1]
DESTINATION = [0, 31, 7, 3, 12]
TOKENS = 18


async def pair(cluster: Cluster) -> tuple[Runtime, Runtime]:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0")
    fill(source.pool, 1)
    return source, destination


async def prefill(tx: SendStream, payload: object = None) -> None:
    for layer in range(LAYOUT.layers):
        tx.layer_ready(layer)
    await tx.done(payload)


def idle(*runtimes: Runtime) -> bool:
    cores = [r._streams_or_none.core for r in runtimes if r._streams_or_none is not None]
    return all(core.idle and core.slots_in_use == 0 for core in cores)


async def test_a_stream_is_byte_exact_layer_by_layer(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    seen: list[int] = []

    async def receive() -> None:
        async with destination.receive("req-1", blocks=DESTINATION, tokens=TOKENS) as rx:
            async for layer in rx:
                seen.append(layer)
                assert kv_bytes(destination.pool, layer, DESTINATION) == kv_bytes(source.pool, layer, SOURCE)
            report = await rx.done()
            assert rx.payload == {"first": 42}
            assert report.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes
            assert report.peer == "prefill-0/0"
            assert not report.provisional

    async with asyncio.TaskGroup() as group:
        group.create_task(receive())
        async with source.send("req-1", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            report = await tx.done({"first": 42})
    assert seen == [0, 1, 2, 3]
    assert (report.peer, report.epoch, report.lane) == ("decode-0/0", 1, "local")
    assert report.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes
    assert idle(source, destination)


async def test_entering_waits_for_nothing_when_the_destination_is_known(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    await source.registry.wait_for("decode-0/0", 5)
    entering = source.send("req-1", blocks=SOURCE, tokens=TOKENS, to="decode-0").__aenter__()
    with pytest.raises(StopIteration) as entered:
        entering.send(None)
    tx = entered.value.value
    async with destination.receive("req-1", blocks=DESTINATION, tokens=TOKENS):
        await prefill(tx)
    assert idle(source, destination)


@pytest.mark.parametrize(("group_bytes", "chunks"), [(1, LAYOUT.layers), (1 << 20, 1)])
async def test_a_short_prompt_takes_few_chunks(cluster: Cluster, group_bytes: int, chunks: int) -> None:
    config = RuntimeConfig(group_bytes=group_bytes)
    source = await cluster.worker("prefill-0", roles=("prefill",), config=config)
    destination = await cluster.worker("decode-0")
    fill(source.pool, 1)
    moves: list[int] = []
    streams = destination._streams
    move = streams.move

    def count(command: Move) -> None:
        moves.append(command.layers)
        move(command)

    streams.move = count  # type: ignore[method-assign]
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        report = await rx.done()
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, DESTINATION) == kv_bytes(source.pool, layer, SOURCE)
    assert len(moves) == chunks
    assert sum(moves) == LAYOUT.layers
    assert report.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes


async def test_other_blocks_of_the_destination_stay_as_they_were(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    fill(destination.pool, 2)
    before = [destination.pool.layer(layer).copy() for layer in range(LAYOUT.layers)]
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    others = [block for block in range(32) if block not in DESTINATION]
    for layer in range(LAYOUT.layers):
        assert destination.pool.layer(layer)[others].tobytes() == before[layer][others].tobytes()


async def test_layers_arrive_while_later_ones_are_not_ready(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        layers = aiter(rx)
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            assert await anext(layers) == 0
            tx.layer_ready(2)
            tx.layer_ready(1)
            assert await anext(layers) == 1
            assert await anext(layers) == 2
            tx.layer_ready(3)
            await tx.done()
        await rx.done()


async def test_layer_ready_from_an_engine_thread(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    received: list[int] = []
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:

            def engine() -> None:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)

            def consumer() -> None:
                for layer in range(LAYOUT.layers):
                    rx.wait_layer(layer, 5.0)
                    received.append(layer)

            await asyncio.gather(asyncio.to_thread(engine), asyncio.to_thread(consumer))
            await tx.done()
        await rx.done()
    assert received == [0, 1, 2, 3]


async def test_wait_layer_times_out_and_reports_the_end(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(rx.wait_layer, 0, 0.01)
        started = threading.Event()

        def wait() -> None:
            started.set()
            rx.wait_layer(3, 5.0)

        waiting = asyncio.create_task(asyncio.to_thread(wait))
        await asyncio.to_thread(started.wait)
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
        with pytest.raises(Cancelled):
            await waiting


async def test_chunked_prefill_with_growing_blocks(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE[:2], tokens=TOKENS, to="decode-0", growing=True) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer, tokens=(0, 6))
            tx.extend(SOURCE[2:])
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer, tokens=(6, TOKENS))
            await tx.done()
        await rx.done()
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, DESTINATION) == kv_bytes(source.pool, layer, SOURCE)


@pytest.mark.parametrize(("first_token", "moved"), [(0, 5), (4, 4), (7, 4), (16, 1), (18, 0)])
async def test_a_prefix_that_is_there_does_not_move(cluster: Cluster, first_token: int, moved: int) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS, first_token=first_token) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            sent = await tx.done()
        assert [layer async for layer in rx] == [0, 1, 2, 3]
        report = await rx.done()
    assert report.bytes == sent.bytes == LAYOUT.layers * moved * LAYOUT.block_bytes
    untouched = DESTINATION[: 5 - moved]
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, DESTINATION[5 - moved :]) == kv_bytes(
            source.pool, layer, SOURCE[5 - moved :]
        )
        assert not np.any(destination.pool.layer(layer)[untouched].view(np.uint8))


@pytest.mark.parametrize("tokens", [1, 3, 4, 5])
async def test_short_prompts(cluster: Cluster, tokens: int) -> None:
    source, destination = await pair(cluster)
    needed = LAYOUT.blocks_for(tokens)
    async with destination.receive("r", blocks=DESTINATION, tokens=tokens) as rx:
        async with source.send("r", blocks=SOURCE[:needed], tokens=tokens, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, DESTINATION[:needed]) == kv_bytes(source.pool, layer, SOURCE[:needed])


async def test_offer_handler_accepts_and_refuses(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    taken: list[asyncio.Task[object]] = []

    @destination.on_offer
    async def _(offer: Offer) -> None:
        if offer.metadata == "no":
            offer.refuse("busy", retry_after=0.25)
        else:
            blocks = destination.pool.acquire(destination.pool.layout.blocks_for(offer.tokens))
            taken.append(asyncio.create_task(offer.accept(blocks=blocks).done()))

    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        await prefill(tx)
    await taken[0]
    with pytest.raises(Refused, match="busy") as refused:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0", metadata="no") as tx:
            await prefill(tx)
    assert refused.value.retry_after == 0.25
    assert idle(source, destination)


async def test_a_failing_offer_handler_is_a_refusal(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """A hook that raises must not leave the stream without an end (vllm 55181)."""
    source, destination = await pair(cluster)

    @destination.on_offer
    async def _(offer: Offer) -> None:
        raise LookupError(offer.stream)

    with pytest.raises(Refused, match="LookupError"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
    assert "on_offer handler failed" in caplog.text


async def test_an_offer_that_nobody_answers_is_refused(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    await cluster.worker("decode-0", config=RuntimeConfig(offer_wait=0.05))
    with pytest.raises(Refused, match="nobody") as refused:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
    assert refused.value.retry_after is not None


async def test_candidates_are_tried_in_order(cluster: Cluster) -> None:
    source, first = await pair(cluster)
    second = await cluster.worker("decode-1")

    @first.on_offer
    async def _(offer: Offer) -> None:
        offer.refuse("full")

    async with second.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            report = await tx.done()
        await rx.done()
    assert (report.peer, report.epoch) == ("decode-1/0", 2)


async def test_default_policy_takes_the_least_loaded_decode_worker(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS) as tx:
            await prefill(tx)
        await rx.done()


async def test_others_see_the_load_of_a_worker(cluster: Cluster) -> None:
    """And not only by renewals, which are 20 s apart here."""
    config = RuntimeConfig(lease_ttl=60)
    source = await cluster.worker("prefill-0", roles=("prefill",), config=config)
    destination = await cluster.worker("decode-0")

    async def until(streams: int) -> None:
        async with asyncio.timeout(5), destination.registry.watch() as changes:
            async for _ in changes:
                record = destination.registry.lookup("prefill-0")
                if record is not None and record.load.streams == streams:
                    return

    async with destination.receive("req-1", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("req-1", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await until(1)
            await prefill(tx)
        await rx.done()
    await until(0)


async def test_default_policy_without_a_fitting_worker(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",), config=RuntimeConfig(connect_timeout=0.1))
    with pytest.raises(Refused, match="found no worker of rank 0"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS):
            pass


@pytest.mark.parametrize("to", ["nobody", None])
async def test_the_wait_for_a_worker_that_is_not_there_is_bounded(cluster: Cluster, to: str | None) -> None:
    """dynamo 10580: the start waited for a worker that was gone. By connect_timeout, and by the stream's deadline."""
    source = await cluster.worker("prefill-0", roles=("prefill",), config=RuntimeConfig(connect_timeout=0.1))
    with pytest.raises(Refused if to is None else UnknownWorker):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=to, deadline=600):
            raise AssertionError
    source = await cluster.worker("prefill-1", roles=("prefill",), config=RuntimeConfig(connect_timeout=600))
    async with asyncio.timeout(20):
        with pytest.raises(DeadlineExceeded, match="while its destination was looked for"):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=to, deadline=0.05):
                raise AssertionError


async def test_source_cancels(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
        with pytest.raises(Cancelled) as cancelled:
            await rx.done()
        assert cancelled.value.valid_layers == (0,)
        with pytest.raises(Cancelled):
            await tx.done()
    await settled(source, destination)


async def test_destination_cancels(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            async for _ in rx:
                break
        with pytest.raises(Cancelled):
            await prefill(tx)
    await settled(source, destination)


async def test_cancelling_the_awaiting_task_ends_the_stream(cluster: Cluster) -> None:
    """A cancelled user task stops the transfer and frees its blocks (LMCache 849)."""
    source, destination = await pair(cluster)

    async def send() -> None:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)

    task = asyncio.create_task(send())
    while not source._streams.core.streams:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source._streams.core.streams == 0
    await settled(source, destination)


@pytest.mark.parametrize("steps", range(12))
async def test_cancellation_at_each_step_of_a_stream(cluster: Cluster, steps: int) -> None:
    """Cancel both users after so many turns of the loop: each side ends once, and nothing is left."""
    source, destination = await pair(cluster)

    async def send() -> None:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0", deadline=0.1) as tx:
            await prefill(tx)

    async def receive() -> None:
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS, deadline=0.1) as rx:
            await rx.done()

    tasks = [asyncio.create_task(receive()), asyncio.create_task(send())]
    for _ in range(steps):
        await asyncio.sleep(0)
    tasks[steps % 2].cancel()
    await asyncio.wait(tasks)
    for task in tasks:
        assert task.cancelled() or isinstance(task.exception(), Cancelled | DeadlineExceeded | None)
    await settled(source, destination)
    assert not destination._streams._written.any()


async def settled(*runtimes: Runtime) -> None:
    """Until the peers have answered each other; the tests' own time-out bounds it."""
    for _ in range(1000):
        if idle(*runtimes):
            return
        await asyncio.sleep(0)
    raise AssertionError("the runtimes did not come to rest")


async def test_deadlines_on_both_sides(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS, deadline=5) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0", deadline=0.05) as tx:
            tx.layer_ready(0)
            with pytest.raises(DeadlineExceeded):
                await rx.done()
            with pytest.raises(DeadlineExceeded, match="3 layers not ready"):
                await tx._report()
    with pytest.raises(DeadlineExceeded, match="no source has offered it"):
        async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS, deadline=0.02) as rx:
            await rx.done()
    await settled(source, destination)


async def test_peer_lost_on_both_sides(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0", config=RuntimeConfig(resume_timeout=0.05))
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            cluster.cut_off(destination)
            cluster.network.break_link(cluster.network.connections[0])
            with pytest.raises(PeerLost, match="decode-0"):
                await tx._report()
            with pytest.raises(PeerLost, match="prefill-0") as lost:
                await rx.done()
            assert lost.value.valid_layers == (0,)
    await settled(source, destination)
    assert source._streams.links._links == {}
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(budget.used == 0 for budget in cluster.budgets.values())


async def test_destination_lost_in_mid_stream_goes_to_the_next(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    fill(source.pool, 1)
    first = await cluster.worker("decode-0", config=RuntimeConfig(resume_timeout=0.05))
    second = await cluster.worker("decode-1")
    async with first.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx1:
        async with second.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx2:
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
                tx.layer_ready(0)
                tx.layer_ready(1)
                await rx1._until(1)
                cluster.cut_off(first)
                cluster.network.break_link(cluster.network.connections[0])
                with pytest.raises(PeerLost):
                    await rx1.done()
                tx.layer_ready(2)
                tx.layer_ready(3)
                report = await tx.done()
            await rx2.done()
    assert (report.epoch, report.peer) == (2, "decode-1/0")
    for layer in range(LAYOUT.layers):
        assert kv_bytes(second.pool, layer, DESTINATION) == kv_bytes(source.pool, layer, SOURCE)


async def test_a_frozen_peer_ends_by_the_stall_timeout(cluster: Cluster) -> None:
    """In progress for ever, because the peer is frozen (nixl PR 2047): the stall time-out ends both sides."""
    config = RuntimeConfig(slots=4, slot_bytes=1024, beat_interval=0.02, stall_timeout=0.1, resume_timeout=0.05)
    source = await cluster.worker("prefill-0", config=config)
    destination = await cluster.worker("decode-0", config=config)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            cluster.cut_off(destination)
            for connection in cluster.network.connections:
                cluster.network.freeze(connection)
            with pytest.raises(PeerLost) as here:
                await tx._report()
            with pytest.raises(PeerLost) as there:
                await rx.done()
            # Whoever counts one beat more is the first to give up; its end is then what the other one hears.
            assert any("silent" in str(error.value) for error in (here, there))


# ---------------------------------------------------------------------- bad input


async def test_bad_values_name_the_field(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    cases: list[tuple[dict[str, object], str]] = [
        ({"blocks": [1, 32], "tokens": 5}, "blocks"),
        ({"blocks": [1, -1], "tokens": 5}, "blocks"),
        ({"blocks": [1, 1], "tokens": 5}, "blocks"),
        ({"blocks": [], "tokens": 5}, "blocks"),
        ({"blocks": [1], "tokens": 5}, "blocks"),
        ({"blocks": [1], "tokens": 0}, "tokens"),
        ({"blocks": [1], "tokens": -3}, "tokens"),
        ({"blocks": [1], "tokens": 4, "deadline": 0}, "deadline"),
        ({"blocks": [1], "tokens": 4, "deadline": float("nan")}, "deadline"),
    ]
    for arguments, field in cases:
        with pytest.raises(ConfigError) as error:
            source.send("r", to="decode-0", **arguments)  # type: ignore[arg-type]
        assert error.value.field == field
        with pytest.raises(ConfigError) as error:
            destination.receive("r", **arguments)  # type: ignore[arg-type]
        assert error.value.field == field
    for name in ("", "x" * 257):
        with pytest.raises(ConfigError) as error:
            source.send(name, blocks=[1], tokens=4)
        assert error.value.field == "stream"
    for to in ([], "a b", ["x", "x"], "decode-0/x"):
        with pytest.raises(ConfigError) as error:
            source.send("r", blocks=[1], tokens=4, to=to)
        assert error.value.field == "to"
    with pytest.raises(ConfigError) as error:
        source.send("r", blocks=[1], tokens=4, metadata=object())
    assert error.value.field == "metadata"
    with pytest.raises(ConfigError) as error:
        destination.receive("r", blocks=[1], tokens=4, first_token=5)._streams.open_receive(
            destination.receive("r", blocks=[1], tokens=4, first_token=5), 5, 1
        )
    assert error.value.field == "first_token"
    assert idle(source, destination)


async def test_unknown_worker(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", config=RuntimeConfig(connect_timeout=0.1))
    with pytest.raises(UnknownWorker, match=r"no worker decode-9/0 is registered; there are prefill-0/0"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-9"):
            pass


async def test_wrong_layout_is_refused_before_anything_moves(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0")
    other = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=8, dtype="float16")
    await cluster.worker("decode-0", layout=other)
    with pytest.raises(LayoutMismatch, match="block_tokens 4 != 8"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
    with pytest.raises(LayoutMismatch):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)


async def test_second_receive_and_second_send_of_an_id(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=[1, 2, 3, 4, 5], tokens=TOKENS):
        with pytest.raises(ConfigError, match="already being received"):
            async with destination.receive("r", blocks=[6, 7, 8, 9, 10], tokens=TOKENS):
                pass
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0"):
            with pytest.raises(ConfigError, match="already being sent"):
                async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0"):
                    pass
    # Once it has ended the id is free again.
    async with destination.receive("r", blocks=[1, 2, 3, 4, 5], tokens=TOKENS):
        pass


async def test_two_live_streams_never_write_one_block(cluster: Cluster) -> None:
    _, destination = await pair(cluster)
    async with destination.receive("r", blocks=[1, 2, 3, 4, 5], tokens=TOKENS):
        with pytest.raises(ConfigError, match="block 5 is being written by another stream"):
            async with destination.receive("s", blocks=[5, 6, 7, 8, 9], tokens=TOKENS):
                pass
    async with destination.receive("s", blocks=[5, 6, 7, 8, 9], tokens=TOKENS):
        pass


async def test_tokens_differ(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    with pytest.raises(ConfigError, match="offered with 18 tokens but received with 17"):
        async with destination.receive("r", blocks=DESTINATION, tokens=17) as rx:
            with pytest.raises(ConfigError, match="offered with 18 tokens but received with 17"):
                async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                    await prefill(tx)
            await rx.done()


async def test_done_before_every_layer_is_ready(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            with pytest.raises(ConfigError, match="layers 1, 2, 3"):
                await tx.done()
            for layer in (1, 2, 3):
                tx.layer_ready(layer)
            await tx.done()
        await rx.done()


async def test_layer_ready_with_bad_values(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE[:2], tokens=TOKENS, to="decode-0", growing=True) as tx:
            for layer, tokens in ((4, None), (-1, None), (0, (0, 19)), (0, (3, 3)), (0, (-1, 3))):
                with pytest.raises(ConfigError):
                    tx.layer_ready(layer, tokens=tokens)
            tx.layer_ready(0, tokens=(0, 18))
            with pytest.raises(ConfigError, match="need 5 blocks, the stream has 2"):
                await tx._report()
            with pytest.raises(ConfigError):
                await rx.done()


async def test_a_source_that_fails_before_it_is_connected_tells_the_destination(cluster: Cluster) -> None:
    """The failure must not stay with the source while the destination waits for its deadline (sglang PR 36108)."""
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0"):
            pass
        async with asyncio.timeout(10):
            with pytest.raises(Cancelled):
                await rx.done()
    await settled(source, destination)


async def test_restart_under_the_same_name_is_a_new_peer(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    await destination.aclose()
    again = await cluster.worker("decode-0")
    assert again.incarnation != destination.incarnation
    async with again.receive("s", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()


async def test_closing_a_runtime_ends_its_streams_on_both_sides(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            tx.layer_ready(0)
            await rx._until(0)
            streams = destination._streams
            await destination.aclose()
            with pytest.raises(Cancelled, match="closing"):
                await rx.done()
            with pytest.raises(Refused, match="closing"):  # elsewhere it might still go
                await tx._report()
    with pytest.raises(Cancelled):
        streams.core.receive(0.0, "x", tokens=1, deadline=1)
    with pytest.raises(ConfigError, match="has been closed"):
        destination.receive("x", blocks=[1], tokens=1)


async def test_use_before_entering() -> None:
    from kvstream import KVPool

    runtime = Runtime("w", pool=KVPool.allocate(LAYOUT, blocks=4))
    with pytest.raises(ConfigError, match="has not been entered"):
        runtime.send("r", blocks=[1], tokens=1)


@pytest.mark.parametrize(
    "arguments", [{"name": "a b"}, {"name": ""}, {"roles": ["x y"]}, {"lanes": "fast"}, {"lanes": []}]
)
def test_bad_runtime_arguments(arguments: dict[str, object]) -> None:
    from kvstream import KVPool

    values: dict[str, object] = {"name": "w", "pool": KVPool.allocate(LAYOUT, blocks=4), **arguments}
    with pytest.raises(ConfigError) as error:
        Runtime(**values)  # type: ignore[arg-type]
    assert error.value.field == next(iter(arguments))


# ---------------------------------------------------------------------- handshake


class Stranger:
    """A peer that speaks the handshake by hand, to say what no runtime would."""

    def __init__(self, cluster: Cluster, source: Runtime, destination: Runtime) -> None:
        self.cluster, self.source, self.destination = cluster, source, destination
        self.frames: asyncio.Queue[wire.Frame] = asyncio.Queue()
        self.lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.sent = 0

    async def dial(self) -> wire.Challenge:
        from kvstream.transport.base import ListenAddress, StagingBudget
        from kvstream.transport.inproc import InprocTransport

        transport = InprocTransport(self.cluster.network, budget=StagingBudget(1 << 20))
        address = msgspec.convert(self.destination.record.address, ListenAddress, from_attributes=True)
        self.connection = await transport.dial(address, ("local",))
        self.connection.start(self._on_message, self.lost.set_result)
        challenge = await self.frames.get()
        assert isinstance(challenge, wire.Challenge)
        return challenge

    def _on_message(self, message: bytes) -> None:
        for frame in wire.decode(message)[1]:
            self.frames.put_nowait(frame)

    def send(self, *frames: wire.Frame) -> None:
        for message in wire.encode(self.sent, frames):
            self.sent += 1
            self.connection.send(message)

    def hello(self, challenge: wire.Challenge, **changes: object) -> wire.Hello:
        me, to = self.source.record, self.destination.record
        hello = wire.Hello(
            wire.VERSION,
            wire.MIN_VERSION,
            me.id,
            me.incarnation,
            to.id,
            to.incarnation,
            b"n" * 16,
            wire.proof(me.key, "hello", challenge.nonce, me.id, me.incarnation, to.incarnation),
            self.destination.pool.layout.fingerprint(),
            msgspec.json.encode(self.destination.pool.layout).decode(),
            (0, 1, 0, 1),
            ["local"],
            self.connection.offer_lanes(("local",), 4, 1024),
        )
        return msgspec.structs.replace(hello, **changes)


async def test_handshake_refusals(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    cases: list[tuple[dict[str, object], str, str]] = [
        ({"version": 99, "min_version": 98}, "protocol", "no common protocol version"),
        ({"version": 0, "min_version": 0}, "protocol", "no common protocol version"),
        ({"target_incarnation": "0" * 32}, "fenced", "look it up again"),
        ({"target": "decode-1/0"}, "fenced", "not here"),
        ({"incarnation": "0" * 32}, "fenced", "is registered as incarnation"),
        ({"proof": b"x" * 32}, "fenced", "proof"),
        ({"fingerprint": "0" * 32, "layout": "{"}, "layout", "can't be read"),
        ({"lane_offer": b"garbage"}, "protocol", ""),
    ]
    for changes, code, text in cases:
        stranger = Stranger(cluster, source, destination)
        challenge = await stranger.dial()
        stranger.send(stranger.hello(challenge, **changes))
        reject = await stranger.frames.get()
        assert isinstance(reject, wire.Reject), (changes, reject)
        assert reject.code == code, (changes, reject)
        assert text in reject.message
        await stranger.connection.fence()
    stranger = Stranger(cluster, source, destination)
    stranger.send_good = stranger.hello(await stranger.dial())  # type: ignore[attr-defined]
    stranger.send(stranger.send_good)  # type: ignore[attr-defined]
    assert isinstance(await stranger.frames.get(), wire.Welcome)
    await stranger.connection.fence()


async def test_a_peer_from_nowhere_is_refused(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0")
    destination = await cluster.worker("decode-0", config=RuntimeConfig(connect_timeout=1.0))
    stranger = Stranger(cluster, source, destination)
    challenge = await stranger.dial()
    stranger.send(stranger.hello(challenge, worker="ghost-0/0"))
    reject = await stranger.frames.get()
    assert isinstance(reject, wire.Reject)
    assert "ghost-0" in reject.message
    await stranger.connection.fence()


@pytest.mark.parametrize(
    "message",
    [b"", b"\x93", msgspec.msgpack.encode([5, []]), msgspec.msgpack.encode([0, [[99, 1]]]), b"\xff" * 100],
)
async def test_garbage_closes_the_connection_and_nothing_else(cluster: Cluster, message: bytes) -> None:
    source, destination = await pair(cluster)
    stranger = Stranger(cluster, source, destination)
    await stranger.dial()
    stranger.connection.send(message)
    await stranger.lost
    assert destination._streams.links.frames_refused == 1
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()


async def test_stale_registry_entry_is_fenced(cluster: Cluster) -> None:
    """A restarted destination is told apart from the one that was meant (nixl PR 2027)."""
    source, destination = await pair(cluster)
    stale = msgspec.structs.replace(destination.record, incarnation="1" * 32)
    source._registry.lookup = lambda worker: stale  # type: ignore[method-assign]
    with pytest.raises(Fenced, match="look it up again"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)


async def test_many_streams_at_once_share_the_slots(cluster: Cluster) -> None:
    """64 concurrent streams through a 2-slot receiver all end (LMCache 1215)."""
    config = RuntimeConfig(slots=2, slot_bytes=1024)
    source = await cluster.worker("prefill-0", blocks=128, config=config)
    destination = await cluster.worker("decode-0", blocks=128, config=config)
    fill(source.pool, 3)
    order = np.random.default_rng(7).permutation(128)

    async def one(number: int) -> None:
        mine, theirs = [2 * number, 2 * number + 1], [int(b) for b in order[2 * number : 2 * number + 2]]
        async with destination.receive(f"r{number}", blocks=theirs, tokens=8) as rx:
            async with source.send(f"r{number}", blocks=mine, tokens=8, to="decode-0") as tx:
                await prefill(tx, number)
            await rx.done()
            assert rx.payload == number
        for layer in range(LAYOUT.layers):
            assert kv_bytes(destination.pool, layer, theirs) == kv_bytes(source.pool, layer, mine)

    await asyncio.gather(*(one(number) for number in range(64)))
    assert idle(source, destination)


async def test_protocol_error_from_a_known_peer_ends_its_streams(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            link = next(iter(source._streams.links._links.values()))
            source._streams.links.transmit(link.id, [wire.Ready(1, 1, 7, 0, 0, 1, 0, 1)])
            with pytest.raises(ProtocolError, match="chunk 7 where"):
                await rx.done()
            with pytest.raises(PeerLost):
                await tx._report()


async def test_a_loopback_listener_of_another_host_is_named(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    address = msgspec.structs.replace(destination.record.address, host_id="elsewhere", scope="loopback")
    elsewhere = msgspec.structs.replace(destination.record, address=address)
    source._registry.lookup = lambda worker: elsewhere  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="decode-0 listens on loopback only; start it with --data-interface"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)


async def test_a_connection_that_is_lost_before_its_first_word_is_a_lost_peer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = await pair(cluster)
    monkeypatch.setattr(Links, "accepted", lambda _, connection: connection.close())
    await cluster.worker("decode-1")
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-1") as tx:
        with pytest.raises(PeerLost):
            await prefill(tx)
