"""A registered worker that says anything at any time: garbage, mutated frames, frames out of order, lies about slots.

It dials a living runtime and is dialed by it; in between that runtime's users send, receive, cancel. Whatever it does,
the runtime's loop sees no exception, every stream ends, nothing is left behind, and the next peer is served as ever.
KVSTREAM_PROPERTY_EXAMPLES runs that many random examples in place of the fixed ones.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstream import (
    KVLayout,
    KVPool,
    KVStreamError,
    Offer,
    PeerLost,
    ReceiveStream,
    Refused,
    Runtime,
    RuntimeConfig,
    wire,
)
from kvstream.discovery import DataAddress, MemoryBroker, MemoryBrokerServer, Registry, WorkerRecord
from kvstream.transport.base import Connection, ListenAddress, StagingBudget
from kvstream.transport.inproc import InprocNetwork, InprocTransport
from tests.unit.test_wire import frames as any_frame

MANY = int(os.environ.get("KVSTREAM_PROPERTY_EXAMPLES", "0"))
LAYOUT = KVLayout(layers=2, kv_heads=1, head_dim=8, block_tokens=4, dtype="float16")
BLOCKS = 8
SLOTS = 3
TOKENS = 12
SECONDS = 20.0
"""Bound on one example, which takes milliseconds; no time-out of the runtime is shorter."""
CONFIG = RuntimeConfig(slots=SLOTS, slot_bytes=2 * LAYOUT.block_bytes, connect_timeout=SECONDS, stall_timeout=SECONDS)
KEY = "5e" * 32
INCARNATION = "ab" * 16

# ---------------------------------------------------------------------- what it says

# Small numbers, so that frames hit what there is as often as not.
few = st.integers(0, 4)
nums = st.sampled_from([1, 1, 1, 1, 1, 1, 2, 2, 2, 3, 0])
names = st.sampled_from(["r0", "r1", "r2"])
tokens = st.sampled_from([TOKENS, TOKENS, TOKENS, 0, 1, 5, 2**32 - 1])
codes = st.sampled_from(["done", "cancelled", "peer-lost", "refused", "corrupted", "nonsense", ""])
epochs = st.sampled_from([1, 1, 1, 0, 2])
ends = st.builds(
    wire.End, nums, epochs, codes, st.just(""), few, st.sampled_from([b"", b"\xc1", b"\x01"]), st.booleans()
)
beats = st.builds(wire.Beat, few, st.booleans())
of_a_source = st.one_of(
    st.builds(
        wire.Offer,
        nums,
        epochs,
        names,
        tokens,
        st.none() | st.sampled_from([0.0, 10.0]),
        st.integers(-3, 3),
        st.sampled_from([b"", b"\xc1", b"\x01"]),
    ),
    st.builds(wire.Ready, nums, epochs, few, st.integers(0, 2), few, few, few, few, st.sampled_from([0, 0, 7])),
    ends,
    beats,
)
of_a_destination = st.one_of(
    st.builds(wire.Accept, nums, epochs, st.sampled_from([0, 0, 4, TOKENS, 13])),
    st.builds(wire.Refuse, nums, epochs, codes, st.just("no"), st.sampled_from([None, 0.1])),
    st.builds(wire.Confirm, nums, epochs, few),
    ends,
    beats,
)


def weighted(*choices: tuple[int, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    """One of them, as often as they weigh (`one_of` would choose evenly)."""
    return st.sampled_from([choice for weight, choice in choices for _ in range(weight)]).flatmap(lambda kind: kind)


def some(frames: st.SearchStrategy[wire.Frame]) -> st.SearchStrategy[list[wire.Frame]]:
    """Mostly those."""
    return st.lists(weighted((7, frames), (1, any_frame)), min_size=1, max_size=3)


@dataclass(frozen=True, slots=True)
class Say:
    """Frames, in a message of the number that is due (or another one), with some of its bytes changed; on a connection
    that it has dialed itself, or on one that it was dialed on, if there is one."""

    dialed: bool
    frames: list[wire.Frame]
    ahead: int
    flips: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Raw:
    data: bytes


@dataclass(frozen=True, slots=True)
class Publish:
    """Put something into a slot, which its next frames may or may not be about."""

    slot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Proper:
    """What a good source would do next: "offer" a stream, announce a "chunk" of it, say the "end"."""

    what: str
    number: int


@dataclass(frozen=True, slots=True)
class Close:
    pass


@dataclass(frozen=True, slots=True)
class Dial:
    """Connect to the runtime, with a good handshake or without any."""

    shake_hands: bool


@dataclass(frozen=True, slots=True)
class Turns:
    count: int


@dataclass(frozen=True, slots=True)
class User:
    """What the runtime's own user does at that moment, with the stream `r<number>`."""

    does: str
    number: int


