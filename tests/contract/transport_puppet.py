"""One end of a UCX connection in a process of its own, for tests that kill and freeze it; and both ends' way of
streaming, which the tests use for the other end.

    python transport_puppet.py source LANE HOW ADDRESS     dials ADDRESS (JSON), streams slots for ever
    python transport_puppet.py destination LANE HOW        prints its address, takes and verifies what comes

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
from kvstream.transport.base import LANES, Connection, Lane, ListenAddress, StagingBudget
from kvstream.transport.ucx import UcxTransport

SLOTS = 8
SLOT_BYTES = 1 << 20


def stream(connection: Connection, lane: Lane, moved: Callable[[], None], lost: Callable[[Exception], None]) -> None:
    """Source: offer the lane and publish every slot again as soon as it is confirmed. Slots hold their generation."""
    generations = 0

    def publish(slot: int) -> None:
        nonlocal generations
        generations += 1
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
    connection.send(connection.offer_lanes((lane,), SLOTS, SLOT_BYTES))


def take(
    connection: Connection,
    lane: Lane,
    moved: Callable[[], None],
    lost: Callable[[Exception], None],
    bad: Callable[[], None],
) -> None:
    """Destination: accept the lane, take each announced slot, verify and confirm it."""

    def on_message(message: bytes) -> None:
        if connection.lost:
            return
        if connection.lane is None:
            connection.send(connection.accept_lane(message, (lane,)))
            return
        slot, generation = msgspec.json.decode(message, type=tuple[int, int])
        connection.take(slot, generation, SLOT_BYTES).add_done_callback(lambda done: taken(slot, generation, done))

    def taken(slot: int, generation: int, done: asyncio.Future[np.ndarray]) -> None:
        if done.cancelled():
            return
        try:
            words = done.result().view(np.uint64)
        except (PeerLost, Corrupted):
            return
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


async def main(role: str, lane: Lane, how: str, address: str) -> None:
    loop = asyncio.get_running_loop()
    transport = UcxTransport(budget=StagingBudget(1 << 28), lanes=(lane,) if lane in LANES else LANES)
    connections: list[Connection] = []

    def accept(connection: Connection) -> None:
        connections.append(connection)
        take(connection, lane, lambda: say("moved"), lambda _: say("lost"), lambda: say("bad"))

    listening = await transport.start(accept)
    if role == "destination":
        say(msgspec.json.encode(listening).decode())
    else:
        connection = await transport.dial(msgspec.json.decode(address, type=ListenAddress), (lane,))
        connections.append(connection)
        stream(connection, lane, lambda: say("moved"), lambda _: say("lost"))
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
    _, role, lane, how, *rest = sys.argv
    uvloop.run(main(role, lane, how, rest[0] if rest else ""))  # pyright: ignore[reportArgumentType]  # a lane's name
