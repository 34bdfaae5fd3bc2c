"""Streams between pools on a GPU (a stand-in, which can be held): events, slots, and blocks that the device writes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstream import (
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    KVPool,
    KVStreamError,
    Runtime,
    RuntimeConfig,
)
from tests.conftest import LAYOUT, Cluster
from tests.fake_cupy import FakeCupy

SOURCE = [5, 2, 9, 30, 1]
DESTINATION = [0, 31, 7, 3, 12]
TOKENS = 18


def host(pool: KVPool, layer: int) -> Any:
    """The bytes of a layer, wherever they are, (blocks, block_bytes)."""
    return np.asarray(pool.layer(layer)).view(np.uint8).reshape(pool.blocks, -1)


def fill(pool: KVPool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for layer in range(LAYOUT.layers):
        view = host(pool, layer)
        view[...] = rng.integers(0, 256, view.shape, np.uint8)


async def pair(cluster: Cluster, source: str = "cuda:0", destination: str = "cuda:1") -> tuple[Runtime, Runtime]:
    config = RuntimeConfig(slots=4, slot_bytes=1024, end_wait=0.2)
    pools = [KVPool.allocate(LAYOUT, blocks=32, device=device) for device in (source, destination)]
    fill(pools[0], 1)
    return (
        await cluster.worker("prefill-0", roles=("prefill",), pool=pools[0], config=config),
        await cluster.worker("decode-0", pool=pools[1], config=config),
    )


def idle(*runtimes: Runtime) -> bool:
    streams = [r._streams_or_none for r in runtimes if r._streams_or_none is not None]
    return all(s.core.idle and s.core.slots_in_use == 0 and s._copies.idle and not s._written.any() for s in streams)


async def settled(*runtimes: Runtime) -> None:
    async with asyncio.timeout(5):
        while not idle(*runtimes):
            await asyncio.sleep(0.001)


async def turns(n: int = 50) -> None:
    for _ in range(n):
        await asyncio.sleep(0.0005)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


async def until_scattering(cupy: FakeCupy, rx: Any) -> None:
    await until(lambda: rx._streams._copies._writing)


def recorded(cupy: FakeCupy, device: int = 0) -> tuple[Any, Any]:
    """An engine's stream, and an event on it."""
    with cupy.cuda.Device(device):
        stream = cupy.cuda.Stream(non_blocking=True)
        return stream, stream.record(cupy.cuda.Event())


def same(source: Runtime, destination: Runtime, layer: int) -> bool:
    return host(source.pool, layer)[SOURCE].tobytes() == host(destination.pool, layer)[DESTINATION].tobytes()


class Late:
    """An event that has been recorded and passes when the test says so."""

    def __init__(self, cupy: FakeCupy) -> None:
        self._cupy = cupy
        with cupy.cuda.Device(0):
            self.event = cupy.cuda.Event()
        cupy._events[self.event.ptr] = 1

    def let_pass(self) -> None:
        self._cupy._events[self.event.ptr] = 0
        self._cupy.hold()
        self._cupy.release()


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cpu", "cuda:0")])
@pytest.mark.parametrize("checksums", [False, True])
async def test_a_stream_is_byte_exact(
    cluster: Cluster, cupy: FakeCupy, devices: tuple[str, str], checksums: bool
) -> None:
    config = RuntimeConfig(slots=4, slot_bytes=1024, checksums=checksums)
    pools = [KVPool.allocate(LAYOUT, blocks=32, device=device) for device in devices]
    fill(pools[0], 1)
    source = await cluster.worker("prefill-0", roles=("prefill",), pool=pools[0], config=config)
    destination = await cluster.worker("decode-0", pool=pools[1], config=config)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        report = await tx.done({"first": 1})
        seen = [layer async for layer in rx]
        arrived = await rx.done()
    assert seen == [0, 1, 2, 3]
    assert all(same(source, destination, layer) for layer in range(LAYOUT.layers))
    assert report.bytes == arrived.bytes == LAYOUT.layers * 5 * LAYOUT.block_bytes
    others = [block for block in range(32) if block not in DESTINATION]
    assert not any(host(destination.pool, layer)[others].any() for layer in range(LAYOUT.layers))
    await settled(source, destination)
    assert len(cupy.registered) == 1, "the staging of the one connection, page-locked once"


