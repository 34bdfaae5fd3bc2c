"""Fetches in the scheduler core, one side at a time: whom the asker asks, what is an answer, when it gives up."""

from __future__ import annotations

import pytest

from kvstream import wire
from kvstream.errors import (
    Cancelled,
    ConfigError,
    DeadlineExceeded,
    Missed,
    PeerLost,
    ProtocolError,
    Refused,
)
from kvstream.scheduler.commands import Accepted, Arrived, Dial, Drop, Ended, Fetched, Transmit
from tests.unit.test_scheduler_core import LAYERS, Side

TOKEN = b"t" * wire.TOKEN_BYTES


class Asker(Side):
    """Links 1, 2, ... are those that it dials, 11, 12, ... those by which the same peers send."""

    def fetch(
        self, *sources: str, tokens: int = 8, exact: bool = True, deadline: float = 10.0, first_token: int = 0
    ) -> int:
        return self.core.fetch(
            self.now,
            "s",
            tokens=tokens,
            exact=exact,
            sources=sources,
            token=TOKEN,
            deadline=deadline,
            first_token=first_token,
        )

    def offer(self, link: int = 11, *, tokens: int = 8, token: bytes = TOKEN, num: int = 1) -> None:
        self.hear(wire.Offer(num, 1, "s", tokens, fetch=token), link)

    def asked(self, *sources: str, link: int = 1, **options: int) -> int:
        """A fetch that the first source has been asked for, on a link that was up; its peer sends on `link`+10."""
        self.up(link, sources[0])
        self.up(link + 10, sources[0], outgoing=False)
        key = self.fetch(*sources, **options)  # type: ignore[arg-type]
        assert isinstance(self.sent()[-1], wire.Fetch)
        return key


def test_a_holder_is_dialed_and_asked() -> None:
    side = Asker()
    side.fetch("d")
    assert side.one(Dial) == Dial("d")
    assert side.sent() == []
    side.up()
    assert side.sent() == [wire.Fetch(1, "s", TOKEN, 8, 10.0)]


def test_a_link_that_is_up_or_being_dialed_is_used() -> None:
    side = Asker()
    side.send("other")
    side.one(Dial)
    side.fetch("d")
    assert side.taken(Dial) == []
    side.up()
    assert [type(frame) for frame in side.sent()] == [wire.Offer, wire.Fetch]


def test_the_offer_with_the_token_is_accepted() -> None:
    side = Asker()
    key = side.asked("d", first_token=4)
    side.offer()
    assert side.one(Accepted) == Accepted(key, "d", 11, 1, tokens=8)
    assert side.sent() == [wire.Accept(1, 1, 4)]
    side.lose(1)
    assert side.taken(Ended) == [], "the way by which it was asked is of no use any more"


def test_as_much_as_is_held_is_taken_where_that_is_open() -> None:
    side = Asker()
    key = side.asked("d", tokens=16, exact=False)
    side.offer(tokens=5)
    assert side.one(Accepted).tokens == 5
    side.hear(wire.Ready(1, 1, 0, 0, 0, 2, 0, 7, layers=LAYERS), 11)
    assert side.taken(Ended) == []
    assert side.core.stream_states(side.now)[0].chunks_announced == 1
    assert key


@pytest.mark.parametrize("first_token", [5, 9])
def test_less_than_what_is_here_already_moves_nothing(first_token: int) -> None:
    side = Asker()
    key = side.asked("d", tokens=16, exact=False, first_token=first_token)
    side.offer(tokens=5)
    assert side.sent() == [wire.Accept(1, 1, 5)]
    assert side.taken(Arrived) == [Arrived(key, layer) for layer in range(LAYERS)]


@pytest.mark.parametrize(
    ("exact", "offered", "field"), [(True, 7, "tokens"), (True, 9, "tokens"), (False, 9, "blocks")]
)
def test_another_number_of_tokens_ends_the_fetch(exact: bool, offered: int, field: str) -> None:
    side = Asker()
    key = side.asked("d", exact=exact)
    side.offer(tokens=offered)
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    end = side.one(Ended)
    assert isinstance(end.error, ConfigError)
    assert (end.stream, end.error.field) == (key, field)


