"""What is let in, what waits, what is refused and with which advice; what a sender makes of it; reservations."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import pytest

from kvstream import wire
from kvstream.config import RuntimeConfig
from kvstream.errors import DeadlineExceeded, PeerLost, Refused
from kvstream.scheduler.commands import (
    Accepted,
    Arrived,
    Command,
    Dial,
    Ended,
    Move,
    Offered,
    Stage,
    Transmit,
    Withdrawn,
)
from kvstream.scheduler.core import Scheduler
from kvstream.scheduler.drain import MAX_RETRY_AFTER, MIN_RETRY_AFTER, DrainRate

C = TypeVar("C", bound=Command)
LAYERS, BLOCK_TOKENS = 2, 4


class Side:
    """One core with a clock; reads begin as soon as they are asked for."""

    def __init__(self, *, jitter: Callable[[], float] = lambda: 0.0, **config: object) -> None:
        values: dict[str, object] = {"deadline": 1000.0, "stall_timeout": 500.0, "beat_interval": 100.0} | config
        self.core = Scheduler(
            RuntimeConfig(**values),  # type: ignore[arg-type]
            layers=LAYERS,
            block_tokens=BLOCK_TOKENS,
            jitter=jitter,
        )
        self.now = 100.0
        self.commands: list[Command] = []
        self.nums: Counter[int] = Counter()

    def taken(self, kind: type[C]) -> list[C]:
        while commands := self.core.take():
            self.commands.extend(commands)
            for command in commands:
                if isinstance(command, Move):
                    self.core.moving(command)
        found = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found

    def sent(self) -> list[wire.Frame]:
        return [command.frame for command in self.taken(Transmit) if not isinstance(command.frame, wire.Beat)]

    def hear(self, frame: wire.Frame, link: int = 1) -> None:
        self.core.frame(self.now, link, frame)

    def after(self, seconds: float) -> None:
        end = self.now + seconds
        while (due := self.core.next_timer()) is not None and due <= end:
            self.now = due
            self.core.tick(due)
        self.now = end

    def up(self, link: int = 1, peer: str = "d", *, outgoing: bool = True) -> None:
        self.core.link_up(self.now, link, peer, outgoing=outgoing, slots=8, slot_blocks=2)

    # -- destination

    def offered(self, name: str, tokens: int = 8, *, share: str = "", deadline: float = 500.0) -> int:
        """An offer comes in on link 1; its number."""
        self.nums[1] += 1
        self.hear(wire.Offer(self.nums[1], 1, name, tokens, deadline, 0, b"", share))
        return self.nums[1]

    def refusals(self) -> dict[int, wire.Refuse]:
        return {frame.num: frame for frame in self.sent() if isinstance(frame, wire.Refuse)}

    def asked(self) -> list[str]:
        return [command.stream for command in self.taken(Offered)]

    def serve(self, name: str, tokens: int, num: int, seconds: float) -> None:
        """Receive a whole stream, which takes so long."""
        blocks = math.ceil(tokens / BLOCK_TOKENS)
        for layer in range(LAYERS):
            self.hear(wire.Ready(num, 1, layer, layer, 0, blocks, layer, 7))
        moves = self.taken(Move)
        self.after(seconds)
        for move in moves:
            self.core.moved(self.now, move)
        self.hear(wire.End(num, 1, "done", chunks=LAYERS))
        self.hear(wire.End(num, 1, "done", answer=True))
        assert [ended.error for ended in self.taken(Ended)] == [None]


def destination(**config: object) -> Side:
    side = Side(**config)
    side.up(peer="src", outgoing=False)
    return side


# ---------------------------------------------------------------------- the rate


def test_the_rate_is_that_of_the_time_with_work() -> None:
    rate = DrainRate()
    rate.begun(0.0)
    rate.finished(1.0, 100.0, more=True)
    rate.finished(2.0, 100.0, more=False)
    rate.begun(1000.0)  # the pause before does not count
    rate.finished(1001.0, 100.0, more=False)
    assert rate.time_for(200.0) == pytest.approx(2.0)


def test_the_rate_follows_what_happened_lately() -> None:
    rate = DrainRate()
    rate.begun(0.0)
    for second in range(1, 20):
        rate.finished(float(second), 10.0, more=True)
    for second in range(20, 40):
        rate.finished(float(second), 1000.0, more=True)
    assert rate.time_for(1000.0) == pytest.approx(1.0, rel=0.05)


@pytest.mark.parametrize("amount", [0.0, 1e-9, 1e12])
def test_advice_is_within_what_is_worth_advising(amount: float) -> None:
    rate = DrainRate()
    assert MIN_RETRY_AFTER <= rate.time_for(amount) <= MAX_RETRY_AFTER
    rate.begun(0.0)
    rate.finished(0.0, 10.0, more=True)  # in no time at all
    assert MIN_RETRY_AFTER <= rate.time_for(amount) <= MAX_RETRY_AFTER
    rate.finished(1.0, 10.0, more=True)
    assert MIN_RETRY_AFTER <= rate.time_for(amount) <= MAX_RETRY_AFTER


# ---------------------------------------------------------------------- bounds of what waits


def test_offers_beyond_the_number_are_refused() -> None:
    side = destination(max_pending_offers=2)
    for name in "abc":
        side.offered(name)
    refused = side.refusals()
    assert list(refused) == [3]
    assert "max_pending_offers" in refused[3].message
    assert refused[3].retry_after


def test_offers_beyond_the_tokens_are_refused_but_one_may_have_any_size() -> None:
    side = destination(max_pending_tokens=100)
    side.offered("huge", 1000)
    side.offered("tiny", 1)
    refused = side.refusals()
    assert list(refused) == [2]
    assert "max_pending_tokens" in refused[2].message
    assert side.core.offers_waiting == (1, 1000)
    side.core.receive(side.now, "huge", tokens=1000, deadline=10.0)
    assert side.core.offers_waiting == (0, 0)
    side.offered("later", 60)
    side.offered("too much", 50)
    assert list(side.refusals()) == [4]


def test_a_flood_of_one_class_leaves_room_for_another() -> None:
    side = destination(max_pending_offers=8, share_weights={"gold": 3.0})
    for number in range(7):
        side.offered(f"flood-{number}", share="flood")
    side.offered("gold-0", share="gold")  # it is the eighth: now nobody else fits
    for number in range(3):
        side.core.receive(side.now, f"flood-{number}", tokens=8, deadline=10.0)
    side.refusals()
    # 4 of the flood wait, whose share beside gold is 2 of 8.
    side.offered("flood-x", share="flood")
    (refusal,) = side.refusals().values()
    assert "'flood'" in refusal.message
    for number in range(1, 4):
        side.offered(f"gold-{number}", share="gold")
    assert not side.refusals()


def test_a_class_alone_may_fill_the_table() -> None:
    side = destination(max_pending_offers=4)
    for number in range(5):
        side.offered(f"s{number}", share="only")
    assert list(side.refusals()) == [5]


def test_waiting_offers_of_a_lost_link_leave_no_trace() -> None:
    side = destination(max_pending_offers=3)
    for name in "abc":
        side.offered(name, share=name)
    side.core.link_lost(side.now, 1, PeerLost("gone"))
    assert side.core.offers_waiting == (0, 0)
    offers = side.core._destination._offers
    assert (dict(offers._by_class), offers._weight, offers.asked) == ({}, 0.0, 0)


# ---------------------------------------------------------------------- as many as may be received


def test_the_handler_gets_as_many_as_may_be_received_and_the_others_as_room_comes() -> None:
    side = destination(max_receiving=2)
    side.core.set_handler(True)
    for name in "abcd":
        side.offered(name)
    offers = side.taken(Offered)
    assert [offer.stream for offer in offers] == ["a", "b"]
    key = side.core.accept(side.now, offers[0].offer)
    assert not side.asked()  # accepted is as good as asked
    side.core.refuse(offers[1].offer, Refused("no"))
    assert side.asked() == ["c"]
    side.core.cancel(side.now, key, "no")
    assert side.asked() == ["d"]
    assert not side.refusals().keys() - {2}


def test_room_comes_from_each_way_in_which_an_offer_or_a_stream_can_go() -> None:
    side = destination(max_receiving=1, offer_wait=10.0)
    side.core.set_handler(True)
    for name in "abcdef":
        side.offered(name)
    assert side.asked() == ["a"]
    side.hear(wire.End(1, 1, "cancelled"))  # withdrawn by its source
    assert side.asked() == ["b"]
    side.core.receive(side.now, "b", tokens=8, deadline=5.0)  # taken by a receive(): then it is a stream
    assert not side.asked()
    side.after(5.0)  # which reaches its deadline
    assert side.asked() == ["c"]
    with pytest.raises(Exception, match="tokens"):
        side.core.receive(side.now, "c", tokens=9, deadline=5.0)
    assert side.asked() == ["d"]
    side.after(5.0)  # nobody answers, and all the others have waited as long
    assert side.core.offers_waiting == (0, 0)
    assert side.core._destination._offers.asked == 0


def test_an_offer_that_expires_makes_room_for_one_that_came_later() -> None:
    side = destination(max_receiving=1, offer_wait=10.0)
    side.core.set_handler(True)
    side.offered("a")
    side.after(5.0)
    side.offered("b")
    assert side.asked() == ["a"]
    side.after(5.0)
    assert len(side.taken(Withdrawn)) == 1
    assert side.asked() == ["b"]


def test_a_lost_link_makes_room_for_offers_of_others() -> None:
    side = destination(max_receiving=1)
    side.core.link_up(side.now, 2, "other", outgoing=False, slots=8, slot_blocks=2)
    side.core.set_handler(True)
    side.offered("a")
    side.offered("b")
    side.hear(wire.Offer(1, 1, "c", 8, 500.0), link=2)
    assert side.asked() == ["a"]
    side.core.link_lost(side.now, 1, PeerLost("gone"))
    assert len(side.taken(Withdrawn)) == 1
    assert side.asked() == ["c"]  # and nobody was asked about b, which has gone too


def test_nobody_is_asked_while_a_runtime_closes() -> None:
    side = destination(max_receiving=1)
    side.core.set_handler(True)
    for name in "abc":
        side.offered(name)
    side.asked()
    side.core.shut(side.now, Refused("closing"))  # type: ignore[arg-type]
    assert not side.asked()
    assert list(side.refusals()) == [1, 2, 3]


def test_what_a_receive_waits_for_is_taken_at_once() -> None:
    side = destination(max_receiving=1)
    side.core.set_handler(True)
    side.offered("a")
    side.asked()
    side.core.receive(side.now, "b", tokens=8, deadline=500.0)
    side.offered("b")
    assert len(side.taken(Accepted)) == 1


def test_handlers_are_asked_in_order_of_due_time_and_by_shares_of_tokens() -> None:
    side = destination(max_receiving=1, share_weights={"gold": 2.0}, short_bytes=1, patience=1000.0)
    side.offered("first")
    side.core.set_handler(True)
    side.asked()
    for number in range(4):
        side.offered(f"plain-{number}", share="plain", deadline=400.0 - number)
    for number in range(8):
        side.offered(f"gold-{number}", share="gold", deadline=400.0 - number)
    order: list[str] = []
    side.hear(wire.End(1, 1, "cancelled"))
    for _ in range(12):
        (offer,) = side.taken(Offered)
        order.append(offer.stream)
        side.core.refuse(offer.offer, Refused("next"))
    assert [name for name in order if name.startswith("plain")] == [f"plain-{n}" for n in (3, 2, 1, 0)]
    for served in range(3, 12, 3):
        assert sum(name.startswith("gold") for name in order[:served]) == 2 * served // 3


# ---------------------------------------------------------------------- advice


def test_the_advice_follows_the_rate_at_which_streams_are_served() -> None:
    advice: list[float] = []
    for seconds in (0.1, 0.4):
        side = destination(max_pending_offers=10)
        for number in range(5):
            side.core.receive(side.now, f"s{number}", tokens=8, deadline=500.0)
            num = side.offered(f"s{number}")
            side.serve(f"s{number}", 8, num, seconds)
        for number in range(11):
            side.offered(f"q{number}")
        (refusal,) = side.refusals().values()
        assert refusal.retry_after is not None
        advice.append(refusal.retry_after)
    # Half of ten streams, at 0.1 and 0.4 s each.
    assert advice == [pytest.approx(0.5, rel=0.01), pytest.approx(2.0, rel=0.01)]


def test_too_many_own_streams_are_refused_with_advice() -> None:
    side = Side(max_streams=4)
    side.up()
    keys = [side.core.send(side.now, f"s{n}", tokens=8, held=2, candidates=["d"], deadline=500.0) for n in range(4)]
    side.after(0.25)
    side.core.cancel(side.now, keys[0], "no")
    side.after(0.25)
    side.core.cancel(side.now, keys[1], "no")
    for name in ("x", "y"):
        side.core.send(side.now, name, tokens=8, held=2, candidates=["d"], deadline=500.0)
    with pytest.raises(Refused) as caught:
        side.core.send(side.now, "z", tokens=8, held=2, candidates=["d"], deadline=500.0)
    assert caught.value.retry_after == pytest.approx(0.25, rel=0.1)


# ---------------------------------------------------------------------- reservations (LMCache 1034)


def test_a_receive_that_nothing_comes_of_expires_before_its_deadline() -> None:
    side = destination(reservation_timeout=3.0)
    side.core.receive(side.now, "s", tokens=8, deadline=500.0)
    side.after(2.9)
    assert not side.taken(Ended)
    side.after(0.2)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    assert "reservation_timeout" in str(ended.error)
    assert side.core.idle


def test_an_accepted_stream_that_never_starts_expires_and_its_source_is_told() -> None:
    side = destination(reservation_timeout=3.0)
    side.core.set_handler(True)
    side.offered("s")
    (offer,) = side.taken(Offered)
    side.core.accept(side.now, offer.offer)
    side.sent()
    side.after(3.1)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    (end,) = side.sent()
    assert isinstance(end, wire.End)
    assert end.code == "deadline"


@pytest.mark.parametrize("first_token", [0, 8])
def test_a_stream_that_has_begun_or_has_nothing_to_move_keeps_its_deadline(first_token: int) -> None:
    side = destination(reservation_timeout=3.0)
    side.core.receive(side.now, "s", tokens=8, deadline=500.0, first_token=first_token)
    num = side.offered("s")
    side.after(2.0)
    if not first_token:
        side.hear(wire.Ready(num, 1, 0, 0, 0, 2, 0, 7))
    side.after(100.0)
    assert not side.taken(Ended)
    assert len(side.taken(Arrived)) == (LAYERS if first_token else 0)


def test_a_deadline_before_the_reservations_end_counts_alone() -> None:
    side = destination(reservation_timeout=3.0)
    side.core.receive(side.now, "s", tokens=8, deadline=2.0)
    side.after(2.0)
    (ended,) = side.taken(Ended)
    assert "reservation" not in str(ended.error)
    side.after(2.0)
    assert not side.taken(Ended)
    assert side.core.next_timer() is None


# ---------------------------------------------------------------------- asking again


def refuse(side: Side, num: int, epoch: int, retry_after: float | None = 1.0, link: int = 1) -> None:
    side.hear(wire.Refuse(num, epoch, "refused", "busy", retry_after), link)


def sending(*, retry: bool = True, deadline: float = 100.0, to: tuple[str, ...] = ("d",), **more: object) -> Side:
    side = Side(**more)  # type: ignore[arg-type]
    side.up()
    if len(to) > 1:
        side.up(2, "e")
    side.core.send(side.now, "s", tokens=8, held=2, candidates=to, deadline=deadline, retry=retry)
    return side


def offers(side: Side) -> list[tuple[int, int]]:
    return [
        (command.link, command.frame.epoch) for command in side.taken(Transmit) if isinstance(command.frame, wire.Offer)
    ]


def test_a_refused_stream_is_offered_again_after_the_advised_time() -> None:
    side = sending()
    assert offers(side) == [(1, 1)]
    refuse(side, 1, 1, 2.0)
    assert not side.taken(Ended)
    (state,) = side.core.stream_states(side.now)
    assert state.waits_for == "retry"
    side.after(1.9)
    assert offers(side) == []
    side.after(0.2)
    assert offers(side) == [(1, 2)]
    side.hear(wire.Accept(2, 2))
    assert len(side.taken(Accepted)) == 1
    assert side.core.next_timer() is not None


def test_without_retry_the_first_refusal_by_all_is_the_end() -> None:
    side = sending(retry=False)
    refuse(side, 1, 1)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, Refused)
    assert ended.error.retry_after == 1.0


def test_only_who_refused_for_now_is_asked_again() -> None:
    side = sending(to=("d", "e"))
    refuse(side, 1, 1, None)
    assert offers(side) == [(1, 1), (2, 2)]
    refuse(side, 1, 2, 0.5, link=2)
    side.after(1.0)
    assert offers(side) == [(2, 3)]
    refuse(side, 2, 3, None, link=2)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, Refused)


def test_the_shortest_advice_of_all_candidates_counts() -> None:
    side = sending(to=("d", "e"))
    refuse(side, 1, 1, 3.0)
    refuse(side, 1, 2, 2.0, link=2)
    assert offers(side) == [(1, 1), (2, 2)]
    side.after(2.0)
    assert offers(side) == [(1, 3)]


def test_a_pause_that_would_end_after_the_deadline_is_not_begun() -> None:
    side = sending(deadline=5.0)
    refuse(side, 1, 1, 5.0)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, Refused)


def test_how_often_is_bounded_also_where_nothing_is_advised() -> None:
    """A receiver that says `retry_after=0` every time is asked a few times, further and further apart."""
    side = sending(deadline=60.0)
    asked = 0
    while not side.taken(Ended):
        for _, epoch in offers(side):
            asked += 1
            refuse(side, epoch, epoch, 0.0)
        side.after(0.01)
    assert 10 <= asked <= 16


def test_pauses_are_spread_by_the_jitter_that_is_given() -> None:
    due: list[float] = []
    for chance in (0.0, 0.5, 1.0):
        side = sending(jitter=lambda chance=chance: chance)
        refuse(side, 1, 1, 2.0)
        timer = side.core._shared.timers
        assert timer.next() is not None
        side.after(1.99)
        begin = side.now
        while not [offer for offer in offers(side) if offer[1] == 2]:
            side.after(0.01)
        due.append(side.now - begin + 1.99)
    assert due == [pytest.approx(2.0, abs=0.02), pytest.approx(2.5, abs=0.02), pytest.approx(3.0, abs=0.02)]


def test_a_stream_that_pauses_can_be_cancelled() -> None:
    side = sending(deadline=10.0)
    refuse(side, 1, 1, 8.0)
    offers(side)
    side.core.cancel(side.now, 1, "no")
    assert len(side.taken(Ended)) == 1
    assert side.core.idle  # there is nobody to tell
    side.after(20.0)
    assert offers(side) == []


def test_a_stream_that_was_offered_again_reaches_its_deadline() -> None:
    side = sending(deadline=10.0)
    refuse(side, 1, 1, 8.0)
    side.after(10.0)
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, DeadlineExceeded)
    side.hear(wire.End(2, 2, "deadline", answer=True))
    assert side.core.idle


def test_marks_that_come_during_a_pause_are_not_lost() -> None:
    side = sending()
    refuse(side, 1, 1, 1.0)
    for layer in range(LAYERS):
        side.core.layer_ready(side.now, 1, layer, 0, 8)
    side.core.finish(side.now, 1, b"")
    side.after(1.0)
    side.hear(wire.Accept(2, 2))
    stages: list[Stage] = []
    while found := side.taken(Stage):
        for stage in found:
            stages.append(stage)
            side.core.staging(stage)
            side.core.staged(side.now, stage, 1)
    assert [stage.layer for stage in stages] == [0, 1]
    assert isinstance(side.sent()[-1], wire.End)


def test_a_connection_that_is_refused_for_now_is_tried_again_too() -> None:
    side = Side()
    side.core.send(side.now, "s", tokens=8, held=2, candidates=["d"], deadline=100.0, retry=True)
    assert side.taken(Dial) == [Dial("d")]
    side.core.link_failed(side.now, "d", Refused("quarantine", retry_after=1.0))
    side.after(1.0)
    assert side.taken(Dial) == [Dial("d")]
    side.core.link_failed(side.now, "d", PeerLost("gone"))
    (ended,) = side.taken(Ended)
    assert isinstance(ended.error, PeerLost)
