"""The frames and their codec: what is sent comes back, and whatever a peer sends is a frame or a ProtocolError."""

from __future__ import annotations

import datetime
import math
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvstream import wire
from kvstream.errors import ConfigError, ProtocolError

FRAMES: tuple[type[wire.Frame], ...] = get_args(wire.Frame)
_pack = msgspec.msgpack.encode

quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Characters that UTF-8 can carry, over its one to four bytes.
text = st.characters(exclude_categories=["Cs"])
u32 = st.integers(0, 2**32 - 1)
short = st.text(text, max_size=64)
long = st.text(text, max_size=1024)
name = st.text(text, min_size=1, max_size=160)
blob = st.binary(max_size=300)
seconds = st.floats(0, 1e9)

STRATEGIES: dict[type[wire.Frame], st.SearchStrategy[Any]] = {
    wire.Challenge: st.builds(wire.Challenge, u32, u32, blob),
    wire.Hello: st.builds(
        wire.Hello,
        u32,
        u32,
        name,
        short,
        name,
        short,
        blob,
        blob,
        short,
        st.text(text, max_size=200),
        st.tuples(u32, u32, u32, u32),
        st.lists(short, max_size=8),
        blob,
    ),
    wire.Welcome: st.builds(wire.Welcome, u32, name, short, blob, short, blob),
    wire.Reject: st.builds(wire.Reject, short, long, st.none() | seconds),
    wire.Offer: st.builds(
        wire.Offer,
        u32,
        u32,
        st.text(text, min_size=1, max_size=256),
        u32,
        st.none() | seconds,
        st.integers(-1000, 1000),
        st.binary(max_size=2048),
        st.text(text, max_size=64),
        st.binary(max_size=16),
    ),
    wire.Accept: st.builds(wire.Accept, u32, u32, u32),
    wire.Refuse: st.builds(wire.Refuse, u32, u32, short, long, st.none() | seconds),
    wire.Ready: st.builds(wire.Ready, u32, u32, u32, u32, u32, u32, u32, st.integers(0, 2**63 - 1)),
    wire.Confirm: st.builds(wire.Confirm, u32, u32, u32),
    wire.End: st.builds(wire.End, u32, u32, short, st.text(text, max_size=500), u32, blob, st.booleans()),
    wire.Beat: st.builds(wire.Beat, u32, st.booleans()),
    wire.Fetch: st.builds(
        wire.Fetch,
        u32,
        st.text(text, min_size=1, max_size=256),
        st.binary(min_size=16, max_size=16),
        u32,
        st.none() | seconds,
        st.integers(-1000, 1000),
        st.text(text, max_size=64),
    ),
}
frames = st.one_of(*STRATEGIES.values())


def test_every_frame_has_a_strategy_and_a_tag_of_its_own() -> None:
    assert set(STRATEGIES) == set(FRAMES)
    tags = [kind.__struct_config__.tag for kind in FRAMES]
    assert sorted(tags) == list(range(1, len(FRAMES) + 1)), "tags are part of the protocol and never change"


# ---------------------------------------------------------------------- round trip and size


@quick
@given(st.integers(0, 2**63 - 1 - 10), st.lists(frames, max_size=6))
def test_frames_come_back_in_order_in_messages_numbered_one_by_one(sequence: int, sent: list[wire.Frame]) -> None:
    messages = wire.encode(sequence, sent)
    received: list[wire.Frame] = []
    for offset, message in enumerate(messages):
        assert len(message) <= wire.MAX_MESSAGE
        number, part = wire.decode(message)
        assert number == sequence + offset
        received += part
    assert received == sent


def test_many_frames_are_split_into_full_messages() -> None:
    sent = [wire.Refuse(number, 1, "refused", "x" * 1000) for number in range(100)]
    messages = wire.encode(7, sent)
    assert [wire.decode(message)[0] for message in messages] == list(range(7, 7 + len(messages)))
    assert [frame for message in messages for frame in wire.decode(message)[1]] == sent
    assert len(messages) <= 2 * 100 * 1020 // wire.MAX_MESSAGE + 2


