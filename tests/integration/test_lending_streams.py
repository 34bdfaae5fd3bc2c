"""A stream whose blocks are lent: what its source takes back while it is being read is never an arrival."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from kvstream import Cancelled, KVPool, Runtime
from kvstream.discovery import EmbeddedServer
from kvstream.transport.base import Lent
from kvstream.transport.ucx import UcxConnection
from tests.integration.worker import LAYOUT, WAYS


async def test_blocks_reused_in_the_middle_of_a_read_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the destination's decision to read and its read, the source cancels and its user overwrites the blocks,
    as it may. The wrong bytes that are read then must not be announced, and the end is the source's word."""
    lane, config = WAYS["lent"]
    pools = [KVPool.allocate(LAYOUT, blocks=8) for _ in range(2)]
    borrow = UcxConnection.borrow
    reads: list[int] = []
    async with (
        EmbeddedServer() as server,
        Runtime("prefill-0", pool=pools[0], nats=server.url, lanes=lane, config=config) as source,
        Runtime("decode-0", pool=pools[1], nats=server.url, lanes=lane, config=config) as target,
        target.receive("r", blocks=[0, 1], tokens=32) as rx,
        source.send("r", blocks=[3, 4], tokens=32, to="decode-0") as tx,
    ):

        def interrupted(connection: UcxConnection, lent: Lent, local: Lent) -> None:
            if not reads:
                tx.cancel("while it is read")
                pools[0].layer(0).view(np.uint8)[...] = 0xEE
            reads.append(lent.nbytes)
            borrow(connection, lent, local)

        monkeypatch.setattr(UcxConnection, "borrow", interrupted)
        tx.layer_ready(0)
        async with asyncio.timeout(20):
            with pytest.raises(Cancelled, match="while it is read"):
                await rx.done()
        assert reads == [2 * LAYOUT.block_bytes]
        assert rx.layers_arrived == 0
        with pytest.raises(Cancelled):
            await tx.done()
