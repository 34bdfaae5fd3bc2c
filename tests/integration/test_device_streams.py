"""Streams from GPU to GPU over the get lane of UCX: gathered into staging on the device, lent, got into staging there.

The GPUs are stand-ins whose memory is host memory, which UCX reads as such: everything but CUDA IPC itself is real.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from kvstream import DeadlineExceeded, KVLayout, KVPool, PeerLost, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer
from kvstream.errors import Cancelled, KVStreamError
from kvstream.transport import ucx
from kvstream.transport._worker import Endpoint
from kvstream.transport.base import Lane
from kvstream.transport.ucx import UcxConnection
from tests.fake_cupy import FakeCupy

LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
SOURCE = [5, 2, 9, 30, 1]
DESTINATION = [0, 31, 7, 3, 12]
TOKENS = 18
CONFIG = RuntimeConfig(slots=4, slot_bytes=8192, device_slot_bytes=600, device_staging=16384)
"""Chunks of two blocks, and room for three connections."""

Ends = tuple[Runtime, Runtime]


@asynccontextmanager
async def opened(
    devices: tuple[str, str] = ("cuda:0", "cuda:1"),
    configs: tuple[RuntimeConfig, RuntimeConfig] = (CONFIG, CONFIG),
    lanes: Lane | Any = "auto",
) -> AsyncIterator[Ends]:
    hub = MemoryBrokerServer()
    async with asyncio.timeout(30), AsyncExitStack() as stack:
        ends: list[Runtime] = []
        for name, device, config in zip(("prefill-0", "decode-0"), devices, configs, strict=True):
            broker = await stack.enter_async_context(MemoryBroker(hub))
            pool = KVPool.allocate(LAYOUT, blocks=32, device=device)
            runtime = Runtime(name, roles={"any"}, pool=pool, broker=broker, lanes=lanes, config=config)
            ends.append(await stack.enter_async_context(runtime))
        fill(ends[0].pool, 1)
        yield ends[0], ends[1]


def fill(pool: KVPool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer in range(LAYOUT.layers):
        pool.unpack(layer, np.arange(32), rng.integers(0, 256, 32 * LAYOUT.block_bytes, np.uint8))


def content(pool: KVPool, blocks: list[int]) -> bytes:
    out = np.empty((LAYOUT.layers, len(blocks) * LAYOUT.block_bytes), np.uint8)
    for layer in range(LAYOUT.layers):
        pool.pack(layer, np.array(blocks), out[layer])
    return out.tobytes()


async def stream(ends: Ends, name: str = "r") -> str:
    """One stream, compared byte by byte. Returns its lane."""
    source, destination = ends
    async with (
        destination.receive(name, blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send(name, blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        report = await tx.done()
        await rx.done()
    assert content(destination.pool, DESTINATION) == content(source.pool, SOURCE)
    return report.lane


def paths(*ends: Runtime) -> list[tuple[bool, bool, str]]:
    return [(path.outgoing, path.used, path.why) for end in ends for path in end.stats().devices]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def launches(cupy: FakeCupy, what: str) -> int:
    return sum(name.startswith(what) for name, *_ in cupy.launches)


async def test_bytes_stay_on_the_devices(cupy: FakeCupy) -> None:
    async with opened() as ends:
        cupy.launches.clear()
        assert await stream(ends) == "get"
        for end in ends:
            assert end.stats().device_staging_used == 4 * 1024
            assert end.stats().device_staging_limit == CONFIG.device_staging
        assert paths(*ends) == [(True, True, ""), (False, True, "")]
        # Three chunks a layer, a launch each; and four of each kind by which the bytes are compared.
        assert launches(cupy, "gather") == 3 * LAYOUT.layers + 2 * LAYOUT.layers
        assert launches(cupy, "scatter") == 3 * LAYOUT.layers
        assert not cupy.registered, "the host's slots hold tables only"
        assert all("between GPUs" in connection(end).describe() for end in ends)
    del ends, end
    gc.collect()
    assert cupy.memory_left == 1 << 30


async def test_the_get_lane_alone(cupy: FakeCupy) -> None:
    async with opened(lanes="get") as ends:
        assert await stream(ends) == "get"
        assert paths(*ends) == [(True, True, ""), (False, True, "")]


async def test_slots_are_used_again_and_again(cupy: FakeCupy) -> None:
    async with opened() as ends:
        for n in range(20):
            fill(ends[0].pool, n)
            await stream(ends, f"r{n}")
        assert connection(ends[1]).slots == 4


async def test_several_streams_at_once(cupy: FakeCupy) -> None:
    async with opened() as ends:
        source, destination = ends

        async def one(n: int) -> None:
            mine, theirs = [n, n + 8, n + 16], [31 - n, 15 - n]
            async with (
                destination.receive(f"r{n}", blocks=theirs, tokens=8) as rx,
                source.send(f"r{n}", blocks=mine[:2], tokens=8, to="decode-0") as tx,
            ):
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done()
                await rx.done()
            assert content(destination.pool, theirs) == content(source.pool, mine[:2])

        await asyncio.gather(*(one(n) for n in range(8)))
        assert idle(*ends)


# -- blocks that are lent where they are


LENDING = msgspec.structs.replace(CONFIG, device_lend_bytes=LAYOUT.block_bytes)


async def test_large_blocks_are_not_gathered(cupy: FakeCupy) -> None:
    async with opened(configs=(LENDING, CONFIG)) as ends:
        await stream(ends, "warm")
        cupy.launches.clear()
        await stream(ends)
        assert launches(cupy, "gather") == 2 * LAYOUT.layers  # by which the bytes are compared
        assert launches(cupy, "scatter") == 3 * LAYOUT.layers


async def test_neighbours_are_read_as_one(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    config = msgspec.structs.replace(CONFIG, device_lend_bytes=2 * LAYOUT.block_bytes)
    gets: list[int] = []
    get_all = Endpoint.get_all

    def counted(self: Endpoint, wanted: Any, done: Any) -> None:
        gets.append(len(wanted))
        get_all(self, wanted, done)

    monkeypatch.setattr(Endpoint, "get_all", counted)
    async with opened(configs=(config, config)) as ends:
        await stream(ends, "warm")
        source, destination = ends
        for mine, gathers in (([4, 5, 8, 9], 0), ([4, 6, 9, 8], 2 * LAYOUT.layers)):
            async with (
                destination.receive("r", blocks=[3, 2, 1, 0], tokens=16) as rx,
                source.send("r", blocks=mine, tokens=16, to="decode-0") as tx,
            ):
                gets.clear()
                cupy.launches.clear()
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done()
                await rx.done()
                assert gets == [1] * 2 * LAYOUT.layers
                assert launches(cupy, "gather") == gathers
            assert content(destination.pool, [3, 2, 1, 0]) == content(source.pool, mine)


@pytest.mark.parametrize("lanes", ["auto", "get"])
async def test_device_blocks_are_not_lent_to_a_host(cupy: FakeCupy, lanes: Any) -> None:
    config = msgspec.structs.replace(LENDING, lend_bytes=64, get_lend_bytes=64)
    async with opened(("cuda:0", "cpu"), (config, config), lanes) as ends:
        await stream(ends)


async def test_memory_that_can_not_be_shared_is_gathered(cupy: FakeCupy) -> None:
    cupy.shares_pools = False
    async with opened(configs=(LENDING, CONFIG)) as ends:
        cupy.launches.clear()
        assert await stream(ends) == "get"
        assert launches(cupy, "gather") == 3 * LAYOUT.layers + 2 * LAYOUT.layers


async def test_blocks_reused_while_they_are_read_do_not_count(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(configs=(LENDING, CONFIG)) as ends:
        await stream(ends, "warm")
        source, destination = ends
        borrow = UcxConnection.borrow
        reading = asyncio.Event()

        def borrowed(self: UcxConnection, lent: Any, local: Any) -> asyncio.Future[None]:
            if not reading.is_set():
                reading.set()
                tx.cancel()
                assert not tx.lent, "taken back before the user heard of the end"
            return borrow(self, lent, local)

        monkeypatch.setattr(UcxConnection, "borrow", borrowed)
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                tx.layer_ready(0)
                with pytest.raises(Cancelled):
                    await tx._report()
            with pytest.raises(Cancelled):
                await rx.done()
        assert not rx.layers_arrived
        await until(lambda: idle(*ends))
        await stream(ends, "after")


# -- by way of the host


@pytest.mark.parametrize(
    ("devices", "changes", "lane", "why"),
    [
        (("cuda:0", "cpu"), ({}, {}), "shared", None),
        (("cpu", "cuda:0"), ({}, {}), "shared", None),
        (("cuda:0", "cuda:1"), ({"device_staging": 0}, {}), "shared", None),
        (("cuda:0", "cuda:1"), ({}, {"device_staging": 0}), "shared", "the peer is on another host, or has no"),
        (("cuda:0", "cuda:1"), ({}, {"device_staging": 4096}), "shared", "(device_staging)"),
        (("cuda:0", "cuda:1"), ({"device_staging": 4096}, {}), "shared", "(device_staging)"),
        (("cuda:0", "cuda:1"), ({"slot_bytes": 2048}, {}), "shared", "can't lend"),
        (("cuda:0", "cuda:1"), ({"checksums": True}, {}), "shared", None),
        (("cuda:0", "cuda:1"), ({}, {"checksums": True}), "shared", "the peer is on another host, or has no"),
    ],
)
async def test_where_either_side_can_not(
    cupy: FakeCupy, devices: tuple[str, str], changes: tuple[Any, Any], lane: str, why: str | None
) -> None:
    configs = tuple(msgspec.structs.replace(CONFIG, **change) for change in changes)
    async with opened(devices, (configs[0], configs[1])) as ends:
        assert await stream(ends) == lane
        found = paths(*ends)
        assert not any(used for _, used, _ in found)
        assert (why or "") in "".join(reason for *_, reason in found)
        assert [end.stats().device_staging_used for end in ends] == [0, 0]


async def test_no_memory_for_staging(cupy: FakeCupy) -> None:
    cupy.memory_left = 0
    async with opened() as ends:
        assert await stream(ends) == "shared"
        assert ends[0].stats().device_staging_limit == 0


async def test_who_comes_when_the_staging_is_used_up(cupy: FakeCupy) -> None:
    async with opened() as ends:
        slab = ends[1]._streams.links.devices._slab
        assert slab is not None
        held = [slab.lease(4, 1024) for _ in range(3)]
        assert await stream(ends, "a") == "shared"
        assert all("(device_staging)" in why for _, _, why in paths(*ends))
        for lease in held:
            assert lease is not None
            lease.end()
        ends[0]._streams.drop_links(Cancelled("anew"))
        await until(lambda: not paths(*ends))
        assert await stream(ends, "b") == "get"


@pytest.mark.parametrize("lanes", ["auto", "get"])
@pytest.mark.parametrize("how", ["fails", "hangs", "wrong", "not carried", "device fails"])
async def test_a_sample_that_can_not_be_read(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, how: str, lanes: Any
) -> None:
    pending: list[asyncio.Future[None]] = []

    def try_device(self: UcxConnection, offer: bytes, address: int) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if how == "fails":
            future.set_exception(PeerLost("no such memory"))
        elif how == "wrong":
            future.set_result(None)
        pending.append(future)
        return future

    def fetch(self: KVPool, staged: Any) -> Any:
        raise KVStreamError("no such copy")

    if how == "not carried":
        monkeypatch.setattr(ucx, "_HOST_READS", frozenset({"cma2"}))
        monkeypatch.setattr(UcxConnection, "_carried_lanes", lambda _: {"shared": "", "get": "", "put": "no"})
    elif how == "device fails":
        monkeypatch.setattr(KVPool, "fetch", fetch)
    else:
        monkeypatch.setattr(UcxConnection, "try_device", try_device)
    config = msgspec.structs.replace(CONFIG, connect_timeout=0.5)
    words = {
        "fails": "no such memory",
        "hangs": "within 0.25 s",
        "wrong": "not the peer's memory",
        "not carried": "which can't read the memory of the peer's GPU",
        "device fails": "no such copy",
    }[how]
    async with opened(lanes=lanes, configs=(config, config)) as ends:
        assert await stream(ends) == ("shared" if lanes == "auto" else "get")
        assert [used for _, used, _ in paths(*ends)] == [False, False]
        assert all(words in why for *_, why in paths(*ends))
        # What may still be written to stays taken.
        assert ends[0].stats().device_staging_used == 0
        assert ends[1].stats().device_staging_used == (4096 if how == "hangs" else 0)
        if how == "hangs":
            pending[0].set_result(None)
            await until(lambda: ends[1].stats().device_staging_used == 0)


async def test_chunks_too_small_to_be_lent(cupy: FakeCupy) -> None:
    small = KVLayout(layers=2, kv_heads=1, head_dim=4, block_tokens=1, dtype="uint8")
    hub = MemoryBrokerServer()
    async with (
        asyncio.timeout(30),
        MemoryBroker(hub) as one,
        MemoryBroker(hub) as two,
        Runtime("a", pool=KVPool.allocate(small, blocks=4, device="cuda:0"), broker=one, config=CONFIG) as source,
        Runtime("b", pool=KVPool.allocate(small, blocks=4, device="cuda:1"), broker=two, config=CONFIG) as target,
    ):
        given = np.arange(16, dtype=np.uint8)
        source.pool.unpack(0, np.array([1, 2]), given)
        async with (
            target.receive("r", blocks=[3, 0], tokens=2) as rx,
            source.send("r", blocks=[1, 2], tokens=2, to="b") as tx,
        ):
            tx.layer_ready(0)
            tx.layer_ready(1)
            assert (await tx.done()).lane == "get"
            await rx.done()
        out = np.empty(16, np.uint8)
        target.pool.pack(0, np.array([3, 0]), out)
        assert out.tobytes() == given.tobytes()
        assert paths(source) == [(True, True, "")]


# -- what goes wrong on the way


async def test_the_device_is_the_current_one_wherever_ucx_works(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvstream.transport import _ucp

    seen: dict[str, set[int | None]] = {}

    def watched(name: str) -> None:
        original = getattr(_ucp.Ucp, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.setdefault(name, set()).add(cupy.current)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(_ucp.Ucp, name, call)

    for name in ("get_all", "unpack_rkey", "map_memory"):
        watched(name)
    progress: set[int | None] = set()
    load = _ucp.load

    def loaded() -> _ucp.Ucp:
        ucp = load()
        step = ucp.worker_progress

        def stepped(worker: int) -> int:
            progress.add(cupy.current)
            return step(worker)

        ucp.worker_progress = stepped
        return ucp

    monkeypatch.setattr(_ucp, "load", loaded)
    async with opened() as ends:
        await stream(ends)
        assert seen["get_all"] == {1}
        assert seen["unpack_rkey"] == {1}
        assert seen["map_memory"] <= {0, 1}
        assert progress == {None, 0, 1}, "the worker that speaks TCP has nothing to do with the device"
        assert cupy.current is None


async def test_a_deadline_while_the_device_is_busy(cupy: FakeCupy) -> None:
    async with opened() as ends:
        await stream(ends, "warm")
        source, destination = ends
        before = content(destination.pool, DESTINATION)
        fill(source.pool, 2)
        event = passed(cupy)
        cupy.hold()
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            with pytest.raises(DeadlineExceeded):
                async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0", deadline=0.2) as tx:
                    for layer in range(LAYOUT.layers):
                        tx.layer_ready(layer, event=event)
                    await tx._report()
            cupy.release()
            with pytest.raises(KVStreamError):
                await rx.done()
        await until(lambda: idle(*ends))
        assert content(destination.pool, DESTINATION) == before
        await stream(ends, "after")


@pytest.mark.parametrize("who", ["source", "destination"])
async def test_cancelled_at_every_step(cupy: FakeCupy, who: str) -> None:
    config = msgspec.structs.replace(CONFIG, offer_wait=0.2)
    async with opened(configs=(config, config)) as ends:
        await stream(ends, "warm")
        source, destination = ends
        for step in range(24):
            fill(source.pool, step)
            async with destination.receive(f"r{step}", blocks=DESTINATION, tokens=TOKENS) as rx:
                async with source.send(f"r{step}", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                    for layer in range(LAYOUT.layers):
                        tx.layer_ready(layer)
                    for _ in range(2 * step):
                        await asyncio.sleep(0)
                    (tx if who == "source" else rx).cancel()
                    for end in (tx, rx):
                        with contextlib.suppress(KVStreamError):
                            await end._report()
            await until(lambda: idle(*ends))
        await stream(ends, "after")
        assert connection(source).lane == "get"


async def test_a_connection_lost_while_the_device_copies(cupy: FakeCupy) -> None:
    # The stream does not come back by a new connection, which would have staging of its own.
    config = msgspec.structs.replace(CONFIG, max_reroutes=0, resume_timeout=0.01)
    async with opened(configs=(config, config)) as ends:
        await stream(ends, "warm")
        source, destination = ends
        event = passed(cupy)
        cupy.hold()
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer, event=event)
                await until(lambda: source._streams.core.slots_in_use > 0)
                source._streams.drop_links(PeerLost("cut"))
                with pytest.raises(PeerLost):
                    await tx._report()
            with pytest.raises(KVStreamError):
                await rx.done()
        await until(lambda: destination.stats().device_staging_used == 0)
        # The gathers still write to the source's slots.
        assert source.stats().device_staging_used == 4096
        cupy.release()
        await until(lambda: source.stats().device_staging_used == 0 and idle(*ends))
        assert await stream(ends, "after") == "get"


async def test_a_device_that_fails(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstream.memory.cuda._LOOK_SECONDS", 0.05)
    async with opened() as ends:
        await stream(ends, "warm")
        source, destination = ends
        async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
            async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
                cupy.fail()
                with pytest.raises(KVStreamError, match="700"):
                    tx.layer_ready(0)
                tx.layer_ready(0, event=999)
                with pytest.raises(KVStreamError):
                    await tx._report()
            with pytest.raises(KVStreamError):
                await rx.done()
        cupy._error = 0


async def test_a_slot_that_is_overwritten_while_it_is_read(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source gives its chunk up and gathers the next one into the slot that the destination is reading."""
    async with opened() as ends:
        await stream(ends, "warm")
        source, destination = ends
        borrow = UcxConnection.borrow

        def borrowed(self: UcxConnection, lent: Any, local: Any) -> asyncio.Future[None]:
            future = borrow(self, lent, local)
            connection(source).write_view(0)
            return future

        monkeypatch.setattr(UcxConnection, "borrow", borrowed)
        async with (
            destination.receive("r", blocks=DESTINATION, tokens=TOKENS, deadline=1.0) as rx,
            source.send("r", blocks=SOURCE[:2], tokens=8, to="decode-0", deadline=1.0) as tx,
        ):
            tx.layer_ready(0)
            with pytest.raises(KVStreamError):
                await rx.done()
        assert not rx._layer_times[0]


# -- helpers


def passed(cupy: FakeCupy) -> Any:
    """An event that the device has passed, whatever becomes of the device."""
    with cupy.cuda.Device(0):
        return cupy.cuda.Event()


def connection(end: Runtime) -> Any:
    (link,) = end._streams.links._links.values()
    return link.connection


def idle(*ends: Runtime) -> bool:
    return all(
        end._streams.core.idle and end._streams.core.slots_in_use == 0 and end._streams._copies.idle for end in ends
    )
