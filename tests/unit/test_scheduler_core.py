"""The scheduler core, one side at a time: every frame of the peer is made by hand, every command looked at."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import (
    Cancelled,
    ConfigError,
    Corrupted,
    DeadlineExceeded,
    Fenced,
    KVStreamError,
    PeerLost,
    ProtocolError,
    Recalled,
    Refused,
)
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Command,
    Dial,
    Drop,
    Ended,
    Move,
    Offered,
    Stage,
    Transmit,
    Withdrawn,
)
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.timers import Timer, Timers

C = TypeVar("C", bound=Command)
LAYERS, BLOCK_TOKENS, SLOTS = 2, 4, 2
CONFIG = RuntimeConfig(
    deadline=30.0,
    offer_wait=2.0,
    end_wait=0.5,
    beat_interval=0.1,
    stall_timeout=1.0,
    idle_timeout=20.0,
    max_pending_offers=2,
    max_streams=3,
)


class Side:
    """One core with a clock, and the commands that it gave. Gathers and reads begin as soon as they are asked for."""

    def __init__(self, config: RuntimeConfig = CONFIG) -> None:
        self.core = Scheduler(config, layers=LAYERS, block_tokens=BLOCK_TOKENS)
        self.now = 100.0
        self._commands: list[Command] = []

    def take(self) -> list[Command]:
        commands, self._commands = self._commands, []
        while more := self.core.take():
            commands.extend(more)
            for command in more:
                if isinstance(command, Stage):
                    self.core.staging(command)
                elif isinstance(command, Move):
                    self.core.moving(command)
        return commands

    def taken(self, kind: type[C]) -> list[C]:
        """Take the commands of one kind; the others stay."""
        commands = self.take()
        self._commands = [command for command in commands if not isinstance(command, kind)]
        return [command for command in commands if isinstance(command, kind)]

    def one(self, kind: type[C]) -> C:
        (command,) = self.taken(kind)
        return command

    def sent(self) -> list[wire.Frame]:
        """The frames given out since the last call, beats apart."""
        return [command.frame for command in self.taken(Transmit) if not isinstance(command.frame, wire.Beat)]

    def up(
        self,
        link: int = 1,
        peer: str = "d",
        *,
        outgoing: bool = True,
        slots: int = SLOTS,
        blocks: int = 2,
        group: int = 0,
    ) -> None:
        self.core.link_up(self.now, link, peer, outgoing=outgoing, slots=slots, slot_blocks=blocks, group_blocks=group)

    def hear(self, frame: wire.Frame, link: int = 1) -> None:
        self.core.frame(self.now, link, frame)

    def lose(self, link: int = 1) -> None:
        """The peer of a link is dead: its connection is lost, it can't be dialed, and the registry knows it no more."""
        peer = self.core._shared.links[link].peer
        self.cut(link)
        self.core.replaced(self.now, peer, None)
        dials = self.taken(Dial)
        self._commands += [dial for dial in dials if dial.peer != peer]
        if Dial(peer) in dials:
            self.core.link_failed(self.now, peer, PeerLost("connection refused"))

    def cut(self, link: int = 1) -> None:
        """A connection is lost, whatever has become of the peer."""
        self.core.link_lost(self.now, link, PeerLost("gone"))

    def after(self, seconds: float) -> None:
        """Let time pass as a driver does: tick whenever a timer is due."""
        end = self.now + seconds
        while (due := self.core.next_timer()) is not None and due <= end:
            self.now = due
            self.core.tick(due)
        self.now = end

    # -- source

    def send(self, name: str = "s", *, tokens: int = 8, to: Sequence[str] = ("d",), deadline: float = 10.0) -> int:
        held = -(-tokens // BLOCK_TOKENS)
        return self.core.send(self.now, name, tokens=tokens, held=held, candidates=to, deadline=deadline)

    def streaming(self, name: str = "s", *, num: int = 1, link: int = 1, **kwargs: Any) -> int:
        """A stream that its destination has accepted, on a link that is up."""
        key = self.send(name, **kwargs)
        self.hear(wire.Accept(num, 1), link)
        self.taken(Transmit)
        self.taken(Accepted)
        return key

    def ready(self, key: int, layer: int, start: int = 0, stop: int = 8) -> None:
        self.core.layer_ready(self.now, key, layer, start, stop)

    def all_ready(self, key: int, tokens: int = 8) -> None:
        for layer in range(LAYERS):
            self.ready(key, layer, 0, tokens)

    def stage(self) -> list[Stage]:
        """Perform the gathers that are asked for, in order."""
        stages = self.taken(Stage)
        for command in stages:
            self.core.staged(self.now, command, generation=7)
        return stages

    def finishing(self, **kwargs: Any) -> int:
        """A stream whose source has announced everything and said so."""
        key = self.streaming(**kwargs)
        self.all_ready(key)
        self.stage()
        self.core.finish(self.now, key, b"pay")
        assert [type(frame) for frame in self.sent()] == [wire.Ready, wire.Ready, wire.End]
        return key

    # -- destination

    def receiving(self, name: str = "s", *, tokens: int = 8, first_token: int = 0, deadline: float = 10.0) -> int:
        """A stream on incoming link 1 as number 1, accepted."""
        self.up(outgoing=False, peer="src")
        key = self.receive(name, tokens=tokens, first_token=first_token, deadline=deadline)
        self.hear(wire.Offer(1, 1, name, tokens, 10.0))
        self.taken(Transmit)
        self.taken(Accepted)
        return key

    def receive(self, name: str = "s", *, tokens: int = 8, first_token: int = 0, deadline: float = 10.0) -> int:
        return self.core.receive(self.now, name, tokens=tokens, first_token=first_token, deadline=deadline)

    def announce(
        self, chunk: int, layer: int, first: int = 0, count: int = 2, *, slot: int = 0, num: int = 1, layers: int = 1
    ) -> None:
        self.hear(wire.Ready(num, 1, chunk, layer, first, count, slot, 7, layers=layers))

    def move(self) -> list[Move]:
        moves = self.taken(Move)
        for command in moves:
            self.core.moved(self.now, command)
        return moves

    def deciding(self) -> int:
        """A destination's stream that has everything and has said that it is done."""
        key = self.receiving()
        self.announce(0, 0)
        self.announce(1, 1, slot=1)
        self.hear(wire.End(1, 1, "done", chunks=2, payload=b"pay"))
        self.move()
        assert self.sent()[-1] == wire.End(1, 1, "done", chunks=2)
        assert not self.taken(Ended)
        return key

    # -- what must be so

    def assert_dropped(self, error: type[KVStreamError] = ProtocolError) -> KVStreamError:
        drop = self.one(Drop)
        assert isinstance(drop.error, error)
        return drop.error

    def assert_alive(self) -> None:
        assert not self.taken(Drop)


@pytest.fixture
def side() -> Side:
    return Side()


# ---------------------------------------------------------------------- source: offers and candidates


def test_send_dials_once_per_peer_and_offers_when_the_link_is_up(side: Side) -> None:
    side.send("x")
    side.send("y")
    assert side.taken(Dial) == [Dial("d")]
    side.up()
    assert side.sent() == [wire.Offer(1, 1, "x", 8, 10.0), wire.Offer(2, 1, "y", 8, 10.0)]
    side.send("z")
    assert side.sent() == [wire.Offer(3, 1, "z", 8, 10.0)]
    assert not side.taken(Dial)


def test_the_offer_carries_what_is_left_of_the_deadline(side: Side) -> None:
    side.send(deadline=4.0)
    side.after(1.5)
    side.up()
    (offer,) = side.sent()
    assert isinstance(offer, wire.Offer)
    assert offer.deadline == pytest.approx(2.5)


def test_an_endless_deadline_fits_into_the_offer(side: Side) -> None:
    side.up()
    side.send(deadline=math.inf)
    (offer,) = side.sent()
    assert wire.decode(wire.encode(0, [offer])[0])[1] == [offer]


def test_a_name_lives_once_and_is_free_again_after_the_end(side: Side) -> None:
    key = side.send()
    with pytest.raises(ConfigError, match="stream"):
        side.send()
    side.core.cancel(side.now, key, "no")
    assert side.send() != key


def test_max_streams_refuses_with_retry_after(side: Side) -> None:
    for name in "abc":
        side.send(name)
    with pytest.raises(Refused) as caught:
        side.send("d")
    assert caught.value.retry_after


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"name": ""}, "stream"),
        ({"name": "x" * 257}, "stream"),
        ({"name": "\ud800"}, "stream"),
        ({"tokens": 0}, "tokens"),
        ({"tokens": 2**32}, "tokens"),
        ({"to": []}, "to"),
        ({"deadline": math.nan}, "deadline"),
        ({"priority": 1001}, "priority"),
        ({"metadata": b"x" * 2049}, "metadata"),
    ],
)
def test_what_a_peer_could_not_decode_is_refused_here(side: Side, wrong: dict[str, Any], field: str) -> None:
    values: dict[str, Any] = {"name": "s", "tokens": 8, "to": ["d"], "deadline": 1.0, "priority": 0, "metadata": b""}
    values |= wrong
    with pytest.raises(ConfigError) as caught:
        side.core.send(
            side.now,
            values["name"],
            tokens=values["tokens"],
            held=2,
            candidates=values["to"],
            deadline=values["deadline"],
            priority=values["priority"],
            metadata=values["metadata"],
        )
    assert caught.value.field == field
    assert side.core.streams == 0
    assert not side.take()


