"""The lane never changes the bytes: whatever the layout, the tables, the chunks, the memory and the lane are.

Each example runs streams between two runtimes and then compares *all* memory on both sides with a model: the blocks of
the destination are the source's, and every other byte (other blocks, gaps, guards) is what it was. The transports stay
open from example to example, so that one costs milliseconds. KVSTREAM_PROPERTY_EXAMPLES runs that many random examples
in place of the fixed ones.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import uvloop
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from kvstream import KVLayout, KVPool, Runtime, RuntimeConfig
from kvstream.discovery import MemoryBroker, MemoryBrokerServer
from kvstream.transport.base import LANES, Connection, Lane, ListenAddress, StagingBudget, Transport
from kvstream.transport.inproc import InprocNetwork, InprocTransport
from kvstream.transport.ucx import UcxTransport
from tests.fake_cupy import FakeCupy
from tests.unit.test_pool import Model, arrangements, on

MANY = int(os.environ.get("KVSTREAM_PROPERTY_EXAMPLES", "0"))
SECONDS = 20.0
"""Bound on one example; it takes some milliseconds."""

Ids = npt.NDArray[np.intp]


# ---------------------------------------------------------------------- memory


class Wrapped:
    """An engine's memory in some arrangement of strides, and the pool around it."""

    def __init__(self, layout: KVLayout, blocks: int, arrange: Callable[..., Any], seed: int, device: str) -> None:
        self._model = Model(layout, blocks, arrange, seed)
        self.pool = KVPool.wrap(layout, on(device, self._model.arrays))

    def read(self, layer: int, ids: Ids) -> npt.NDArray[np.uint8]:
        return np.frombuffer(self._model.read(layer, ids), np.uint8)

    def write(self, layer: int, ids: Ids, data: npt.NDArray[np.uint8]) -> None:
        if ids.size:
            self._model.memory[...] = self._model.written(layer, ids, data)

    def all(self) -> npt.NDArray[np.uint8]:
        """A copy of all there is, guards and gaps included."""
        return self._model.memory.copy()


class Allocated:
    """A pool's own memory: one slab, in which the neighbours of a block are other blocks."""

    def __init__(self, layout: KVLayout, blocks: int, seed: int, device: str) -> None:
        self.pool = KVPool.allocate(layout, blocks=blocks, device=device)
        # Of the stand-in for a GPU it is host memory too.
        layers = [np.asarray(self.pool.layer(layer)) for layer in range(layout.layers)]
        self._layers = [layer.view(np.uint8).reshape(blocks, -1) for layer in layers]
        for array in self._layers:
            array[...] = np.random.default_rng(seed).integers(0, 256, array.shape, np.uint8)

    def read(self, layer: int, ids: Ids) -> npt.NDArray[np.uint8]:
        return self._layers[layer][ids].reshape(-1)

    def write(self, layer: int, ids: Ids, data: npt.NDArray[np.uint8]) -> None:
        if ids.size:
            self._layers[layer][ids] = data.reshape(len(ids), -1)

    def all(self) -> npt.NDArray[np.uint8]:
        return np.concatenate([array.reshape(-1) for array in self._layers])


Memory = Wrapped | Allocated


def make_memory(
    layout: KVLayout, blocks: int, arrange: Callable[..., Any] | None, seed: int, device: str = "cpu"
) -> Memory:
    if arrange is None:
        return Allocated(layout, blocks, seed, device)
    return Wrapped(layout, blocks, arrange, seed, device)


# ---------------------------------------------------------------------- examples


@dataclass(frozen=True, slots=True)
class Flow:
    """One stream. `cuts` are the tokens up to which the prompt is prefilled, piece by piece."""

    mine: Ids
    theirs: Ids
    tokens: int
    first_token: int
    cuts: tuple[int, ...]
    growing: bool
    layers: tuple[int, ...]
    """In which order they get ready."""


