"""What users and dying peers do to a runtime and should not: each a typed end, in time, with nothing left over."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np
import pytest
import xxhash

from kvstream import (
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    Fenced,
    KVLayout,
    KVPool,
    KVStreamError,
    LayoutMismatch,
    Offer,
    PeerLost,
    ProtocolError,
    ReceiveStream,
    Refused,
    Runtime,
    RuntimeConfig,
    wire,
)
from kvstream.discovery import MemoryBroker
from kvstream.discovery.records import encode_record, lease_key
from kvstream.scheduler.commands import Move
from kvstream.transport.base import Connection, StagingBudget
from kvstream.transport.inproc import InprocTransport
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes
from tests.unit.test_runtime import DESTINATION, SOURCE, TOKENS, pair, prefill, settled


async def test_streams_that_were_not_entered(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    tx = source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0")
    rx = destination.receive("r", blocks=DESTINATION, tokens=TOKENS)
    for call in (tx.done, rx.done, lambda: anext(aiter(rx))):
        with pytest.raises(ConfigError, match="has not been entered"):
            await call()
    for act in (tx.cancel, rx.cancel, lambda: tx.layer_ready(0), lambda: tx.extend([1])):
        with pytest.raises(ConfigError, match="has not been entered"):
            act()
    async with rx:
        with pytest.raises(ConfigError, match="entered before"):
            await rx.__aenter__()
        async with tx:
            await prefill(tx)
        with pytest.raises(ConfigError, match="entered before"):
            await tx.__aenter__()


async def test_other_threads_are_told(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE[:2], tokens=TOKENS, to="decode-0", growing=True) as tx:
            for act in (tx.cancel, rx.cancel, lambda: tx.extend([7])):
                with pytest.raises(ConfigError, match="thread"):
                    await asyncio.to_thread(act)
            with pytest.raises(ConfigError, match="thread"):
                await asyncio.to_thread(asyncio.run, destination.receive("s", blocks=[1], tokens=4).__aenter__())
            with pytest.raises(ConfigError, match="would block the event loop"):
                rx.wait_layer(0, 1.0)
            with pytest.raises(ConfigError) as error:
                await asyncio.to_thread(rx.wait_layer, 4, 1.0)
            assert error.value.field == "layer"


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("tokens", ["32", None, 1.5, True, 2**40]),
        ("stream", [None, 5, b"r", ""]),
        ("to", [5, b"d", [None], [], {}]),
        ("deadline", ["x", float("nan"), float("inf"), -1, True]),
        ("priority", ["x", None, 1.5, True, 1001]),
        ("blocks", [None, 5, "abc", [1.5] * 5, ["1"] * 5, np.arange(5.0)]),
    ],
)
async def test_wrong_types_in_send(cluster: Cluster, field: str, values: list[object]) -> None:
    source, _ = await pair(cluster)
    for value in values:
        arguments: dict[str, object] = {
            "stream": "r",
            "blocks": SOURCE,
            "tokens": TOKENS,
            "to": "decode-0",
            field: value,
        }
        with pytest.raises(ConfigError) as error:
            source.send(arguments.pop("stream"), **arguments)  # type: ignore[arg-type]
        assert error.value.field == field, value


@pytest.mark.parametrize("value", [1.5, "x", None, True, -1, TOKENS + 1])
async def test_wrong_first_token(cluster: Cluster, value: object) -> None:
    _, destination = await pair(cluster)
    with pytest.raises(ConfigError) as error:
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS, first_token=value)  # type: ignore[arg-type]
    assert error.value.field == "first_token"


async def test_numbers_of_numpy_are_numbers(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive(
        "r", blocks=np.array(DESTINATION, np.uint64), tokens=np.int32(TOKENS), first_token=np.int64(4)
    ) as rx:
        async with source.send(
            "r", blocks=np.array(SOURCE, np.int16), tokens=np.int64(TOKENS), to="decode-0", priority=np.int8(3)
        ) as tx:
            for layer in np.arange(LAYOUT.layers):
                tx.layer_ready(layer, tokens=(np.int64(0), np.int64(TOKENS)))
            await tx.done()
        await rx.done()


async def test_wrong_arguments_of_layer_ready(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            for layer in ("0", None, 1.0, True):
                with pytest.raises(ConfigError):
                    tx.layer_ready(layer)  # type: ignore[arg-type]
            for tokens in (5, (0,), (0, 1, 2), (0, 16.5), (0.0, 16.0)):
                with pytest.raises(ConfigError):
                    tx.layer_ready(0, tokens=tokens)  # type: ignore[arg-type]
            await prefill(tx)
        await rx.done()


async def test_extend_takes_what_send_takes(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=[], tokens=TOKENS, to="decode-0", growing=True) as tx:
            for blocks in (None, "3", 5, [1.5], []):
                with pytest.raises(ConfigError) as error:
                    tx.extend(blocks)  # type: ignore[arg-type]
                assert error.value.field == "blocks"
            tx.extend(np.array(SOURCE[:2], np.uint64))
            tx.extend(SOURCE[2:])
            with pytest.raises(ConfigError):
                tx.extend([7])
            await prefill(tx)
        await rx.done()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", None), ("name", 5), ("roles", "decode"), ("roles", 5), ("roles", {1}), ("lanes", None), ("lanes", 5),
        ("lanes", "local"), ("shard", 3), ("config", {}), ("pool", None),
    ],
)  # fmt: skip
def test_wrong_types_in_runtime(field: str, value: object) -> None:
    arguments: dict[str, object] = {"name": "w", "pool": KVPool.allocate(LAYOUT, blocks=4), field: value}
    with pytest.raises(ConfigError) as error:
        Runtime(**arguments)  # type: ignore[arg-type]
    assert error.value.field == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("slots", 1.5), ("slots", "8"), ("slots", 0), ("slots", 5000), ("slot_bytes", 2 << 30), ("deadline", "x"),
        ("deadline", float("inf")), ("connect_timeout", float("nan")), ("max_streams", True), ("lease_ttl", None),
        ("lease_ttl", 1.5), ("stall_timeout", 0.1), ("stream_share", 1.5), ("moves", 0), ("patience", -1.0),
        ("share_weights", None), ("share_weights", {"a": 0}), ("share_weights", {1: 1.0}),
        ("share_weights", {"a": True}),
    ],
)  # fmt: skip
def test_wrong_configuration(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as error:
        RuntimeConfig(**{field: value})  # type: ignore[arg-type]
    assert error.value.field == field


def test_wrong_types_in_pools() -> None:
    for call, field in (
        (lambda: KVPool.allocate(None, blocks=4), "layout"),  # type: ignore[arg-type]
        (lambda: KVPool.allocate(LAYOUT, blocks=4, device=None), "device"),  # type: ignore[arg-type]
        (lambda: KVPool.allocate(LAYOUT, blocks=4, device=0), "device"),  # type: ignore[arg-type]
        (lambda: KVPool.wrap(LAYOUT, None), "arrays"),  # type: ignore[arg-type]
        (lambda: KVPool.wrap({}, []), "layout"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert error.value.field == field


async def test_an_offer_is_answered_once(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    seen: list[str] = []

    @destination.on_offer
    async def _(offer: Offer) -> None:
        with pytest.raises(ConfigError):
            offer.refuse("busy", retry_after="soon")  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            offer.accept(blocks=[1, 2])
        assert not offer.answered
        offer.refuse("busy")
        for again in (lambda: offer.refuse("again"), lambda: offer.accept(blocks=DESTINATION)):
            with pytest.raises(ConfigError, match="answered already"):
                again()
        seen.append(offer.stream)

    with pytest.raises(Refused, match="busy"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
    assert seen == ["r"]
    with pytest.raises(ConfigError, match="async def"):
        destination.on_offer(lambda offer: None)  # type: ignore[arg-type,return-value]


async def test_a_handler_that_fails_after_it_accepted(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is there to use the stream: its source must not hear that it is done."""
    source, destination = await pair(cluster)

    @destination.on_offer
    async def _(offer: Offer) -> None:
        offer.accept(blocks=DESTINATION)
        raise LookupError("after")

    with pytest.raises(Refused, match="LookupError"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await tx._report()
    await settled(source, destination)
    assert "on_offer handler failed" in caplog.text


async def test_cancelled_while_leaving_a_receive(cluster: Cluster) -> None:
    """All layers are there and the source has not said done: a cancelled exit still ends the stream."""
    source, destination = await pair(cluster)

    async def receive() -> None:
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            async for _ in rx:
                pass

    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        receiving = asyncio.create_task(receive())
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        while not any(
            isinstance(s, ReceiveStream) and s.layers_arrived == 4 for s in destination._streams._sessions.values()
        ):
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        assert receiving.cancelled()
        with pytest.raises(Cancelled):
            await tx._report()
    assert not destination._streams._written.any()
    await settled(source, destination)


async def test_closing_is_bounded_whatever_a_handler_does(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    source = await cluster.worker("prefill-0")
    destination = await cluster.worker("decode-0", config=RuntimeConfig(close_wait=0.05))
    inside = asyncio.Event()
    release = asyncio.Event()

    @destination.on_offer
    async def _(offer: Offer) -> None:
        inside.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0"):
        await inside.wait()
        async with asyncio.timeout(10):
            await destination.aclose()
    assert "does not end" in caplog.text
    release.set()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_deadline_covers_the_search_for_a_destination(cluster: Cluster) -> None:
    source, _ = await pair(cluster)
    with pytest.raises(DeadlineExceeded, match="looked for"):
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="nobody", deadline=0.05):
            pass


async def test_a_layout_mismatch_reaches_the_one_who_waits(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0")
    other = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=8, dtype="float16")
    destination = await cluster.worker("decode-0", layout=other)
    async with destination.receive("r", blocks=[1, 2, 3], tokens=TOKENS) as rx:
        with pytest.raises(LayoutMismatch):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await prefill(tx)
        async with asyncio.timeout(10):
            with pytest.raises(LayoutMismatch, match="block_tokens"):
                await rx.done()


async def test_what_fails_in_dialing_ends_the_stream_and_not_the_peer(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, destination = await pair(cluster)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda loop, context: None)

    async def broken(*_: object) -> object:
        raise OSError("no descriptors left")

    with monkeypatch.context() as patch:
        patch.setattr(InprocTransport, "dial", broken)
        with pytest.raises(KVStreamError, match="no descriptors left"):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await prefill(tx)
    async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()


async def test_what_fails_in_accepting_reaches_the_dialer(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = await pair(cluster)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

    def broken(*_: object, **__: object) -> bytes:
        raise OSError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr("kvstream.transport.inproc.InprocConnection.accept_lane", broken)
        async with asyncio.timeout(10):
            with pytest.raises(KVStreamError, match="no memory left"):
                async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                    await prefill(tx)
    async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()


async def test_a_replaced_incarnation_gets_no_more_streams(cluster: Cluster) -> None:
    """A frozen worker's name is taken over; its connections must not catch what is meant for the new one."""
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    assert source._streams.links._links
    newer = msgspec.structs.replace(destination.record, incarnation="f" * 32)
    key = lease_key(newer.name, newer.rank)
    async with MemoryBroker(cluster.hub) as broker:
        revision = cluster.hub.snapshot()[key].revision
        await broker.put(key, encode_record(newer), ttl=3.0, revision=revision)
        async with asyncio.timeout(10):
            while source._streams.links._links or source._registry.lookup("decode-0") != newer:
                await asyncio.sleep(0.005)


async def test_a_fenced_runtime_says_so_and_lets_go(cluster: Cluster) -> None:
    config = RuntimeConfig(end_wait=0.01)
    source = await cluster.worker("prefill-0", config=config)
    destination = await cluster.worker("decode-0", config=config)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            destination._on_fenced(Fenced("decode-0/0 is held by another living worker"))
            with pytest.raises(Fenced):
                await rx.done()
            with pytest.raises((Fenced, PeerLost)):
                await tx._report()
    with pytest.raises(Fenced):
        async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS):
            pass
    async with asyncio.timeout(10):
        while destination._streams.links._links:
            await asyncio.sleep(0.005)


async def test_many_threads_report_layers_of_many_streams(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    start = threading.Barrier(3)

    async def one(name: str, mine: list[int], theirs: list[int]) -> None:
        async with destination.receive(name, blocks=theirs, tokens=4) as rx:
            async with source.send(name, blocks=mine, tokens=4, to="decode-0") as tx:

                def engine() -> None:
                    start.wait(5)
                    for layer in range(LAYOUT.layers):
                        tx.layer_ready(layer)

                await asyncio.to_thread(engine)
                await tx.done()
            await rx.done()

    await asyncio.gather(*(one(f"r{n}", [n], [n + 10]) for n in range(3)))


def _failing(error: BaseException) -> object:
    def fail(*_: object) -> object:
        raise error

    return fail


def _failed_future(error: BaseException) -> object:
    def fail(*_: object) -> asyncio.Future[object]:
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        future.set_exception(error)
        return future

    return fail


LEGS: list[tuple[str, object]] = [
    ("kvstream.memory.pool.KVPool.pack", _failing(Corrupted("gather failed"))),
    ("kvstream.memory.pool.KVPool.unpack", _failing(Corrupted("scatter failed"))),
    ("kvstream.transport.inproc.InprocConnection.publish", _failed_future(Corrupted("publish failed"))),
    ("kvstream.transport.inproc.InprocConnection.take", _failed_future(Corrupted("take failed"))),
    ("kvstream.transport.inproc.InprocConnection.check", lambda *_: False),
]


@pytest.mark.parametrize(("leg", "failure"), LEGS, ids=[leg.rpartition(".")[2] for leg, _ in LEGS])
async def test_a_failure_on_any_leg_is_never_an_arrival(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, leg: str, failure: object
) -> None:
    """A failed load must not be reported as success (dynamo 15079, LMCache 4385): the layer is not announced, both
    sides end typed, and what was whole before is named."""
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            monkeypatch.setattr(leg, failure)
            tx.layer_ready(1)
            with pytest.raises(Corrupted):
                await rx.done()
            with pytest.raises(Corrupted):
                await tx._report()
            assert rx.layers_arrived == 1
            with pytest.raises(Corrupted):
                await anext(aiter_from(rx, 1))
    monkeypatch.undo()
    await settled(source, destination)
    async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()


async def aiter_from(rx: ReceiveStream, first: int) -> object:
    """The layers of a stream from `first` on."""
    async for layer in rx:
        if layer >= first:
            yield layer


async def test_checksums_catch_a_flipped_bit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """What changed between the source's gather and the destination's scatter is not announced as arrived."""
    config = RuntimeConfig(slots=4, slot_bytes=1024, checksums=True)
    source = await cluster.worker("prefill-0", config=config)
    destination = await cluster.worker("decode-0")
    fill(source.pool, 1)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    for layer in range(LAYOUT.layers):
        assert kv_bytes(destination.pool, layer, DESTINATION) == kv_bytes(source.pool, layer, SOURCE)
    pack = KVPool.pack

    def flipping(pool: KVPool, layer: int, ids: np.ndarray, out: np.ndarray) -> int:
        size = pack(pool, layer, ids, out)
        asyncio.get_running_loop().call_soon(lambda: out.__setitem__(size // 2, out[size // 2] ^ 1))
        return size

    monkeypatch.setattr(KVPool, "pack", flipping)
    async with destination.receive("s", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("s", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            with pytest.raises(Corrupted, match="checksum"):
                await rx.done()
            with pytest.raises(Corrupted, match="checksum"):
                await tx._report()
            assert rx.layers_arrived == 0


async def test_the_checksum_is_that_of_the_chunk_and_optional(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = await cluster.worker("prefill-0", config=RuntimeConfig(slots=4, slot_bytes=1024, checksums=True))
    destination = await cluster.worker("decode-0")
    fill(source.pool, 1)
    seen: list[int] = []
    moved = type(destination._streams).move

    def note(streams: object, command: Move) -> None:
        seen.append(command.checksum)
        moved(streams, command)  # type: ignore[arg-type]

    monkeypatch.setattr(type(destination._streams), "move", note)
    async with destination.receive("r", blocks=[3], tokens=4) as rx:
        async with source.send("r", blocks=[7], tokens=4, to="decode-0") as tx:
            await prefill(tx)
        await rx.done()
    chunk = b"".join(source.pool.layer(n)[7].tobytes() for n in range(4))
    assert seen == [xxhash.xxh3_64_intdigest(chunk) & (2**63 - 1)]
    async with source.receive("back", blocks=[7], tokens=4) as rx:
        async with destination.send("back", blocks=[3], tokens=4, to="prefill-0") as tx:
            await prefill(tx)
        await rx.done()
    assert seen[1:] == [0]


@pytest.mark.parametrize("count", [1, 12])
async def test_every_receiver_hears_of_a_layout_mismatch(cluster: Cluster, count: int) -> None:
    source = await cluster.worker("prefill-0")
    other = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=8, dtype="float16")
    destination = await cluster.worker("decode-0", layout=other)

    async def receive(number: int) -> None:
        with pytest.raises(LayoutMismatch):
            async with destination.receive(f"r{number}", blocks=[number], tokens=4) as rx:
                await rx.done()

    async def send(number: int) -> None:
        with pytest.raises(LayoutMismatch):
            async with source.send(f"r{number}", blocks=[number], tokens=4, to="decode-0") as tx:
                await prefill(tx)

    async with asyncio.timeout(20):
        await asyncio.gather(*(call(number) for number in range(count) for call in (receive, send)))


async def test_a_receiver_hears_of_another_protocol_version(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = await pair(cluster)
    negotiate = wire.negotiate

    def later(version: int, least: int) -> int:
        """As by a destination of a time to come, in which this source's version is no longer spoken."""
        return negotiate(version, least, ours=wire.VERSION + 2, our_min=wire.MIN_VERSION + 2)

    monkeypatch.setattr(wire, "negotiate", later)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        with pytest.raises(ProtocolError, match="no common protocol version"):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await prefill(tx)
        async with asyncio.timeout(10):
            with pytest.raises(ProtocolError, match="no common protocol version"):
                await rx.done()


async def test_a_receiver_hears_that_no_lane_works(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = await pair(cluster)

    def none(*_: object, **__: object) -> bytes:
        raise ConfigError("lanes", "none works")

    monkeypatch.setattr("kvstream.transport.inproc.InprocConnection.accept_lane", none)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        with pytest.raises(ConfigError, match="none works"):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await prefill(tx)
        async with asyncio.timeout(10):
            with pytest.raises(ConfigError, match="none works"):
                await rx.done()


async def test_long_stream_ids_do_not_cost_the_connection(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0")
    destination = await cluster.worker("decode-0")

    async def one(number: int) -> None:
        name = f"{number:02}" + "\U0001f600" * 254
        async with destination.receive(name, blocks=[number], tokens=4) as rx:
            async with source.send(name, blocks=[number], tokens=4, to="decode-0") as tx:
                await prefill(tx)
            await rx.done()

    await asyncio.gather(*(one(number) for number in range(20)))


@pytest.mark.parametrize(
    ("field", "value"),
    [("deadline", 10**400), ("tokens", 10**5000), ("priority", 10**5000), ("stream", "\ud800")],
    ids=["deadline", "tokens", "priority", "stream"],
)
async def test_absurd_values(cluster: Cluster, field: str, value: object) -> None:
    source, _ = await pair(cluster)
    arguments: dict[str, object] = {"stream": "r", "blocks": SOURCE, "tokens": TOKENS, "to": "decode-0", field: value}
    with pytest.raises(ConfigError) as error:
        source.send(arguments.pop("stream"), **arguments)  # type: ignore[arg-type]
    assert error.value.field == field


async def test_what_fails_in_the_handshake_leaves_no_connection(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = await pair(cluster)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with monkeypatch.context() as patch:
        patch.setattr("kvstream.transport.inproc.InprocConnection.offer_lanes", _failing(ValueError("a bug")))
        with pytest.raises(KVStreamError, match="a bug"):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await prefill(tx)
    assert source._streams.links._links == {}
    for _ in range(100):
        await asyncio.sleep(0)
    assert destination._streams.links._links == {}
    assert all(budget.used == 0 for budget in cluster.budgets.values())


@pytest.mark.parametrize(
    ("says", "error", "words"),
    [
        ("nothing", PeerLost, "closed the connection"),
        ("challenge", PeerLost, "closed the connection"),
        ("garbage", ProtocolError, "undecodable message"),
        ("challenge garbage", ProtocolError, "undecodable message"),
        ("challenge reject", LayoutMismatch, "another layout"),
    ],
)
async def test_a_destination_that_ends_the_handshake_is_an_error_at_once(
    cluster: Cluster, says: str, error: type[KVStreamError], words: str
) -> None:
    """All that it says is read in one go: what ends the connection must not go under behind what came before."""
    source = await cluster.worker("prefill-0", config=RuntimeConfig(connect_timeout=60, stall_timeout=60))
    destination = await cluster.worker("decode-0")
    messages = {
        "nothing": [],
        "challenge": wire.encode(0, [wire.Challenge(wire.VERSION, wire.MIN_VERSION, b"n" * 16)]),
        "garbage": [b""],
        "reject": wire.encode(1, [wire.Reject("layout", "another layout")]),
    }
    transport = InprocTransport(cluster.network, budget=StagingBudget(0))

    def accepted(connection: Connection) -> None:
        connection.start(lambda _: None, lambda _: None)
        for word in says.split():
            for message in messages[word]:
                connection.send(message)
        # Its messages go out with the next turn; the loss follows them.
        asyncio.get_running_loop().call_soon(asyncio.get_running_loop().call_soon, connection.close)

    listening = await transport.start(accepted)
    address = msgspec.structs.replace(destination.record.address, port=listening.port)
    record = msgspec.structs.replace(destination.record, address=address)
    source._registry.lookup = lambda worker: record  # type: ignore[method-assign]
    async with asyncio.timeout(10):
        with pytest.raises(error, match=words):
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                await tx._report()
    await settled(source)
    assert source._streams.links._links == {}
    await transport.aclose()


async def test_closing_twice_at_once_keeps_the_order_of_leaving(cluster: Cluster) -> None:
    source, _ = await pair(cluster)
    assert source._stack is not None
    release = asyncio.Event()
    order: list[str] = []

    async def slow() -> None:
        await release.wait()
        order.append("first")

    source._stack.callback(order.append, "second")
    source._stack.push_async_callback(slow)
    closing = [asyncio.create_task(source.aclose()) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == []
    assert not any(task.done() for task in closing)
    release.set()
    await asyncio.gather(*closing)
    assert order == ["first", "second"]