@pytest.mark.parametrize("token", [b"u" * wire.TOKEN_BYTES, TOKEN[:-1]])
def test_an_offer_with_another_token_is_refused(token: bytes) -> None:
    side = Asker()
    side.asked("d")
    side.offer(token=token)
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert "not being fetched" in refusal.message
    assert side.taken(Ended) == []
    side.offer(num=2)
    assert len(side.taken(Accepted)) == 1


def test_an_offer_of_another_peer_is_refused_though_it_knows_the_token() -> None:
    side = Asker()
    side.asked("d")
    side.up(12, "other", outgoing=False)
    side.offer(12)
    assert [type(frame) for frame in side.sent()] == [wire.Refuse]
    assert side.taken(Accepted) == []


def test_an_offer_that_answers_a_fetch_is_never_handed_out() -> None:
    """Also where the stream is waited for by its name, or nobody waits and there is a handler."""
    side = Side()
    side.up(11, outgoing=False)
    side.core.set_handler(True)
    side.hear(wire.Offer(1, 1, "s", 8, fetch=TOKEN), 11)
    side.core.receive(side.now, "s", tokens=8, deadline=10.0)
    side.hear(wire.Offer(2, 1, "s", 8, fetch=TOKEN), 11)
    assert [type(command.frame) for command in side.taken(Transmit)] == [wire.Refuse, wire.Refuse]
    assert side.core.offers_waiting == (0, 0)


def test_a_refusal_leads_to_the_next_and_the_last_one_is_the_end() -> None:
    side = Asker()
    key = side.asked("d", "e", "f")
    side.hear(wire.Refuse(1, 0, "missed", "not here"))
    assert side.one(Dial) == Dial("e")
    side.core.link_failed(side.now, "e", PeerLost("e is away"))
    assert side.one(Dial) == Dial("f")
    side.up(3, "f")
    assert len(side.sent()) == 1
    side.offer(11)
    assert [type(frame) for frame in side.sent()] == [wire.Refuse], "d has been asked before, and said no"
    side.hear(wire.Refuse(1, 0, "refused", "busy", 0.3), 3)
    end = side.one(Ended)
    assert end.stream == key
    assert isinstance(end.error, Refused)
    assert end.error.retry_after == 0.3
    assert side.core.idle


def test_a_link_that_is_lost_leads_to_the_next() -> None:
    side = Asker()
    side.asked("d", "e")
    side.lose(1)
    assert side.one(Dial) == Dial("e")
    assert side.taken(Ended) == []


def test_the_loss_of_the_last_link_is_the_end() -> None:
    side = Asker()
    side.asked("d")
    side.lose(1)
    assert isinstance(side.one(Ended).error, PeerLost)


def test_a_holder_that_falls_silent_is_given_up() -> None:
    """Nothing but beats tells: it has been asked, and neither offers nor refuses."""
    side = Asker()
    side.up(1, "d")
    side.fetch("d", "e")
    side.after(2.0)
    assert side.one(Drop).link == 1
    side.lose(1)
    assert side.one(Dial) == Dial("e")


def test_an_older_peer_is_not_asked() -> None:
    side = Asker()
    side.core.link_up(side.now, 1, "d", outgoing=True, slots=2, slot_blocks=2, version=1)
    side.fetch("d")
    assert side.sent() == []
    assert isinstance(side.one(Ended).error, ProtocolError)


def test_the_deadline_ends_a_fetch_that_is_not_answered() -> None:
    side = Asker()
    side.up(1, "d")
    key = side.fetch("d", deadline=0.5)
    side.take()
    side.after(0.6)
    end = side.one(Ended)
    assert (end.stream, type(end.error)) == (key, DeadlineExceeded)
    assert not side.core._shared.links[1].fetches
    side.hear(wire.Refuse(1, 0, "missed", "too late"))
    assert side.core.counters.stale_frames == 1


