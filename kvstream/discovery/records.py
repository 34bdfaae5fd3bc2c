"""What a worker publishes about itself, and its JSON form in the lease table.

Bytes from the table are another process's: they are bounded and validated here, and what does not fit is None,
never an exception.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

from kvstream.discovery.broker import MAX_VALUE
from kvstream.errors import ConfigError

__all__ = [
    "DataAddress",
    "Load",
    "State",
    "WorkerRecord",
    "check_name",
    "decode_record",
    "encode_record",
    "lease_key",
    "parse_worker",
    "worker_subject",
]

State = Literal["ready", "draining"]

_DECODED = 1024
"""Values whose records are kept: what several registries of one process are told is decoded and stored once."""

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

_Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
_Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
_Secret = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{1,256}\Z")]
_Short = Annotated[str, msgspec.Meta(max_length=256)]
_Count = Annotated[int, msgspec.Meta(ge=0)]
_Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]


class DataAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the worker's transport listens; field for field the transport's own listen address."""

    transport: _Short
    host: _Short
    port: _Port
    host_id: _Short
    scope: _Short = "loopback"
    get_port: _Port = 0
    device: bool = False


class Load(msgspec.Struct, frozen=True):
    """How busy a worker is: open streams, and the free and total KV blocks of its pool."""

    streams: _Count = 0
    free_blocks: _Count = 0
    blocks: _Count = 0


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One worker in the registry.

    `name` is the logical instance, `rank` its shard; together they are the id. `incarnation` (32 hex digits) is
    drawn at each start; `key` (hex) is the per-start secret by which the worker proves it on the data plane. `shard`
    is (tp_rank, tp_size, pp_rank, pp_size), `protocol` the (oldest, newest) version spoken, `started` Unix seconds.
    """

    name: _Name
    rank: _Count = 0
    incarnation: _Hex32
    key: _Secret
    roles: tuple[_Name, ...] = ()
    address: DataAddress
    fingerprint: _Short = ""
    shard: tuple[_Count, _Count, _Count, _Count] = (0, 1, 0, 1)
    pid: _Count
    host: _Short
    protocol: tuple[_Count, _Count] = (1, 1)
    load: Load = Load()
    state: State = "ready"
    started: float

    @property
    def id(self) -> str:
        """The worker's id, `name/rank`."""
        return f"{self.name}/{self.rank}"

    def __repr__(self) -> str:
        # Not the generated one: `key` is a secret and must not reach a log.
        return (
            f"WorkerRecord({self.id}, incarnation={self.incarnation}, roles={self.roles}, state={self.state!r}, "
            f"host={self.host!r}, pid={self.pid}, load={self.load})"
        )


_decoder = msgspec.json.Decoder(WorkerRecord)


def check_name(field: str, name: str) -> str:
    """The name, or ConfigError naming `field` when it can't be a logical instance or a role."""
    if not _NAME.fullmatch(name):
        raise ConfigError(field, f"{name!r} is not a name; use 1 to 64 of A-Z a-z 0-9 _ -")
    return name


def parse_worker(worker: str, field: str = "worker") -> tuple[str, int | None]:
    """Split `name` or `name/rank`. Raises ConfigError naming `field`."""
    name, slash, rank = worker.partition("/")
    check_name(field, name)
    if not slash:
        return name, None
    if not (rank.isascii() and rank.isdigit() and len(rank) <= 9):
        raise ConfigError(field, f"{worker!r}: the rank after the slash must be a number")
    return name, int(rank)


def lease_key(name: str, rank: int) -> str:
    """The key of a worker in the lease table."""
    return f"w.{name}.{rank}"


def worker_subject(name: str, rank: int, operation: str) -> str:
    """The subject on which a worker serves `operation`."""
    return f"kvstream.w.{name}.{rank}.{operation}"


def encode_record(record: WorkerRecord) -> bytes:
    """The record as JSON. Raises ConfigError naming the field where it is not one that `decode_record` takes."""
    check_name("name", record.name)
    for role in record.roles:
        check_name("roles", role)
    data = msgspec.json.encode(record)
    if len(data) > MAX_VALUE:
        raise ConfigError("record", f"{len(data)} bytes; at most {MAX_VALUE}")
    try:
        _decoder.decode(data)
    except msgspec.ValidationError as error:
        raise ConfigError("record", str(error)) from None
    return data


@lru_cache(maxsize=_DECODED)
def decode_record(key: str, value: bytes) -> WorkerRecord | None:
    """The record on `key`, or None where the value is none, or not this key's. Equal values give the same object."""
    if len(value) > MAX_VALUE:
        return None
    try:
        record = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        # msgspec skips unknown fields recursively, so a few KiB of brackets reach the interpreter's limit.
        return None
    return record if lease_key(record.name, record.rank) == key else None
