"""The demo's worker process, without its process: what it does with offers while it leaves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from kvstream import KVLayout, KVPool, Offer, ProtocolError
from kvstream.cli.demo import worker
from kvstream.cli.demo.messages import Setup


class Link:
    """A coordinator that closes the pipe when it is told to."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def send(self, message: object) -> None:
        pass

    async def command(self) -> None:
        await self.closed.wait()


class Offered:
    tokens = 4

    def __init__(self) -> None:
        self.refused: list[str] = []

    def accept(self, blocks: list[int]) -> object:
        raise AssertionError("accepted by a worker that leaves")

    def refuse(self, reason: str) -> None:
        self.refused.append(reason)


def make_worker(link: Link) -> Any:
    pool = KVPool.allocate(KVLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float16"), blocks=8)
    setup = Setup(name="decode-0", role="decode", model="synthetic", dtype="float16", lane="shared", new_tokens=4)
    compute = SimpleNamespace(stop=lambda: None)
    return worker._Worker(setup, cast(Any, link), cast(Any, compute), cast(Any, None), cast(Any, None), pool)


async def test_an_offer_that_comes_while_leaving_is_refused() -> None:
    link = Link()
    link.closed.set()
    served = make_worker(link)
    async with served._group:
        await served._obey()
    offer = Offered()
    await served._take(cast(Offer, offer))
    assert offer.refused == ["leaving"]
    assert served._pool.free_blocks == 8


@pytest.mark.parametrize("error", [ProtocolError("broken"), MemoryError("a bug, or no memory")])
async def test_an_offer_that_comes_when_another_task_has_just_failed_is_refused(error: Exception) -> None:
    served = make_worker(Link())
    offer = Offered()

    async def fails() -> None:
        raise error

    async def scenario() -> None:
        async with served._group:
            served._start(fails())
            task = next(iter(served._tasks))
            # After the failure and before the group has ended its body.
            taken = asyncio.Event()
            task.add_done_callback(lambda _: taken.set())
            try:
                await taken.wait()
            finally:
                await served._take(cast(Offer, offer))

    with pytest.raises(ExceptionGroup):
        await scenario()
    assert offer.refused == ["leaving"]
