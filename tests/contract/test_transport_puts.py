"""Puts go to UCX a window at a time: what a control message waits behind is bounded, by count of bytes, not by time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from transport_suite import Harness, Pair, pattern, turns

from kvstream.errors import Cancelled, PeerLost
from kvstream.transport import _ucp
from kvstream.transport._puts import WITHDRAWN, Puts
from kvstream.transport._worker import Endpoint
from kvstream.transport.base import StagingBudget
from kvstream.transport.ucx import UcxTransport

WINDOW = 64 << 10
SLOTS = 8
SLOT_BYTES = 1 << 20


class Wire:
    """Stands in for an endpoint: notes what is posted, and completes when the test says so."""

    def __init__(self) -> None:
        self.open = True
        self.at_once = False
        self.log: list[tuple[int, int] | str] = []
        self.waiting: list[Callable[[int], None]] = []

    def put(self, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        assert remote == local + 1000
        self._post((local, nbytes), done)

    def flush(self, done: Callable[[int], None]) -> None:
        self._post("flush", done)

    def _post(self, what: tuple[int, int] | str, done: Callable[[int], None]) -> None:
        assert self.open
        self.log.append(what)
        if self.at_once:
            done(_ucp.OK)
        else:
            self.waiting.append(done)

    def complete(self, status: int = _ucp.OK) -> None:
        self.waiting.pop(0)(status)


def puts_of(wire: Wire, window: int = 8) -> Puts:
    return Puts(wire, window)  # pyright: ignore[reportArgumentType] - what is used of an Endpoint


def test_pieces_go_in_order_and_within_the_window() -> None:
    wire, ends = Wire(), []
    puts = puts_of(wire)
    puts.put(0, 100, 10, 1100, 7, lambda status: ends.append((0, status)))
    puts.put(1, 200, 6, 1200, 7, lambda status: ends.append((1, status)))
    assert wire.log == [(100, 4), (104, 4)]
    wire.complete()
    assert wire.log[2:] == [(108, 2), "flush"]
    assert (puts.under_way, ends) == (6, [])
    wire.complete()
    assert wire.log[4:] == [(200, 3), (203, 3), "flush"]
    while wire.waiting:
        wire.complete()
        assert puts.under_way <= 8
    assert ends == [(0, _ucp.OK), (1, _ucp.OK)]


def test_what_completes_at_once_goes_in_one_go() -> None:
    wire, ends = Wire(), []
    wire.at_once = True
    puts_of(wire).put(0, 0, 20, 1000, 7, ends.append)
    assert wire.log == [(0, 4), (4, 4), (8, 4), (12, 4), (16, 4), "flush"]
    assert ends == [_ucp.OK]


def test_a_piece_larger_than_the_window_still_goes() -> None:
    wire, ends = Wire(), []
    wire.at_once = True
    puts_of(wire, 1).put(0, 0, 3, 1000, 7, ends.append)
    assert wire.log == [(0, 1), (1, 1), (2, 1), "flush"]


def test_what_is_withdrawn_goes_no_further() -> None:
    wire, ends = Wire(), []
    puts = puts_of(wire)
    for slot in range(3):
        puts.put(slot, 100 * slot, 20, 1000 + 100 * slot, 7, lambda status, slot=slot: ends.append((slot, status)))
    puts.withdraw(0)
    puts.withdraw(2)
    # What is under way of the first has to arrive before its slot is anybody's; the second follows.
    assert wire.log == [(0, 4), (4, 4), "flush"]
    while wire.waiting:
        wire.complete()
    assert wire.log[3:] == [(100, 4), (104, 4), (108, 4), (112, 4), (116, 4), "flush"]
    assert sorted(ends) == [(0, WITHDRAWN), (1, _ucp.OK), (2, WITHDRAWN)]


def test_a_piece_that_fails_ends_the_transfer() -> None:
    wire, ends = Wire(), []
    puts_of(wire).put(0, 0, 20, 1000, 7, ends.append)
    wire.complete(-3)
    assert wire.log == [(0, 4), (4, 4), "flush"]
    wire.complete()
    wire.complete()
    assert ends == [-3]


def test_nothing_is_posted_on_a_closed_endpoint() -> None:
    wire, ends = Wire(), []
    puts = puts_of(wire)
    puts.put(0, 0, 20, 1000, 7, ends.append)
    wire.open = False
    wire.complete(_ucp.CANCELED)
    wire.complete(_ucp.CANCELED)
    puts.put(1, 0, 20, 1000, 7, ends.append)
    assert (wire.log, ends, puts.under_way) == ([(0, 4), (4, 4)], [], 0)


# -- over UCX


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    def transport() -> UcxTransport:
        return UcxTransport(budget=StagingBudget(1 << 28), lanes=("put",), put_window=WINDOW)

    harness = Harness(transport(), transport(), "put")
    try:
        await harness.start()
        pair = await harness.connect(open_lane=False)
        pair.open("put", SLOTS, SLOT_BYTES)
        yield pair
    finally:
        await harness.aclose()


class Traffic:
    """Bytes of puts that UCX has and has not completed, and the most of them when a message was sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.posted = 0
        self.under_way = 0
        self.ahead: list[int] = []
        put, send = Endpoint.put, Endpoint.send

        def counted(endpoint: Endpoint, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]):
            def completed(status: int) -> None:
                self.under_way -= nbytes
                done(status)

            self.posted += nbytes
            self.under_way += nbytes
            put(endpoint, local, nbytes, remote, rkey, completed)

        def noted(endpoint: Endpoint, message: bytes, done: Callable[[int], None]) -> None:
            self.ahead.append(self.under_way)
            send(endpoint, message, done)

        monkeypatch.setattr(Endpoint, "put", counted)
        monkeypatch.setattr(Endpoint, "send", noted)


