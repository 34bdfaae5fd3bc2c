"""Pools on a GPU: the order of what runs there, who may use which buffer when, and what the loop hears of it.

The device is a stand-in that runs on a thread of its own and can be held; on the event loop nothing may wait for it.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import mmap
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvstream.errors import ConfigError, Corrupted, KVStreamError
from kvstream.layout import KVLayout
from kvstream.memory import KVPool, cuda
from kvstream.memory.completion import COMPLETED, Completion
from kvstream.memory.cuda import event_handle
from tests.fake_cupy import FakeCupy, OnDevice

LAYOUT = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
IDS = np.array([3, 1, 6])
NBYTES = len(IDS) * LAYOUT.block_bytes


@pytest.fixture
def pool(cupy: FakeCupy) -> KVPool:
    return KVPool.allocate(LAYOUT, blocks=8, device="cuda:1")


def data(seed: int) -> Any:
    return np.random.default_rng(seed).integers(0, 256, NBYTES, np.uint8)


def area(nbytes: int = NBYTES) -> Any:
    return np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)


async def over(completion: Completion) -> KVStreamError | None:
    async with asyncio.timeout(5):
        done = asyncio.Event()
        completion.add_done_callback(lambda _: done.set())
        await done.wait()
    return completion.error()


# --- order and completion


async def test_copies_are_issued_and_end_later(cupy: FakeCupy, pool: KVPool) -> None:
    written, read = data(1), np.zeros(NBYTES, np.uint8)
    cupy.hold()
    scatter = pool.unpack_async(0, IDS, written)
    gather = pool.pack_async(0, IDS, read, after=scatter.event)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not scatter.done() and not gather.done()
    assert not read.any()
    cupy.release()
    await gather
    await scatter
    assert scatter.done() and scatter.error() is None
    assert np.array_equal(read, written)
    assert cupy.current is None
    assert cupy.host_functions == 2, "one for each copy, and no waiting besides"


async def test_one_launch_for_all_parts_of_a_layer(cupy: FakeCupy) -> None:
    layout = KVLayout(layers=1, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16", parts="split")
    keys, values = np.zeros((2, 8, layout.block_bytes // 2), np.uint8)
    pool = KVPool.wrap(layout, [(OnDevice(keys), OnDevice(values))])
    table, given = np.array([5, 2]), data(1)[: 2 * layout.block_bytes]
    await pool.unpack_async(0, table, given)
    assert [name for name, _, _ in cupy.launches] == ["scatter_16"]
    out = np.zeros_like(given)
    await pool.pack_async(0, table, out)
    assert [name for name, _, _ in cupy.launches] == ["scatter_16", "gather_16"]
    assert np.array_equal(out, given)
    assert np.array_equal(keys[table], given.reshape(2, 2, -1)[:, 0])
    assert np.array_equal(values[table], given.reshape(2, 2, -1)[:, 1])


async def test_the_loop_thread_never_waits(cupy: FakeCupy, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> None:
        raise AssertionError("synchronised with the device on the event loop")

    monkeypatch.setattr(cupy.cuda.Stream, "synchronize", refuse)
    cupy.hold()
    buffer = area()
    pool.pin(buffer)
    event = pool.mark()
    completions = [
        pool.passed(event),
        pool.unpack_async(1, IDS, buffer, after=event),
        pool.pack_async(1, IDS, buffer, after=event),
    ]
    assert not any(completion.done() for completion in completions)
    cupy.release()
    for completion in completions:
        await completion


async def test_an_event_that_has_passed_costs_no_turn(cupy: FakeCupy, pool: KVPool) -> None:
    event = pool.mark()
    cupy.settle()
    assert pool.passed(event) is COMPLETED
    assert pool.passed(event).done()


async def test_a_copy_waits_for_its_event_and_for_no_other(cupy: FakeCupy, pool: KVPool) -> None:
    with cupy.cuda.Device(1):
        engine, other = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream(non_blocking=True)
        event = engine.record()
        late = cupy.cuda.Event()
        cupy._events[late.ptr] = 1  # recorded on a stream that does not get there
        cupy._put(other, late.ptr)
    behind = pool.passed(late)
    out = np.zeros(NBYTES, np.uint8)
    await pool.unpack_async(0, IDS, data(1))
    await pool.pack_async(0, IDS, out, after=event)
    assert np.array_equal(out, data(1))
    assert not behind.done()
    cupy._events[late.ptr] = 0
    cupy.hold()
    cupy.release()
    assert await over(behind) is None


async def test_a_scatter_waits_for_its_event(cupy: FakeCupy, pool: KVPool) -> None:
    with cupy.cuda.Device(1):
        late = cupy.cuda.Event()
        cupy._events[late.ptr] = 1
    scatter = pool.unpack_async(0, IDS, data(1), after=late)
    await pool.pack_async(1, IDS, area())
    assert not np.asarray(pool.layer(0)).any()
    cupy._events[late.ptr] = 0
    await pool.pack_async(1, IDS, area())
    await scatter
    assert np.asarray(pool.layer(0)).any()


async def test_many_copies_at_once_share_the_staging(cupy: FakeCupy, pool: KVPool) -> None:
    """Sizes grow and shrink, so the staging and the table on the device are replaced while copies are under way."""
    cupy.hold()
    tables = [np.array([block, 7 - block][: 1 + block % 2]) for block in range(4)] * 2
    inputs = [np.full(len(table) * LAYOUT.block_bytes, 10 + i, np.uint8) for i, table in enumerate(tables)]
    copies = [
        pool.unpack_async(i % 2, table, given) for i, (table, given) in enumerate(zip(tables, inputs, strict=True))
    ]
    for given in inputs:
        assert not given.flags.owndata or given.flags.writeable
    event = copies[-1].event
    outputs = [np.zeros_like(given) for given in inputs]
    reads = [
        pool.pack_async(i % 2, table, out, after=event)
        for i, (table, out) in enumerate(zip(tables, outputs, strict=True))
    ]
    cupy.release()
    for completion in reads:
        await completion
    expected: dict[tuple[int, int], int] = {}
    for i, table in enumerate(tables):
        expected |= {(i % 2, int(block)): 10 + i for block in table}
    for i, (table, out) in enumerate(zip(tables, outputs, strict=True)):
        assert [int(row[0]) for row in out.reshape(len(table), -1)] == [expected[i % 2, int(b)] for b in table]


async def test_a_cancelled_wait_leaves_the_copy_alone(cupy: FakeCupy, pool: KVPool) -> None:
    cupy.hold()
    out = np.zeros(NBYTES, np.uint8)
    completion = pool.pack_async(0, IDS, out)

    async def wait() -> None:
        await completion

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not completion.done()
    cupy.release()
    assert await over(completion) is None


async def test_buffers_live_until_the_copy_is_over(cupy: FakeCupy, pool: KVPool) -> None:
    cupy.hold()
    buffer = area()
    buffer[...] = data(4)
    pool.pin(buffer)
    assert list(cupy.registered.values()) == [(NBYTES, 1)]
    completion = pool.unpack_async(0, IDS, buffer[:])
    del buffer
    gc.collect()
    assert cupy.registered, "unregistered, and unmapped, under a copy"
    cupy.release()
    await completion
    del completion
    gc.collect()
    assert not cupy.registered
    out = np.zeros(NBYTES, np.uint8)
    pool.pack(0, IDS, out)
    assert np.array_equal(out, data(4))


async def test_a_failed_device_ends_every_copy(cupy: FakeCupy, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA calls no host function then: the copies must not be waited for for ever."""
    monkeypatch.setattr("kvstream.memory.cuda._LOOK_SECONDS", 0.01)
    cupy.hold()
    event = pool.mark()
    copies = [pool.pack_async(0, IDS, area()), pool.unpack_async(0, IDS, area()), pool.passed(event)]
    await asyncio.sleep(0.03)  # looked at, found to be at work
    assert not any(copy.done() for copy in copies)
    cupy.fail(700)
    for copy in copies:
        error = await over(copy)
        assert isinstance(error, KVStreamError)
        assert "700" in str(error)
        with pytest.raises(KVStreamError, match="GPU has failed"):
            await copy
    for call in (
        lambda: pool.pack_async(0, IDS, area()),
        lambda: pool.unpack_async(0, IDS, area()),
        lambda: pool.passed(event),
        lambda: pool.pack(0, IDS, area()),
        pool.mark,
    ):
        with pytest.raises(KVStreamError, match="cuda:1: cudaError 700"):
            call()
    assert cupy.current is None