def test_refused_goes_on_to_the_next_candidate_with_the_next_epoch(side: Side) -> None:
    side.up()
    side.up(2, "e")
    key = side.send(to=["d", "e"])
    side.sent()
    side.hear(wire.Refuse(1, 1, "refused", "busy", 0.5))
    assert side.taken(Transmit) == [Transmit(2, wire.Offer(1, 2, "s", 8, 10.0))]
    side.hear(wire.Refuse(1, 2, "refused", "busy too", 0.7), link=2)
    ended = side.one(Ended)
    assert (ended.stream, ended.epoch, ended.peer) == (key, 2, "e")
    assert isinstance(ended.error, Refused)
    assert ended.error.retry_after == 0.7
    assert "busy too" in str(ended.error)
    assert side.core.idle


def test_a_failed_dial_goes_on_to_the_next_candidate(side: Side) -> None:
    side.send(to=["d", "e"])
    side.core.link_failed(side.now, "d", PeerLost("unreachable"))
    assert side.taken(Dial) == [Dial("d"), Dial("e")]
    side.core.link_failed(side.now, "e", PeerLost("unreachable too"))
    assert isinstance(side.one(Ended).error, PeerLost)


def test_streams_that_end_together_do_not_share_an_error(side: Side) -> None:
    side.send("x")
    side.send("y")
    side.core.link_failed(side.now, "d", PeerLost("unreachable"))
    first, second = (command.error for command in side.taken(Ended))
    assert first is not second
    assert "stream x" in str(first)
    assert "stream y" in str(second)


def test_a_stream_cancelled_while_connecting_is_told_to_whom_it_was_for(side: Side) -> None:
    """The peer may be waiting for it (sglang PR 36108); it hears of it once, with its first words on the link."""
    key = side.send()
    side.core.cancel(side.now, key, "no")
    assert isinstance(side.one(Ended).error, Cancelled)
    assert not side.core.idle
    side.up()
    offer, end = side.sent()
    assert isinstance(offer, wire.Offer)
    assert isinstance(end, wire.End)
    assert (offer.num, offer.epoch, end.code) == (end.num, end.epoch, "cancelled")
    assert not side.core.idle
    side.hear(wire.End(offer.num, offer.epoch, "cancelled", answer=True))
    assert not side.sent()
    assert side.core.idle


def test_a_stream_cancelled_while_connecting_in_vain_is_forgotten(side: Side) -> None:
    key = side.send()
    side.core.cancel(side.now, key, "no")
    side.core.link_failed(side.now, "d", PeerLost("nobody"))
    assert side.core.idle
    side.up()
    assert not side.sent()


def test_a_link_that_is_being_dropped_gets_no_offer(side: Side) -> None:
    side.up()
    side.core.drop_all(PeerLost("closing"))
    side.send()
    assert side.taken(Dial) == [Dial("d")]
    assert not side.sent()


def test_link_loss_in_mid_stream_streams_again_from_layer_0_without_new_marks(side: Side) -> None:
    side.up()
    key = side.streaming(to=["d", "e"])
    side.ready(key, 0)
    side.stage()
    side.hear(wire.Confirm(1, 1, 1))
    side.ready(key, 1)
    side.take()
    side.lose()
    assert side.one(Dial) == Dial("e")
    side.up(2, "e")
    side.hear(wire.Accept(1, 2), link=2)
    assert [frame.epoch for frame in side.sent() if isinstance(frame, wire.Offer)] == [2]
    stages = side.stage()
    assert [(s.epoch, s.chunk, s.layer, s.first, s.count) for s in stages] == [(2, 0, 0, 0, 2), (2, 1, 1, 0, 2)]
    side.core.finish(side.now, key, b"p")
    side.hear(wire.End(1, 2, "done"), link=2)
    assert (side.one(Ended).error, side.core.slots_in_use) == (None, 0)


def test_a_gather_of_the_lost_epoch_does_not_count_in_the_next(side: Side) -> None:
    side.up()
    key = side.streaming(to=["d", "e"])
    side.ready(key, 0)
    late = side.one(Stage)
    side.lose()
    side.up(2, "e")
    side.core.staged(side.now, late, 7)
    side.core.stage_failed(side.now, late, Corrupted("late"))
    side.hear(wire.Accept(1, 2), link=2)
    assert not [frame for frame in side.sent() if isinstance(frame, wire.Ready)]
    assert len(side.stage()) == 1


def test_loss_of_a_link_gives_no_more_work_on_it(side: Side) -> None:
    """Slots that come free while the streams of a lost link end must not be given to its other streams."""
    side.up()
    one, two = side.streaming("x", deadline=1.0), side.streaming("y", num=2)
    side.all_ready(one)
    side.all_ready(two)
    late, last = side.taken(Stage)
    side.core.staged(side.now, last, 7)  # chunk 1 before chunk 0: not announced yet
    assert late.stream == last.stream == one
    side.lose()
    assert not side.taken(Stage)


# ---------------------------------------------------------------------- source: slots, order, announcements


def test_chunks_are_cut_to_slots_and_wait_for_free_ones(side: Side) -> None:
    side.up(slots=2, blocks=2)
    key = side.streaming(tokens=20)
    side.ready(key, 0, 0, 20)
    stages = side.stage()
    assert [(s.chunk, s.layer, s.first, s.count) for s in stages] == [(0, 0, 0, 2), (1, 0, 2, 2)]
    assert {s.slot for s in stages} == {0, 1}
    assert side.core.slots_in_use == 2
    assert not side.taken(Stage)
    side.hear(wire.Confirm(1, 1, 1))
    (third,) = side.taken(Stage)
    assert (third.chunk, third.first, third.count, third.slot) == (2, 4, 1, stages[0].slot)


@pytest.mark.parametrize(("group", "shares"), [(0, [1, 1]), (3, [1, 1]), (4, [2]), (9, [2])])
def test_layers_that_are_ready_together_share_a_chunk(side: Side, group: int, shares: list[int]) -> None:
    side.up(blocks=4, group=group)
    key = side.send()
    side.all_ready(key)
    side.hear(wire.Accept(1, 1))
    side.sent()
    stages = side.taken(Stage)
    assert [command.layers for command in stages] == shares
    for command in stages:
        side.core.staged(side.now, command, 7)
    ready = [frame for frame in side.sent() if isinstance(frame, wire.Ready)]
    assert [(frame.layer, frame.layers, frame.first, frame.count) for frame in ready] == [
        (sum(shares[:n]), share, 0, 2) for n, share in enumerate(shares)
    ]
    side.core.finish(side.now, key, b"")
    assert side.sent() == [wire.End(1, 1, "done", chunks=len(shares))]


def test_a_chunk_of_layers_is_no_larger_than_a_slot(side: Side) -> None:
    side.up(blocks=3, group=4)
    side.all_ready(side.send())
    side.hear(wire.Accept(1, 1))
    assert [command.layers for command in side.taken(Stage)] == [1, 1]