@pytest.mark.parametrize("when", ["dialing", "asked"])
def test_cancelling_leaves_nothing(when: str) -> None:
    side = Asker()
    if when == "asked":
        side.up(1, "d")
    key = side.fetch("d")
    side.core.cancel(side.now, key, "enough")
    if when == "dialing":
        side.up(1, "d")
    side.up(11, "d", outgoing=False)
    side.offer()
    assert isinstance(side.one(Ended).error, Cancelled)
    assert [type(frame) for frame in side.sent()] == ([wire.Fetch] if when == "asked" else []) + [wire.Refuse]
    assert side.core.idle


def test_no_source() -> None:
    side = Asker()
    with pytest.raises(ConfigError, match="source"):
        side.fetch()
    assert side.core.idle


# -- the holder's half


def test_what_a_peer_asks_for_is_told_and_answered() -> None:
    side = Side()
    side.up(11, "asker", outgoing=False)
    side.hear(wire.Fetch(3, "s", TOKEN, 8, 2.0, 5, "gold"), 11)
    assert side.one(Fetched) == Fetched(11, 3, "asker", "s", TOKEN, 8, 2.0, 5, "gold")
    side.core.refuse_fetch(11, 3, Missed("not here"))
    assert side.sent() == [wire.Refuse(3, 0, "missed", "not here")]
    side.core.refuse_fetch(99, 3, Missed("nobody there"))
    assert side.take() == []


def test_numbers_of_offers_and_fetches_are_one_sequence() -> None:
    side = Side()
    side.up(11, "asker", outgoing=False)
    side.hear(wire.Fetch(1, "s", TOKEN), 11)
    side.hear(wire.Fetch(1, "s", TOKEN), 11)
    side.hear(wire.Offer(1, 1, "x", 8), 11)
    side.hear(wire.Offer(2, 1, "x", 8), 11)
    assert len(side.taken(Fetched)) == 1
    assert side.core.counters.stale_frames == 2
    assert side.core.offers_waiting == (1, 8)


def test_a_fetch_from_whom_we_send_to_is_nonsense() -> None:
    side = Side()
    side.up(1, "d")
    side.hear(wire.Fetch(1, "s", TOKEN), 1)
    assert isinstance(side.one(Drop).error, ProtocolError)


def test_a_core_that_is_shut_refuses() -> None:
    side = Side()
    side.up(11, "asker", outgoing=False)
    side.core.shut(side.now, Cancelled("closing"))
    side.hear(wire.Fetch(1, "s", TOKEN), 11)
    assert side.taken(Fetched) == []
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.code == "refused"


def test_copies_share_a_name() -> None:
    side = Side()
    side.up(1, "d")
    for copy in (False, True, True):
        side.core.send(side.now, "s", tokens=8, held=2, candidates=["d"], deadline=9.0, copy=copy, fetch=TOKEN)
    assert [frame.fetch for frame in side.sent() if isinstance(frame, wire.Offer)] == [TOKEN] * 3
    with pytest.raises(ConfigError):
        side.send("s")
    side.core.shut(side.now, Cancelled("closing"))
    assert not side.core._source._names


def test_a_retry_after_beyond_what_a_frame_can_say_is_cut() -> None:
    side = Side()
    side.up(11, "asker", outgoing=False)
    side.core.refuse_fetch(11, 1, Refused("later", 1e12))
    (refusal,) = side.sent()
    assert isinstance(refusal, wire.Refuse)
    assert refusal.retry_after == wire.MAX_SECONDS


def test_a_fetch_does_not_end_by_the_word_of_a_third() -> None:
    side = Asker()
    side.asked("d")
    side.core.fail_waiting(side.now, ["s"], ConfigError("layout", "differs"))
    assert side.taken(Ended) == []
    side.offer()
    assert len(side.taken(Accepted)) == 1