async def test_staging_is_page_locked_as_long_as_its_connection(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        tx.layer_ready(0)
        await anext(aiter(rx))
        assert len(cupy.registered) == 1
    await settled(source, destination)
    await source.aclose()
    await destination.aclose()
    assert not cupy.registered


async def test_a_layer_goes_when_its_event_has_passed(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    late = Late(cupy)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        tx.layer_ready(0, event=late.event)
        tx.layer_ready(1)
        await turns()
        assert rx.layers_arrived == 0
        assert not cupy.launches
        late.let_pass()
        await rx._until(1)
        tx.layer_ready(2, event=recorded(cupy)[1])
        _, handle = recorded(cupy)
        tx.layer_ready(3, event=handle.ptr)
        await tx.done()
        await rx.done()
    assert all(same(source, destination, layer) for layer in range(LAYOUT.layers))


async def test_nothing_on_the_loop_waits_for_the_device(
    cluster: Cluster, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, destination = await pair(cluster)

    def refuse(self: object) -> None:
        raise AssertionError("synchronised with the device")

    monkeypatch.setattr(cupy.cuda.Stream, "synchronize", refuse)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        cupy.hold()
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer, event=recorded(cupy)[1])
        await turns()
        assert rx.layers_arrived == 0
        cupy.release()
        await tx.done()
        await rx.done()
    assert all(same(source, destination, layer) for layer in range(LAYOUT.layers))


async def test_a_layer_that_is_not_ready_takes_no_slot_from_others(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    late = Late(cupy)
    async with (
        destination.receive("slow", blocks=DESTINATION, tokens=TOKENS) as slow,
        source.send("slow", blocks=SOURCE, tokens=TOKENS, to="decode-0") as slow_tx,
    ):
        for layer in range(LAYOUT.layers):
            slow_tx.layer_ready(layer, event=late.event)
        await turns()
        async with (
            destination.receive("quick", blocks=[20, 21, 22, 23, 24], tokens=TOKENS) as rx,
            source.send("quick", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
        ):
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer, event=recorded(cupy)[1])
            async with asyncio.timeout(5):
                await tx.done()
                await rx.done()
        assert slow.layers_arrived == 0
        late.let_pass()
        await slow_tx.done()
        await slow.done()


async def test_without_an_event_the_default_stream_is_waited_for(cluster: Cluster, cupy: FakeCupy) -> None:
    """An engine that launches on the default stream and calls layer_ready at once, from its own thread."""
    source, destination = await pair(cluster)
    expected = host(source.pool, 0).copy() ^ 0xFF
    computing = Late(cupy)

    def engine() -> None:
        memory = host(source.pool, 0)
        default = cupy.cuda.get_current_stream()
        cupy._put(default, computing.event.ptr)
        cupy._put(default, lambda: np.bitwise_xor(memory, 0xFF, out=memory) is None)
        tx.layer_ready(0)

    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        await turns()
        computing.let_pass()
        assert await anext(aiter(rx)) == 0
        assert host(destination.pool, 0)[DESTINATION].tobytes() == expected[SOURCE].tobytes()


async def test_blocks_are_written_after_what_the_device_had_to_do_before(cluster: Cluster, cupy: FakeCupy) -> None:
    """A kernel of the block's former user may still be queued when the block is handed to receive()."""
    source, destination = await pair(cluster, "cpu", "cuda:1")
    memory = host(destination.pool, 0)
    computing = Late(cupy)
    default = cupy.cuda.get_current_stream()
    cupy._put(default, computing.event.ptr)
    cupy._put(default, lambda: memory.fill(0xAA))
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        tx.layer_ready(0)
        await until_scattering(cupy, rx)
        await turns()
        computing.let_pass()
        assert await anext(aiter(rx)) == 0
        assert same(source, destination, 0)


async def test_a_slot_that_is_reused_while_the_device_reads_it(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster, "cpu", "cuda:1")
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            cupy.hold()
            tx.layer_ready(0)
            await until_scattering(cupy, rx)
            staging = cluster.network.connections[0].link.staging
            assert staging is not None
            staging.generations[:] = [99] * len(staging.generations)
            cupy.release()
            with pytest.raises(Corrupted, match=r"took slot .* back"):
                await rx.done()
            with pytest.raises(Corrupted):
                await tx._report()
    await settled(source, destination)


async def test_an_event_for_a_layer(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        with pytest.raises(ConfigError, match=r"^layer: 0 has not arrived"):
            rx.layer_event(0)
        tx.layer_ready(0)
        assert await anext(aiter(rx)) == 0
        event = rx.layer_event(0)
        assert event.ptr > 0 and event.done
        assert event is not rx.idle_after
        with pytest.raises(ConfigError, match=r"^layer: "):
            rx.layer_event(4)


async def test_an_event_for_a_layer_that_was_there_already(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS, first_token=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        assert await anext(aiter(rx)) == 0
        assert rx.layer_event(0).ptr > 0
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done()


async def test_on_the_cpu_there_are_no_events(cluster: Cluster) -> None:
    source, destination = await pair(cluster, "cpu", "cpu")
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        with pytest.raises(ConfigError, match=r"^event: is a GPU's, but the pool is on the cpu"):
            tx.layer_ready(0, event=7)
        tx.layer_ready(0, event=None)
        assert await anext(aiter(rx)) == 0
        with pytest.raises(ConfigError, match="use wait_layer"):
            rx.layer_event(0)


@pytest.mark.parametrize("event", ["soon", SimpleNamespace(cuda_event=0)])
async def test_what_is_no_event_is_told_to_the_caller(cluster: Cluster, cupy: FakeCupy, event: Any) -> None:
    source, destination = await pair(cluster)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS),
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        with pytest.raises(ConfigError, match=r"^event: "):
            tx.layer_ready(0, event=event)
        assert not tx.ended


async def test_an_event_that_never_passes(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    late = Late(cupy)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0", deadline=0.1) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer, event=late.event)
            with pytest.raises(DeadlineExceeded, match="4 layers not ready"):
                await tx.done()
        with pytest.raises(DeadlineExceeded):
            await rx.done()
    await settled(source, destination)
    late.let_pass()
    cupy.settle()
    await turns()


async def test_an_event_that_comes_after_the_end_is_not_waited_for(cluster: Cluster, cupy: FakeCupy) -> None:
    """The engine's thread does not know that the stream was left meanwhile."""
    source, _ = await pair(cluster)
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        pass
    _, event = recorded(cupy)
    tx.layer_ready(0, event=event)
    tx.layer_ready(1)
    await turns(5)
    assert tx._awaited is None and not tx._marks


async def test_a_wait_for_an_event_that_is_cancelled(cluster: Cluster, cupy: FakeCupy) -> None:
    """Cancelling done() leaves the stream as it is."""
    source, destination = await pair(cluster)
    late = Late(cupy)
    async with (
        destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx,
        source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
    ):
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer, event=late.event)
        task = asyncio.create_task(tx.done())
        await turns(5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        late.let_pass()
        await tx.done()
        await rx.done()
    assert all(same(source, destination, layer) for layer in range(LAYOUT.layers))


async def test_a_gpu_that_fails_ends_its_streams(
    cluster: Cluster, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstream.memory.cuda._LOOK_SECONDS", 0.01)
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            cupy.hold()
            tx.layer_ready(0, event=recorded(cupy)[1])
            await turns(5)
            cupy.fail()
            with pytest.raises(KVStreamError, match="700"):
                await tx._report()
        with pytest.raises(KVStreamError):
            await rx.done()
    await settled(source, destination)


async def test_an_end_waits_for_what_the_device_writes(
    cluster: Cluster, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination's GPU is held while a scatter is queued: its blocks are not free before it is over."""
    source, destination = await pair(cluster, "cpu", "cuda:1")
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        rx = destination.receive("r", blocks=DESTINATION, tokens=TOKENS)
        await rx.__aenter__()
        cupy.hold()
        tx.layer_ready(0)
        await until_scattering(cupy, rx)
        leaving = asyncio.create_task(rx.__aexit__(None, None, None))
        await turns()
        assert not leaving.done() and not rx.ended
        other = destination.receive("s", blocks=DESTINATION[:1], tokens=1)
        with pytest.raises(ConfigError, match="is being written by another stream"):
            await other.__aenter__()
        cupy.release()
        async with asyncio.timeout(5):
            await leaving
        assert rx.ended
        with pytest.raises(Cancelled):
            await rx.done()
        cupy.settle()
        before = host(destination.pool, 0).copy()
        await turns()
        assert np.array_equal(host(destination.pool, 0), before)
        with pytest.raises(Cancelled):
            await tx._report()
    await settled(source, destination)


async def test_leaving_that_is_cancelled_while_the_device_writes(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster, "cpu", "cuda:1")
    async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
        rx = destination.receive("r", blocks=DESTINATION, tokens=TOKENS)
        await rx.__aenter__()
        cupy.hold()
        tx.layer_ready(0)
        await until_scattering(cupy, rx)
        leaving = asyncio.create_task(rx.__aexit__(None, None, None))
        await turns(5)
        leaving.cancel()
        await turns(5)
        assert not leaving.done() and not rx.ended, "the device still writes the blocks"
        cupy.release()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await leaving
        assert rx.ended
    await settled(source, destination)


async def test_the_source_leaves_while_the_device_reads(cluster: Cluster, cupy: FakeCupy) -> None:
    """What was read is thrown away; the slots come back."""
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            late = Late(cupy)
            cupy._put(source.pool._ops._gathers.stream, late.event.ptr)
            before = len(cupy.launches)
            tx.layer_ready(1)
            await until(lambda: len(cupy.launches) > before)
        assert tx.ended
        with pytest.raises(Cancelled):
            await rx.done()
        assert not idle(source), "the device still fills a slot"
        late.let_pass()
    await settled(source, destination)
    assert tx.moved_bytes == 5 * LAYOUT.block_bytes


@pytest.mark.parametrize("lost", [False, True])
async def test_closing_waits_for_what_the_device_writes(cluster: Cluster, cupy: FakeCupy, lost: bool) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            tx.layer_ready(0)
            await rx._until(0)
            late = Late(cupy)
            cupy._put(destination.pool._ops._scatters.stream, late.event.ptr)
            tx.layer_ready(1)
            await until_scattering(cupy, rx)
            if lost:
                # Then the stream is suspended, for its source to come back to, which has to wait for the device too.
                cluster.network.break_link(cluster.network.connections[0])
                await turns(5)
            closing = asyncio.create_task(destination.aclose())
            await turns(100)
            assert not closing.done() and not rx.ended
            late.let_pass()
            async with asyncio.timeout(5):
                await closing
            assert rx.ended
            with pytest.raises(Cancelled):
                await rx.done()
            with pytest.raises(KVStreamError):
                await tx._report()


async def test_closing_while_the_device_reads(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster)
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            late = Late(cupy)
            cupy._put(source.pool._ops._gathers.stream, late.event.ptr)
            tx.layer_ready(0)
            await until(lambda: bool(cupy.launches))
            async with asyncio.timeout(5):
                await source.aclose()
            assert tx.ended
            with pytest.raises(KVStreamError):
                await rx.done()
            late.let_pass()
            cupy.settle()
            await turns()


async def test_a_source_that_is_lost_while_the_device_writes(cluster: Cluster, cupy: FakeCupy) -> None:
    source, destination = await pair(cluster, "cpu", "cuda:1")
    async with destination.receive("r", blocks=DESTINATION, tokens=TOKENS) as rx:
        async with source.send("r", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx:
            cupy.hold()
            tx.layer_ready(0)
            await until_scattering(cupy, rx)
            cluster.cut_off(destination)
            cluster.network.break_link(cluster.network.connections[0])
            await until(lambda: tx.ended)
            assert not rx.ended
            cupy.release()
            async with asyncio.timeout(5):
                with pytest.raises(KVStreamError):
                    await rx.done()
    await settled(source, destination)
