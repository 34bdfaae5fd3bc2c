"""One end of a UCX connection in a process of its own, for tests that kill and freeze it; and both ends' way of
streaming, which the tests use for the other end.

    python transport_puppet.py source WAY HOW ADDRESS     dials ADDRESS (JSON), streams slots for ever
    python transport_puppet.py destination WAY HOW        prints its address, takes and verifies what comes

WAY is a lane, or "lent-" and a lane that lends: then the source's memory is read where it is.

It writes one word a line: "moved" for every slot taken or confirmed, "lost" when the connection is, "bad" for bytes
that passed every check and are wrong. It ends when its stdin does, HOW says in which way: "aclose", "fence" (only the
connection) or "abandon" (nothing is closed).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

import msgspec
import numpy as np
import uvloop

from kvstream.errors import Corrupted, PeerLost
from kvstream.transport.base import LANES, ByteView, Connection, Lane, Lent, ListenAddress, Slab, StagingBudget
from kvstream.transport.ucx import UcxTransport

SLOTS = 8
SLOT_BYTES = 1 << 20
RUN_BYTES = 1 << 13
WAYS = (*LANES, "lent-shared", "lent-get")


def lane_of(way: str) -> Lane:
    (lane,) = (lane for lane in LANES if lane == way.removeprefix("lent-"))
    return lane


def open_transport(way: str) -> tuple[UcxTransport, ByteView]:
    """A transport for this way, and memory of its own to lend: as much as the slots have."""
    transport = UcxTransport(budget=StagingBudget(1 << 28), lanes=(lane_of(way),))
    memory = np.zeros(SLOTS * SLOT_BYTES, np.uint8)
    transport.expose([Slab(memory.ctypes.data, memory.nbytes, memory)])
    return transport, memory


def runs(memory: ByteView) -> Lent:
    """All of a flat array as runs, the last ones first."""
    starts = np.arange(0, memory.nbytes, RUN_BYTES, dtype=np.uint64)
    return Lent(memory.ctypes.data + starts[::-1], RUN_BYTES)


def stream(
    connection: Connection, way: str, memory: ByteView, moved: Callable[[], None], lost: Callable[[Exception], None]
) -> None:
    """Source: offer the lane and publish, or lend, every slot again as soon as it is confirmed. Slots hold their
    generation."""
    generations = 0

    def publish(slot: int) -> None:
        nonlocal generations
        generations += 1
        if way.startswith("lent-"):
            assert connection.lends
            part = memory.reshape(SLOTS, SLOT_BYTES)[slot]
            part.view(np.uint64)[:] = generations
            connection.send(msgspec.json.encode((slot, connection.lend(slot, runs(part)))))
            return
        connection.write_view(slot).view(np.uint64)[:] = generations
        connection.publish(slot, SLOT_BYTES).add_done_callback(lambda done: announce(slot, done))

    def announce(slot: int, done: asyncio.Future[int]) -> None:
        if not done.cancelled() and done.exception() is None:
            connection.send(msgspec.json.encode((slot, done.result())))

    def on_message(message: bytes) -> None:
        if connection.lost:
            return
        if connection.lane is None:
            connection.open_lane(message)
            for slot in range(SLOTS):
                publish(slot)
        else:
            moved()
            publish(int(message))

    connection.start(on_message, lost)
    connection.send(connection.offer_lanes((lane_of(way),), SLOTS, SLOT_BYTES))


def take(
    connection: Connection,
    way: str,
    memory: ByteView,
    moved: Callable[[], None],
    lost: Callable[[Exception], None],
    bad: Callable[[], None],
) -> None:
    """Destination: accept the lane, take each announced slot, verify and confirm it."""

    def on_message(message: bytes) -> None:
        if connection.lost:
            return
        if connection.lane is None:
            connection.send(connection.accept_lane(message, (lane_of(way),)))
            return
        slot, generation = msgspec.json.decode(message, type=tuple[int, int])
        connection.take(slot, generation, SLOT_BYTES).add_done_callback(lambda done: taken(slot, generation, done))

    def taken(slot: int, generation: int, done: asyncio.Future[ByteView | Lent]) -> None:
        if done.cancelled():
            return
        try:
            found = done.result()
        except (PeerLost, Corrupted):
            return
        if isinstance(found, Lent):
            part = memory.reshape(SLOTS, SLOT_BYTES)[slot]
            reading = connection.borrow(found, runs(part))
            reading.add_done_callback(lambda done: borrowed(slot, generation, part, done))
        else:
            verify(slot, generation, found)

    def borrowed(slot: int, generation: int, part: ByteView, done: asyncio.Future[None]) -> None:
        if not isinstance(done.exception(), PeerLost | Corrupted):
            done.result()
            verify(slot, generation, part)

    def verify(slot: int, generation: int, found: ByteView) -> None:
        words = found.view(np.uint64)
        right = bool((words == generation).all())
        if not connection.check(slot, generation):
            return
        if not right:
            bad()
        moved()
        connection.send(b"%d" % slot)

    connection.start(on_message, lost)


def say(word: str) -> None:
    print(word, flush=True)


async def main(role: str, way: str, how: str, address: str) -> None:
    loop = asyncio.get_running_loop()
    transport, memory = open_transport(way)
    connections: list[Connection] = []

    def accept(connection: Connection) -> None:
        connections.append(connection)
        take(connection, way, memory, lambda: say("moved"), lambda _: say("lost"), lambda: say("bad"))

    listening = await transport.start(accept)
    if role == "destination":
        say(msgspec.json.encode(listening).decode())
    else:
        connection = await transport.dial(msgspec.json.decode(address, type=ListenAddress), (lane_of(way),))
        connections.append(connection)
        stream(connection, way, memory, lambda: say("moved"), lambda _: say("lost"))
    ended = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    await ended.wait()
    loop.remove_reader(sys.stdin.fileno())
    if how == "aclose":
        await transport.aclose()
    elif how == "fence":
        for connection in connections:
            await connection.fence()


if __name__ == "__main__":
    _, role, way, how, *rest = sys.argv
    uvloop.run(main(role, way, how, rest[0] if rest else ""))