Act = Say | Raw | Publish | Proper | Close | Dial | Turns | User

ahead = st.sampled_from([0] * 20 + [-1, 1])
flips = st.sampled_from([0] * 15 + [1, 3]).flatmap(
    lambda n: st.lists(st.tuples(st.integers(0, 200), st.integers(1, 255)), min_size=n, max_size=n)
)
said = st.builds(Say, st.just(True), some(of_a_source), ahead, flips) | st.builds(
    Say, st.just(False), some(of_a_destination), ahead, flips
)
proper = st.builds(Proper, st.sampled_from(["offer", "chunk", "chunk", "chunk", "end"]), st.integers(0, 2))
acts = weighted(
    (3, said),
    (8, proper),
    (1, st.builds(Raw, st.binary(max_size=60))),
    (1, st.builds(Publish, st.integers(0, SLOTS - 1), st.sampled_from([LAYOUT.block_bytes, 2 * LAYOUT.block_bytes]))),
    (1, st.builds(Close)),
    (1, st.builds(Dial, st.sampled_from([True, True, True, False]))),
    (1, st.builds(Turns, st.integers(0, 8))),
    (4, st.builds(User, st.sampled_from(["send", "send", "receive", "receive", "cancel", "task"]), st.integers(0, 2))),
)


@dataclass(frozen=True, slots=True)
class Manners:
    """What it answers by itself."""

    offer: bool
    ready: bool
    end: bool


@dataclass(frozen=True, slots=True)
class Play:
    manners: Manners
    first: list[User]
    dials: bool
    """Whether a connection of its own stands at the start."""
    hasty: bool
    """Whether everything is said at once, in place of a few turns of the loop after each act."""
    acts: list[Act]


often = st.sampled_from([True, True, False])
plays = st.builds(
    Play,
    st.builds(Manners, often, often, often),
    st.lists(st.builds(User, st.sampled_from(["send", "receive"]), st.integers(0, 2)), max_size=2),
    often,
    st.sampled_from([False, False, True]),
    st.lists(acts, min_size=6, max_size=30),
)


# ---------------------------------------------------------------------- who says it


class Line:
    """One connection of the hostile peer."""

    def __init__(self, connection: Connection, on_frame: Callable[[Line, wire.Frame], None]) -> None:
        self.connection = connection
        self.sent = 0
        self.offers = 0
        self.chunks = 0
        self._on_frame = on_frame
        connection.start(self._received, lambda _: None)

    def _received(self, message: bytes) -> None:
        # What a runtime says can always be read.
        for frame in wire.decode(message)[1]:
            with suppress(KVStreamError):  # it may be lost by now
                self._on_frame(self, frame)

    def say(self, frames: list[wire.Frame], ahead: int = 0, flips: list[tuple[int, int]] | None = None) -> None:
        for message in wire.encode(max(0, self.sent + ahead), frames):
            self.sent += 1
            changed = bytearray(message)
            for at, value in flips or ():
                changed[at % len(changed)] ^= value
            self.connection.send(bytes(changed))

    async def go_on(self, act: Proper) -> None:
        """As a good source, with one block to a chunk."""
        connection = self.connection
        if not connection.dialed or connection.lane is None:
            return
        needed = LAYOUT.blocks_for(TOKENS)
        if act.what == "offer" or not self.offers:
            self.offers += 1
            self.chunks = 0
            self.say([wire.Offer(self.offers, 1, f"r{act.number}", TOKENS, 10.0)])
        elif act.what == "end":
            self.say([wire.End(self.offers, 1, "done", chunks=self.chunks)])
        elif self.chunks < needed * LAYOUT.layers:
            slot = self.chunks % SLOTS
            connection.write_view(slot)[:] = self.chunks
            generation = await connection.publish(slot, LAYOUT.block_bytes)
            layer, first = divmod(self.chunks, needed)
            self.say([wire.Ready(self.offers, 1, self.chunks, layer, first, 1, slot, generation)])
            self.chunks += 1


