"""Pools on a GPU (the stand-in) over the real lanes of UCX: their staging is page-locked, used, and let go."""

from __future__ import annotations

import asyncio
import gc

import numpy as np
import pytest

from kvstream import KVPool, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer
from kvstream.transport.base import LANES, Lane
from tests.conftest import LAYOUT
from tests.fake_cupy import FakeCupy

SOURCE = [5, 2, 9, 30, 1]
DESTINATION = [0, 31, 7, 3, 12]
TOKENS = 18


@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cpu", "cuda:0"), ("cuda:0", "cpu")])
async def test_a_stream_over_each_lane(cupy: FakeCupy, lane: Lane, devices: tuple[str, str]) -> None:
    config = RuntimeConfig(slots=4, slot_bytes=1024)
    pools = [KVPool.allocate(LAYOUT, blocks=32, device=device) for device in devices]
    given = np.random.default_rng(1).integers(0, 256, (LAYOUT.layers, 5 * LAYOUT.block_bytes), np.uint8)
    for layer, data in enumerate(given):
        pools[0].unpack(layer, np.array(SOURCE), data)
    hub = MemoryBrokerServer()
    async with (
        asyncio.timeout(30),
        MemoryBroker(hub) as one,
        MemoryBroker(hub) as two,
        Runtime("prefill-0", roles={"prefill"}, pool=pools[0], broker=one, lanes=lane, config=config) as prefill,
        Runtime("decode-0", roles={"decode"}, pool=pools[1], broker=two, lanes=lane, config=config) as decode,
    ):
        for n in range(3):
            async with (
                decode.receive(f"r{n}", blocks=DESTINATION, tokens=TOKENS) as rx,
                prefill.send(f"r{n}", blocks=SOURCE, tokens=TOKENS, to="decode-0") as tx,
            ):
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer, event=pools[0].mark())
                report = await tx.done()
                await rx.done()
        assert report.lane == lane
        for layer, data in enumerate(given):
            out = np.empty_like(data)
            pools[1].pack(layer, np.array(DESTINATION), out)
            assert np.array_equal(out, data)
        ends = {"shared": (1, 9), "get": (1, 1), "put": (1, 1)}[lane]
        locked = [end for end, device in zip(ends, devices, strict=True) if device != "cpu"]
        # One registration for each end that is on a GPU; the peer's memory is mapped read-only.
        assert sorted(flags for _, flags in cupy.registered.values()) == sorted(locked)
    gc.collect()
    assert not cupy.registered
