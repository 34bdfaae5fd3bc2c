"""The UCX transport and staging on a GPU (here: host memory that is called so): the sample, the lane, the loans.

What a transport does is the same for both kinds of memory; whether UCX can carry a GPU's is what the sample is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext

import msgspec
import numpy as np
import pytest
from transport_suite import End, Harness, Pair, move, pattern

from kvstream.errors import KVStreamError, PeerLost, ProtocolError
from kvstream.transport import ucx
from kvstream.transport.base import LANES, ByteView, DeviceStaging, Lane, Lent, Slab, StagingBudget
from kvstream.transport.ucx import UcxTransport

SAMPLE = bytes(range(64))
SLOT_BYTES = 5000
DEVICE_SLOT = 1 << 16


def staging(seed: int, *, gpu: bool = False) -> tuple[DeviceStaging, ByteView]:
    memory = pattern(seed, 1 << 18)
    memory[: len(SAMPLE)] = np.frombuffer(SAMPLE, np.uint8)
    return DeviceStaging(Slab(memory.ctypes.data, memory.nbytes, memory, gpu), SAMPLE, nullcontext), memory


class Devices:
    """A pair of transports, each with staging."""

    def __init__(self) -> None:
        ends = [UcxTransport(budget=StagingBudget(1 << 26), fence_timeout=0.2) for _ in range(2)]
        self.harness = Harness(ends[0], ends[1], "get")
        self.lanes: tuple[Lane, ...] = LANES
        self.memories: list[ByteView] = []
        for n, end in enumerate(ends):
            given, memory = staging(n)
            assert end.attach_device(given)
            self.memories.append(memory)

    async def connect(self) -> Pair:
        assert self.harness.address is not None
        async with asyncio.timeout(20):
            dialed = await self.harness.source.dial(self.harness.address, self.lanes)
            accepted = await self.harness._accepted.get()
        return Pair(End(dialed), End(accepted))

    def offer(self, pair: Pair, slot_bytes: int = SLOT_BYTES) -> bytes:
        pair.source.connection.offer_device(DEVICE_SLOT)
        return pair.source.connection.offer_lanes(self.lanes, 2, slot_bytes)

    async def open(self, why: str = "") -> Pair:
        pair = await self.connect()
        offer = self.offer(pair)
        pair.destination.connection.settle_device(why)
        pair.source.connection.open_lane(pair.destination.connection.accept_lane(offer, self.lanes, borrows=False))
        return pair


@pytest.fixture
async def devices() -> AsyncIterator[Devices]:
    made = Devices()
    await made.harness.start()
    yield made
    await made.harness.aclose()
    made.harness.assert_budgets_returned()


async def test_the_sample_is_read(devices: Devices) -> None:
    assert devices.harness.address is not None and devices.harness.address.device
    pair = await devices.connect()
    offer = devices.offer(pair)
    assert len(offer) <= 2048
    destination = pair.destination.connection
    offered = destination.device_offered(offer)
    assert offered is not None
    assert (offered.slots, offered.slot_bytes, offered.sample, offered.why) == (2, DEVICE_SLOT, SAMPLE, "")
    target = devices.memories[1]
    await destination.try_device(offer, target.ctypes.data + 1000)
    assert target[1000 : 1000 + len(SAMPLE)].tobytes() == SAMPLE
    assert np.array_equal(target[1064:], pattern(1, 1 << 18)[1064:])


async def test_once_it_is_proven_the_lane_is_get(devices: Devices) -> None:
    pair = await devices.open()
    for end in (pair.source, pair.destination):
        connection = end.connection
        assert (connection.lane, connection.lends, connection.lends_device) == ("get", True, True)
        assert connection.no_device == ""
        assert "between GPUs" in connection.describe()
    source, target = devices.memories
    lent = Lent(np.array([source.ctypes.data + 512], np.uint64), DEVICE_SLOT)
    generation = pair.source.connection.lend(1, lent)
    taken = await pair.destination.connection.take(1, generation, DEVICE_SLOT)
    assert isinstance(taken, Lent)
    local = Lent(np.array([target.ctypes.data + 1024], np.uint64), DEVICE_SLOT)
    await pair.destination.connection.borrow(taken, local)
    assert np.array_equal(target[1024 : 1024 + DEVICE_SLOT], source[512 : 512 + DEVICE_SLOT])
    assert pair.destination.connection.check(1, generation)
    await move(pair, 0, pattern(5, 100))  # a slot may hold the bytes themselves, too


async def test_once_it_is_not_the_lane_is_what_it_was(devices: Devices) -> None:
    pair = await devices.open("the sample was wrong" + "!" * 1000)
    for end in (pair.source, pair.destination):
        connection = end.connection
        assert (connection.lane, connection.lends, connection.lends_device) == ("shared", False, False)
        assert connection.no_device.startswith("the sample was wrong")
    await move(pair, 0, pattern(5, 100))


async def test_a_source_that_has_offered_nothing(devices: Devices) -> None:
    pair = await devices.connect()
    offer = pair.source.connection.offer_lanes(LANES, 2, SLOT_BYTES)
    destination = pair.destination.connection
    assert destination.device_offered(offer) is None
    with pytest.raises(RuntimeError, match="no memory of a GPU"):
        destination.try_device(offer, devices.memories[1].ctypes.data)
    answer = msgspec.msgpack.decode(destination.accept_lane(offer, ("get",)), type=ucx._Answer)
    with pytest.raises(ProtocolError, match="GPU"):
        pair.source.connection.open_lane(msgspec.msgpack.encode(msgspec.structs.replace(answer, device=True)))
    with pytest.raises(ProtocolError):
        destination.device_offered(b"garbage")


@pytest.mark.parametrize(
    ("changes", "words"), [({"gpu": True}, "can't be mapped"), ({"rkey": b"\xff" * 40}, "unusable remote key")]
)
async def test_a_sample_that_can_not_be_reached_costs_nothing_but_the_way(
    devices: Devices, changes: dict[str, object], words: str
) -> None:
    pair = await devices.connect()
    described = msgspec.msgpack.decode(devices.offer(pair), type=ucx._Offer)
    assert described.device is not None
    bad = msgspec.structs.replace(described.device, **changes)
    offer = msgspec.msgpack.encode(msgspec.structs.replace(described, device=bad))
    destination = pair.destination.connection
    with pytest.raises(KVStreamError, match=words):
        await destination.try_device(offer, devices.memories[1].ctypes.data)
    assert not destination.lost
    destination.settle_device("it can't be read")
    pair.source.connection.open_lane(destination.accept_lane(offer, LANES))
    await move(pair, 0, pattern(5, 100))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"host_id": "elsewhere"}, "another host"),
        ({"lends": False}, "can't lend"),
        ({"slot_bytes": 100}, "can't lend"),
        ({"device": {"gpu": True}}, "can't read the memory of the peer's GPU"),
    ],
)
async def test_what_can_not_be_carried_is_said(devices: Devices, changes: dict[str, object], words: str) -> None:
    pair = await devices.connect()
    described = msgspec.msgpack.decode(devices.offer(pair), type=ucx._Offer)
    assert described.device is not None
    if "device" in changes:
        changes = {"device": msgspec.structs.replace(described.device, gpu=True)}
    offer = msgspec.msgpack.encode(msgspec.structs.replace(described, **changes))
    offered = pair.destination.connection.device_offered(offer)
    assert offered is not None
    assert words in offered.why


@pytest.mark.parametrize(
    ("lanes", "slot_bytes", "words"),
    [(LANES, 100, "slot_bytes"), (("shared", "put"), SLOT_BYTES, "another host, or has no staging")],
)
async def test_what_is_not_offered_is_said(
    devices: Devices, lanes: tuple[Lane, ...], slot_bytes: int, words: str
) -> None:
    devices.lanes = lanes
    pair = await devices.connect()
    offer = devices.offer(pair, slot_bytes)
    assert pair.destination.connection.device_offered(offer) is None
    pair.source.connection.open_lane(pair.destination.connection.accept_lane(offer, lanes))
    assert words in pair.source.connection.no_device
    assert pair.destination.connection.no_device == ""


async def test_it_is_told_of_the_fence_once(devices: Devices) -> None:
    pair = await devices.open()
    told: list[int] = []
    connection = pair.destination.connection
    connection.when_fenced(lambda: told.append(1))
    connection.close()
    assert told == []
    await connection.fence()
    assert told == [1]
    connection.when_fenced(lambda: told.append(2))
    await connection.fence()
    assert told == [1, 2]


async def test_it_is_not_told_before_the_last_read_is_over(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = await devices.open()
    told: list[int] = []
    connection = pair.destination.connection
    connection.when_fenced(lambda: told.append(1))
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(connection._endpoint, "when_settled", lambda: held)
    await connection.fence()
    assert connection.quarantined > 0
    assert told == []
    held.set_result(None)
    await connection.fence()
    assert told == [1]


async def test_after_the_loss_nothing_is_tried(devices: Devices) -> None:
    pair = await devices.connect()
    offer = devices.offer(pair)
    pair.destination.connection.close()
    with pytest.raises(PeerLost):
        await pair.destination.connection.try_device(offer, devices.memories[1].ctypes.data)


async def test_staging_is_attached_before_the_start_and_once() -> None:
    without_get = UcxTransport(budget=StagingBudget(1), lanes=("shared", "put"))
    assert not without_get.attach_device(staging(1)[0])
    transport = UcxTransport(budget=StagingBudget(1 << 20))
    assert transport.attach_device(staging(1)[0])
    with pytest.raises(RuntimeError, match="before it starts"):
        transport.attach_device(staging(2)[0])
    plain = UcxTransport(budget=StagingBudget(1 << 20))
    try:
        assert not (await plain.start(lambda _: None)).device
        with pytest.raises(RuntimeError, match="before it starts"):
            plain.attach_device(staging(1)[0])
    finally:
        await plain.aclose()
