"""A source's stream that loses the destination which had accepted it, in the scheduler core: where it goes, what it is
sent again, what becomes of the slots, and which destinations are in doubt."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvstream import wire
from kvstream.errors import Cancelled, ConfigError, Fenced, PeerLost, Refused
from kvstream.scheduler.commands import Accepted, Declined, Dial, Drop, Ended, Move, Rerouted, Route, Stage
from tests.unit.test_scheduler_core import CONFIG as BASE
from tests.unit.test_scheduler_core import Side

CONFIG = replace(BASE, reroute_timeout=0.5, stall_timeout=2.0)
WHERE = ["d", "e"]


@pytest.fixture
def side() -> Side:
    """Connected to d (link 1) and e (link 2)."""
    side = Side(CONFIG)
    side.up()
    side.up(2, "e")
    return side


def offers(side: Side) -> list[wire.Offer]:
    return [frame for frame in side.sent() if isinstance(frame, wire.Offer)]


def routable(side: Side, to: list[str], *, num: int = 1) -> int:
    key = side.core.send(side.now, "s", tokens=8, held=2, candidates=to, deadline=10.0, routable=True)
    side.hear(wire.Accept(num, 1))
    side.take()
    return key


def silence(side: Side, seconds: float, *, speaks: int | None = None) -> None:
    """Time in which only the peer of one link is heard."""
    for _ in range(round(seconds / CONFIG.beat_interval)):
        side.after(CONFIG.beat_interval)
        if speaks is not None:
            side.hear(wire.Beat(1), link=speaks)


def test_all_that_was_ready_goes_to_the_next_and_the_engine_goes_on(side: Side) -> None:
    key = side.streaming(to=WHERE)
    side.ready(key, 0)
    side.stage()
    side.lose()
    rerouted = side.one(Rerouted)
    assert (rerouted.stream, rerouted.epoch, rerouted.peer) == (key, 1, "d")
    assert isinstance(rerouted.error, PeerLost)
    assert [d.peer for d in side.taken(Declined)] == ["d"]
    (offer,) = offers(side)
    assert offer.epoch == 2
    side.ready(key, 1)  # the engine goes on meanwhile
    side.hear(wire.Accept(1, 2), link=2)
    assert side.one(Accepted) == Accepted(key, "e", 2, 2, resent=1)
    assert [(s.link, s.epoch, s.chunk, s.layer) for s in side.stage()] == [(2, 2, 0, 0), (2, 2, 1, 1)]
    side.core.finish(side.now, key, b"")
    side.hear(wire.End(1, 2, "done"), link=2)
    ended = side.one(Ended)
    assert (ended.error, ended.peer, ended.epoch, ended.in_doubt) == (None, "e", 2, ())
    assert side.core.slots_in_use == 0
    assert side.core.counters.reroutes == 1


def test_who_refused_before_is_asked_again_but_not_who_was_lost(side: Side) -> None:
    side.send(to=WHERE)
    side.hear(wire.Refuse(1, 1, "refused", "busy"))
    side.hear(wire.Accept(1, 2), link=2)
    side.take()
    side.lose(2)
    (offer,) = offers(side)
    assert (offer.num, offer.epoch) == (2, 3)
    side.hear(wire.Accept(2, 3))
    side.take()
    side.lose()
    assert isinstance(side.one(Ended).error, PeerLost)
    assert not side.taken(Dial)


@pytest.mark.parametrize("code", ["refused", "fenced", "peer_lost"])
def test_a_destination_that_can_not_go_on_hands_over(side: Side, code: str) -> None:
    key = side.streaming(to=WHERE)
    side.all_ready(key)
    side.stage()
    side.take()
    side.hear(wire.End(1, 1, code, "draining"))
    answer, offer = side.sent()
    assert answer == wire.End(1, 1, code, answer=True)
    assert isinstance(offer, wire.Offer)
    assert side.core.slots_in_use == 0  # the peer has said that it reads no more
    assert "draining" in str(side.one(Rerouted).error)


@pytest.mark.parametrize("code", ["cancelled", "deadline", "corrupted"])
def test_a_destination_whose_user_ends_the_stream_ends_it(side: Side, code: str) -> None:
    side.streaming(to=WHERE)
    side.hear(wire.End(1, 1, code, "enough"))
    error = side.one(Ended).error
    assert error is not None
    assert error.code == code
    assert not offers(side)


def test_what_may_be_done_elsewhere_is_in_doubt(side: Side) -> None:
    key = side.finishing(to=WHERE)
    side.take()
    side.lose()
    side.hear(wire.Accept(1, 2), link=2)
    stages = side.stage()
    assert [s.epoch for s in stages] == [2, 2]
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["done"]
    side.hear(wire.End(1, 2, "done"), link=2)
    ended = side.one(Ended)
    assert (ended.stream, ended.error, ended.in_doubt) == (key, None, ("d",))


def test_the_doubt_stays_when_the_stream_fails_in_the_end(side: Side) -> None:
    key = side.finishing(to=WHERE)
    side.lose()
    side.take()
    side.core.cancel(side.now, key, "enough")
    ended = side.one(Ended)
    assert isinstance(ended.error, Cancelled)
    assert ended.error.in_doubt == ended.in_doubt == ("d",)


def test_a_destination_that_failed_is_not_in_doubt(side: Side) -> None:
    side.finishing(to=WHERE)
    side.hear(wire.End(1, 1, "refused", "closing"))
    side.hear(wire.Accept(1, 2), link=2)
    side.stage()
    side.hear(wire.End(1, 2, "done"), link=2)
    assert side.one(Ended).in_doubt == ()


def test_the_number_of_reroutes_is_bounded() -> None:
    side = Side(replace(CONFIG, max_reroutes=1))
    for link, peer in enumerate("def", 1):
        side.up(link, peer)
    side.streaming(to=["d", "e", "f"])
    side.lose()
    side.hear(wire.Accept(1, 2), link=2)
    assert not side.taken(Ended)
    side.lose(2)
    assert isinstance(side.one(Ended).error, PeerLost)


# ---------------------------------------------------------------------- silence


def test_a_silent_destination_loses_what_can_go_elsewhere(side: Side) -> None:
    key = side.streaming("can", to=WHERE)
    side.streaming("can't", num=2)
    side.ready(key, 0)
    side.stage()
    side.take()
    silence(side, CONFIG.reroute_timeout - 2 * CONFIG.beat_interval)
    assert not side.taken(Rerouted)
    silence(side, 3 * CONFIG.beat_interval)
    assert not side.taken(Drop)
    assert side.one(Rerouted).stream == key
    end, offer = (f for f in side.sent() if not isinstance(f, wire.Beat))
    assert isinstance(end, wire.End)
    assert (end.num, end.epoch, end.code) == (1, 1, "fenced")
    assert isinstance(offer, wire.Offer)
    # The slot is the frozen peer's until it answers, and the other link is not held up by it.
    assert side.core.slots_in_use == 1
    side.hear(wire.Accept(1, 2), link=2)
    assert len(side.stage()) == 1
    side.hear(wire.End(1, 1, "fenced", answer=True))
    assert side.core.slots_in_use == 1


def test_a_slot_of_the_old_epoch_is_not_given_out_before_the_peer_has_answered(side: Side) -> None:
    key = side.streaming(to=WHERE)
    other = side.streaming("other", num=2)
    side.ready(key, 0)
    side.stage()
    side.core.reroute(side.now, "s", ["e"])
    side.all_ready(other)
    (stage,) = [command for command in side.stage() if command.stream == other]
    assert stage.slot == 1
    assert not side.taken(Stage)  # the other slot of two is what the peer may be reading
    side.hear(wire.End(1, 1, "fenced", answer=True))
    (stage,) = side.stage()
    assert (stage.stream, stage.slot) == (other, 0)


def test_a_silent_destination_keeps_what_was_rerouted_too_often() -> None:
    side = Side(replace(CONFIG, max_reroutes=1))
    for link, peer in enumerate("def", 1):
        side.up(link, peer)
    key = side.streaming(to=["d", "e", "f"])
    side.lose()
    side.hear(wire.Accept(1, 2), link=2)
    side.ready(key, 0)
    side.stage()
    side.take()
    silence(side, CONFIG.reroute_timeout + 3 * CONFIG.beat_interval)
    assert not side.taken(Ended)
    assert side.core.slots_in_use == 1


def test_a_silent_candidate_is_passed_over(side: Side) -> None:
    side.send(to=WHERE)
    side.take()
    silence(side, CONFIG.reroute_timeout + 2 * CONFIG.beat_interval)
    assert not side.taken(Rerouted)
    assert offers(side) == [wire.Offer(1, 2, "s", 8, pytest.approx(9.4, abs=0.2))]


def test_a_late_decision_of_the_old_destination_is_stale(side: Side) -> None:
    side.finishing(to=WHERE)
    side.core.reroute(side.now, "s", [])
    side.take()
    side.hear(wire.End(1, 1, "done"))
    assert side.core.counters.stale_frames == 1
    assert not side.taken(Ended)
    assert side.core.slots_in_use == 0


def test_a_gather_for_the_old_destination_gives_its_slot_back(side: Side) -> None:
    key = side.streaming(to=WHERE)
    side.ready(key, 0)
    late = side.one(Stage)
    side.core.reroute(side.now, "s", ["e"])
    side.hear(wire.Accept(1, 2), link=2)
    side.sent()
    side.core.staged(side.now, late, 7)
    assert not [frame for frame in side.sent() if isinstance(frame, wire.Ready)]
    assert side.core.slots_in_use == 1  # that of the new epoch


# ---------------------------------------------------------------------- orders


def test_an_order_takes_a_stream_away(side: Side) -> None:
    key = side.streaming()
    side.core.reroute(side.now, "s", ["e"])
    end, offer = side.sent()
    assert isinstance(end, wire.End)
    assert (end.code, end.epoch) == ("fenced", 1)
    assert isinstance(offer, wire.Offer)
    assert isinstance(side.one(Rerouted).error, Cancelled)
    assert not side.taken(Declined)  # d has done nothing wrong
    side.hear(wire.Refuse(1, 2, "refused", "busy"), link=2)
    (back,) = offers(side)  # who had it is the last resort
    assert (back.num, back.epoch) == (2, 3)
    side.hear(wire.Accept(2, 3))
    assert side.one(Accepted).peer == "d"
    side.core.cancel(side.now, key, "enough")


def test_orders_that_lead_nowhere(side: Side) -> None:
    with pytest.raises(ConfigError, match="not being sent"):
        side.core.reroute(side.now, "s", ["e"])
    side.streaming()
    with pytest.raises(ConfigError, match="goes to d already"):
        side.core.reroute(side.now, "s", ["d"])
    with pytest.raises(Refused, match="no destination but d"):
        side.core.reroute(side.now, "s", [])
    assert not side.take()


def test_an_order_while_it_is_offered_or_connected(side: Side) -> None:
    side.send("x")
    side.send("y", to=["f"])
    side.take()
    side.core.reroute(side.now, "x", ["e"])
    end, offer = side.sent()
    assert isinstance(end, wire.End)
    assert end.code == "fenced"
    assert isinstance(offer, wire.Offer)
    side.core.reroute(side.now, "y", ["e"])
    (offer,) = offers(side)
    assert offer.stream == "y"
    side.up(3, "f")
    assert not offers(side)
    assert side.core.counters.reroutes == 0


# ---------------------------------------------------------------------- policies


def test_a_policy_is_asked_for_more(side: Side) -> None:
    key = routable(side, ["d"])
    side.lose()
    assert side.one(Route) == Route(key, ("d",))
    assert not side.taken(Ended)
    assert side.core.stream_states(side.now)[0].waits_for == "route"
    side.core.routed(side.now, key, ["d", "e"])
    (offer,) = offers(side)
    assert offer.epoch == 2
    side.hear(wire.Refuse(1, 2, "refused", "busy"), link=2)
    assert side.one(Route) == Route(key, ("d", "e"))
    side.core.routed(side.now, key, [])
    error = side.one(Ended).error
    assert isinstance(error, Refused)


def test_a_policy_is_asked_before_a_silent_destination_is_left(side: Side) -> None:
    key = routable(side, ["d"])
    silence(side, CONFIG.reroute_timeout + CONFIG.beat_interval)
    assert side.one(Route) == Route(key, ("d",))
    assert not side.taken(Rerouted)
    side.core.routed(side.now, key, ["e"])
    assert not side.taken(Rerouted)
    side.after(CONFIG.beat_interval)
    assert side.one(Rerouted).stream == key


def test_a_destination_that_is_heard_again_keeps_its_stream(side: Side) -> None:
    key = routable(side, ["d"])
    silence(side, CONFIG.reroute_timeout + CONFIG.beat_interval)
    side.core.routed(side.now, key, ["e"])
    side.hear(wire.Beat(1))
    side.after(3 * CONFIG.beat_interval)
    assert not side.taken(Rerouted)


def test_a_late_answer_of_a_policy_changes_nothing(side: Side) -> None:
    key = routable(side, ["d"])
    side.lose()
    side.core.cancel(side.now, key, "enough")
    side.take()
    side.core.routed(side.now, key, ["e"])
    assert not side.take()


# ---------------------------------------------------------------------- the destination


def test_the_old_destination_ends_typed_and_says_so_after_its_last_read() -> None:
    side = Side()
    side.receiving()
    side.announce(0, 0)
    move = side.one(Move)
    side.hear(wire.End(1, 1, "fenced", "goes elsewhere"))
    assert isinstance(side.one(Ended).error, Fenced)
    assert not side.sent()
    side.core.moved(side.now, move)
    assert side.sent() == [wire.End(1, 1, "fenced", "goes elsewhere", answer=True)]


def test_a_worker_that_closes_hands_its_streams_over() -> None:
    side = Side()
    side.receiving()
    side.core.shut(side.now, Cancelled("closing"))
    assert isinstance(side.one(Ended).error, Cancelled)
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["refused"]


def test_a_worker_that_is_fenced_says_so() -> None:
    side = Side()
    side.receiving()
    side.core.shut(side.now, Fenced("another holds the name"))
    assert [frame.code for frame in side.sent() if isinstance(frame, wire.End)] == ["fenced"]