def test_only_layers_in_sequence_with_the_same_blocks_share_a_chunk(side: Side) -> None:
    side.up(blocks=4, group=4)
    key = side.streaming()
    side.ready(key, 1)
    side.ready(key, 0)
    assert [(command.layer, command.layers) for command in side.stage()] == [(1, 1), (0, 1)]
    key = side.streaming("t", num=2)
    side.ready(key, 0, 0, 4)
    side.ready(key, 1, 0, 8)
    assert not side.taken(Stage)  # both slots are taken
    side.hear(wire.End(1, 1, "cancelled"))
    assert [(command.layer, command.layers) for command in side.taken(Stage)] == [(0, 1), (1, 1)]


def test_what_becomes_ready_before_a_gather_begins_joins_the_next(side: Side) -> None:
    side.up(blocks=4, group=4)
    key = side.streaming(tokens=4)
    side.ready(key, 0, 0, 4)
    (waiting,) = [command for command in side.core.take() if isinstance(command, Stage)]
    side.ready(key, 1, 0, 4)
    other = side.streaming("t", num=2, deadline=1.0)
    side.all_ready(other)
    assert not [command for command in side.core.take() if isinstance(command, Stage)]
    side.core.staging(waiting)
    (urgent,) = [command for command in side.core.take() if isinstance(command, Stage)]
    assert (urgent.stream, urgent.layers) == (other, 2)


