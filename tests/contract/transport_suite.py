"""The transport contract as tests: `kvstream/transport/base.py`, sentence by sentence.

A test class derives from TransportSuite and gives a `harness` fixture; every transport and every lane passes the same.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable

import numpy as np
import pytest

from kvstream.errors import ConfigError, Corrupted, PeerLost, ProtocolError, Recalled, Refused
from kvstream.transport.base import MAX_MESSAGE, Connection, Lane, ListenAddress, StagingBudget, Transport

SLOTS = 4
SLOT_BYTES = 70_001  # a size that is a multiple of nothing


class End:
    """One end of a connection with everything that was delivered on it, in order."""

    def __init__(self, connection: Connection, *, start: bool = True) -> None:
        self.connection = connection
        self.log: list[bytes | Exception] = []
        self._changed = asyncio.Event()
        if start:
            self.start()

    def start(self) -> None:
        self.connection.start(self._note, self._note)

    def _note(self, what: bytes | Exception) -> None:
        self.log.append(what)
        self._changed.set()

    @property
    def messages(self) -> list[bytes]:
        return [entry for entry in self.log if isinstance(entry, bytes)]

    @property
    def losses(self) -> list[Exception]:
        return [entry for entry in self.log if not isinstance(entry, bytes)]

    async def until(self, ready: Callable[[], bool], seconds: float = 10.0) -> None:
        async with asyncio.timeout(seconds):
            while not ready():
                self._changed.clear()
                await self._changed.wait()

    async def until_lost(self) -> None:
        await self.until(lambda: bool(self.losses))


@dataclasses.dataclass(slots=True)
class Pair:
    source: End
    destination: End

    def open(self, lane: Lane, slots: int = SLOTS, slot_bytes: int = SLOT_BYTES) -> None:
        source, destination = self.source.connection, self.destination.connection
        source.open_lane(destination.accept_lane(source.offer_lanes((lane,), slots, slot_bytes), (lane,)))


class Harness:
    """Two started transports; the first dials, the second listens."""

    def __init__(self, source: Transport, destination: Transport, lane: Lane) -> None:
        self.source = source
        self.destination = destination
        self.lane: Lane = lane
        self.address: ListenAddress | None = None
        self._accepted: asyncio.Queue[Connection] = asyncio.Queue()

    async def start(self) -> None:
        def unexpected(_: Connection) -> None:
            raise AssertionError("nobody dials the source")

        await self.source.start(unexpected)
        self.address = await self.destination.start(self._accepted.put_nowait)

    async def aclose(self) -> None:
        await self.source.aclose()
        await self.destination.aclose()

    async def connect(self, *, open_lane: bool = True, start: bool = True) -> Pair:
        assert self.address is not None
        async with asyncio.timeout(20):
            dialed = await self.source.dial(self.address, (self.lane,))
            accepted = await self._accepted.get()
        pair = Pair(End(dialed, start=start), End(accepted, start=start))
        if open_lane:
            pair.open(self.lane)
        return pair

    def budgets(self) -> tuple[StagingBudget, StagingBudget]:
        return self.source.budget, self.destination.budget

    def assert_budgets_returned(self) -> None:
        for budget in self.budgets():
            assert (budget.used, budget.quarantined) == (0, 0)


async def turns(count: int = 20) -> None:
    """Some turns of the loop: enough for whatever was queued with call_soon."""
    for _ in range(count):
        await asyncio.sleep(0)


def pattern(seed: int, nbytes: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


async def move(pair: Pair, slot: int, content: np.ndarray) -> int:
    """Publish, take, compare, check. Returns the generation."""
    source, destination = pair.source.connection, pair.destination.connection
    source.write_view(slot)[: len(content)] = content
    generation = await source.publish(slot, len(content))
    view = await destination.take(slot, generation, len(content))
    assert view.nbytes == len(content)
    assert np.array_equal(view, content)
    assert destination.check(slot, generation)
    return generation


class TransportSuite:
    @pytest.fixture
    async def pair(self, harness: Harness) -> Pair:
        return await harness.connect()

    # -- control messages

    async def test_messages_are_whole_and_in_order_both_ways(self, pair: Pair) -> None:
        rng = random.Random(1)
        sent = [[rng.randbytes(rng.choice((0, 1, 100, 4000, MAX_MESSAGE))) for _ in range(400)] for _ in range(2)]
        ends = (pair.source, pair.destination)
        for to_destination, to_source in zip(*sent, strict=True):
            pair.source.connection.send(to_destination)
            pair.destination.connection.send(to_source)
            if rng.random() < 0.1:
                await asyncio.sleep(0)
        for end, expected in zip(ends, reversed(sent), strict=True):
            await end.until(lambda end=end: len(end.log) >= 400)
            assert end.log == expected

    async def test_what_came_before_start_is_delivered_after_it(self, harness: Harness) -> None:
        pair = await harness.connect(start=False, open_lane=False)
        pair.source.connection.send(b"one")
        pair.source.connection.send(b"two")
        pair.source.start()
        pair.destination.connection.send(b"three")
        await pair.source.until(lambda: pair.source.log == [b"three"])
        pair.destination.start()
        assert pair.destination.log == []
        await pair.destination.until(lambda: len(pair.destination.log) == 2)
        assert pair.destination.log == [b"one", b"two"]

    async def test_nothing_is_delivered_from_within_a_call(self, pair: Pair) -> None:
        pair.source.connection.send(b"x")
        pair.source.connection.close()
        assert pair.source.log == pair.destination.log == []

    async def test_message_size_is_limited(self, pair: Pair) -> None:
        for connection in (pair.source.connection, pair.destination.connection):
            with pytest.raises(ValueError, match=str(MAX_MESSAGE)):
                connection.send(bytes(MAX_MESSAGE + 1))
        pair.source.connection.send(bytes(MAX_MESSAGE))
        await pair.destination.until(lambda: pair.destination.log == [bytes(MAX_MESSAGE)])

    async def test_a_callback_that_raises_ends_nothing(self, harness: Harness) -> None:
        pair = await harness.connect(start=False)
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))
        error = RuntimeError("from the callback")
        got: list[bytes] = []
        last = asyncio.Event()
        lost: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()

        def on_message(message: bytes) -> None:
            got.append(message)
            if message == b"1":
                raise error
            if message == b"2":
                last.set()

        pair.destination.connection.start(on_message, lost.set_result)
        pair.source.start()
        for number in range(3):
            pair.source.connection.send(b"%d" % number)
        pair.destination.connection.send(b"back")
        await pair.source.until(lambda: pair.source.log == [b"back"])
        async with asyncio.timeout(20):
            await last.wait()
            pair.destination.connection.close()
            assert isinstance(await lost, PeerLost)
        assert got == [b"0", b"1", b"2"]
        assert reported == [error]

    async def test_a_backlog_ends_the_connection(self, harness: Harness) -> None:
        pair = await harness.connect()
        for _ in range(20_000):  # without a turn of the loop nobody reads
            pair.source.connection.send(bytes(MAX_MESSAGE))
            if pair.source.connection.lost:
                break
        assert pair.source.connection.lost
        await pair.source.until_lost()
        await pair.destination.until_lost()
        assert isinstance(pair.source.losses[0], PeerLost)
        assert "unsent" in str(pair.source.losses[0])

    async def test_messages_nobody_takes_end_the_connection(self, harness: Harness) -> None:
        pair = await harness.connect(start=False)
        pair.source.start()
        for number in range(6000):
            pair.source.connection.send(b"x")
            if number % 50 == 0:
                await asyncio.sleep(0)
        await pair.source.until_lost()
        assert pair.destination.connection.lost
        pair.destination.start()
        await pair.destination.until_lost()
        assert isinstance(pair.destination.losses[0], ProtocolError)

    # -- loss

    @pytest.mark.parametrize("by", ["source", "destination"])
    @pytest.mark.parametrize("how", ["close", "fence"])
    async def test_lost_is_told_once_on_both_sides(self, pair: Pair, by: str, how: str) -> None:
        ends = {"source": pair.source, "destination": pair.destination}
        closing, other = ends.pop(by), next(iter(ends.values()))
        if how == "close":
            closing.connection.close()
        else:
            await closing.connection.fence()
            assert len(closing.losses) == 1
        assert closing.connection.lost
        await closing.until_lost()
        await other.until_lost()
        assert other.connection.lost
        for end in (closing, other):
            end.connection.close()
            await end.connection.fence()
            await end.connection.fence()
        await turns()
        for end in (closing, other):
            assert [type(entry) for entry in end.log] == [PeerLost]

    async def test_loss_before_start_is_told_after_it(self, harness: Harness) -> None:
        pair = await harness.connect(start=False, open_lane=False)
        await pair.source.connection.fence()
        pair.destination.start()
        await pair.destination.until_lost()
        pair.source.start()
        await pair.source.until_lost()
        assert len(pair.source.losses) == len(pair.destination.losses) == 1

    async def test_no_message_after_the_loss(self, pair: Pair) -> None:
        for number in range(300):
            pair.source.connection.send(b"%d" % number)
            pair.destination.connection.send(b"%d" % number)
        await asyncio.sleep(0)
        await pair.destination.connection.fence()
        await pair.source.until_lost()
        await turns()
        for end in (pair.source, pair.destination):
            assert len(end.losses) == 1
            assert end.log[-1] is end.losses[0]
            assert end.messages == [b"%d" % number for number in range(len(end.messages))]

    async def test_a_lost_connection_does_nothing_any_more(self, pair: Pair) -> None:
        generation = await move(pair, 0, pattern(0, 100))
        await pair.source.connection.fence()
        await pair.destination.until_lost()
        pair.source.connection.send(b"dropped")
        pair.destination.connection.send(b"dropped")
        with pytest.raises(PeerLost):
            pair.source.connection.write_view(0)
        with pytest.raises(PeerLost):
            await pair.source.connection.publish(0, 1)
        with pytest.raises(PeerLost):
            await pair.destination.connection.take(0, generation, 1)
        await turns()
        assert pair.source.messages == pair.destination.messages == []

    async def test_operations_under_way_end_with_the_loss(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        source.write_view(0)
        ready = await source.publish(0, SLOT_BYTES)
        futures: list[asyncio.Future] = [source.publish(slot, SLOT_BYTES) for slot in range(1, SLOTS)]
        futures.append(destination.take(0, ready, SLOT_BYTES))
        destination.close()
        source.close()
        done, pending = await asyncio.wait(futures, timeout=5)
        assert not pending
        for future in done:
            assert future.exception() is None or isinstance(future.exception(), PeerLost)
        await source.fence()
        await destination.fence()

    async def test_what_a_source_had_published_when_it_closed(self, pair: Pair) -> None:
        """The peer may see that the bytes are gone before it sees that the source is: that is no corruption."""
        source, destination = pair.source.connection, pair.destination.connection
        source.write_view(0)[:100] = 1
        generation = await source.publish(0, 100)
        source.close()
        try:
            view = await destination.take(0, generation, 100)
        except (PeerLost, Recalled):
            pass
        else:
            assert isinstance(view, np.ndarray)
            assert (view == 1).all()
        await source.fence()
        await destination.fence()

    # -- negotiation

    async def test_lane_attributes(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        source, destination = pair.source.connection, pair.destination.connection
        assert source.dialed
        assert not destination.dialed
        for connection in (source, destination):
            assert (connection.lane, connection.slots, connection.lost) == (None, 0, False)
        offer = source.offer_lanes((harness.lane,), 3, 1000)
        assert len(offer) <= 2048
        answer = destination.accept_lane(offer, (harness.lane,))
        assert (destination.lane, destination.slots, destination.slot_bytes) == (harness.lane, 3, 1000)
        assert source.lane is None
        source.open_lane(answer)
        assert (source.lane, source.slots, source.slot_bytes) == (harness.lane, 3, 1000)
        assert source.describe()
        assert destination.describe()
        assert source.peer_address

    async def test_garbage_offers_and_answers(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        source, destination = pair.source.connection, pair.destination.connection
        offer = source.offer_lanes((harness.lane,), SLOTS, SLOT_BYTES)
        rng = random.Random(7)
        garbage = [b"", b"\x00", b"\xff" * 100, *(rng.randbytes(rng.randrange(1, 200)) for _ in range(300))]
        for bad in (*garbage, *(offer[:cut] for cut in range(len(offer))), offer + b"\x00"):
            with pytest.raises(ProtocolError):
                destination.accept_lane(bad, (harness.lane,))
        answer = destination.accept_lane(offer, (harness.lane,))
        for bad in (*garbage, *(answer[:cut] for cut in range(len(answer))), answer + b"\x00", offer):
            with pytest.raises(ProtocolError):
                source.open_lane(bad)
        source.open_lane(answer)
        await move(pair, 0, pattern(0, 1000))

    async def test_an_answer_to_another_offer(self, harness: Harness) -> None:
        first = await harness.connect(open_lane=False)
        second = await harness.connect(open_lane=False)
        answers = [
            pair.destination.connection.accept_lane(
                pair.source.connection.offer_lanes((harness.lane,), 2, 100), (harness.lane,)
            )
            for pair in (first, second)
        ]
        with pytest.raises(ProtocolError):
            first.source.connection.open_lane(answers[1])
        first.source.connection.open_lane(answers[0])
        await move(first, 1, pattern(0, 100))

    async def test_no_lane_allowed(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        with pytest.raises(ConfigError, match="lanes"):
            pair.source.connection.offer_lanes((), SLOTS, SLOT_BYTES)
        offer = pair.source.connection.offer_lanes((harness.lane,), SLOTS, SLOT_BYTES)
        with pytest.raises(ConfigError, match="lanes"):
            pair.destination.connection.accept_lane(offer, ())
        assert pair.destination.connection.lane is None

    async def test_exhausted_budgets_refuse(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        source, destination = harness.budgets()
        source.limit, limit = 1000, source.limit
        with pytest.raises(Refused, match="staging"):
            pair.source.connection.offer_lanes((harness.lane,), SLOTS, SLOT_BYTES)
        assert source.used == 0
        source.limit = limit
        offer = pair.source.connection.offer_lanes((harness.lane,), SLOTS, SLOT_BYTES)
        if harness.lane in ("get", "put"):  # there the destination has staging too
            destination.limit, limit = 1000, destination.limit
            with pytest.raises(Refused, match="staging"):
                pair.destination.connection.accept_lane(offer, (harness.lane,))
            assert destination.used == 0
            assert pair.destination.connection.lane is None
            destination.limit = limit
        pair.source.connection.open_lane(pair.destination.connection.accept_lane(offer, (harness.lane,)))
        await move(pair, 0, pattern(0, 10))

    # -- bytes

    async def test_bytes_are_exact(self, pair: Pair) -> None:
        rng = random.Random(3)
        generations: list[int] = []
        sizes = [0, 1, 63, 64, 65, SLOT_BYTES - 1, SLOT_BYTES, *(rng.randrange(SLOT_BYTES + 1) for _ in range(60))]
        for seed, nbytes in enumerate(sizes):
            generations.append(await move(pair, rng.randrange(SLOTS), pattern(seed, nbytes)))
        assert generations == sorted(set(generations))

    async def test_all_slots_at_once(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        for round_ in range(20):
            contents = [pattern(100 * round_ + slot, SLOT_BYTES) for slot in range(SLOTS)]
            for slot, content in enumerate(contents):
                source.write_view(slot)[:] = content
            generations = await asyncio.gather(*(source.publish(slot, SLOT_BYTES) for slot in range(SLOTS)))
            order = list(range(SLOTS))
            random.Random(round_).shuffle(order)
            views = await asyncio.gather(*(destination.take(slot, generations[slot], SLOT_BYTES) for slot in order))
            for slot, view in zip(order, views, strict=True):
                assert np.array_equal(view, contents[slot])
                assert destination.check(slot, generations[slot])

    async def test_views(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        view = source.write_view(2)
        assert (view.shape, view.dtype) == ((SLOT_BYTES,), np.uint8)
        view[:] = 9
        taken = await destination.take(2, await source.publish(2, 50), 50)
        assert taken.shape == (50,)
        with pytest.raises(ValueError, match="read-only"):
            taken[0] = 1

    async def test_a_generation_that_is_not_there(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        old, new = pattern(1, SLOT_BYTES), pattern(2, SLOT_BYTES)
        first = await move(pair, 1, old)
        second = await move(pair, 1, new)
        for wrong in (-1, 0, first, second + 1, 1 << 62):
            with pytest.raises(Corrupted):
                await destination.take(1, wrong, SLOT_BYTES)
            assert not destination.check(1, wrong)
        with pytest.raises(Corrupted):  # never published
            await destination.take(3, second, 10)
        view = await destination.take(1, second, SLOT_BYTES)
        source.write_view(1)[:] = 0
        # Either the reader has a copy of its own, or it is told that what it read is not to be believed.
        assert not destination.check(1, second) or np.array_equal(view, new)
        await move(pair, 1, old)
        assert not destination.check(1, second)

    async def test_slots_out_of_range(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        generation = await move(pair, 0, pattern(0, 100))
        for slot, nbytes in ((-1, 1), (SLOTS, 1), (1 << 40, 1), (0, -1), (0, SLOT_BYTES + 1), (0, 1 << 62)):
            with pytest.raises(ProtocolError):
                await destination.take(slot, generation, nbytes)
        for slot in (-1, SLOTS, 1 << 40):
            assert not destination.check(slot, generation)
            with pytest.raises(ValueError, match="slot"):
                source.write_view(slot)
        for nbytes in (-1, SLOT_BYTES + 1):
            with pytest.raises(ValueError, match="slot"):
                source.publish(0, nbytes)
        await move(pair, 0, pattern(0, 100))

    async def test_take_without_a_lane(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        with pytest.raises(ProtocolError):
            await pair.destination.connection.take(0, 1, 1)

    async def test_messages_with_bytes(self, pair: Pair) -> None:
        """A notification sent when `publish` is done never overtakes the bytes."""
        source, destination = pair.source.connection, pair.destination.connection
        taken = 0
        for number in range(200):
            slot = number % SLOTS
            source.write_view(slot)[:] = number % 251
            source.send(b"%d" % await source.publish(slot, SLOT_BYTES))
            await pair.destination.until(lambda number=number: len(pair.destination.messages) > number)
            generation = int(pair.destination.messages[number])
            view = await destination.take(slot, generation, SLOT_BYTES)
            assert view[0] == view[-1] == number % 251
            taken += 1
        assert taken == 200

    # -- cancellation and the fence

    async def test_cancelled_operations_leave_the_rest_working(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        source.write_view(0)[:] = 1
        generation = await source.publish(0, SLOT_BYTES)
        destination.take(0, generation, SLOT_BYTES).cancel()
        source.write_view(1)
        source.publish(1, SLOT_BYTES).cancel()
        for slot in (2, 3):
            await move(pair, slot, pattern(slot, SLOT_BYTES))
        assert pair.source.log == pair.destination.log == []

    async def test_cancelled_operations_then_the_fence(self, harness: Harness, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        source.write_view(0)
        generation = await source.publish(0, SLOT_BYTES)
        destination.take(0, generation, SLOT_BYTES).cancel()
        for slot in range(1, SLOTS):
            source.write_view(slot)
            source.publish(slot, SLOT_BYTES).cancel()
        await asyncio.gather(source.fence(), destination.fence())
        harness.assert_budgets_returned()

    @pytest.mark.parametrize("first", ["source", "destination"])
    async def test_the_fence_gives_everything_back(self, harness: Harness, pair: Pair, first: str) -> None:
        assert harness.source.budget.used > 0
        await move(pair, 0, pattern(0, SLOT_BYTES))
        ends = [pair.source.connection, pair.destination.connection]
        for connection in ends if first == "source" else reversed(ends):
            await connection.fence()
            await connection.fence()
        harness.assert_budgets_returned()

    async def test_views_outlive_the_fence(self, pair: Pair) -> None:
        source, destination = pair.source.connection, pair.destination.connection
        writing = source.write_view(0)
        writing[:] = 5
        view = await destination.take(0, await source.publish(0, 1000), 1000)
        await source.fence()
        await destination.fence()
        del source, destination
        writing[:] = 6  # nobody's memory now, but memory still
        assert view.sum() >= 0

    async def test_a_cancelled_fence_completes_anyway(self, harness: Harness, pair: Pair) -> None:
        for end in (pair.source, pair.destination):
            fencing = asyncio.create_task(end.connection.fence())
            await asyncio.sleep(0)
            fencing.cancel()
            await asyncio.wait((fencing,))
        for end in (pair.source, pair.destination):
            await asyncio.gather(end.connection.fence(), end.connection.fence())
            assert len(end.losses) == 1
        harness.assert_budgets_returned()

    async def test_the_fence_without_a_lane(self, harness: Harness) -> None:
        pair = await harness.connect(open_lane=False)
        pair.source.connection.offer_lanes((harness.lane,), SLOTS, SLOT_BYTES)
        await pair.source.connection.fence()
        await pair.destination.connection.fence()
        harness.assert_budgets_returned()

    # -- transports

    async def test_many_connections_at_once(self, harness: Harness) -> None:
        # Which accepted connection belongs to which dialed one is told by a message, as in real life.
        dialed = await asyncio.gather(*(harness.connect(open_lane=False) for _ in range(50)))
        accepted: dict[bytes, End] = {}
        for number, pair in enumerate(dialed):
            pair.source.connection.send(b"%d" % number)
        for pair in dialed:
            await pair.destination.until(lambda pair=pair: bool(pair.destination.log))
            accepted[pair.destination.messages[0]] = pair.destination
        pairs = [Pair(pair.source, accepted[b"%d" % number]) for number, pair in enumerate(dialed)]
        assert len(accepted) == 50

        async def use(pair: Pair, seed: int) -> None:
            pair.open(harness.lane, slots=2, slot_bytes=5000)
            for round_ in range(5):
                await move(pair, round_ % 2, pattern(seed * 10 + round_, 5000))

        await asyncio.gather(*(use(pair, seed) for seed, pair in enumerate(pairs)))
        await asyncio.gather(*(pair.source.connection.fence() for pair in pairs[:25]))
        for pair in pairs[:25]:
            await pair.destination.until_lost()
        await asyncio.gather(*(move(pair, 0, pattern(seed, 5000)) for seed, pair in enumerate(pairs[25:])))
        await harness.aclose()
        harness.assert_budgets_returned()

    async def test_aclose_ends_all(self, harness: Harness, pair: Pair) -> None:
        await move(pair, 0, pattern(0, 100))
        await harness.destination.aclose()
        assert harness.destination.budget.used == 0
        await pair.source.until_lost()
        assert len(pair.destination.losses) == 1
        await harness.destination.aclose()
        assert harness.address is not None
        async with asyncio.timeout(10):
            with pytest.raises(PeerLost):
                await harness.source.dial(harness.address, (harness.lane,))
        await harness.source.aclose()
        harness.assert_budgets_returned()
        with pytest.raises(PeerLost):
            await harness.source.dial(harness.address, (harness.lane,))

    async def test_a_cancelled_dial_leaves_nothing(self, harness: Harness) -> None:
        assert harness.address is not None
        for patience in (0, 1, 3, 30):
            dialing = asyncio.create_task(harness.source.dial(harness.address, (harness.lane,)))
            await turns(patience)
            dialing.cancel()
            await asyncio.wait((dialing,))
            if not dialing.cancelled():
                await (await dialing).fence()
        await harness.source.aclose()
        await harness.destination.aclose()
        harness.assert_budgets_returned()

    async def test_loopback_of_another_host_is_refused(self, harness: Harness) -> None:
        assert harness.address is not None
        raw = {field: getattr(harness.address, field) for field in ListenAddress.__struct_fields__}
        elsewhere = ListenAddress(**{**raw, "host_id": "another", "scope": "loopback"})
        with pytest.raises(ConfigError, match="listens on loopback only; start it with --data-interface"):
            await harness.source.dial(elsewhere, (harness.lane,))
        foreign = ListenAddress(**{**raw, "transport": "smoke-signals"})
        with pytest.raises(ConfigError, match="smoke-signals"):
            await harness.source.dial(foreign, (harness.lane,))