def test_a_loop_that_is_closed_before_the_copy_is_over(
    cupy: FakeCupy, pool: KVPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def issue() -> None:
        pool.pack_async(0, IDS, area())

    async def again() -> None:
        await pool.pack_async(0, IDS, area())
        cupy.hold()
        lost = pool.pack_async(0, IDS, area())
        cupy.fail()
        assert await over(lost) is not None

    monkeypatch.setattr("kvstream.memory.cuda._LOOK_SECONDS", 0.01)
    cupy.hold()
    asyncio.run(issue())
    cupy.release()
    cupy.settle()
    asyncio.run(again())


def test_pack_in_threads(cupy: FakeCupy, pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The calls that wait share one staging area: they take turns."""
    download = cuda._Queue.download

    def slowly(queue: cuda._Queue, out: Any) -> None:
        cupy.settle()
        time.sleep(0.0005)
        download(queue, out)

    monkeypatch.setattr(cuda._Queue, "download", slowly)
    for layer in range(2):
        pool.unpack(layer, IDS, data(layer))
    wrong: list[int] = []

    def read(layer: int) -> None:
        out = np.zeros(NBYTES, np.uint8)
        for _ in range(20):
            pool.pack(layer, IDS, out)
            if not np.array_equal(out, data(layer)):
                wrong.append(layer)

    threads = [threading.Thread(target=read, args=(n % 2,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_pack_comes_after_the_callers_stream(cupy: FakeCupy, pool: KVPool) -> None:
    pool.unpack(0, IDS, data(1))
    with cupy.cuda.Device(1):
        engine = cupy.cuda.Stream(non_blocking=True)
        memory = pool.layer(0)
        with engine:
            # What an engine computes: it is not there yet when pack is called.
            cupy.hold()
            cupy._put(engine, lambda: np.asarray(memory).view(np.uint8).fill(9))
            threading.Timer(0.01, cupy.release).start()
            out = np.zeros(NBYTES, np.uint8)
            pool.pack(0, IDS, out)
    assert (out == 9).all()


# --- page-locked memory


def test_memory_is_page_locked_once_and_until_it_goes(cupy: FakeCupy, pool: KVPool) -> None:
    buffer = area(4096)
    for start in (0, 64, 128):
        pool.pin(buffer[start : start + 64])
    assert list(cupy.registered.values()) == [(4096, 1)]
    assert cupy.registrations == 1
    read_only = np.frombuffer(mmap.mmap(-1, 64, access=mmap.ACCESS_READ), np.uint8)
    pool.pin(read_only)
    assert sorted(cupy.registered.values()) == [(64, 9), (4096, 1)]
    del buffer, read_only
    gc.collect()
    assert not cupy.registered
    again = area(4096)
    pool.pin(again)
    assert len(cupy.registered) == 1
    del pool
    gc.collect()
    del again
    gc.collect()
    assert not cupy.registered


async def test_memory_that_can_not_be_page_locked(
    cupy: FakeCupy, pool: KVPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstream")
    cupy.refuses_pinning = True
    buffers = [area(), area()]
    for buffer in buffers:
        pool.pin(buffer)
        await pool.pack_async(0, IDS, buffer)
    assert caplog.text.count("not page-locked") == 1
    del buffers, buffer
    gc.collect()
    assert not cupy.registered


def test_memory_that_another_pool_has_page_locked(
    cupy: FakeCupy, pool: KVPool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvstream")
    other = KVPool.allocate(LAYOUT, blocks=1, device="cuda:0")
    buffer = area()
    other.pin(buffer)
    pool.pin(buffer)
    assert len(cupy.registered) == 1
    del buffer
    gc.collect()
    assert not cupy.registered
    assert "not page-locked" not in caplog.text


# --- events


def test_handles_of_events() -> None:
    assert event_handle(SimpleNamespace(ptr=7)) == 7
    assert event_handle(SimpleNamespace(cuda_event=8)) == 8
    assert event_handle(9) == 9


@pytest.mark.parametrize(
    "event", ["event", 1.5, True, object(), SimpleNamespace(ptr="7"), SimpleNamespace(record=print)]
)
def test_what_is_no_event(event: Any, pool: KVPool) -> None:
    with pytest.raises(ConfigError, match=r"^event: must be a recorded cupy.cuda.Event or torch.cuda.Event"):
        pool.check_event(event)


@pytest.mark.parametrize("event", [0, -1, SimpleNamespace(cuda_event=0)])
def test_an_event_that_was_never_recorded(event: Any, pool: KVPool) -> None:
    """torch makes its events when they are first recorded."""
    with pytest.raises(ConfigError, match=r"^event: has never been recorded"):
        pool.passed(event)


async def test_wrong_arguments_move_nothing(cupy: FakeCupy, pool: KVPool) -> None:
    before = len(cupy.launches)
    with pytest.raises(ConfigError, match="block 8 is outside the pool"):
        pool.pack_async(0, np.array([8]), area())
    with pytest.raises(ConfigError, match=r"^layer: "):
        pool.unpack_async(2, IDS, area())
    with pytest.raises(Corrupted, match="bytes arrived"):
        pool.unpack_async(0, IDS, area(NBYTES + 1))
    with pytest.raises(ConfigError, match=r"^event: "):
        pool.pack_async(0, IDS, area(), after="soon")
    assert pool.pack_async(0, IDS[:0], area()) is COMPLETED
    assert pool.unpack_async(0, IDS[:0], np.empty(0, np.uint8)) is COMPLETED
    assert len(cupy.launches) == before


# --- the same calls on the CPU


async def test_on_the_cpu_everything_is_done_at_once() -> None:
    pool = KVPool.allocate(LAYOUT, blocks=8)
    assert not pool.is_device
    assert pool.mark() is None
    out = area()
    pool.pin(out)
    assert pool.unpack_async(0, IDS, data(1)) is COMPLETED
    completion = pool.pack_async(0, IDS, out)
    assert completion is COMPLETED
    assert completion.done() and completion.error() is None and completion.event is None
    seen: list[Completion] = []
    completion.add_done_callback(seen.append)
    assert seen == [completion]
    await completion
    assert np.array_equal(out, data(1))


async def test_on_the_cpu_there_are_no_events() -> None:
    pool = KVPool.allocate(LAYOUT, blocks=8)
    for call in (
        lambda: pool.passed(7),
        lambda: pool.check_event(7),
        lambda: pool.pack_async(0, IDS, area(), after=7),
        lambda: pool.unpack_async(0, IDS, data(1), after=7),
    ):
        with pytest.raises(ConfigError, match=r"^event: .* the pool is on the cpu"):
            call()
    assert not np.asarray(pool.layer(0)).any()