def test_a_confirm_is_a_total_and_repeats_change_nothing(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    side.stage()
    assert side.core.slots_in_use == 2
    side.hear(wire.Confirm(1, 1, 2))
    assert side.core.slots_in_use == 0
    for chunks in (2, 1, 0):
        side.hear(wire.Confirm(1, 1, chunks))
    assert side.core.slots_in_use == 0
    side.assert_alive()


def test_gathers_may_finish_in_any_order_chunks_are_announced_in_theirs(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    first, second = side.taken(Stage)
    side.core.staged(side.now, second, 9)
    assert not side.sent()
    side.core.staged(side.now, first, 8)
    assert side.sent() == [wire.Ready(1, 1, 0, 0, 0, 2, first.slot, 8), wire.Ready(1, 1, 1, 1, 0, 2, second.slot, 9)]


def test_the_earliest_deadline_gets_the_slot_then_the_oldest_stream(side: Side) -> None:
    side.up(slots=1)
    busy = side.streaming("busy", deadline=1.0)
    side.ready(busy, 0)
    side.stage()
    keys = {name: side.streaming(name, num=num, deadline=d) for name, num, d in (("late", 2, 9.0), ("old", 3, 5.0))}
    side.core.cancel(side.now, busy, "make room")  # its slot stays taken until the peer answers
    keys["young"] = side.streaming("young", num=4, deadline=5.0)
    for name in ("young", "late", "old"):
        side.ready(keys[name], 0)
    order: list[int] = []
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    while stages := side.stage():
        order.append(stages[0].stream)
        num = {"late": 2, "old": 3, "young": 4}[next(n for n, k in keys.items() if k == stages[0].stream)]
        side.hear(wire.Confirm(num, 1, 1))
    assert order == [keys["old"], keys["young"], keys["late"]]


def test_the_order_of_bulk_work_is_that_of_the_slots(side: Side) -> None:
    side.up()
    late, soon = side.streaming("late", deadline=9.0), side.streaming("soon", num=2, deadline=1.0)
    side.ready(late, 0)
    side.ready(soon, 0)
    orders = [(stage.order, stage.stream) for stage in side.taken(Stage)]
    assert [stream for _, stream in sorted(orders)] == [soon, late]


def test_chunked_prefill_moves_whole_blocks_and_the_last_part_at_the_end(side: Side) -> None:
    side.up(slots=8, blocks=8)
    key = side.streaming(tokens=10)
    for stop, staged in ((3, []), (4, [(0, 1)]), (7, []), (9, [(1, 1)]), (10, [(2, 1)])):
        side.ready(key, 0, 0, stop)
        assert [(s.first, s.count) for s in side.taken(Stage)] == staged


def test_marks_may_repeat_but_not_leave_a_gap(side: Side) -> None:
    side.up(slots=8)
    key = side.streaming()
    side.ready(key, 0, 0, 4)
    side.ready(key, 0, 0, 4)
    side.ready(key, 0, 2, 4)
    assert len(side.taken(Stage)) == 1
    for layer, start, stop in ((0, 5, 8), (2, 0, 8), (-1, 0, 8), (0, 0, 9), (0, 4, 4), (0, -1, 4)):
        with pytest.raises(ConfigError):
            side.ready(key, layer, start, stop)
    side.ready(key, 0, 4, 8)
    assert len(side.taken(Stage)) == 1


def test_tokens_beyond_the_blocks_held_need_extend(side: Side) -> None:
    side.up(slots=8)
    key = side.core.send(side.now, "s", tokens=8, held=1, candidates=["d"], deadline=9.0)
    side.hear(wire.Accept(1, 1))
    with pytest.raises(ConfigError, match="extend"):
        side.ready(key, 0)
    side.ready(key, 0, 0, 4)
    side.core.extend(key, 1)
    side.ready(key, 0, 4, 8)
    assert [(s.first, s.count) for s in side.taken(Stage)] == [(0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("first_token", "blocks"), [(0, [0, 1, 2]), (3, [0, 1, 2]), (4, [1, 2]), (7, [1, 2]), (9, [2]), (10, [])]
)
def test_only_what_the_destination_lacks_moves(side: Side, first_token: int, blocks: list[int]) -> None:
    side.up(slots=8, blocks=1)
    key = side.send(tokens=10)
    side.ready(key, 0, 0, 10)  # ready before the answer
    side.hear(wire.Accept(1, 1, first_token))
    side.ready(key, 1, 0, 10)  # and after it
    assert [(s.layer, s.first) for s in side.stage()] == [(layer, b) for layer in range(LAYERS) for b in blocks]
    side.sent()
    side.core.finish(side.now, key, b"")
    assert side.sent() == [wire.End(1, 1, "done", chunks=2 * len(blocks))]


def test_nothing_is_staged_before_the_answer(side: Side) -> None:
    side.up()
    key = side.send()
    side.all_ready(key)
    side.core.finish(side.now, key, b"")
    assert not side.taken(Stage)
    assert [type(frame) for frame in side.sent()] == [wire.Offer]


def test_a_failed_gather_ends_the_stream_and_gives_the_slot_back(side: Side) -> None:
    side.up(slots=3)
    key = side.streaming(tokens=8)
    side.all_ready(key)
    first, second = side.taken(Stage)
    side.core.staged(side.now, second, 7)
    side.core.stage_failed(side.now, first, Corrupted("bad"))
    assert isinstance(side.one(Ended).error, Corrupted)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["corrupted"]
    assert side.core.slots_in_use == 0
    assert not side.core.idle
    side.hear(wire.End(1, 1, "corrupted", answer=True))
    assert side.core.idle


def test_a_gather_that_fails_with_the_peer_leaves_the_rest_to_the_loss_of_the_link(side: Side) -> None:
    side.up()
    key = side.streaming(to=["d", "e"])
    side.ready(key, 0)
    side.core.stage_failed(side.now, side.one(Stage), PeerLost("gone"))
    assert not side.taken(Ended)
    side.lose()
    assert side.one(Dial) == Dial("e")


# ---------------------------------------------------------------------- source: finish and the end


def test_finish_names_the_layers_that_are_missing_and_changes_nothing(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.ready(key, 0)
    side.ready(key, 1, 0, 4)
    with pytest.raises(ConfigError, match="layers 1"):
        side.core.finish(side.now, key, b"")
    side.stage()
    assert not [frame for frame in side.sent() if isinstance(frame, wire.End)]
    side.ready(key, 1, 4, 8)
    side.core.finish(side.now, key, b"")


def test_end_follows_the_last_announcement(side: Side) -> None:
    side.up(slots=1)
    key = side.streaming()
    side.all_ready(key)
    side.core.finish(side.now, key, b"pay")
    side.stage()
    assert [type(frame) for frame in side.sent()] == [wire.Ready]
    side.hear(wire.Confirm(1, 1, 1))
    side.stage()
    ready, end = side.sent()
    assert isinstance(ready, wire.Ready)
    assert end == wire.End(1, 1, "done", chunks=2, payload=b"pay")


def test_the_destinations_decision_ends_the_stream_and_is_answered(side: Side) -> None:
    side.up()
    key = side.finishing()
    side.hear(wire.Confirm(1, 1, 2))
    assert not side.taken(Ended)
    side.hear(wire.End(1, 1, "done", chunks=2))
    assert side.sent() == [wire.End(1, 1, "done", answer=True)]
    assert side.one(Ended) == Ended(key, None, b"", 1, "d", provisional=False, ready=True)
    assert (side.core.idle, side.core.slots_in_use) == (True, 0)
    assert side.core.counters.ended == {"done": 1}


def test_the_destinations_error_ends_the_stream_and_frees_its_slots(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    side.stage()
    assert side.core.slots_in_use == 2
    side.sent()
    side.hear(wire.End(1, 1, "corrupted", "stream s: bad"))
    assert side.sent() == [wire.End(1, 1, "corrupted", answer=True)]
    ended = side.one(Ended)
    assert isinstance(ended.error, Corrupted)
    assert ended.error.in_doubt == ()
    assert (side.core.idle, side.core.slots_in_use) == (True, 0)
    side.ready(key, 0)  # the engine goes on for a while: nothing happens
    side.core.finish(side.now, key, b"")
    side.core.extend(key, 1)
    side.core.cancel(side.now, key, "late")
    assert not side.take()


def test_a_cancelled_source_keeps_its_slots_until_the_peer_answers(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    side.stage()
    other = side.streaming("y", num=2)
    side.sent()
    side.core.cancel(side.now, key, "no")
    assert side.sent() == [wire.End(1, 1, "cancelled", "stream s: no")]
    assert isinstance(side.one(Ended).error, Cancelled)
    side.ready(other, 0)
    assert not side.taken(Stage)
    side.hear(wire.Confirm(1, 1, 2))  # late, and no proof that nothing more is read
    assert side.core.counters.stale_frames == 1
    assert not side.taken(Stage)
    assert not side.core.idle
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    assert len(side.taken(Stage)) == 1
    assert side.core.slots_in_use == 1


def test_a_gather_under_way_at_the_end_gives_its_slot_back_when_it_reports(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    first, second = side.taken(Stage)
    side.core.cancel(side.now, key, "no")
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    assert side.core.slots_in_use == 2
    side.core.staged(side.now, first, 7)
    side.core.stage_failed(side.now, second, Cancelled("ended"))
    assert side.core.slots_in_use == 0
    assert not [frame for frame in side.sent() if isinstance(frame, wire.Ready)]


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("code", ["cancelled", "done"])
def test_ends_that_cross_settle_each_other_on_the_source(side: Side, code: str, answered: bool) -> None:
    side.up()
    key = side.finishing()
    side.core.cancel(side.now, key, "no")
    side.sent()
    ended = side.one(Ended)
    assert isinstance(ended.error, Cancelled)
    assert ended.error.in_doubt == ("d",)
    side.hear(wire.End(1, 1, code, answer=answered))
    assert not side.sent()
    assert (side.core.idle, side.core.slots_in_use) == (True, 0)
    assert not side.taken(Ended)
    side.hear(wire.End(1, 1, "cancelled", answer=True))  # the answer to the End that had crossed
    assert not side.take()


def test_an_answer_that_crosses_a_cancel_is_stale(side: Side) -> None:
    side.up()
    for num, frame in ((1, wire.Accept(1, 1)), (2, wire.Refuse(2, 1, "refused", "busy"))):
        key = side.send(f"s{num}", to=["d", "e"])
        side.core.cancel(side.now, key, "no")
        side.hear(frame)
        assert side.core.counters.stale_frames == num
        side.hear(wire.End(num, 1, "cancelled", answer=True))
    assert not side.taken(Dial)
    assert not side.taken(Accepted)
    assert side.core.idle


def test_link_loss_while_finishing_is_in_doubt(side: Side) -> None:
    side.up()
    side.finishing(to=["d"])
    side.take()
    side.lose()
    ended = side.one(Ended)
    assert isinstance(ended.error, PeerLost)
    assert ended.error.in_doubt == ended.in_doubt == ("d",)
    assert side.core.idle


def test_the_deadline_of_a_source_says_how_far_it_came(side: Side) -> None:
    side.up()
    key = side.streaming(deadline=0.5)
    side.ready(key, 0)
    side.stage()
    side.after(0.49)
    assert not side.taken(Ended)
    side.after(0.02)
    ended = side.one(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    assert "0 of 1 announced" in str(ended.error)
    assert "1 layers not ready" in str(ended.error)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["deadline"]


def test_a_deadline_while_connecting_and_while_offered(side: Side) -> None:
    side.send("x", deadline=0.5)
    side.after(0.5)
    assert isinstance(side.one(Ended).error, DeadlineExceeded)
    assert not side.sent()
    side.up()
    assert [type(frame) for frame in side.sent()] == [wire.Offer, wire.End]
    side.send("y", deadline=0.5)
    side.after(0.5)
    assert isinstance(side.one(Ended).error, DeadlineExceeded)
    assert [type(frame) for frame in side.sent()] == [wire.Offer, wire.End]


# ---------------------------------------------------------------------- destination: receive and offers


def test_receive_before_the_offer(side: Side) -> None:
    key = side.receive(first_token=5)
    assert not side.take()
    side.up(outgoing=False, peer="src")
    side.hear(wire.Offer(1, 3, "s", 8, 5.0))
    accepted, frame = side.take()
    assert accepted == Accepted(key, "src", 1, 3, tokens=8)
    assert frame == Transmit(1, wire.Accept(1, 3, 4))


def test_receive_after_the_offer(side: Side) -> None:
    side.up(outgoing=False, peer="src")
    side.hear(wire.Offer(1, 3, "s", 8, 5.0))
    assert not side.take()
    assert not side.core.idle
    key = side.receive()
    assert side.take() == [Accepted(key, "src", 1, 3, tokens=8), Transmit(1, wire.Accept(1, 3, 0))]


def test_a_destination_that_has_everything_says_so_and_is_done(side: Side) -> None:
    key = side.receiving(first_token=8)
    assert side.taken(Arrived) == [Arrived(key, 0), Arrived(key, 1)]
    side.hear(wire.End(1, 1, "done", payload=b"p"))
    side.hear(wire.End(1, 1, "done", answer=True))
    assert side.one(Ended) == Ended(key, None, b"p", 1, "src", provisional=False)


@pytest.mark.parametrize("first_token", [-1, 9])
def test_first_token_is_within_the_stream(side: Side, first_token: int) -> None:
    with pytest.raises(ConfigError, match="first_token"):
        side.receive(first_token=first_token)
    assert side.core.streams == 0
    side.up(outgoing=False)
    side.core.set_handler(True)
    side.hear(wire.Offer(1, 1, "s", 8))
    offer = side.one(Offered).offer
    with pytest.raises(ConfigError, match="first_token"):
        side.core.accept(side.now, offer, first_token=first_token)
    side.core.accept(side.now, offer, first_token=8)  # the offer is still open


def test_a_receive_with_other_tokens_refuses_the_offer_on_both_sides(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 1, "s", 8))
    with pytest.raises(ConfigError, match="tokens"):
        side.receive(tokens=12)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.Refuse)] == ["config"]
    key = side.receive(tokens=12)
    side.hear(wire.Offer(2, 1, "s", 8))
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.Refuse)] == ["config"]
    ended = side.one(Ended)
    assert ended.stream == key
    assert isinstance(ended.error, ConfigError)
    assert side.core.idle


def test_an_offer_that_nobody_answers_is_refused_after_its_wait(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 1, "s", 8, 30.0))
    for _ in range(19):
        side.hear(wire.Beat(1))
        side.after(0.1)
    assert not side.sent()
    side.after(0.11)
    (refuse,) = side.sent()
    assert isinstance(refuse, wire.Refuse)
    assert refuse.retry_after
    assert side.core.counters.offers_refused == 1
    assert side.core.idle


def test_an_offer_waits_no_longer_than_its_stream_lives(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 1, "s", 8, 0.3))
    side.after(0.3)
    assert [type(frame) for frame in side.sent()] == [wire.Refuse]


def test_pending_offers_are_bounded_but_a_waiting_receive_is_not_turned_away(side: Side) -> None:
    side.up(outgoing=False)
    side.receive("wanted")
    for num in (1, 2, 3):
        side.hear(wire.Offer(num, 1, f"s{num}", 8))
    (refuse,) = side.sent()
    assert isinstance(refuse, wire.Refuse)
    assert (refuse.num, refuse.code) == (3, "refused")
    assert refuse.retry_after
    side.hear(wire.Offer(4, 1, "wanted", 8))
    assert side.sent() == [wire.Accept(4, 1, 0)]
    side.receive("s1")  # a place is free again
    side.hear(wire.Offer(5, 1, "s5", 8))
    assert side.sent() == [wire.Accept(1, 1, 0)]


def test_max_streams_bounds_what_is_received(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 1, "s1", 8))
    for name in "abc":
        side.receive(name)
    with pytest.raises(Refused):
        side.receive("d")
    with pytest.raises(Refused):
        side.receive("s1")
    side.hear(wire.Offer(2, 1, "s2", 8))
    assert [frame.num for frame in side.sent() if isinstance(frame, wire.Refuse)] == [2]
    side.hear(wire.Offer(3, 1, "a", 8))
    assert side.sent() == [wire.Accept(3, 1, 0)]