async def test_a_message_waits_behind_a_window_at_most(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    source, destination = pair.source.connection, pair.destination.connection
    contents = [pattern(slot, SLOT_BYTES) for slot in range(SLOTS)]
    published: list[asyncio.Future[int]] = []
    for slot, content in enumerate(contents):
        source.write_view(slot)[...] = content
        published.append(source.publish(slot, SLOT_BYTES))
        source.send(b"%d" % slot)
    while not all(future.done() for future in published):
        await asyncio.sleep(0)
        source.send(b"more")
    assert len(traffic.ahead) > SLOTS
    assert max(traffic.ahead) <= WINDOW
    assert traffic.posted > SLOTS * SLOT_BYTES
    for slot, content in enumerate(contents):
        view = await destination.take(slot, published[slot].result(), SLOT_BYTES)
        assert np.array_equal(view, content)


async def test_a_withdrawn_slot_ends_and_can_be_used_again(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    source, destination = pair.source.connection, pair.destination.connection
    published: list[asyncio.Future[int]] = []
    for slot in range(SLOTS):
        source.write_view(slot)
        published.append(source.publish(slot, SLOT_BYTES))
    posted = traffic.posted
    for slot in range(SLOTS):
        source.withdraw(slot)
    async with asyncio.timeout(10):
        ends = await asyncio.gather(*published, return_exceptions=True)
    assert all(isinstance(end, Cancelled) for end in ends[1:])
    assert traffic.posted == posted
    content = pattern(1, SLOT_BYTES)
    source.write_view(0)[...] = content
    view = await destination.take(0, await source.publish(0, SLOT_BYTES), SLOT_BYTES)
    assert np.array_equal(view, content)


async def test_a_lost_connection_posts_nothing_more(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = Traffic(monkeypatch)
    source = pair.source.connection
    published: list[asyncio.Future[int]] = []
    for slot in range(SLOTS):
        source.write_view(slot)
        published.append(source.publish(slot, SLOT_BYTES))
    posted = traffic.posted
    source.close()
    await turns()
    assert traffic.posted == posted
    ends = await asyncio.gather(*published, return_exceptions=True)
    assert all(isinstance(end, PeerLost) for end in ends if isinstance(end, BaseException))
    assert isinstance(ends[-1], PeerLost)