def test_frames_that_fit_share_one_message() -> None:
    assert len(wire.encode(0, [wire.Confirm(1, 1, number) for number in range(500)])) == 1


@pytest.mark.parametrize(
    "frame",
    [
        wire.Ready(*[2**32 - 1] * 7, 2**63 - 1),
        wire.Confirm(*[2**32 - 1] * 3),
        wire.Accept(*[2**32 - 1] * 3),
        wire.Beat(2**32 - 1, reply=True),
        wire.End(2**32 - 1, 2**32 - 1, "cancelled", "", 2**32 - 1, answer=True),
    ],
)
def test_the_frames_of_every_chunk_are_small(frame: wire.Frame) -> None:
    (message,) = wire.encode(2**62, [frame])
    assert len(message) <= 64


@pytest.mark.parametrize(
    "frame",
    [
        wire.Offer(
            1, 1, "\U0001f600" * 256, 1, 1.0, 0, b"x" * wire.MAX_METADATA, "\U0001f600" * 64, b"t" * wire.TOKEN_BYTES
        ),
        wire.Fetch(1, "\U0001f600" * 256, b"t" * wire.TOKEN_BYTES, 1, 1.0, 0, "\U0001f600" * 64),
        wire.End(1, 1, "done", "", 1, b"x" * wire.MAX_PAYLOAD),
        wire.End(1, 1, "corrupted", "\U0001f600" * 1000),
        wire.Refuse(1, 1, "refused", "\U0001f600" * 1000),
    ],
)
def test_the_largest_frames_of_streams_fit(frame: wire.Frame) -> None:
    (message,) = wire.encode(2**62, [frame])
    assert wire.decode(message)[1] == [frame]


def test_a_frame_over_the_limit_is_an_error_that_names_it() -> None:
    huge = wire.Challenge(1, 1, b"x" * 9000)
    with pytest.raises(ProtocolError, match="Challenge"):
        wire.encode(0, [wire.Beat(1), huge])


# ---------------------------------------------------------------------- whatever a peer may send


@quick
@given(st.binary(max_size=200))
def test_garbage_is_a_protocol_error(data: bytes) -> None:
    try:
        sequence, decoded = wire.decode(data)
    except ProtocolError:
        return
    assert sequence >= 0
    assert all(isinstance(frame, FRAMES) for frame in decoded)


msgpack_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(text, max_size=10)
    | st.binary(max_size=10),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.integers(0, 5) | st.text(text, max_size=3), inner),
    max_leaves=20,
)


@quick
@given(st.integers(0, 15), st.lists(msgpack_values, max_size=14))
def test_wrong_values_in_a_frame_are_a_protocol_error(tag: int, values: list[Any]) -> None:
    try:
        _, (frame,) = wire.decode(_pack((0, [[tag, *values]])))
    except ProtocolError:
        return
    # What was taken is within bounds: it could have been sent by ourselves.
    assert wire.decode(wire.encode(0, [frame])[0]) == (0, [frame])