def test_a_name_is_received_and_offered_once(side: Side) -> None:
    side.receiving("s")
    with pytest.raises(ConfigError):
        side.receive("s")
    side.hear(wire.Offer(2, 1, "s", 8))
    side.hear(wire.Offer(3, 1, "t", 8))
    side.hear(wire.Offer(4, 1, "t", 8))
    side.hear(wire.Offer(5, 1, "u", 0))
    assert [(f.num, f.code) for f in side.sent() if isinstance(f, wire.Refuse)] == [
        (2, "config"),
        (4, "config"),
        (5, "config"),
    ]
    side.assert_alive()


def test_a_handler_is_asked_once_per_offer_also_of_those_before_it(side: Side) -> None:
    side.up(outgoing=False, peer="src")
    side.hear(wire.Offer(1, 2, "x", 8, 5.0, 3, b"meta", "gold"))
    side.core.set_handler(True)
    side.core.set_handler(True)
    asked = side.one(Offered)
    assert asked == Offered(asked.offer, "src", "x", 2, 8, 3, 5.0, b"meta", "gold")
    side.hear(wire.Offer(2, 1, "y", 8))
    refused = side.one(Offered).offer
    key = side.core.accept(side.now, asked.offer, first_token=4)
    assert side.take() == [Accepted(key, "src", 1, 2, tokens=8), Transmit(1, wire.Accept(1, 2, 4))]
    side.core.refuse(refused, Refused("busy", retry_after=0.5))
    # No Withdrawn: it was the handler itself that answered.
    assert side.take() == [Transmit(1, wire.Refuse(2, 1, "refused", "busy", 0.5))]
    with pytest.raises(Refused):
        side.core.accept(side.now, refused)
    side.core.refuse(refused, Refused("again"))
    assert not side.take()


@pytest.mark.parametrize("retry_after", [math.inf, -1.0, math.nan])
def test_a_refusal_is_always_decodable(side: Side, retry_after: float) -> None:
    side.up(outgoing=False)
    side.core.set_handler(True)
    side.hear(wire.Offer(1, 1, "x", 8))
    side.core.refuse(side.one(Offered).offer, Refused("\ud800" + "x" * 5000, retry_after))
    (refuse,) = side.sent()
    assert wire.decode(wire.encode(0, [refuse])[0])[1] == [refuse]


@pytest.mark.parametrize("how", ["time", "source", "loss", "shut", "tokens"])
def test_an_offer_that_is_gone_is_withdrawn_from_the_handler(side: Side, how: str) -> None:
    side.up(outgoing=False)
    side.core.set_handler(True)
    side.hear(wire.Offer(1, 1, "x", 8, 0.5))
    asked = side.one(Offered)
    if how == "time":
        side.after(0.5)
        assert [type(frame) for frame in side.sent()] == [wire.Refuse]
    elif how == "source":
        side.hear(wire.End(1, 1, "cancelled", "no"))
        assert side.sent() == [wire.End(1, 1, "cancelled", answer=True)]
    elif how == "loss":
        side.lose()
        assert not side.sent()
    elif how == "shut":
        side.core.shut(side.now, Cancelled("closing"))
        assert [type(frame) for frame in side.sent()] == [wire.Refuse]
    else:
        with pytest.raises(ConfigError):
            side.receive("x", tokens=4)
    assert side.one(Withdrawn).offer == asked.offer
    with pytest.raises(KVStreamError):
        side.core.accept(side.now, asked.offer)
    assert side.core.idle


def test_the_end_of_another_epoch_does_not_withdraw_an_offer(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 2, "x", 8))
    side.hear(wire.End(1, 1, "cancelled"))
    assert side.core.counters.stale_frames == 1
    assert not side.core.idle


# ---------------------------------------------------------------------- destination: chunks and the end


def test_chunks_become_moves_confirms_and_layers(side: Side) -> None:
    key = side.receiving(tokens=10)
    side.announce(0, 0, 0, 2)
    side.announce(1, 0, 2, 1, slot=1)
    first, second = side.taken(Move)
    assert (first.layer, first.first, first.count, first.slot, first.generation) == (0, 0, 2, 0, 7)
    side.core.moved(side.now, second)  # out of order: nothing to confirm yet, no layer is whole
    assert not side.take()
    side.core.moved(side.now, first)
    assert side.take() == [Arrived(key, 0), Transmit(1, wire.Confirm(1, 1, 2))]


def test_a_layer_arrives_with_its_last_block(side: Side) -> None:
    key = side.receiving(tokens=10)
    side.announce(0, 1, 0, 2)
    side.move()
    assert not side.taken(Arrived)
    side.announce(1, 1, 2, 1)
    side.move()
    assert side.one(Arrived) == Arrived(key, 1)


def test_the_source_says_done_before_the_last_bytes_are_in_place(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0)
    side.announce(1, 1, slot=1)
    side.hear(wire.End(1, 1, "done", chunks=2, payload=b"pay"))
    first, second = side.taken(Move)
    side.core.moved(side.now, first)
    assert side.sent() == [wire.Confirm(1, 1, 1)]
    side.core.moved(side.now, second)
    assert side.sent() == [wire.End(1, 1, "done", chunks=2)]
    assert not side.taken(Ended)
    side.hear(wire.End(1, 1, "done", answer=True))
    assert side.one(Ended) == Ended(key, None, b"pay", 1, "src", provisional=False)
    assert side.core.idle


def test_a_busy_stream_is_confirmed_in_halves_of_the_slots_and_at_once_when_it_pauses(side: Side) -> None:
    side.up(outgoing=False, peer="src", slots=4)
    side.receive()
    side.hear(wire.Offer(1, 1, "s", 8, 10.0))
    side.take()
    for chunk, (layer, first) in enumerate([(0, 0), (0, 1), (1, 0)]):
        side.announce(chunk, layer, first, 1, slot=chunk)
    moves = side.taken(Move)
    told: list[list[wire.Frame]] = []
    for command in moves:
        side.core.moved(side.now, command)
        told.append(side.sent())
    assert told == [[], [wire.Confirm(1, 1, 2)], [wire.Confirm(1, 1, 3)]]
    side.announce(3, 1, 1, 1, slot=0)
    (last,) = side.taken(Move)
    side.core.moved(side.now, last)
    assert side.sent() == [wire.Confirm(1, 1, 4)]