class Hostile:
    """A worker in the registry with a transport of its own and no runtime behind it."""

    def __init__(self, network: InprocNetwork, victim: Runtime, manners: Manners) -> None:
        self.manners = manners
        self.transport = InprocTransport(network, budget=StagingBudget(1 << 24))
        self.lines: list[Line] = []
        self._victim = victim

    async def start(self) -> WorkerRecord:
        address = await self.transport.start(self._accepted)
        return WorkerRecord(
            name="hostile",
            incarnation=INCARNATION,
            key=KEY,
            roles=("decode", "prefill"),
            address=msgspec.convert(address, DataAddress, from_attributes=True),
            fingerprint=LAYOUT.fingerprint(),
            pid=1,
            host="h",
            started=0.0,
        )

    def line(self, dialed: bool) -> Line | None:
        """The newest connection of that kind, else of the other."""
        lines = [line for line in reversed(self.lines) if not line.connection.lost]
        return max(lines, key=lambda line: line.connection.dialed == dialed, default=None)

    def _accepted(self, connection: Connection) -> None:
        line = Line(connection, self._on_frame)
        self.lines.append(line)
        line.say([wire.Challenge(wire.VERSION, wire.MIN_VERSION, b"c" * 16)])

    async def dial(self, shake_hands: bool) -> None:
        address = msgspec.convert(self._victim.record.address, ListenAddress, from_attributes=True)
        connection = await self.transport.dial(address, ("local",))
        if not shake_hands:
            self.lines.append(Line(connection, lambda line, frame: None))
            return
        self.lines.append(Line(connection, self._on_frame))
        while connection.lane is None and not connection.lost:
            await asyncio.sleep(0)

    def _on_frame(self, line: Line, frame: wire.Frame) -> None:
        victim, connection = self._victim.record, line.connection
        if isinstance(frame, wire.Challenge) and connection.dialed and connection.lane is None:
            hello = wire.Hello(
                wire.VERSION,
                wire.MIN_VERSION,
                "hostile/0",
                INCARNATION,
                victim.id,
                victim.incarnation,
                b"n" * 16,
                wire.proof(KEY, "hello", frame.nonce, "hostile/0", INCARNATION, victim.incarnation),
                LAYOUT.fingerprint(),
                msgspec.json.encode(LAYOUT).decode(),
                (0, 1, 0, 1),
                ["local"],
                connection.offer_lanes(("local",), SLOTS, CONFIG.slot_bytes),
            )
            line.say([hello])
        elif isinstance(frame, wire.Welcome) and connection.dialed and connection.lane is None:
            connection.open_lane(frame.lane_answer)
        elif isinstance(frame, wire.Hello) and not connection.dialed and connection.lane is None:
            answer = connection.accept_lane(frame.lane_offer, ("local",))
            proof = wire.proof(KEY, "welcome", frame.nonce, "hostile/0", INCARNATION, victim.incarnation)
            line.say([wire.Welcome(wire.VERSION, "hostile/0", INCARNATION, proof, "local", answer)])
        elif isinstance(frame, wire.Offer) and self.manners.offer:
            line.say([wire.Accept(frame.num, frame.epoch)])
        elif isinstance(frame, wire.Ready) and self.manners.ready:
            line.say([wire.Confirm(frame.num, frame.epoch, frame.chunk + 1)])
        elif isinstance(frame, wire.End) and self.manners.end and not frame.answer:
            # To what it sent itself this is the answer, to what was sent to it the decision.
            line.say([wire.End(frame.num, frame.epoch, frame.code, answer=connection.dialed, chunks=frame.chunks)])


