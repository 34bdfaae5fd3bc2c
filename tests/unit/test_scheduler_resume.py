"""A connection that breaks while both ends live, in the scheduler core: what each side keeps, and how the stream goes
on at the first block that is not in place."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvstream import wire
from kvstream.errors import Cancelled, Corrupted, Fenced, PeerLost, ProtocolError, Recalled, Refused
from kvstream.scheduler.commands import Accepted, Arrived, Dial, Drop, Ended, Move, Rerouted
from tests.unit.test_scheduler_core import CONFIG, Side

BACK = wire.Offer(1, 2, "s", 8, 10.0, resumes=1)


@pytest.fixture
def side() -> Side:
    return Side(replace(CONFIG, resume_timeout=0.5, reroute_timeout=0.3, end_wait=0.3))


# ---------------------------------------------------------------------- source


def test_a_source_comes_back_and_sends_what_is_not_in_place(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.all_ready(key)
    side.stage()
    side.take()
    side.cut()
    assert side.one(Dial) == Dial("d")
    assert side.core.streams == 1
    side.up(2)
    (offer,) = side.sent()
    assert offer == BACK
    side.hear(wire.Accept(1, 2, 0, [2, 1]), link=2)
    rerouted = side.one(Rerouted)
    assert (rerouted.epoch, rerouted.peer) == (1, "d")
    assert side.one(Accepted) == Accepted(key, "d", 2, 2, resent=1, resumed=True)
    assert [(s.link, s.epoch, s.chunk, s.layer, s.first, s.count) for s in side.stage()] == [(2, 2, 0, 1, 1, 1)]
    side.core.finish(side.now, key, b"pay")
    assert side.sent()[-1] == wire.End(1, 2, "done", chunks=1, payload=b"pay")
    side.hear(wire.End(1, 2, "done"), link=2)
    ended = side.one(Ended)
    assert (ended.error, ended.epoch, ended.in_doubt) == (None, 2, ())
    assert (side.core.counters.resumes, side.core.counters.reroutes) == (1, 0)
    assert side.core.slots_in_use == 0


def test_the_engine_goes_on_while_there_is_no_connection(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.cut()
    side.ready(key, 0)
    side.up(2)
    side.ready(key, 1)
    side.hear(wire.Accept(1, 2, 0, [0, 0]), link=2)
    assert [(s.layer, s.count) for s in side.stage()] == [(0, 2), (1, 2)]


def test_what_was_decided_meanwhile_is_heard(side: Side) -> None:
    side.up()
    side.finishing()
    side.cut()
    side.up(2)
    side.take()
    side.hear(wire.End(1, 2, "done"), link=2)
    ended = side.one(Ended)
    assert (ended.error, ended.in_doubt) == (None, ())
    assert side.sent() == [wire.End(1, 2, "done", answer=True)]


def test_a_decision_that_can_not_be_is_not_believed(side: Side) -> None:
    side.up()
    side.streaming()
    side.cut()
    side.up(2)
    side.hear(wire.End(1, 2, "done"), link=2)
    assert isinstance(side.one(Drop).error, ProtocolError)


@pytest.mark.parametrize("have", [[], [0], [0, 0, 0], [3, 0], [0, 1]])
def test_what_a_destination_can_not_have_is_not_believed(side: Side, have: list[int]) -> None:
    side.up()
    key = side.streaming()
    side.ready(key, 0)
    side.stage()  # two blocks of layer 0 are announced, nothing of layer 1
    side.cut()
    side.up(2)
    side.hear(wire.Accept(1, 2, 0, have), link=2)
    assert isinstance(side.one(Drop).error, ProtocolError)


def test_a_new_incarnation_is_another_worker(side: Side) -> None:
    side.up(3, "e")
    side.core.link_up(side.now, 1, "d", outgoing=True, slots=2, slot_blocks=2, incarnation="one")
    side.streaming(to=["d", "e"])
    side.cut()
    side.core.link_up(side.now, 2, "d", outgoing=True, slots=2, slot_blocks=2, incarnation="two")
    assert isinstance(side.one(Rerouted).error, PeerLost)
    (offer,) = side.sent()
    assert isinstance(offer, wire.Offer)
    assert (offer.epoch, offer.resumes) == (2, 0)


def test_a_destination_that_has_forgotten_it_is_out(side: Side) -> None:
    side.up(3, "e")
    side.up()
    side.finishing(to=["d", "e"])
    side.cut()
    side.up(2)
    side.take()
    side.hear(wire.Refuse(1, 2, "refused", "not here any more"), link=2)
    assert "gone" in str(side.one(Rerouted).error)
    (offer,) = side.sent()
    assert isinstance(offer, wire.Offer)
    assert (offer.epoch, offer.resumes) == (3, 0)
    side.hear(wire.Accept(1, 3), link=3)
    side.stage()
    side.hear(wire.End(1, 3, "done"), link=3)
    assert side.one(Ended).in_doubt == ("d",)


def test_a_silent_path_is_tried_for_a_bounded_time(side: Side) -> None:
    side.up()
    side.finishing()
    side.cut()
    for _ in range(2):
        assert side.one(Dial) == Dial("d")
        side.after(0.2)
        side.core.link_failed(side.now, "d", PeerLost("no answer"), silent=True)
        assert not side.taken(Dial)
        side.after(0.05)
    assert side.one(Dial) == Dial("d")
    side.after(0.2)
    side.core.link_failed(side.now, "d", PeerLost("no answer"), silent=True)
    ended = side.one(Ended)
    assert isinstance(ended.error, PeerLost)
    assert ended.in_doubt == ("d",)
    assert ended.epoch == 1
    assert side.core.idle


def test_a_stream_that_ends_between_two_tries_leaves_nothing_behind(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.cut()
    side.core.link_failed(side.now, "d", PeerLost("no way"), silent=True)
    side.core.cancel(side.now, key, "enough")
    assert side.core.idle
    assert side.core.next_timer() is None


def test_who_was_silent_is_not_waited_for_when_there_are_others(side: Side) -> None:
    side.up(2, "e")
    side.up()
    side.streaming(to=["d", "e"])
    for _ in range(20):
        side.after(0.1)
        side.hear(wire.Beat(1), link=2)
    assert len([f for f in side.sent() if isinstance(f, wire.Offer) and not f.resumes]) == 1
    assert not side.taken(Dial)


def test_a_stream_that_ends_while_it_comes_back_is_told(side: Side) -> None:
    side.up()
    key = side.streaming()
    side.cut()
    side.core.cancel(side.now, key, "enough")
    side.up(2)
    offer, end = side.sent()
    assert offer == BACK
    assert isinstance(end, wire.End)
    assert (end.num, end.epoch, end.code) == (1, 2, "cancelled")


def test_a_connection_that_breaks_again_and_again(side: Side) -> None:
    side.up()
    side.streaming()
    for link in range(1, 4):
        side.cut(link)
        side.up(link + 1)
    offers = [frame for frame in side.sent() if isinstance(frame, wire.Offer)]
    assert [(offer.epoch, offer.resumes) for offer in offers] == [(2, 1), (3, 1), (4, 1)]
    side.after(0.5)
    side.take()
    side.cut(4)  # that was the end of its patience
    assert isinstance(side.one(Ended).error, PeerLost)


# ---------------------------------------------------------------------- destination


def test_a_destination_keeps_what_it_has_for_its_source(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0)
    side.move()
    side.announce(1, 1, count=1, slot=1)
    late = side.one(Move)
    assert side.taken(Arrived) == [Arrived(key, 0)]
    side.sent()
    side.cut()
    assert side.core.stream_states(side.now)[0].waits_for == "bytes"
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    assert not side.sent()  # something may still be written into its blocks
    side.core.moved(side.now, late)
    assert side.sent() == [wire.Accept(1, 2, 0, [2, 0])]
    assert side.one(Accepted) == Accepted(key, "src", 2, 2, tokens=8, resumed=True)
    side.hear(wire.Ready(1, 2, 0, 1, 0, 2, 0, 7), link=2)
    side.hear(wire.End(1, 2, "done", chunks=1, payload=b"pay"), link=2)
    side.move()
    assert side.taken(Arrived) == [Arrived(key, 1)]
    assert side.sent() == [wire.End(1, 2, "done", chunks=1)]
    side.hear(wire.End(1, 2, "done", answer=True), link=2)
    assert side.one(Ended) == Ended(key, None, b"pay", 2, "src", provisional=False)


def test_blocks_behind_a_gap_are_asked_for_again(side: Side) -> None:
    side.receiving(tokens=12)
    for chunk in range(2):
        side.announce(chunk, 0, first=chunk, count=1, slot=chunk)
    first, second = side.taken(Move)
    side.core.moved(side.now, second)
    side.sent()
    side.cut()
    side.core.moved(side.now, first)  # it came too late to be counted
    side.up(2, "src", outgoing=False)
    side.hear(wire.Offer(1, 2, "s", 12, 10.0, resumes=1), link=2)
    assert side.sent() == [wire.Accept(1, 2, 0, [0, 0])]


def test_a_destination_that_has_not_noticed_the_loss(side: Side) -> None:
    key = side.receiving()
    side.announce(0, 0)
    move = side.one(Move)
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    assert side.one(Drop).link == 1
    assert not side.sent()
    side.core.moved(side.now, move)  # on the old link, which is not lost yet
    assert side.sent() == [wire.Accept(1, 2, 0, [0, 0])]
    side.cut()
    assert side.core.stream_states(side.now)[0].peer == "src"
    assert not side.taken(Ended)
    side.core.cancel(side.now, key, "enough")


def test_an_acceptance_that_was_lost_with_its_connection(side: Side) -> None:
    side.receiving()
    for link in (2, 3):
        side.cut(link - 1)
        side.up(link, "src", outgoing=False)
        side.hear(wire.Offer(1, link, "s", 8, 10.0, resumes=1), link=link)
        assert side.sent() == [wire.Accept(1, link, 0, [0, 0])]


def test_what_was_taken_back_is_not_in_place(side: Side) -> None:
    """A source that closes the connection recalls what it lent, which may show before the loss does."""
    side.receiving()
    side.announce(0, 0)
    side.core.move_failed(side.now, side.one(Move), Recalled("taken back"))
    side.cut()
    side.after(0.45)  # longer than it would wait for the End that explains it
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    assert side.sent() == [wire.Accept(1, 2, 0, [0, 0])]


def test_what_is_decided_is_told_again(side: Side) -> None:
    key = side.deciding()
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    assert side.sent() == [wire.End(1, 2, "done")]
    side.hear(wire.End(1, 2, "done", answer=True), link=2)
    assert side.one(Ended) == Ended(key, None, b"pay", 2, "src", provisional=False)


def test_a_source_that_does_not_come_back_is_lost(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.move()
    side.sent()
    side.cut()
    side.after(0.4)
    assert not side.taken(Ended)
    side.after(0.2)
    error = side.one(Ended).error
    assert isinstance(error, PeerLost)
    assert error.valid_layers == (0,)
    assert side.core.idle
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == Refused.code


def test_a_read_that_never_ends_does_not_hold_it_for_ever(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.one(Move)
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    side.after(0.6)
    assert isinstance(side.one(Ended).error, PeerLost)
    (end,) = side.sent()
    assert isinstance(end, wire.End)
    assert (end.epoch, end.code) == (2, "peer_lost")


@pytest.mark.parametrize(
    "wrong",
    [
        {"resumes": 3},
        {"tokens": 7},
        {"stream": "t"},
    ],
)
def test_what_is_not_known_is_not_resumed(side: Side, wrong: dict[str, object]) -> None:
    side.receiving()
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(replace(BACK, epoch=4, **wrong), link=2)  # type: ignore[arg-type]
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)


def test_nobody_else_can_resume_it(side: Side) -> None:
    side.receiving()
    side.cut()
    side.up(2, "other", outgoing=False)
    side.hear(BACK, link=2)
    assert isinstance(side.sent()[0], wire.Refuse)
    side.core.link_up(side.now, 3, "src", outgoing=False, slots=2, slot_blocks=0, incarnation="new")
    side.hear(BACK, link=3)
    assert isinstance(side.sent()[0], wire.Refuse)


def test_a_source_that_was_replaced_is_not_waited_for(side: Side) -> None:
    side.receiving()
    side.cut()
    side.core.replaced(side.now, "another", "new")
    assert not side.taken(Ended)
    side.core.replaced(side.now, "src", "new")
    assert isinstance(side.one(Ended).error, PeerLost)


def test_a_chunk_or_an_end_before_it_is_resumed_breaks_the_protocol(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    side.one(Move)
    side.cut()
    for link, frame in ((2, wire.Ready(1, 2, 0, 0, 0, 2, 0, 7)), (3, wire.End(1, 3, "done"))):
        side.up(link, "src", outgoing=False)
        side.hear(wire.Offer(1, link, "s", 8, 10.0, resumes=link - 1), link=link)
        side.hear(frame, link=link)
        assert isinstance(side.one(Drop).error, ProtocolError)
        side.core.link_lost(side.now, link, PeerLost("dropped"))
    assert not side.taken(Ended)


def test_users_can_end_what_is_suspended(side: Side) -> None:
    key = side.receiving()
    side.cut()
    side.core.cancel(side.now, key, "enough")
    assert isinstance(side.one(Ended).error, Cancelled)
    assert side.core.idle
    assert side.core.offers_waiting == (0, 0)


def test_a_stream_that_is_offered_anew_ends_the_old_epoch(side: Side) -> None:
    side.receiving()
    side.cut()
    side.core.set_handler(True)
    side.up(2, "src", outgoing=False)
    side.hear(wire.Offer(1, 4, "s", 8, 10.0), link=2)
    assert isinstance(side.one(Ended).error, Fenced)
    assert side.core.offers_waiting == (1, 8)


def test_a_broken_protocol_is_no_broken_path(side: Side) -> None:
    side.receiving()
    side.core.link_lost(side.now, 1, ProtocolError("nonsense"))
    assert isinstance(side.one(Ended).error, ProtocolError)


def test_a_late_failure_of_a_read_does_not_touch_the_next_epoch(side: Side) -> None:
    side.receiving()
    side.announce(0, 0)
    late = side.one(Move)
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(BACK, link=2)
    side.core.move_failed(side.now, late, Corrupted("late"))
    assert not side.taken(Ended)
    assert side.sent() == [wire.Accept(1, 2, 0, [0, 0])]


# ---------------------------------------------------------------------- copies under one name


def test_another_copy_of_the_name_does_not_take_a_stream_over(side: Side) -> None:
    """Or the bytes of two copies, perhaps of different KV, would be mixed in one stream that is done."""
    side.receiving()
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(replace(BACK, copy=7), link=2)
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert "nothing to resume" in refusal.message
    side.hear(replace(BACK, num=2), link=2)
    assert side.sent() == [wire.Accept(2, 2, 0, [0, 0])]


def test_a_later_epoch_of_another_copy_does_not_end_a_stream(side: Side) -> None:
    side.receiving()
    side.cut()
    side.up(2, "src", outgoing=False)
    side.hear(wire.Offer(1, 2, "s", 8, 10.0, copy=7), link=2)
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert (refusal.code, refusal.retry_after) == ("refused", 0.5)
    assert side.taken(Ended) == []


def test_what_is_live_on_a_connection_is_not_resumed_by_it(side: Side) -> None:
    side.receiving()
    side.hear(replace(BACK, num=2))
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert side.taken(Drop) == [] and side.taken(Ended) == []


def test_a_source_of_an_older_version_is_not_waited_for(side: Side) -> None:
    side.core.link_up(side.now, 1, "src", outgoing=False, slots=2, slot_blocks=2, version=1)
    side.receive()
    side.hear(wire.Offer(1, 1, "s", 8, 10.0))
    side.cut()
    assert isinstance(side.one(Ended).error, PeerLost)