@quick
@given(st.lists(frames, min_size=1, max_size=3), st.data())
def test_truncated_and_flipped_messages_raise_nothing_else(sent: list[wire.Frame], data: st.DataObject) -> None:
    message = wire.encode(3, sent)[0]
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(ProtocolError):
        wire.decode(message[:cut])
    flipped = bytearray(message)
    flipped[cut] ^= data.draw(st.integers(1, 255))
    try:
        wire.decode(bytes(flipped))
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"\x91" * 8000,
        b"\x92\x01" + b"\x91" * 8000,
        _pack((0, [[99, 1]])),
        _pack((0, [["5", 1, 1]])),
        _pack((0, [[-1]])),
        _pack((0, [[]])),
        _pack((0, [{}])),
        _pack((-1, [])),
        _pack((2**63, [])),
        _pack((0, [], 0)),
        _pack((0,)),
        _pack({"sequence": 0}),
        _pack((0, [])) + b"\x00",
        _pack((0, [[11, 0]] * wire.MAX_MESSAGE)),
    ],
)
def test_not_a_message(message: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(message)


@pytest.mark.parametrize(
    "values",
    [
        (5, 1, 1, "s", 8, math.nan),
        (5, 1, 1, "s", 8, math.inf),
        (5, 1, 1, "s", 8, -1.0),
        (5, 1, 1, "", 8),
        (5, 1, 1, "x" * 257, 8),
        (5, 1, 1, "s", 8, 1.0, 1001),
        (5, 1, 1, "s", 8, 1.0, 0, b"x" * 4097),
        (5, -1, 1, "s", 8),
        (5, 2**32, 1, "s", 8),
        (5, 1, 1, "s", 8.0),
        (8, 1, 1, 0, 0, 0, 1, 0, 2**63),
        (8, 1, 1, 0, 0, 0, 1, 0),
        (9, True, 1, 1),
        (10, 1, 1, "x" * 65),
        (10, 1, 1, "done", "", 0, b"x" * 4097),
        (10, 1, 1, "done", "", 0, b"", 1),
    ],
)
def test_values_out_of_bounds(values: tuple[Any, ...]) -> None:
    with pytest.raises(ProtocolError):
        wire.decode(_pack((0, [values])))


@quick
@given(frames, st.lists(msgpack_values, min_size=1, max_size=3))
def test_fields_that_a_later_version_appends_are_ignored(frame: wire.Frame, extra: list[Any]) -> None:
    values = msgspec.msgpack.decode(_pack(frame))
    message = _pack((0, [[*values, *extra]]))
    if len(message) <= wire.MAX_MESSAGE:
        assert wire.decode(message) == (0, [frame])


@pytest.mark.parametrize(
    ("frame", "required"),
    [
        (wire.Offer(1, 2, "s", 8), 5),
        (wire.Accept(1, 2), 3),
        (wire.Refuse(1, 2, "refused", "busy"), 5),
        (wire.End(1, 2, "done"), 4),
        (wire.Beat(3), 2),
        (wire.Reject("refused", "busy"), 3),
    ],
)
def test_fields_that_an_earlier_version_lacked_have_defaults(frame: wire.Frame, required: int) -> None:
    values = msgspec.msgpack.decode(_pack(frame))[:required]
    assert wire.decode(_pack((0, [values]))) == (0, [frame])


# ---------------------------------------------------------------------- versions


@pytest.mark.parametrize(
    ("theirs", "ours", "chosen"),
    [
        ((5, 4), (5, 4), 5),
        ((4, 3), (5, 4), 4),  # N-1
        ((6, 5), (5, 4), 5),  # N+1
        ((3, 2), (5, 4), None),  # N-2
        ((7, 6), (5, 4), None),  # N+2
        ((9, 1), (5, 4), 5),
        ((1, 1), (1, 1), 1),
        ((0, 0), (1, 1), None),
        ((4, 5), (5, 4), None),  # an inverted range
        ((2**32 - 1, 0), (5, 4), 5),
    ],
)
def test_negotiate(theirs: tuple[int, int], ours: tuple[int, int], chosen: int | None) -> None:
    if chosen is not None:
        assert wire.negotiate(*theirs, ours=ours[0], our_min=ours[1]) == chosen
        assert wire.negotiate(*ours, ours=theirs[0], our_min=theirs[1]) == chosen
        return
    with pytest.raises(ProtocolError) as caught:
        wire.negotiate(*theirs, ours=ours[0], our_min=ours[1])
    for number in (*theirs, *ours):
        assert str(number) in str(caught.value)


@quick
@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_negotiate_finds_the_newest_common_version_if_there_is_one(a: int, b: int, c: int, d: int) -> None:
    common = set(range(b, a + 1)) & set(range(d, c + 1))
    if common:
        assert wire.negotiate(a, b, ours=c, our_min=d) == max(common)
    else:
        with pytest.raises(ProtocolError):
            wire.negotiate(a, b, ours=c, our_min=d)


def test_this_version_speaks_with_itself_and_the_one_before() -> None:
    assert wire.negotiate(wire.VERSION, wire.MIN_VERSION) == wire.VERSION
    assert wire.MIN_VERSION in (wire.VERSION, wire.VERSION - 1)


# ---------------------------------------------------------------------- proofs

KEY = "00ff" * 16


def test_a_proof_is_of_its_key_role_nonce_and_parties() -> None:
    good = wire.proof(KEY, "hello", b"nonce", "a", "b")
    assert good == wire.proof(KEY, "hello", b"nonce", "a", "b")
    assert len(good) == 32
    others = [
        wire.proof("00fe" + KEY[4:], "hello", b"nonce", "a", "b"),
        wire.proof(KEY, "welcome", b"nonce", "a", "b"),
        wire.proof(KEY, "hello", b"noncf", "a", "b"),
        wire.proof(KEY, "hello", b"nonce", "b", "a"),
        wire.proof(KEY, "hello", b"nonce", "a"),
        wire.proof(KEY, "hello", b"nonce", "a", "b", ""),
    ]
    assert len({good, *others}) == 7


@quick
@given(st.tuples(st.text(text), st.binary(), st.lists(st.text(text))), st.data())
def test_no_two_inputs_share_a_proof(one: tuple[str, bytes, list[str]], data: st.DataObject) -> None:
    """The peer chooses the nonce: moving bytes between nonce, role and parties must not give the same proof."""
    role, nonce, parties = one
    whole = nonce + "\0".join((role, *parties)).encode()
    cut = data.draw(st.integers(0, len(whole)))
    try:
        fields = whole[cut:].decode().split("\0")
    except UnicodeDecodeError:
        return
    other = (fields[0], whole[:cut], fields[1:])
    same = other == one
    assert (wire.proof(KEY, role, nonce, *parties) == wire.proof(KEY, other[0], other[1], *other[2])) is same


# ---------------------------------------------------------------------- payloads and metadata

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(text, max_size=20)
    | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(text, max_size=5), inner, max_size=4),
    max_leaves=15,
)