@dataclass(frozen=True, slots=True)
class Example:
    layout: KVLayout
    blocks: tuple[int, int]
    arrange: tuple[Callable[..., Any] | None, Callable[..., Any] | None]
    configs: tuple[RuntimeConfig, RuntimeConfig]
    flows: tuple[Flow, ...]
    seed: int


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    parts = draw(st.sampled_from(["split", "packed", "latent"]))
    return KVLayout(
        layers=draw(st.integers(1, 4)),
        kv_heads=1 if parts == "latent" else draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([1, 3, 8, 16, 33, 64])),
        block_tokens=draw(st.sampled_from([1, 2, 3, 4, 8, 16])),
        dtype=draw(
            st.sampled_from(["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8", "float32"])
        ),
        order=draw(st.sampled_from(["NHD", "HND"])),
        parts=parts,
    )


def configs(layout: KVLayout) -> st.SearchStrategy[RuntimeConfig]:
    block = layout.block_bytes
    return st.builds(
        RuntimeConfig,
        slots=st.integers(1, 8),
        slot_bytes=st.sampled_from([1, block, 2 * block + 1, 5 * block, 4200, 8192, 1 << 20]),
        group_bytes=st.sampled_from([1, 2 * block, 1 << 20]),
        put_window=st.sampled_from([64 << 10, 4 << 20]),
        lend_bytes=st.sampled_from([64, 512, 32 << 10, 1 << 30]),
        get_lend_bytes=st.sampled_from([64, 512, 32 << 10, 1 << 30]),
        lend_chunk=st.sampled_from([1, block, 3 * block, 4 << 20]),
        checksums=st.sampled_from([False, False, True]),
        device_staging=st.sampled_from([16 << 20, 16 << 20, 64 << 10]),
        device_slot_bytes=st.sampled_from([1, block, 3 * block, 1 << 20]),
        device_lend_bytes=st.sampled_from([64, max(64, 2 * block), 1 << 20]),
        # What ends here ends by itself: a machine that is busy elsewhere must not end it.
        connect_timeout=st.just(SECONDS),
        stall_timeout=st.just(SECONDS),
        end_wait=st.just(SECONDS),
    )


@st.composite
def orders(draw: st.DrawFn, blocks: int) -> Ids:
    """All blocks in some order: runs, backwards, every second one first, or shuffled."""
    ids = np.arange(blocks)
    match draw(st.sampled_from(["run", "backwards", "gaps", "shuffled"])):
        case "run":
            return np.roll(ids, draw(st.integers(0, blocks - 1)))
        case "backwards":
            return ids[::-1]
        case "gaps":
            return np.concatenate([ids[::2], ids[1::2]])
        case _:
            return np.random.default_rng(draw(st.integers(0, 99))).permutation(ids)