def test_a_decision_that_is_not_answered_is_provisional_after_its_wait(side: Side) -> None:
    key = side.deciding()
    side.after(0.49)
    assert not side.taken(Ended)
    side.after(0.02)
    assert side.one(Ended) == Ended(key, None, b"pay", 1, "src", provisional=True)
    side.hear(wire.End(1, 1, "done", answer=True))
    assert not side.taken(Ended)
    assert side.core.idle


@pytest.mark.parametrize("what", ["cancel", "fail", "shut", "lost", "source cancels", "deadline"])
def test_what_is_decided_stays_done_whatever_comes(side: Side, what: str) -> None:
    """The source may have heard the decision: an error now would give the stream two ends."""
    key = side.deciding()
    if what == "cancel":
        side.core.cancel(side.now, key, "no")
    elif what == "fail":
        side.core.fail(side.now, key, Corrupted("late"))
    elif what == "shut":
        side.core.shut(side.now, Cancelled("closing"))
    elif what == "lost":
        side.lose()
        side.after(CONFIG.end_wait)
    elif what == "source cancels":
        side.hear(wire.End(1, 1, "cancelled", "no"))
    else:
        side.after(20.0)
    assert side.one(Ended) == Ended(key, None, b"pay", 1, "src", provisional=True)
    assert not [frame for frame in side.sent() if isinstance(frame, wire.End)]
    assert side.core.idle


def test_a_repeated_done_of_the_source_is_no_answer(side: Side) -> None:
    key = side.deciding()
    side.hear(wire.End(1, 1, "done", chunks=2, payload=b"pay"))
    assert side.core.counters.stale_frames == 1
    assert not side.taken(Ended)
    side.hear(wire.End(1, 1, "done", answer=True))
    assert side.one(Ended).stream == key