@quick
@given(plain)
def test_payload_and_metadata_round_trip(value: Any) -> None:
    assert wire.decode_payload(wire.encode_payload(value)) == value
    assert wire.decode_payload(wire.encode_metadata(value)) == value


@pytest.mark.parametrize(
    ("encode", "limit", "field"),
    [
        (wire.encode_payload, wire.MAX_PAYLOAD, "payload"),
        (wire.encode_metadata, wire.MAX_METADATA, "metadata"),
    ],
)
def test_limits_of_payload_and_metadata(encode: Any, limit: int, field: str) -> None:
    fits = b"x" * (limit - 3)  # msgpack: three bytes of header
    assert len(encode(fits)) == limit
    with pytest.raises(ConfigError) as caught:
        encode(fits + b"x")
    assert caught.value.field == field
    assert str(limit) in str(caught.value)


def _cycle() -> list[Any]:
    value: list[Any] = []
    value.append(value)
    return value


def test_a_tuple_comes_back_as_a_list() -> None:
    assert wire.decode_payload(wire.encode_payload({"a": (1, [2])})) == {"a": [1, [2]]}


@pytest.mark.parametrize(
    "value", [object(), 2**70, -(2**63) - 1, "\ud800", _cycle(), {"a": object()}, lambda: None], ids=repr
)
def test_what_cannot_be_sent_is_a_config_error(value: Any) -> None:
    with pytest.raises(ConfigError):
        wire.encode_payload(value)


@quick
@given(st.binary(max_size=100))
def test_a_payload_of_garbage_is_a_protocol_error(data: bytes) -> None:
    try:
        wire.decode_payload(data)
    except ProtocolError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        b"\x81\x81\xc0\xc0\xc0",  # a map as a map's key
        b"\xc1",
        b"\x91" * 4000,
        b"\xd7\xff" + b"\xff" * 8,
        b"\xa1\xff",
    ],
)
def test_payloads_that_do_not_decode(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_payload(data)


@pytest.mark.parametrize(
    "data", [_pack(datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)), _pack(msgspec.msgpack.Ext(5, b"x"))]
)
def test_payloads_hold_plain_objects_only(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        wire.decode_payload(data)


@pytest.mark.parametrize("value", [{1, 2}, datetime.date(2020, 1, 1), {"a": (datetime.time(1),)}])
def test_what_would_come_back_as_another_type_cannot_be_sent(value: Any) -> None:
    with pytest.raises(ConfigError):
        wire.encode_payload(value)