# ---------------------------------------------------------------------- whom it meets


@dataclass
class Users:
    """The users of the runtime under attack: each stream in a task of its own, with blocks of its own."""

    runtime: Runtime
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    streams: dict[str, Any] = field(default_factory=dict)
    count: int = 0

    def start(self, work: Awaitable[None]) -> asyncio.Task[None]:
        self.count += 1
        task = asyncio.ensure_future(work)
        self.tasks[f"{self.count}"] = task
        return task

    async def on_offer(self, offer: Offer) -> None:
        pool = self.runtime.pool
        for _ in range(3):  # time in which the offer may be taken back
            await asyncio.sleep(0)
        try:
            blocks = pool.acquire(pool.layout.blocks_for(offer.tokens))
        except Refused as error:
            offer.refuse(str(error))
            return
        try:
            rx = offer.accept(blocks)
        except KVStreamError:
            pool.release(blocks)
            return
        self.start(self._take(rx, blocks))

    async def _take(self, rx: ReceiveStream, blocks: list[int]) -> None:
        try:
            async with rx:
                async for _ in rx:
                    pass
                await rx.done()
        except KVStreamError:
            pass
        finally:
            self.runtime.pool.release(blocks)

    async def _receive(self, name: str) -> None:
        pool = self.runtime.pool
        try:
            blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
        except Refused:
            return
        try:
            rx = self.runtime.receive(name, blocks=blocks, tokens=TOKENS)
            self.streams[name] = rx
        except KVStreamError:
            pool.release(blocks)
            raise
        await self._take(rx, blocks)

    async def _send(self, name: str) -> None:
        try:
            async with self.runtime.send(name, blocks=[0, 1, 2], tokens=TOKENS, to="hostile") as tx:
                self.streams[name] = tx
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                    await asyncio.sleep(0)
                await tx.done({"a": 1})
        except KVStreamError:
            pass

    def act(self, does: str, name: str) -> None:
        if does == "send":
            self.start(self._send(name))
        elif does == "receive":
            self.start(self._receive(name))
        elif does == "cancel":
            stream = self.streams.get(name)
            if stream is not None and stream.key:
                stream.cancel("by its user")
        elif self.tasks:
            next(reversed(self.tasks.values())).cancel()

    async def end(self) -> None:
        """Leave everything, as a user does; no stream may refuse to end."""
        for task in self.tasks.values():
            task.cancel()
        if self.tasks:
            await asyncio.wait(list(self.tasks.values()))
        for task in self.tasks.values():
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error


