"""Whose chunk is next, on the scheduler core: both sides, by hand, at full load and in figures."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import Cancelled, ConfigError, PeerLost, ProtocolError
from kvstream.scheduler.commands import Drop, Ended, Move, Stage, Transmit
from kvstream.scheduler.core import Scheduler

LAYERS, BLOCK_TOKENS = 2, 4
CONFIG = RuntimeConfig(deadline=1000.0, stall_timeout=100.0, short_bytes=32, share_weights={"gold": 3.0})
"""Blocks are of one byte: streams of up to 16 blocks a layer are short."""


class Source:
    """A core that sends to peers which confirm whatever is announced, as soon as the test says so."""

    def __init__(self, config: RuntimeConfig = CONFIG) -> None:
        self.core = Scheduler(config, layers=LAYERS, block_tokens=BLOCK_TOKENS)
        self.now = 0.0
        self.frames: list[tuple[int, wire.Frame]] = []
        self.nums: Counter[int] = Counter()
        self.place: dict[int, tuple[int, int]] = {}
        self.flying: list[Stage] = []
        """What is staged and not confirmed, oldest first."""

    def link(self, link: int, *, slots: int, blocks: int = 1) -> None:
        self.core.link_up(self.now, link, f"d{link}", outgoing=True, slots=slots, slot_blocks=blocks)

    def stream(
        self, name: str, blocks: int, *, link: int = 1, share: str = "", deadline: float = 500.0, priority: int = 0
    ) -> int:
        """One that is accepted and has all its blocks ready."""
        tokens = blocks * BLOCK_TOKENS
        key = self.core.send(
            self.now,
            name,
            tokens=tokens,
            held=blocks,
            candidates=[f"d{link}"],
            deadline=deadline,
            priority=priority,
            share=share,
        )
        self.nums[link] += 1
        self.place[key] = link, self.nums[link]
        for layer in range(LAYERS):
            self.core.layer_ready(self.now, key, layer, 0, tokens)
        self.core.frame(self.now, link, wire.Accept(self.nums[link], 1))
        return key

    def take(self) -> list[Stage]:
        """What is to be staged now, each begun and staged at once."""
        stages: list[Stage] = []
        while commands := self.core.take():
            for command in commands:
                assert not isinstance(command, Drop)
                if isinstance(command, Transmit):
                    self.frames.append((command.link, command.frame))
                elif isinstance(command, Stage):
                    stages.append(command)
                    self.core.staging(command)
                    self.core.staged(self.now, command, 1)
        self.flying += stages
        return stages

    def confirm(self, stage: Stage) -> None:
        link, num = self.place[stage.stream]
        self.core.frame(self.now, link, wire.Confirm(num, 1, stage.chunk + 1))

    def flow(self, chunks: int) -> list[Stage]:
        """The order in which so many chunks go out when the oldest announced one is confirmed each time."""
        done: list[Stage] = []
        while len(done) < chunks:
            self.take()
            if not self.flying:
                return done
            done.append(self.flying.pop(0))
            self.confirm(done[-1])
        return done


# ---------------------------------------------------------------------- shares


def test_classes_share_a_link_by_weight_on_the_source() -> None:
    source = Source()
    source.link(1, slots=2)
    names = {source.stream("g", 1000, share="gold"): "gold", source.stream("p", 1000, share="plain"): "plain"}
    counts = Counter(names[stage.stream] for stage in source.flow(400))
    assert abs(counts["gold"] - 300) <= 3


def test_classes_share_the_process_by_weight_over_links() -> None:
    """Each class has its own destination, and slots enough: what is shared is the time to gather."""
    source = Source(RuntimeConfig(deadline=1000.0, short_bytes=1, share_weights={"gold": 3.0}))
    source.link(1, slots=4096)
    source.link(2, slots=4096)
    names = {
        source.stream("p", 2000, link=1, share="plain"): "plain",
        source.stream("g", 2000, link=2, share="gold"): "gold",
    }
    first: Counter[str] = Counter()
    while first.total() < 400:
        (stage,) = [command for command in source.core.take() if isinstance(command, Stage)]
        first[names[stage.stream]] += 1
        source.core.staging(stage)
    assert abs(first["gold"] - 300) <= 3


def test_one_class_may_use_what_the_others_leave() -> None:
    source = Source()
    source.link(1, slots=2)
    plain = source.stream("p", 100, share="plain")
    assert {stage.stream for stage in source.flow(50)} == {plain}
    gold = source.stream("g", 10, share="gold")
    order = [stage.stream for stage in source.flow(40)]
    assert order.index(gold) <= 3
    assert set(order[-5:]) == {plain}


def test_a_class_of_many_streams_gets_no_more_than_one_of_few() -> None:
    source = Source()
    source.link(1, slots=4)
    crowd = {source.stream(f"c{n}", 20, share="crowd") for n in range(50)}
    lone = source.stream("l", 200, share="lone")
    counts = Counter("crowd" if stage.stream in crowd else "lone" for stage in source.flow(200))
    assert counts["lone"] == pytest.approx(100, abs=5)
    assert lone not in crowd


# ---------------------------------------------------------------------- due times, priority, patience


def test_deadline_order_meets_deadlines_that_fifo_misses() -> None:
    """At full load, in figures: 40 streams of 10 chunks whose deadlines are against the order in which they came."""

    def missed(deadlines: Callable[[int], float]) -> int:
        source = Source(RuntimeConfig(deadline=1000.0, patience=1000.0))
        source.link(1, slots=2)
        wanted = {source.stream(f"s{n}", 5, deadline=deadlines(n)): 405.0 - 10 * n for n in range(40)}
        ends: dict[int, int] = {}
        for when, stage in enumerate(source.flow(400), 1):  # a chunk takes a second
            ends[stage.stream] = when
        return sum(ends[key] > wanted[key] for key in wanted)

    assert missed(lambda n: 405.0 - 10 * n) == 0
    assert missed(lambda n: 900.0) >= 19  # all alike: by age


def test_a_far_deadline_waits_no_longer_than_patience() -> None:
    """With deadlines alone, a stream that never ends would wait for every newer one with a deadline."""
    source = Source(RuntimeConfig(deadline=1000.0, patience=10.0, max_streams=1000))
    source.link(1, slots=1)
    source.stream("busy", 1, deadline=1.0)
    patient = source.stream("patient", 1, deadline=float("inf"))
    order: list[int] = []
    for second in range(30):
        source.now = float(second)
        source.stream(f"urgent-{second}", 1, deadline=5.0)
        order += [stage.stream for stage in source.flow(1)]
    assert 5 <= order.index(patient) <= 20


@pytest.mark.parametrize(("priority", "first"), [(0, "old"), (1, "old"), (30, "young")])
def test_priority_is_a_head_start_in_time(priority: int, first: str) -> None:
    source = Source(RuntimeConfig(deadline=1000.0, priority_step=0.01))
    source.link(1, slots=1)
    source.stream("busy", 1, deadline=1.0)
    source.take()
    keys = {source.stream("old", 1, deadline=5.0): "old"}
    source.now = 0.2
    keys[source.stream("young", 1, deadline=5.0, priority=priority)] = "young"
    order = [keys[stage.stream] for stage in source.flow(8) if stage.stream in keys]
    assert order[0] == first


# ---------------------------------------------------------------------- short beside long


def test_a_short_prompt_is_not_stuck_behind_a_long_one() -> None:
    """A stream of 100,000 tokens is under way and due first; a short one ends within twice its time alone, and what is
    in the slots already."""
    slots = 8
    source = Source()
    source.link(1, slots=slots)
    long = source.stream("long", 25_000, deadline=100.0)
    source.flow(100)
    short = source.stream("short", 10, deadline=200.0)
    order = [stage.stream for stage in source.flow(100)]
    last = max(at for at, key in enumerate(order, 1) if key == short)
    assert last <= 2 * 10 * LAYERS + slots
    assert order.count(long) == 100 - 10 * LAYERS


def test_many_short_prompts_do_not_starve_a_long_one() -> None:
    source = Source()
    source.link(1, slots=8)
    long = source.stream("long", 1000, deadline=900.0)
    for number in range(200):
        source.stream(f"short-{number}", 2, deadline=10.0)
    order = [stage.stream for stage in source.flow(200)]
    assert order.count(long) == pytest.approx(100, abs=8)


@pytest.mark.parametrize(("slots", "most"), [(1, 1), (2, 2), (4, 3), (8, 6)])
def test_a_stream_leaves_slots_to_its_neighbours(slots: int, most: int) -> None:
    source = Source()
    source.link(1, slots=slots)
    key = source.stream("long", 1000)
    assert [stage.stream for stage in source.take()] == [key] * most
    other = source.stream("other", 1000)
    assert [stage.stream for stage in source.take()] == [other] * (slots - most)


def test_a_stream_at_its_share_goes_on_when_a_slot_comes_back() -> None:
    source = Source()
    source.link(1, slots=4)
    key = source.stream("long", 1000)
    first, *_ = source.take()
    source.confirm(first)
    assert [(stage.stream, stage.chunk) for stage in source.take()] == [(key, 3)]


# ---------------------------------------------------------------------- frozen peers


def test_a_peer_that_confirms_nothing_costs_the_others_nothing() -> None:
    source = Source()
    source.link(1, slots=2)
    source.link(2, slots=2)
    for number in range(10):
        source.stream(f"frozen-{number}", 100, link=1, deadline=1.0)
    source.take()
    source.flying.clear()  # nothing of link 1 is ever confirmed
    fine = source.stream("fine", 50, link=2, deadline=400.0)
    assert [stage.stream for stage in source.flow(200)] == [fine] * 100


# ---------------------------------------------------------------------- the destination


class Destination:
    """A core that receives on links whose peers announce what the test says."""

    def __init__(self, config: RuntimeConfig = CONFIG) -> None:
        self.core = Scheduler(config, layers=LAYERS, block_tokens=BLOCK_TOKENS)
        self.now = 0.0
        self.commands: list[object] = []
        self.streams: dict[str, tuple[int, int, int]] = {}
        self.nums: Counter[int] = Counter()
        self.sent: list[wire.Frame] = []

    def link(self, link: int, *, slots: int = 100) -> None:
        self.core.link_up(self.now, link, f"s{link}", outgoing=False, slots=slots, slot_blocks=0)

    def stream(
        self, name: str, blocks: int, *, link: int = 1, share: str = "", deadline: float = 500.0, priority: int = 0
    ) -> int:
        self.nums[link] += 1
        num = self.nums[link]
        key = self.core.receive(self.now, name, tokens=blocks * BLOCK_TOKENS, deadline=1000.0)
        offer = wire.Offer(num, 1, name, blocks * BLOCK_TOKENS, deadline, priority, b"", share)
        self.core.frame(self.now, link, offer)
        self.streams[name] = key, link, num
        return key

    def announce(self, name: str, chunks: int, *, start: int = 0, slot: int = 0) -> None:
        _, link, num = self.streams[name]
        for chunk in range(start, start + chunks):
            self.core.frame(self.now, link, wire.Ready(num, 1, chunk, 0, chunk, 1, slot, 7))

    def take(self) -> list[Move]:
        """The Moves that are to be performed now; none of them is begun."""
        moves: list[Move] = []
        for command in self.core.take():
            assert not isinstance(command, Drop)
            if isinstance(command, Move):
                moves.append(command)
            elif isinstance(command, Transmit):
                self.sent.append(command.frame)
        return moves

    def begin(self) -> list[Move]:
        """All Moves that may be under way together."""
        found: list[Move] = []
        while moves := self.take():
            for move in moves:
                found.append(move)
                self.core.moving(move)
        return found

    def work(self, moves: int) -> list[int]:
        """Perform so many Moves one at a time: their streams."""
        found: list[int] = []
        while len(found) < moves and (given := self.take()):
            for move in given:
                found.append(move.stream)
                self.core.moving(move)
                self.core.moved(self.now, move)
        return found


def test_classes_share_the_reads_by_weight_over_links() -> None:
    side = Destination(RuntimeConfig(deadline=1000.0, short_bytes=1, share_weights={"gold": 3.0}))
    side.link(1, slots=400)
    side.link(2, slots=400)
    gold = side.stream("gold", 400, link=1, share="gold")
    plain = side.stream("plain", 400, link=2, share="plain")
    side.announce("plain", 400)
    side.announce("gold", 400)
    counts = Counter(side.work(400))
    assert counts[gold] == pytest.approx(300, abs=3)
    assert counts[plain] == pytest.approx(100, abs=3)


def test_the_most_urgent_chunk_is_read_next_whichever_link_it_came_on() -> None:
    side = Destination()
    for link in (1, 2, 3):
        side.link(link)
    keys = [side.stream(f"s{n}", 20, link=link, deadline=d) for n, (link, d) in enumerate([(1, 9), (2, 3), (3, 6)])]
    side.announce("s0", 4)
    side.announce("s2", 4)
    side.announce("s1", 4)
    late, soon, middle = keys
    # The very first was given when nothing else was there.
    assert side.work(12) == [late, *[soon] * 4, *[middle] * 4, *[late] * 3]


def test_a_short_prompt_passes_what_a_long_one_has_announced() -> None:
    side = Destination()
    side.link(1)
    long = side.stream("long", 25_000, deadline=100.0)
    short = side.stream("short", 10, deadline=200.0)
    side.announce("long", 90)
    side.announce("short", 10)
    order = side.work(100)
    assert max(at for at, key in enumerate(order, 1) if key == short) <= 21
    assert order.count(long) == 90


def test_moves_under_way_are_bounded_for_a_peer_and_for_the_process() -> None:
    side = Destination(RuntimeConfig(moves=5, peer_moves=3))
    side.link(1)
    side.link(2)
    side.stream("x", 50, link=1)
    side.stream("y", 50, link=2)
    side.announce("x", 10)
    side.announce("y", 10)
    moves = side.begin()
    assert Counter(move.link for move in moves) == {1: 3, 2: 2}
    side.core.moved(side.now, next(move for move in moves if move.link == 1))
    moves += side.begin()
    assert len(moves) == 6
    side.core.link_lost(side.now, 1, PeerLost("gone"))
    for move in moves:
        if move.link == 1:
            side.core.moved(side.now, move)  # late: the loss of the link has counted for it
    moves += side.begin()
    assert [move.link for move in moves].count(2) == 3
    assert side.core._destination._reading == 3


def test_a_peer_at_its_bound_goes_on_with_each_read_that_ends() -> None:
    side = Destination(RuntimeConfig(moves=9, peer_moves=2))
    side.link(1)
    side.stream("x", 50)
    side.announce("x", 5)
    done: list[int] = []
    moves = side.begin()
    while moves:
        assert len(moves) <= 2
        done.append(moves[0].chunk)
        side.core.moved(side.now, moves.pop(0))
        moves += side.begin()
    assert done == [0, 1, 2, 3, 4]


def test_a_peer_whose_reads_hang_leaves_room_for_others() -> None:
    side = Destination(RuntimeConfig(moves=4, peer_moves=2))
    side.link(1)
    side.link(2)
    side.stream("hangs", 50, link=1, deadline=1.0)
    fine = side.stream("fine", 50, link=2)
    side.announce("hangs", 10)
    assert len(side.begin()) == 2
    side.announce("fine", 10)
    assert side.work(10) == [fine] * 10


def test_what_is_not_being_read_when_a_stream_ends_never_is() -> None:
    """The source hears of the end at once, and the room that the chunks took on the link is there again."""
    side = Destination(RuntimeConfig(peer_moves=2))
    side.link(1, slots=4)
    key = side.stream("x", 50)
    side.announce("x", 1)
    (first,) = side.begin()
    side.core.moved(side.now, first)
    side.announce("x", 4, start=1)
    given, *others = side.begin()
    assert len(others) == 1
    side.sent.clear()
    side.core.cancel(side.now, key, "no")
    side.core.moved(side.now, given)
    assert not side.begin()
    assert not side.sent  # one read is still under way
    side.core.moved(side.now, others[0])
    assert not side.begin()
    (end,) = side.sent
    assert isinstance(end, wire.End)
    side.stream("y", 50)
    side.announce("y", 4)
    assert len(side.begin()) == 2
    with pytest.raises(AssertionError):  # the fifth is one more than there are slots
        side.announce("y", 1, start=4)
        side.take()


def test_a_cancelled_stream_with_nothing_under_way_is_told_at_once() -> None:
    side = Destination(RuntimeConfig(moves=1))
    side.link(1)
    busy = side.stream("busy", 50)
    side.announce("busy", 1)
    side.begin()
    key = side.stream("x", 50)
    side.announce("x", 5)
    side.take()
    side.sent.clear()
    side.core.cancel(side.now, key, "no")
    assert not side.take()
    assert [type(frame) for frame in side.sent] == [wire.End]
    assert busy != key


# ---------------------------------------------------------------------- the class on its way


def test_the_offer_carries_the_class() -> None:
    source = Source()
    source.link(1, slots=1)
    source.stream("x", 1, share="gold")
    source.take()
    (offer,) = [frame for _, frame in source.frames if isinstance(frame, wire.Offer)]
    assert offer.share == "gold"
    assert wire.decode(wire.encode(0, [offer])[0])[1] == [offer]


@pytest.mark.parametrize("share", ["x" * 65, "\ud800"])
def test_a_class_that_a_peer_could_not_decode_is_refused_here(share: str) -> None:
    source = Source()
    with pytest.raises(ConfigError) as caught:
        source.stream("x", 1, share=share)
    assert caught.value.field == "share_class"


# ---------------------------------------------------------------------- cost


def test_an_event_costs_the_same_with_few_streams_and_with_many() -> None:
    """Counted in work, not in time: comparisons of the heaps grow by the logarithm only."""

    class Counted(float):
        compared = 0

        def __lt__(self, other: object) -> bool:
            Counted.compared += 1
            return float.__lt__(self, other)  # type: ignore[operator]

    def cost(streams: int) -> float:
        source = Source(RuntimeConfig(deadline=1000.0, max_streams=100_000))
        source.link(1, slots=8)
        for number in range(streams):
            key = source.stream(f"s{number}", 2, deadline=100.0 + number % 97)
            stream = source.core._source._streams[key]
            stream.due = Counted(stream.due)
        source.flow(8)
        Counted.compared = 0
        rounds = [len(source.flow(1)) for _ in range(16)]
        assert statistics.mean(rounds) == 1
        return Counted.compared / 16

    assert cost(5000) <= 8 * max(cost(10), 8)


def test_a_lost_link_leaves_nothing_behind() -> None:
    source = Source()
    source.link(1, slots=1)
    keys = [source.stream(f"s{n}", 10) for n in range(5)]
    source.take()
    source.core.link_lost(source.now, 1, PeerLost("gone"))
    source.core.link_failed(source.now, "d1", PeerLost("refused"))
    ended = [command.stream for command in source.core.take() if isinstance(command, Ended)]
    assert ended == keys
    assert source.core.streams == 0
    assert not source.core._source._turns.waits_for_room(1)


def test_the_next_turn_is_given_although_the_link_of_the_last_is_gone() -> None:
    """A Stage, or a Move, whose link is lost before it is begun must not hold up all that come after."""
    source = Source()
    source.link(1, slots=4)
    source.link(2, slots=4)
    source.stream("x", 10, link=1, deadline=1.0)
    (lost,) = [command for command in source.core.take() if isinstance(command, Stage)]
    fine = source.stream("y", 10, link=2)
    source.core.link_lost(source.now, 1, PeerLost("gone"))
    assert not [command for command in source.core.take() if isinstance(command, Stage)]
    source.core.staging(lost)
    assert {stage.stream for stage in source.take()} == {fine}

    side = Destination()
    side.link(1)
    side.link(2)
    side.stream("x", 10, link=1)
    other = side.stream("y", 10, link=2)
    side.announce("x", 2)
    (gone,) = side.take()
    side.announce("y", 2)
    side.core.link_lost(side.now, 1, PeerLost("gone"))
    assert not side.take()
    side.core.moving(gone)
    side.core.moved(side.now, gone)
    assert [move.stream for move in side.begin()] == [other, other]


def test_a_confirmed_chunk_of_a_cancelled_neighbour_frees_its_slot() -> None:
    source = Source()
    source.link(1, slots=2)
    key = source.stream("x", 10)
    stages = source.take()
    assert len(stages) == 2
    other = source.stream("y", 10)
    assert not source.take()
    source.core.fail(source.now, key, Cancelled("no"))
    source.take()
    link, num = source.place[key]
    source.core.frame(source.now, link, wire.End(num, 1, "cancelled", answer=True))
    assert {stage.stream for stage in source.take()} == {other}


def test_more_chunks_than_slots_still_break_the_protocol() -> None:
    side = Destination()
    side.link(1, slots=2)
    side.stream("x", 10)
    side.announce("x", 3)
    (drop,) = [command for command in side.core.take() if isinstance(command, Drop)]
    assert isinstance(drop.error, ProtocolError)
