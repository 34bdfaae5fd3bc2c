"""A stream by the lane put that ends in the middle: what of it is not under way is not sent any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from kvstream import Cancelled, KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer
from kvstream.transport.ucx import Endpoint

LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=1024, block_tokens=16, dtype="float16")
CONFIG = RuntimeConfig(put_window=64 << 10)
BLOCKS = list(range(8))


async def test_a_cancelled_stream_posts_no_further_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [KVPool.allocate(LAYOUT, blocks=8) for _ in range(2)]
    held: list[Callable[[], None]] = []
    posted = asyncio.Event()
    put = Endpoint.put

    def hold(endpoint: Endpoint, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        posted.set()
        put(endpoint, local, nbytes, remote, rkey, lambda status: held.append(lambda: done(status)))

    async with (
        EmbeddedServer() as server,
        Runtime("prefill-0", pool=pools[0], nats=server.url, lanes="put", config=CONFIG) as source,
        Runtime("decode-0", pool=pools[1], nats=server.url, lanes="put", config=CONFIG) as target,
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Endpoint, "put", hold)
            async with (
                asyncio.timeout(10),
                target.receive("r", blocks=BLOCKS, tokens=128) as rx,
                source.send("r", blocks=BLOCKS, tokens=128, to="decode-0") as tx,
            ):
                tx.layer_ready(0)
                await posted.wait()
                tx.cancel("not wanted")
                with pytest.raises(Cancelled):
                    await tx.done()
                with pytest.raises(Cancelled):
                    await rx.done()
                while len(held) < 2:
                    await asyncio.sleep(0)
            first, second = held
            held.clear()
            first()
            second()
            assert held == []
        # The slot is free again, and the connection in order.
        async with (
            asyncio.timeout(10),
            target.receive("s", blocks=BLOCKS, tokens=128) as rx,
            source.send("s", blocks=BLOCKS, tokens=128, to="decode-0") as tx,
        ):
            tx.layer_ready(0)
            await tx.done()
            await rx.done()