class Scene:
    """A runtime that is attacked, a good one, and the hostile peer between them."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.hub = MemoryBrokerServer()
        self.network = InprocNetwork()
        self.budgets: list[StagingBudget] = []

    async def runtime(self, name: str) -> Runtime:
        broker = await self._stack.enter_async_context(MemoryBroker(self.hub))
        budget = StagingBudget(1 << 24)
        self.budgets.append(budget)
        transport = InprocTransport(self.network, budget=budget)
        self._stack.push_async_callback(transport.aclose)
        pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
        runtime = Runtime(name, roles={"decode"}, pool=pool, config=CONFIG, broker=broker, transport=transport)
        return await self._stack.enter_async_context(runtime)

    async def hostile(self, victim: Runtime, manners: Manners) -> Hostile:
        broker = await self._stack.enter_async_context(MemoryBroker(self.hub))
        registry = await self._stack.enter_async_context(Registry(broker, rng=random.Random(1)))
        hostile = Hostile(self.network, victim, manners)
        record = await hostile.start()
        self._stack.push_async_callback(hostile.transport.aclose)
        await registry.register(record)
        await victim.registry.wait_for("hostile", SECONDS)
        return hostile


async def perform(act: Act, hostile: Hostile, users: Users) -> None:
    line = hostile.line(dialed=act.dialed if isinstance(act, Say) else True)
    if isinstance(act, User):
        users.act(act.does, f"r{act.number}")
    elif isinstance(act, Turns):
        for _ in range(act.count):
            await asyncio.sleep(0)
    elif isinstance(act, Dial):
        await hostile.dial(act.shake_hands)
    elif isinstance(act, Proper):
        if line is None or not line.connection.dialed:
            await hostile.dial(shake_hands=True)
        else:
            with suppress(PeerLost):
                await line.go_on(act)
    elif line is None:
        return
    elif isinstance(act, Say):
        line.say(act.frames, act.ahead, act.flips)
    elif isinstance(act, Raw):
        line.connection.send(act.data)
    elif isinstance(act, Publish):
        if line.connection.dialed and line.connection.lane is not None:
            with suppress(PeerLost):
                line.connection.write_view(act.slot)[:] = act.slot
                await line.connection.publish(act.slot, act.nbytes)
    else:
        line.connection.close()


async def settled(runtime: Runtime) -> None:
    """Wait, bounded by the example's time, until the runtime has nothing to do with anybody any more."""
    streams = runtime._streams
    while not streams.core.idle or streams._offer_tasks or streams.links._links or streams.links._fences:
        await asyncio.sleep(0)


async def exchange(source: Runtime, target: Runtime, name: str) -> None:
    """A stream as it should be."""
    blocks, into = [4, 1, 2], [7, 3, 0]
    for layer in range(LAYOUT.layers):
        view = source.pool.layer(layer).view(np.uint8)
        view[...] = np.random.default_rng(layer).integers(0, 256, view.shape, np.uint8)
    async with target.receive(name, blocks=into, tokens=TOKENS) as rx:
        async with source.send(name, blocks=blocks, tokens=TOKENS, to=target.worker) as tx:
            for layer in range(LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
        await rx.done()
    for layer in range(LAYOUT.layers):
        assert target.pool.layer(layer)[into].tobytes() == source.pool.layer(layer)[blocks].tobytes()


async def play(drawn: Play) -> set[str]:
    """Returns how streams have ended, by the codes of their ends."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    async with asyncio.timeout(SECONDS), AsyncExitStack() as stack:
        scene = Scene(stack)
        victim, good = await scene.runtime("victim"), await scene.runtime("good")
        hostile = await scene.hostile(victim, drawn.manners)
        users = Users(victim)
        victim.on_offer(users.on_offer)
        for act in [*drawn.first, *([Dial(shake_hands=True)] if drawn.dials else []), Turns(8), *drawn.acts]:
            await perform(act, hostile, users)
            if not drawn.hasty:
                await perform(Turns(4), hostile, users)
        await perform(Turns(8), hostile, users)
        # While its connections stand, so that it is not their loss that ends the streams.
        await users.end()
        for line in hostile.lines:
            await line.connection.fence()
        await settled(victim)
        ends = set(victim._streams.core.counters.ended)
        assert victim._streams.core.streams == victim._streams.core.slots_in_use == 0
        assert not victim._streams._sessions
        assert not victim._streams._written.any()
        assert victim.pool.free_blocks == BLOCKS
        assert scene.budgets[0].used == 0
        victim.on_offer(users.on_offer)
        await exchange(good, victim, "to the victim")
        await exchange(victim, good, "from the victim")
        await users.end()
    assert [budget.used for budget in scene.budgets] == [0, 0]
    assert problems == []
    return ends


@pytest.mark.timeout(0 if MANY else 120)
def test_a_hostile_peer_harms_nobody_but_itself() -> None:
    with asyncio.Runner() as runner:

        @settings(
            max_examples=MANY or 150,
            derandomize=not MANY,
            database=None,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        )
        @given(plays)
        def check(drawn: Play) -> None:
            reached.update(runner.run(play(drawn)))

        reached: set[str] = set()
        check()
        # Frames that are all refused at the door would prove little.
        assert {"done", "cancelled", "protocol"} <= reached
