"""The order of work through whole runtimes: whose chunks are moved while there is more to move than time."""

from __future__ import annotations

import asyncio
from collections import Counter

from kvstream import KVPool, Offer, Runtime, RuntimeConfig
from kvstream.scheduler.commands import Move
from tests.conftest import LAYOUT, Cluster, fill, kv_bytes

CHUNK = 4
"""Blocks of a chunk: slots are of 1 KiB."""
LONG, SHORT = 2000, 4


def config(**more: object) -> RuntimeConfig:
    return RuntimeConfig(slots=4, slot_bytes=CHUNK * LAYOUT.block_bytes, short_bytes=16 << 10, **more)  # type: ignore[arg-type]


async def pair(cluster: Cluster, **more: object) -> tuple[Runtime, Runtime]:
    pools = [KVPool.allocate(LAYOUT, blocks=2 * LONG) for _ in range(2)]
    fill(pools[0], 1)
    source = await cluster.worker("prefill-0", roles=("prefill",), config=config(**more), pool=pools[0])
    return source, await cluster.worker("decode-0", config=config(**more), pool=pools[1])


class Reads:
    """The streams whose chunks a runtime reads, in order."""

    def __init__(self, runtime: Runtime) -> None:
        self.order: list[str] = []
        streams = runtime._streams
        move = streams.move

        def note(command: Move) -> None:
            self.order.append(streams._sessions[command.stream].stream if command.stream in streams._sessions else "")
            move(command)

        streams.move = note  # type: ignore[method-assign]


async def transfer(source: Runtime, destination: Runtime, name: str, blocks: list[int], share: str = "") -> None:
    tokens = len(blocks) * LAYOUT.block_tokens
    async with destination.receive(name, blocks=blocks, tokens=tokens) as rx:
        async with source.send(name, blocks=blocks, tokens=tokens, to="decode-0", share_class=share) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
        await rx.done()


async def test_a_short_prompt_beside_a_long_one(cluster: Cluster) -> None:
    """It ends within twice the chunks that it takes alone, and what is on its way already (sglang, vLLM: head-of-line
    blocking behind long prompts)."""
    source, destination = await pair(cluster)
    reads = Reads(destination)
    async with asyncio.TaskGroup() as group:
        long = group.create_task(transfer(source, destination, "long", list(range(LONG))))
        while len(reads.order) < 50:
            await asyncio.sleep(0)
        start = len(reads.order)
        await transfer(source, destination, "short", list(range(LONG, LONG + SHORT)))
        assert not long.done()
        meanwhile = Counter(reads.order[start:])
    alone = SHORT * LAYOUT.layers // CHUNK
    # Offer and acceptance take turns of the loop too, and each of them moves a chunk of the long one.
    assert meanwhile["long"] <= 2 * alone + 2 * 4 + 10
    for layer in range(LAYOUT.layers):
        blocks = list(range(LONG + SHORT))
        assert kv_bytes(source.pool, layer, blocks) == kv_bytes(destination.pool, layer, blocks)


async def test_classes_share_a_connection_by_weight(cluster: Cluster) -> None:
    source, destination = await pair(cluster, share_weights={"gold": 3.0})
    reads = Reads(destination)
    async with asyncio.TaskGroup() as group:
        group.create_task(transfer(source, destination, "plain", list(range(1000)), "plain"))
        group.create_task(transfer(source, destination, "gold", list(range(1000, 2000)), "gold"))
    both = reads.order[reads.order.index("gold") :]
    counts = Counter(both[:400])
    assert 280 <= counts["gold"] <= 320


async def test_the_handler_is_told_the_class(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    seen: list[str] = []

    @destination.on_offer
    async def _(offer: Offer) -> None:
        seen.append(offer.share_class)
        offer.accept(blocks=[1])

    async with source.send("r", blocks=[1], tokens=4, to="decode-0", share_class="tenant-a") as tx:
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done()
    assert seen == ["tenant-a"]
