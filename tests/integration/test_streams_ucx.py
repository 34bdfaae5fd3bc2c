"""Streams between real processes over real UCX and a real NATS server: bytes, many at once, every kind of end."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import numpy as np
import pytest

from kvstream import Cancelled, KVPool, KVStreamError, Refused, Runtime
from kvstream.discovery import EmbeddedServer
from tests.fake_cupy import FakeCupy
from tests.integration.worker import ALL_WAYS, BLOCKS, DEVICE_WAYS, LAYOUT, WAYS, allocate, checksum, rss, worker

STREAMS = int(os.environ.get("KVSTREAM_TEST_STREAMS", "1000"))


def guarded_pool(blocks: int, seed: int) -> tuple[KVPool, list[np.ndarray]]:
    """A pool wrapped around memory with guard blocks before and after each layer; returns the whole memory too."""
    rng = np.random.default_rng(seed)
    shape = (blocks + 2, *LAYOUT.block_shape)
    whole = [rng.integers(0, 256, (*shape[:-1], shape[-1] * 2), np.uint8) for _ in range(LAYOUT.layers)]
    return KVPool.wrap(LAYOUT, [memory[1:-1] for memory in whole]), whole


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 333])
async def test_bytes_and_canaries(server: EmbeddedServer, way: str, tokens: int) -> None:
    """Shuffled tables on both sides; guard blocks, and blocks that belong to nobody, keep their bytes (vllm 54272)."""
    lane, config = WAYS[way]
    needed = LAYOUT.blocks_for(tokens)
    order = np.random.default_rng(tokens)
    mine = [int(block) for block in order.permutation(64)[:needed]]
    theirs = [int(block) for block in order.permutation(64)[:needed]]
    source_pool, source_memory = guarded_pool(64, 1)
    target_pool, target_memory = guarded_pool(64, 2)
    source_before = [memory.copy() for memory in source_memory]
    expected = [memory.copy() for memory in target_memory]
    for layer in range(LAYOUT.layers):
        expected[layer][np.array(theirs) + 1] = source_memory[layer][np.array(mine) + 1]
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            Runtime("prefill-0", pool=source_pool, nats=server.url, lanes=lane, config=config)
        )
        target = await stack.enter_async_context(
            Runtime("decode-0", pool=target_pool, nats=server.url, lanes=lane, config=config)
        )
        async with target.receive("r", blocks=theirs, tokens=tokens) as rx:
            async with source.send("r", blocks=mine, tokens=tokens, to="decode-0") as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                report = await tx.done()
                assert not tx.lent
            await rx.done()
    assert report.lane == lane
    for layer in range(LAYOUT.layers):
        assert np.array_equal(target_memory[layer], expected[layer])
        assert np.array_equal(source_memory[layer], source_before[layer])


@pytest.mark.parametrize("way", list(WAYS))
async def test_from_whole_blocks_into_blocks_in_pieces(server: EmbeddedServer, way: str) -> None:
    """The destination's heads are padded, as some engines' are; a source that lends knows nothing of that."""
    lane, config = WAYS[way]
    padded = [
        np.full((64, *LAYOUT.block_shape[:-1], LAYOUT.block_shape[-1] + 8), 7, np.uint16) for _ in range(LAYOUT.layers)
    ]
    target_pool = KVPool.wrap(LAYOUT, [memory[..., : LAYOUT.block_shape[-1]] for memory in padded])
    source_pool = KVPool.allocate(LAYOUT, blocks=64)
    for layer in range(LAYOUT.layers):
        bits = source_pool.layer(layer).view(np.uint16)
        bits[...] = np.random.default_rng(layer).integers(0, 2**16, bits.shape, np.uint16)
    mine, theirs = list(range(50)), list(range(63, 13, -1))
    async with AsyncExitStack() as stack:
        source = await stack.enter_async_context(
            Runtime("prefill-0", pool=source_pool, nats=server.url, lanes=lane, config=config)
        )
        target = await stack.enter_async_context(
            Runtime("decode-0", pool=target_pool, nats=server.url, lanes=lane, config=config)
        )
        async with target.receive("r", blocks=theirs, tokens=800) as rx:
            async with source.send("r", blocks=mine, tokens=800, to="decode-0") as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done()
            await rx.done()
    for layer in range(LAYOUT.layers):
        got = padded[layer][theirs][..., : LAYOUT.block_shape[-1]]
        assert np.array_equal(got, source_pool.layer(layer).view(np.uint16)[mine])
        assert np.all(padded[layer][..., LAYOUT.block_shape[-1] :] == 7)


@pytest.mark.parametrize("way", list(ALL_WAYS))
async def test_many_streams_between_two_processes(server: EmbeddedServer, cupy: FakeCupy, way: str) -> None:
    """Random sizes, cancels on either side, refusals: each stream ends exactly once on both sides, blocks come back,
    memory does not grow."""
    lane, config = ALL_WAYS[way]
    count = STREAMS if way == "shared" else STREAMS // 4
    rng = random.Random(way)
    ended: dict[str, int] = {}
    handed: set[str] = set()
    growth: list[tuple[int, int]] = []
    gate = asyncio.Semaphore(8)
    async with worker("decode-0", server.url, way) as other:
        pool = allocate(way)
        for layer in range(LAYOUT.layers):
            whole = np.asarray(pool.layer(layer)).view(np.uint8)
            whole[...] = np.random.default_rng(layer).integers(0, 256, whole.shape, np.uint8)
        async with Runtime("prefill-0", pool=pool, nats=server.url, lanes=lane, config=config) as source:

            async def one(number: int) -> None:
                tokens = rng.choice([1, 16, rng.randint(1, 40), rng.randint(1, 600)])
                action = rng.choices(["take", "refuse", "cancel", "cancel-here", "cancel-task"], [6, 1, 1, 1, 1])[0]
                layers = rng.randrange(LAYOUT.layers)
                pause = rng.random() < 0.3
                async with gate:
                    blocks = pool.acquire(LAYOUT.blocks_for(tokens))
                    rng.shuffle(blocks)
                    try:
                        work = asyncio.ensure_future(send(number, blocks, tokens, action, layers, pause))
                        if action == "cancel-task":
                            asyncio.get_running_loop().call_later(rng.random() * 0.01, work.cancel)
                        await asyncio.wait([work])
                        code = "task" if work.cancelled() else work.result()
                    finally:
                        pool.release(blocks)
                ended[code] = ended.get(code, 0) + 1

            async def send(n: int, blocks: list[int], tokens: int, action: str, layers: int, pause: bool) -> str:
                metadata = {"action": action, "layers": layers}
                try:
                    async with source.send(
                        f"r{n}", blocks=blocks, tokens=tokens, to="decode-0", metadata=metadata, deadline=20
                    ) as tx:
                        for layer in range(LAYOUT.layers):
                            tx.layer_ready(layer)
                            if pause:
                                await asyncio.sleep(0.0005)
                            if action == "cancel-here" and layer == layers:
                                tx.cancel("told to")
                        await tx.done({"sum": checksum(pool, blocks)})
                        handed.add(f"r{n}")
                except (Refused, Cancelled) as error:
                    return error.code
                except KVStreamError as error:
                    raise AssertionError(f"r{n} {action}: {error!r}") from error
                return "done"

            for start in range(0, count, 100):
                await asyncio.gather(*(one(number) for number in range(start, min(start + 100, count))))
                theirs = await other.ask("stats")
                growth.append((rss(), theirs["rss"]))
            core = source._streams.core
            async with asyncio.timeout(20):
                # On a GPU a gather may be under way for a stream that has ended; its slot comes back with it.
                while not core.idle or core.slots_in_use:
                    await asyncio.sleep(0.01)
            assert core.streams == 0
            assert pool.free_blocks == BLOCKS
            assert [path.used for path in source.stats().devices] == [True] * (way in DEVICE_WAYS)
        theirs = await other.ask("stats")
    assert sum(ended.values()) == count
    assert ended["done"] > count / 3
    assert theirs["twice"] == []
    assert theirs["wrong_bytes"] == []
    assert theirs["idle"]
    assert theirs["streams"] == 0
    assert theirs["free_blocks"] == BLOCKS
    # Every stream that was done here was done there; some were done there and cancelled here at the very end.
    assert theirs["ended"].get("done", 0) >= len(handed)
    print(f"{way}: ends here {ended}, there {theirs['ended']}; resident bytes after each hundred {growth}")
    if len(growth) > 3:
        for side in (0, 1):
            grown = growth[-1][side] - growth[1][side]
            assert grown < 8 << 20, f"{'source' if side == 0 else 'destination'} grew by {grown} bytes: {growth}"