@st.composite
def examples(draw: st.DrawFn) -> Example:
    layout = draw(layouts())
    mine, theirs = draw(st.integers(1, 20)), draw(st.integers(1, 20))
    left = draw(orders(theirs))
    flows: list[Flow] = []
    for _ in range(draw(st.integers(1, 3))):
        if not left.size:
            break
        n = draw(st.integers(1, min(mine, left.size)))
        table, left = left[:n], left[n:]
        tokens = (n - 1) * layout.block_tokens + draw(
            st.sampled_from([1, (layout.block_tokens + 1) // 2, layout.block_tokens])
        )
        cuts = sorted(set(draw(st.lists(st.integers(1, tokens), max_size=2))) | {tokens})
        flows.append(
            Flow(
                mine=draw(orders(mine))[:n],
                theirs=table,
                tokens=tokens,
                first_token=draw(st.sampled_from([0, 0, 0, tokens, tokens // 2, min(layout.block_tokens, tokens)])),
                cuts=tuple(cuts),
                growing=draw(st.booleans()),
                layers=tuple(draw(st.permutations(range(layout.layers)))),
            )
        )
    arranged = st.none() | st.sampled_from(arrangements(layout))
    return Example(
        layout=layout,
        blocks=(mine, theirs),
        arrange=(draw(arranged), draw(arranged)),
        configs=(draw(configs(layout)), draw(configs(layout))),
        flows=tuple(flows),
        seed=draw(st.integers(0, 9)),
    )


# ---------------------------------------------------------------------- transports


class Standing(Transport):
    """A transport that stays open while runtimes come and go on it."""

    name = "ucx"

    def __init__(self, inner: UcxTransport) -> None:
        self.inner = inner
        self.budget = inner.budget
        self._address: ListenAddress | None = None
        self._on_connection: Callable[[Connection], None] = Connection.close

    async def start(self, on_connection: Callable[[Connection], None]) -> ListenAddress:
        self._on_connection = on_connection
        if self._address is None:
            self._address = await self.inner.start(self._accepted)
        return self._address

    def _accepted(self, connection: Connection) -> None:
        self._on_connection(connection)

    async def dial(self, address: ListenAddress, lanes: tuple[Lane, ...]) -> Connection:
        return await self.inner.dial(address, lanes)

    async def aclose(self) -> None:
        self._on_connection = Connection.close


class Bench:
    """The loop, and a pair of transports per lane, for all examples."""

    def __init__(self, runner: asyncio.Runner) -> None:
        self.runner = runner
        self.device = "cpu"
        """Where both pools are."""
        self.problems: list[dict[str, Any]] = []
        runner.get_loop().set_exception_handler(lambda _, context: self.problems.append(context))
        self._standing = tuple(Standing(UcxTransport(budget=StagingBudget(1 << 30))) for _ in range(2))

    def pair(self, lane: Lane) -> tuple[Transport | None, Transport | None]:
        """None: of the runtime's own, which are given the staging of a pool."""
        if self.device != "cpu":
            return None, None
        if lane == "local":
            network = InprocNetwork()
            source, target = (InprocTransport(network, budget=StagingBudget(1 << 30)) for _ in range(2))
            return source, target
        return self._standing[0], self._standing[1]

    def run(self, work: Awaitable[None]) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(SECONDS):
                await work

        self.runner.run(bounded())
        assert self.problems == []

    def close(self) -> None:
        for standing in self._standing:
            self.runner.run(standing.inner.aclose())


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        bench = Bench(runner)
        yield bench
        bench.close()


# ---------------------------------------------------------------------- the property


def first_block(flow: Flow, layout: KVLayout) -> int:
    """Of the stream's table: what is before it is at the destination already."""
    return len(flow.mine) if flow.first_token == flow.tokens else flow.first_token // layout.block_tokens


class Case:
    """One example on one lane, with both pools on one kind of device."""

    def __init__(self, example: Example, device: str) -> None:
        layout = example.layout
        self.example = example
        self.layout = layout
        self.source = make_memory(layout, example.blocks[0], example.arrange[0], example.seed, device)
        self.target = make_memory(layout, example.blocks[1], example.arrange[1], example.seed + 10, device)
        self.stayed = 0
        """Connections whose bytes have gone from device to device."""
        rng = np.random.default_rng(example.seed + 20)
        self._content = rng.integers(0, 256, (layout.layers, example.blocks[0], layout.block_bytes), np.uint8)
        """What the prefill will have computed, by layer and block of the source."""
        self.expected = make_memory(layout, example.blocks[1], example.arrange[1], example.seed + 10)
        for flow in example.flows:
            first = first_block(flow, layout)
            for layer in range(layout.layers):
                self.expected.write(layer, flow.theirs[first:], self.content(layer, flow.mine[first:]))

    def content(self, layer: int, ids: Ids) -> npt.NDArray[np.uint8]:
        return self._content[layer][ids].reshape(-1)

    def prefill(self, layer: int, flow: Flow, start: int, stop: int) -> None:
        """Compute tokens [start, stop): a block has its content once its last token has, and noise until then."""
        tokens = self.layout.block_tokens
        last = -(-stop // tokens) if stop == flow.tokens else stop // tokens
        ids = flow.mine[start // tokens : last]
        self.source.write(layer, ids, self.content(layer, ids))

    async def send(self, runtime: Runtime, number: int, flow: Flow) -> None:
        needed = self.layout.blocks_for(flow.cuts[0]) if flow.growing else len(flow.mine)
        table = [int(block) for block in flow.mine]
        async with runtime.send(
            f"r{number}", blocks=table[:needed], tokens=flow.tokens, to="decode-0", growing=flow.growing
        ) as tx:
            start = 0
            for stop in flow.cuts:
                if more := table[needed : self.layout.blocks_for(stop)]:
                    tx.extend(more)
                    needed += len(more)
                for layer in flow.layers:
                    self.prefill(layer, flow, start, stop)
                    tx.layer_ready(layer, (start, stop))
                    await asyncio.sleep(0)
                start = stop
            report = await tx.done(number)
            assert not tx.lent
        moved = len(flow.mine) - first_block(flow, self.layout)
        assert report.bytes == moved * self.layout.layers * self.layout.block_bytes

    async def receive(self, runtime: Runtime, number: int, flow: Flow) -> None:
        first = first_block(flow, self.layout)
        async with runtime.receive(
            f"r{number}", blocks=flow.theirs, tokens=flow.tokens, first_token=flow.first_token
        ) as rx:
            async for layer in rx:
                arrived = self.target.read(layer, flow.theirs[first:])
                assert np.array_equal(arrived, self.content(layer, flow.mine[first:])), f"layer {layer} of r{number}"
            await rx.done()
            assert rx.payload == number

    async def run(self, lane: Lane, transports: tuple[Transport | None, Transport | None]) -> None:
        hub = MemoryBrokerServer()
        async with AsyncExitStack() as stack:
            runtimes: list[Runtime] = []
            memories = (self.source, self.target)
            for name, memory, config, transport in zip(
                ("prefill-0", "decode-0"), memories, self.example.configs, transports, strict=True
            ):
                broker = await stack.enter_async_context(MemoryBroker(hub))
                if transport is not None:
                    stack.push_async_callback(transport.aclose)
                runtime = Runtime(name, pool=memory.pool, lanes=lane, config=config, broker=broker, transport=transport)
                runtimes.append(await stack.enter_async_context(runtime))
            async with asyncio.TaskGroup() as group:
                for number, flow in enumerate(self.example.flows):
                    group.create_task(self.receive(runtimes[1], number, flow))
                    group.create_task(self.send(runtimes[0], number, flow))
            # From here on the blocks are the engine's again, on both sides.
            computed = self.source.all()
            for layer in range(self.layout.layers):
                everything = np.arange(self.example.blocks[0])
                self.source.write(layer, everything, np.zeros(len(everything) * self.layout.block_bytes, np.uint8))
            async with asyncio.timeout(SECONDS / 2):
                # On a GPU a gather may be under way for a stream that has ended; its slot comes back with it.
                while any(runtime._streams.core.slots_in_use for runtime in runtimes):
                    await asyncio.sleep(0.001)
            for runtime in runtimes:
                self.stayed += sum(path.used for path in runtime.stats().devices)
                assert runtime._streams.core.streams == runtime._streams.core.slots_in_use == 0
        assert all(transport is None or transport.budget.used == 0 for transport in transports)
        assert np.array_equal(self.target.all(), self.expected.all())
        assert np.array_equal(computed, self._computed())

    def _computed(self) -> npt.NDArray[np.uint8]:
        """The source's memory as the prefills left it: nobody else has written there."""
        example = self.example
        memory = make_memory(self.layout, example.blocks[0], example.arrange[0], example.seed)
        for flow in example.flows:
            for layer in range(self.layout.layers):
                memory.write(layer, flow.mine, self.content(layer, flow.mine))
        return memory.all()


@pytest.mark.timeout(0 if MANY else 120)
@pytest.mark.parametrize("lane", ["local", *LANES])
def test_the_lane_never_changes_the_bytes(bench: Bench, lane: Lane) -> None:
    @settings(
        max_examples=MANY or 60,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(examples())
    def check(example: Example) -> None:
        note(f"lane {lane}")
        bench.run(Case(example, "cpu").run(lane, bench.pair(lane)))

    check()


async def _no_warm_up(*_: object) -> None:
    pass


@pytest.mark.timeout(0 if MANY else 120)
def test_nor_does_the_way_from_gpu_to_gpu(bench: Bench, cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same over the lane get, with pools on a stand-in for a GPU: staged on the device, lent from where the blocks
    are, or through the host where the staging is too small."""
    monkeypatch.setattr(bench, "device", "cuda:1")
    # Each example has transports of its own, and their first connections may be slow.
    monkeypatch.setattr(UcxTransport, "_warm_up", _no_warm_up)
    stayed: list[int] = []

    @settings(
        max_examples=MANY or 30,
        derandomize=not MANY,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(examples())
    def check(example: Example) -> None:
        case = Case(example, bench.device)
        bench.run(case.run("get", bench.pair("get")))
        stayed.append(case.stayed)

    check()
    assert 0 < stayed.count(2) < len(stayed)