def test_done_without_every_layer_is_corrupted(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.move()
    side.sent()
    side.hear(wire.End(1, 1, "done", chunks=1))
    ended = side.one(Ended)
    assert isinstance(ended.error, Corrupted)
    assert ended.error.valid_layers == (0,)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["corrupted"]


def test_a_cancelled_destination_tells_the_source_after_the_last_read(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0)
    side.announce(1, 1, slot=1)
    first, second = side.taken(Move)
    side.core.cancel(side.now, key, "no")
    assert isinstance(side.one(Ended).error, Cancelled)
    assert not side.sent()
    side.core.moved(side.now, second)
    assert not side.sent()
    side.core.move_failed(side.now, first, Corrupted("x"))
    assert side.sent() == [wire.End(1, 1, "cancelled", "stream s: no")]
    assert not side.core.idle
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    assert side.core.idle
    assert not side.take()


def test_a_source_that_ends_gets_its_answer_after_the_last_read(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    (move,) = side.taken(Move)
    side.hear(wire.End(1, 1, "fenced", "stream s: old"))
    assert isinstance(side.one(Ended).error, Fenced)
    assert not side.sent()
    side.core.moved(side.now, move)
    assert side.sent() == [wire.End(1, 1, "fenced", "stream s: old", answer=True)]
    assert side.core.idle
    side.receive("t")  # the link works on, its account of reads is right
    side.hear(wire.Offer(2, 1, "t", 8))
    side.announce(0, 0, num=2)
    side.announce(1, 1, num=2, slot=1)
    side.assert_alive()


@pytest.mark.parametrize("frame", [wire.End(1, 1, "cancelled", "no"), wire.End(1, 1, "done", chunks=1)])
def test_ends_that_cross_while_reads_are_under_way(side: Side, frame: wire.End) -> None:
    key = side.receiving()
    side.announce(0, 0)
    (move,) = side.taken(Move)
    side.core.cancel(side.now, key, "mine")
    side.hear(frame)
    assert not side.sent()
    assert not side.core.idle
    side.core.moved(side.now, move)
    assert side.sent() == [wire.End(1, 1, "cancelled", "stream s: mine", answer=True)]
    assert side.core.idle


@pytest.mark.parametrize("frame", [wire.End(1, 1, "cancelled", "no"), wire.End(1, 1, "done", chunks=0)])
def test_ends_that_cross_settle_each_other_on_the_destination(side: Side, frame: wire.End) -> None:
    key = side.receiving()
    side.core.cancel(side.now, key, "mine")
    assert len(side.sent()) == 1
    side.hear(frame)
    assert not side.sent()
    assert side.core.idle


def test_an_end_after_a_refusal_that_crossed_it_is_answered(side: Side) -> None:
    side.up(outgoing=False)
    side.core.set_handler(True)
    side.hear(wire.Offer(1, 1, "x", 8))
    side.core.refuse(side.one(Offered).offer, Refused("busy"))
    side.take()
    side.hear(wire.End(1, 1, "cancelled", "no"))
    assert side.sent() == [wire.End(1, 1, "cancelled", answer=True)]
    assert side.core.counters.stale_frames == 1


def test_chunks_after_the_end_here_are_stale(side: Side) -> None:
    key = side.receiving()
    side.core.cancel(side.now, key, "no")
    side.announce(0, 0)
    side.announce(1, 1, slot=1)
    assert side.core.counters.stale_frames == 2
    assert not side.taken(Move)
    side.assert_alive()


def test_a_failed_read_ends_the_stream_with_what_is_valid(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.announce(1, 1, slot=1)
    first, second = side.taken(Move)
    side.core.moved(side.now, first)
    side.core.move_failed(side.now, second, Corrupted("checksum"))
    ended = side.one(Ended)
    assert isinstance(ended.error, Corrupted)
    assert ended.error.valid_layers == (0,)
    assert [type(frame) for frame in side.sent()] == [wire.Confirm, wire.End]


def test_a_read_that_fails_with_the_peer_leaves_the_end_to_the_loss_of_the_link(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.core.move_failed(side.now, side.one(Move), PeerLost("gone"))
    assert not side.take()
    side.lose()
    assert isinstance(side.one(Ended).error, PeerLost)


def test_a_chunk_of_several_layers_arrives_as_all_of_them(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0, layers=2)
    (move,) = side.move()
    assert (move.layer, move.layers, move.first, move.count) == (0, 2, 0, 2)
    assert side.taken(Arrived) == [Arrived(key, 0), Arrived(key, 1)]
    side.hear(wire.End(1, 1, "done", chunks=1))
    assert side.sent()[-1] == wire.End(1, 1, "done", chunks=1)


def test_link_loss_ends_what_is_received_with_what_is_valid(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.announce(1, 1, slot=1)
    first, second = side.taken(Move)
    side.core.moved(side.now, first)
    side.lose()
    ended = side.one(Ended)
    assert isinstance(ended.error, PeerLost)
    assert ended.error.valid_layers == (0,)
    assert side.core.idle
    side.core.moved(side.now, second)  # it was under way
    assert not side.taken(Ended)


def test_the_deadline_of_a_destination_is_the_earlier_of_both_sides(side: Side) -> None:
    side.receive("own", deadline=0.5)
    side.after(0.5)
    ended = side.one(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    assert "no source" in str(ended.error)
    side.up(outgoing=False, peer="src")
    side.receive("x", deadline=9.0)
    side.hear(wire.Offer(1, 1, "x", 8, 0.5))
    side.take()
    side.after(0.5)
    ended = side.one(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    assert "0 of 2 layers had arrived from src" in str(ended.error)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["deadline"]
    side.receive("y", deadline=0.5)
    side.hear(wire.Offer(2, 1, "y", 8, 9.0))
    side.after(0.5)
    assert isinstance(side.one(Ended).error, DeadlineExceeded)


# ---------------------------------------------------------------------- violations


@pytest.mark.parametrize(
    "violate",
    [
        pytest.param(lambda side: side.announce(1, 0), id="a chunk is missing"),
        pytest.param(lambda side: side.announce(0, LAYERS), id="no such layer"),
        pytest.param(lambda side: side.announce(0, 1, layers=2), id="more layers than there are"),
        pytest.param(lambda side: side.announce(0, 0, layers=2**32 - 1), id="absurdly many layers"),
        pytest.param(
            lambda side: [side.announce(0, 1, 0, 1), side.announce(1, 0, 0, 1, layers=2)], id="overlap in one of two"
        ),
        pytest.param(lambda side: side.announce(0, 0, 1), id="a block is missing"),
        pytest.param(lambda side: side.announce(0, 0, 0, 3), id="more blocks than there are"),
        pytest.param(lambda side: side.announce(0, 0, 0, 0), id="no block"),
        pytest.param(lambda side: side.announce(0, 0, slot=SLOTS), id="no such slot"),
        pytest.param(lambda side: [side.announce(0, 0, 0, 1), side.announce(1, 0, 0, 1)], id="overlap"),
        pytest.param(lambda side: [side.announce(0, 0, 0, 1), side.announce(0, 0, 1, 1)], id="a chunk twice"),
        pytest.param(lambda side: side.announce(0, 0, num=2), id="never offered"),
        pytest.param(lambda side: side.announce(0, 0, num=0), id="number 0"),
        pytest.param(lambda side: side.hear(wire.End(2, 1, "cancelled")), id="end of what was never offered"),
        pytest.param(lambda side: side.hear(wire.End(2, 1, "done", answer=True)), id="answer to nothing"),
        pytest.param(lambda side: side.hear(wire.End(1, 1, "done", answer=True)), id="answer to no decision"),
        pytest.param(lambda side: side.hear(wire.End(1, 1, "cancelled", answer=True)), id="answer to no end"),
        pytest.param(lambda side: side.hear(wire.End(1, 1, "done", chunks=1)), id="chunks that never came"),
        pytest.param(lambda side: side.hear(wire.Accept(1, 1)), id="accept from the source"),
        pytest.param(lambda side: side.hear(wire.Refuse(1, 1, "refused", "")), id="refuse from the source"),
        pytest.param(lambda side: side.hear(wire.Confirm(1, 1, 0)), id="confirm from the source"),
        pytest.param(lambda side: side.hear(wire.Challenge(1, 1, b"")), id="a second handshake"),
    ],
)
def test_a_source_that_breaks_the_protocol_loses_the_link(side: Side, violate: Callable[[Side], Any]) -> None:
    side.receiving()
    violate(side)
    side.assert_dropped()
    assert side.core.counters.protocol_errors == 1
    side.take()
    side.announce(0, 0)  # nothing is taken from it any more
    side.core.shut(side.now, Cancelled("closing"))
    assert not side.taken(Transmit)
    side.lose()
    assert side.core.idle


def test_more_chunks_in_flight_than_slots_lose_the_link(side: Side) -> None:
    side.receiving(tokens=16)
    for chunk in range(SLOTS):
        side.announce(chunk, 0, chunk, 1, slot=chunk)
    side.assert_alive()
    side.announce(SLOTS, 0, SLOTS, 1)
    side.assert_dropped()


def test_chunks_after_the_source_was_done_lose_the_link(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.hear(wire.End(1, 1, "done", chunks=1))
    side.announce(1, 1, slot=1)
    side.assert_dropped()


@pytest.mark.parametrize(
    "frame",
    [
        pytest.param(wire.Confirm(1, 1, 2), id="confirms what was never announced"),
        pytest.param(wire.Accept(1, 1), id="accepts twice"),
        pytest.param(wire.Refuse(1, 1, "refused", ""), id="refuses what it has accepted"),
        pytest.param(wire.End(1, 1, "done", chunks=1), id="is done before the source"),
        pytest.param(wire.End(1, 1, "cancelled", answer=True), id="answers no end"),
        pytest.param(wire.Accept(2, 1), id="accepts what was never offered"),
        pytest.param(wire.Confirm(0, 1, 0), id="number 0"),
        pytest.param(wire.End(2, 1, "cancelled"), id="ends what was never offered"),
        pytest.param(wire.Offer(2, 1, "x", 8), id="offers"),
        pytest.param(wire.Ready(1, 1, 0, 0, 0, 1, 0, 0), id="announces"),
        pytest.param(wire.Reject("refused", ""), id="a second handshake"),
    ],
)
def test_a_destination_that_breaks_the_protocol_loses_the_link(side: Side, frame: wire.Frame) -> None:
    side.up()
    key = side.streaming()
    side.ready(key, 0)
    side.stage()
    side.hear(frame)
    side.assert_dropped()
    assert not side.taken(Ended)
    side.lose()
    assert isinstance(side.one(Ended).error, PeerLost)


def test_an_acceptance_beyond_the_stream_loses_the_link(side: Side) -> None:
    side.up()
    side.send()
    side.hear(wire.Accept(1, 1, 9))
    side.assert_dropped()


def test_an_answer_in_place_of_a_decision_is_not_believed(side: Side) -> None:
    side.up()
    side.finishing()
    side.hear(wire.End(1, 1, "done", answer=True))
    side.assert_dropped()
    assert not side.taken(Ended)


def test_frames_of_another_epoch_are_stale(side: Side) -> None:
    side.up()
    side.streaming()
    for frame in (wire.Confirm(1, 9, 0), wire.Accept(1, 9), wire.Refuse(1, 9, "refused", ""), wire.End(1, 9, "done")):
        side.hear(frame)
    assert side.core.counters.stale_frames == 4
    other = Side()
    other.receiving()
    other.hear(wire.Ready(1, 9, 0, 0, 0, 1, 0, 0))
    other.hear(wire.End(1, 9, "cancelled"))
    other.hear(wire.Offer(1, 1, "s", 8, 10.0))  # repeated
    assert other.core.counters.stale_frames == 3
    for each in (side, other):
        each.assert_alive()
        assert each.core.streams == 1


def test_an_end_is_answered_under_its_own_epoch_even_when_nobody_knows_the_stream(side: Side) -> None:
    side.receiving()
    side.hear(wire.End(1, 9, "cancelled"))
    assert side.sent() == [wire.End(1, 9, "cancelled", answer=True)]
    side.hear(wire.End(1, 9, "cancelled", answer=True))
    assert not side.sent()
    source = Side()
    source.up()
    source.streaming()
    source.hear(wire.End(1, 9, "cancelled"))
    assert source.sent() == [wire.End(1, 9, "cancelled", answer=True)]


# ---------------------------------------------------------------------- liveness of links


def beats(side: Side) -> list[wire.Beat]:
    return [command.frame for command in side.taken(Transmit) if isinstance(command.frame, wire.Beat)]


def test_a_link_beats_only_while_something_lives_on_it(side: Side) -> None:
    side.up()
    side.after(1.0)
    assert not beats(side)
    key = side.send(deadline=9.0)
    side.taken(Transmit)
    for _ in range(5):
        side.after(0.1)
        side.hear(wire.Beat(1))
    sent = beats(side)
    assert len(sent) in (4, 5)  # the offer itself spoke for the first
    assert set(sent) == {wire.Beat(1, reply=True)}
    side.core.cancel(side.now, key, "no")
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    side.taken(Transmit)
    side.after(1.0)
    assert not beats(side)


def test_other_frames_stand_for_beats(side: Side) -> None:
    side.up(slots=8)
    side.send("x")
    for number in range(1, 3):
        side.after(0.1)
        side.send(f"x{number}", deadline=9.0)
    side.after(0.05)
    assert not beats(side)


def test_an_otherwise_silent_peer_answers_a_beat_but_never_an_answer(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Beat(1, reply=True))
    side.hear(wire.Beat(1, reply=False))
    assert beats(side) == [wire.Beat(0)]
    side.receive()
    side.hear(wire.Offer(1, 1, "s", 8, 10.0))
    side.take()
    side.hear(wire.Beat(1, reply=True))  # it beats by itself now
    assert not beats(side)


@pytest.mark.parametrize("outgoing", [True, False])
def test_silence_of_a_whole_stall_time_out_gives_the_link_up(side: Side, outgoing: bool) -> None:
    if outgoing:
        side.up()
        side.streaming()
    else:
        side.receiving()
    side.after(0.35)
    side.hear(wire.Beat(1))
    side.after(0.95)
    side.assert_alive()
    side.after(2 * CONFIG.beat_interval + 0.06)
    assert "silent" in str(side.assert_dropped(PeerLost))
    side.after(5.0)
    side.assert_alive()


def test_a_pending_offer_listens_to_its_source(side: Side) -> None:
    side.up(outgoing=False)
    side.hear(wire.Offer(1, 1, "s", 8, 10.0))
    side.after(1.5)
    side.assert_dropped(PeerLost)


def test_our_own_lateness_is_not_the_peers_silence(side: Side) -> None:
    side.up()
    side.streaming(deadline=1000.0)
    side.after(0.5)
    side.now += 60.0  # stopped, or the loop was held
    side.core.tick(side.now)
    side.assert_alive()
    side.hear(wire.Beat(1))  # what had come in meanwhile
    side.after(0.9)
    side.assert_alive()
    side.after(0.4)
    side.assert_dropped(PeerLost)


def test_constant_lateness_delays_the_verdict_but_does_not_prevent_it(side: Side) -> None:
    side.up()
    side.streaming(deadline=1e6)
    for _ in range(12):
        side.now += 3.0
        side.core.tick(side.now)
    side.assert_dropped(PeerLost)


def test_an_end_that_a_beating_peer_never_answers_gives_the_link_up(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.ready(key, 0)
    side.stage()
    side.core.cancel(side.now, key, "no")
    for _ in range(9):
        side.after(0.1)
        side.hear(wire.Beat(1))
    side.assert_alive()
    for _ in range(4):
        side.after(0.1)
        side.hear(wire.Beat(1))
    assert "not answered" in str(side.assert_dropped(PeerLost))
    side.lose()
    assert (side.core.idle, side.core.slots_in_use) == (True, 0)


def test_a_link_without_streams_is_closed_by_its_source_only(side: Side) -> None:
    side.up(1, "d")
    side.up(2, "src", outgoing=False)
    side.after(19.9)
    side.assert_alive()
    side.after(0.2)
    assert side.one(Drop).link == 1


def test_a_stream_puts_off_the_idle_time_out(side: Side) -> None:
    side.up()
    side.after(15.0)
    key = side.send()
    side.core.cancel(side.now, key, "no")
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    side.after(15.0)
    side.hear(wire.Confirm(1, 1, 0))  # a late frame changes nothing
    side.assert_alive()
    side.after(5.2)
    side.assert_dropped(PeerLost)


@pytest.mark.parametrize("start", [0.1, 0.7, 1e6 + 0.3])
def test_the_idle_time_out_comes_at_any_clock(start: float) -> None:
    side = Side(RuntimeConfig(idle_timeout=0.7))
    side.now = start
    side.up()
    due = side.core.next_timer()
    assert due is not None
    side.core.tick(due)
    side.assert_dropped(PeerLost)


# ---------------------------------------------------------------------- shutting


def test_shut_ends_everything_and_tells_the_peers(side: Side) -> None:
    side.receiving("in")
    side.hear(wire.Offer(2, 1, "pending", 8))
    side.up(2, "d")
    out = side.streaming("out", link=2)
    side.ready(out, 0)
    side.stage()
    side.send("connecting", to=["e"])
    side.take()
    side.core.shut(side.now, Cancelled("closing"))
    transmitted = [(command.link, command.frame) for command in side.taken(Transmit)]
    assert [(link, type(frame)) for link, frame in transmitted] == [(1, wire.Refuse), (2, wire.End), (1, wire.End)]
    ended = side.taken(Ended)
    assert len(ended) == 3
    assert all(isinstance(command.error, Cancelled) for command in ended)
    assert len({id(command.error) for command in ended}) == 3
    assert not side.core.idle
    side.hear(wire.End(1, 1, "cancelled", answer=True))
    side.hear(wire.End(1, 1, "cancelled", answer=True), link=2)
    assert not side.core.idle  # "e" is still to be told of "connecting"
    for call in (side.send, side.receive):
        with pytest.raises(Cancelled):
            call("new")
    side.hear(wire.Offer(3, 1, "late", 8))
    assert [type(frame) for frame in side.sent()] == [wire.Refuse]
    side.up(3, "e")
    assert [type(frame) for frame in side.sent()] == [wire.Offer, wire.End]
    side.hear(wire.End(1, 1, "cancelled", answer=True), link=3)
    assert side.core.idle


def test_drop_all_drops_every_link_once(side: Side) -> None:
    side.up(1)
    side.up(2, "src", outgoing=False)
    side.core.drop_all(PeerLost("closing"))
    side.core.drop_all(PeerLost("closing"))
    assert [command.link for command in side.taken(Drop)] == [1, 2]


def test_reports_and_frames_of_unknown_links_are_ignored(side: Side) -> None:
    side.hear(wire.Beat(1), link=9)
    side.core.link_lost(side.now, 9, PeerLost("gone"))
    stage = Stage(9, 1, 1, 0, 0, 0, 1, 0, (0.0, 0, 0))
    move = Move(9, 1, 1, 0, 0, 0, 1, 0, 1, 0, (0.0, 0, 0))
    side.core.staged(side.now, stage, 1)
    side.core.stage_failed(side.now, stage, Corrupted("x"))
    side.core.moved(side.now, move)
    side.core.move_failed(side.now, move, Corrupted("x"))
    assert not side.take()


# ---------------------------------------------------------------------- memory and timers


def test_timers_of_ended_streams_do_not_pile_up(side: Side) -> None:
    side.up()
    for number in range(1, 2000):
        key = side.send(deadline=1000.0)
        side.core.cancel(side.now, key, "no")
        side.hear(wire.End(number, 1, "cancelled", answer=True))
    side.take()
    side.after(1.0)
    assert side.core.next_timer() is not None
    side.lose()
    assert side.core.next_timer() is None


def test_timers_fire_in_order_once_and_only_if_live() -> None:
    timers = Timers()
    timers.arm(2.0, Timer.OFFER, 1)
    timers.arm(1.0, Timer.OFFER, 2)
    timers.arm(1.0, Timer.INBOUND, 2)
    timers.arm(3.0, Timer.OFFER, 2)  # set anew
    timers.arm(math.inf, Timer.INBOUND, 3)
    timers.arm(0.5, Timer.BEAT, 1)
    timers.cancel(Timer.BEAT, 1)
    assert len(timers) == 3
    assert timers.next() == 1.0
    assert timers.pop(0.9) is None
    fired = [timers.pop(9.0) for _ in range(4)]
    assert fired == [(Timer.INBOUND, 2), (Timer.OFFER, 1), (Timer.OFFER, 2), None]
    assert (len(timers), timers.next()) == (0, None)


def test_cancelled_timers_leave_the_heap() -> None:
    timers = Timers()
    timers.arm(5.0, Timer.BEAT, 0)
    for number in range(5000):
        timers.arm(10.0 + number, Timer.OUTBOUND, number)
        timers.cancel(Timer.OUTBOUND, number)
    assert len(timers._heap) < 200
    assert timers.pop(5.0) == (Timer.BEAT, 0)


def test_what_was_recalled_ends_with_the_sources_word(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0)
    (move,) = side.taken(Move)
    side.core.move_failed(side.now, move, Recalled("taken back"))
    assert not side.take()
    side.hear(wire.End(1, 1, "cancelled", "no more"))
    ended = side.one(Ended)
    assert ended.stream == key
    assert isinstance(ended.error, Cancelled)
    assert [type(frame) for frame in side.sent()] == [wire.End]
    assert side.core.idle


def test_what_was_recalled_without_a_word_is_corrupted_after_the_wait(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    (move,) = side.taken(Move)
    side.core.move_failed(side.now, move, Recalled("taken back"))
    side.after(0.49)
    assert not side.taken(Ended)
    side.after(0.02)
    error = side.one(Ended).error
    assert isinstance(error, Corrupted)
    assert "taken back" in str(error)
    side.hear(wire.End(1, 1, "corrupted", answer=True))
    assert side.core.idle


def test_what_was_recalled_just_before_its_own_deadline_ends_by_that(side: Side) -> None:
    """Source and destination have the same deadline: what the source took back at its end is not corrupted."""
    side.receiving(deadline=0.3)
    side.announce(0, 0)
    (move,) = side.taken(Move)
    side.core.move_failed(side.now, move, Recalled("taken back"))
    side.after(0.31)
    assert isinstance(side.one(Ended).error, DeadlineExceeded)
    side.hear(wire.End(1, 1, "deadline", "the deadline passed"))
    assert side.core.idle
