"""Worker records: names, the JSON form, and bytes that are none."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given

from kvstream.discovery.records import (
    DataAddress,
    Load,
    WorkerRecord,
    check_name,
    decode_record,
    encode_record,
    parse_worker,
)
from kvstream.errors import ConfigError
from kvstream.transport.base import ListenAddress


def record(**fields: Any) -> WorkerRecord:
    base = WorkerRecord(
        name="decode-0",
        rank=3,
        incarnation="0123456789abcdef" * 2,
        key="5ec2e7",
        roles=("cache", "decode"),
        address=DataAddress(transport="ucx", host="10.0.0.1", port=5, host_id="h", scope="10.0.0.1", get_port=6),
        fingerprint="f00",
        shard=(3, 4, 0, 1),
        pid=7,
        host="box",
        protocol=(1, 2),
        load=Load(1, 2, 3),
        started=1700000000.25,
    )
    return msgspec.structs.replace(base, **fields)


def test_round_trip_and_id() -> None:
    mine = record()
    assert mine.id == "decode-0/3"
    assert decode_record("w.decode-0.3", encode_record(mine)) == mine


def test_the_secret_is_not_shown() -> None:
    assert "5ec2e7" not in repr(record())


def test_the_address_is_the_transports_field_for_field() -> None:
    assert DataAddress.__struct_fields__ == ListenAddress.__struct_fields__
    assert DataAddress.__struct_defaults__ == ListenAddress.__struct_defaults__


@pytest.mark.parametrize("name", ["", "a b", "a.b", "a/0", "ä", "x" * 65, "a\n"])
def test_names_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        check_name("name", name)
    with pytest.raises(ConfigError, match="name"):
        encode_record(record(name=name))
    with pytest.raises(ConfigError, match="to:"):
        parse_worker(name.replace("a/0", "a/zero"), "to")


def test_parse_worker() -> None:
    assert parse_worker("decode-0") == ("decode-0", None)
    assert parse_worker("decode-0/12") == ("decode-0", 12)
    for wrong in ("a/", "a/-1", "a/1/2", "a/\u0663", "/1", "a/9999999999"):
        with pytest.raises(ConfigError):
            parse_worker(wrong)


@pytest.mark.parametrize(
    ("field", "value"),
    [("incarnation", "xyz"), ("key", "no hex"), ("roles", ("a b",)), ("pid", -1), ("host", "h" * 300)],
)
def test_fields_are_checked(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"roles|record"):
        encode_record(record(**{field: value}))
    data = msgspec.json.encode(record(**{field: value}))
    assert decode_record("w.decode-0.3", data) is None


@pytest.mark.parametrize("data", [b"[" * 16000, b'{"a":' * 3000, b'"\xed\xa0\x80"', b""], ids=["a", "b", "c", "d"])
def test_nasty_garbage_is_none(data: bytes) -> None:
    assert decode_record("w.decode-0.3", data) is None


@given(st.binary(max_size=200))
def test_garbage_is_none(data: bytes) -> None:
    assert decode_record("w.decode-0.3", data) is None


def test_a_record_on_anothers_key_is_none() -> None:
    data = encode_record(record())
    assert decode_record("w.decode-0.4", data) is None
    assert decode_record("w.decode-0.3", data + b" " * 16384) is None
