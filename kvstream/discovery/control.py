"""The control protocol as data: the subjects, requests, answers and events by which a worker is steered and watched.

Everything is JSON over the broker, so that an orchestrator in any language can take part; docs/control.md is the text
to it, and docs/schemas holds the schemas made from these types. What comes in is bounded and validated here; nothing
here acts.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar, get_args

import msgspec

from kvstream.discovery.records import Load, State
from kvstream.errors import ConfigError

__all__ = [
    "ALL",
    "EVENTS",
    "KINDS",
    "MAX_BUDGET",
    "OPERATIONS",
    "CancelReply",
    "CreditStall",
    "DrainReport",
    "Event",
    "Level",
    "LevelReply",
    "NoArguments",
    "OperationType",
    "PeerStats",
    "PushReply",
    "RerouteReply",
    "Role",
    "StateReply",
    "StreamEnded",
    "StreamRecord",
    "StreamRerouted",
    "StreamsReply",
    "ToBudget",
    "ToLevel",
    "ToPush",
    "ToReroute",
    "ToStream",
    "ToStreams",
    "WorkerDraining",
    "WorkerInfo",
    "WorkerJoined",
    "WorkerLeft",
    "WorkerLost",
    "WorkerResumed",
    "WorkerStats",
    "WorkerSuspect",
    "decode_event",
    "decode_request",
    "event_subject",
    "kind_of",
]

_T = TypeVar("_T")

ALL = "kvstream.all"
"""Requests on `kvstream.all.<operation>` are answered by every worker."""
EVENTS = "kvstream.event"
"""Events are published on `kvstream.event.<kind>.<name>.<rank>`."""
MAX_REQUEST = 64 * 1024
MAX_BUDGET = 86400
"""Seconds."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Worker = Annotated[str, msgspec.Meta(min_length=1, max_length=80)]
_Seconds = Annotated[float, msgspec.Meta(ge=0, le=MAX_BUDGET)]

Role = Literal["source", "destination", "holder"]
Level = Literal["debug", "info", "warning", "error"]


class _Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A misspelt argument must not be taken for one that is not given."""


class NoArguments(_Request, frozen=True):
    """Of `info`, `stats` and `resume`."""


class ToStream(_Request, frozen=True):
    """Of `cancel`: the stream's id."""

    stream: _Id


class ToStreams(_Request, frozen=True):
    """Of `streams`: one stream's id, or none for all."""

    stream: _Id | None = None


class ToBudget(_Request, frozen=True):
    """Of `drain`: seconds after which what is still live is cancelled."""

    budget: _Seconds = 30.0


class ToReroute(_Request, frozen=True):
    """Of `reroute`: the stream, and the workers to try in order; none for the worker's own routing."""

    stream: _Id
    to: Annotated[list[_Worker], msgspec.Meta(max_length=64)] | None = None


class ToPush(_Request, frozen=True):
    """Of `fetch`: have the worker push what it holds under this id to another one."""

    stream: _Id
    to: _Worker


class ToLevel(_Request, frozen=True):
    """Of `log_level`."""

    level: Level


class WorkerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A worker about itself. `started` is Unix time, `protocol` the (oldest, newest) version spoken, `version` that of
    its software."""

    name: str
    rank: int
    incarnation: str
    roles: tuple[str, ...]
    state: State
    host: str
    pid: int
    address: str
    version: str
    protocol: tuple[int, int]
    fingerprint: str
    load: Load
    started: float


class PeerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A connection: see `kvstream.Runtime.stats`."""

    peer: str
    direction: str
    streams: int
    slots: int
    slots_used: int
    moves: int
    offers: int
    waiting: bool
    stalled: float
    silent: float


class WorkerStats(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's counters: as `kvstream.Runtime.stats` has them, with the number of its live streams. `malformed`:
    control requests that made no sense; `events_dropped`: events beyond the rate, or while the broker was down."""

    worker: str
    streams: int
    peers: tuple[PeerStats, ...]
    offers_waiting: int
    tokens_waiting: int
    staging_used: int
    staging_limit: int
    staging_quarantined: int
    offers_refused: int
    stalls: int
    stale_frames: int
    protocol_errors: int
    ended: dict[str, int]
    malformed: int
    events_dropped: int


class StreamRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A stream as one worker has it. `peer` is the other side, empty where not known yet; `state` what the stream waits
    for there, `waited` for how many seconds; `layers_done` of `layers` are ready (source) or in place (destination).

    `copies`: the workers that have all of it, as far as those that answered say; filled in by ControlClient.
    """

    worker: str
    stream: str
    role: Role
    peer: str
    epoch: int
    state: str
    waited: float
    layers: int
    layers_done: int
    share_class: str = ""
    copies: tuple[str, ...] = ()


class StreamsReply(msgspec.Struct, frozen=True, kw_only=True):
    """The streams of a worker, oldest first; `total` is their number where there are more than are listed."""

    worker: str
    streams: tuple[StreamRecord, ...]
    total: int


class DrainReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a drain did: how many of the live streams ended by themselves, how many were cancelled at the end of the
    budget, and how many seconds it took."""

    finished: int
    cancelled: int
    seconds: float


class StateReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `resume`."""

    state: State


class CancelReply(msgspec.Struct, frozen=True, kw_only=True):
    """How many ends of the stream this worker has cancelled: two where it sends to itself."""

    cancelled: int


class RerouteReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `reroute`: the order is taken; where the stream went is told by the event."""

    stream: str


class PushReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `fetch`: what was moved, in bytes, by which lane."""

    stream: str
    peer: str
    bytes: int
    lane: str


class LevelReply(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to `log_level`."""

    level: Level


class OperationType(msgspec.Struct, frozen=True):
    """What an operation takes and answers."""

    name: str
    about: str
    request: type[_Request]
    reply: type[msgspec.Struct]


OPERATIONS = (
    OperationType("info", "what the worker is", NoArguments, WorkerInfo),
    OperationType("stats", "its counters and connections", NoArguments, WorkerStats),
    OperationType("streams", "its live streams", ToStreams, StreamsReply),
    OperationType("drain", "take nothing new, let what is live finish, within the budget", ToBudget, DrainReport),
    OperationType("resume", "take streams again after a drain", NoArguments, StateReply),
    OperationType("cancel", "end a stream as cancelled", ToStream, CancelReply),
    OperationType("reroute", "send a stream to another destination", ToReroute, RerouteReply),
    OperationType("fetch", "push what the worker holds to another", ToPush, PushReply),
    OperationType("log_level", "how much the worker logs", ToLevel, LevelReply),
)


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """`worker` is `name/rank`, `time` Unix seconds. `seq` counts what this incarnation had to tell: where numbers are
    missing, events were dropped."""

    worker: str
    incarnation: str
    time: float
    seq: int


class WorkerJoined(_Event, frozen=True, tag="joined"):
    """The worker is registered and takes streams."""

    roles: tuple[str, ...]


class WorkerLeft(_Event, frozen=True, tag="left"):
    """The worker leaves, of its own accord."""

    drained: bool


class WorkerDraining(_Event, frozen=True, tag="draining"):
    """The worker takes nothing new."""

    budget: float


class WorkerResumed(_Event, frozen=True, tag="resumed"):
    """The worker takes streams again."""


class StreamEnded(_Event, frozen=True, tag="stream-ended"):
    """A stream's end on this side. `code` is "done" or an error's, `why` its text; `seconds` since it was opened."""

    stream: str
    role: Role
    peer: str
    epoch: int
    code: str
    why: str
    tokens: int
    bytes: int
    seconds: float


class StreamRerouted(_Event, frozen=True, tag="rerouted"):
    """A stream was taken by another destination than the one that was tried first; `epoch` counts those tried."""

    stream: str
    peer: str
    epoch: int


class CreditStall(_Event, frozen=True, tag="credit-stall"):
    """A peer has made no progress for so long, in seconds: `role` is what this worker is to the streams concerned, of
    which `stream` is one."""

    peer: str
    role: Role
    stream: str
    streams: int
    chunks: int
    seconds: float


class WorkerSuspect(_Event, frozen=True, tag="suspect"):
    """A worker's lease is gone and it is not known yet whether it lives. Never published: each observer finds out by
    itself."""


class WorkerLost(_Event, frozen=True, tag="lost"):
    """A worker is gone without having said so. Never published, as `suspect`."""


Event = (
    WorkerJoined
    | WorkerLeft
    | WorkerDraining
    | WorkerResumed
    | StreamEnded
    | StreamRerouted
    | CreditStall
    | WorkerSuspect
    | WorkerLost
)


def kind_of(event: type[Event]) -> str:
    """What this kind of event is called."""
    return str(event.__struct_config__.tag)


KINDS: dict[str, type[Event]] = {kind_of(kind): kind for kind in get_args(Event)}
"""All events by the names of their kinds."""

_events = msgspec.json.Decoder(
    WorkerJoined | WorkerLeft | WorkerDraining | WorkerResumed | StreamEnded | StreamRerouted | CreditStall
)


def event_subject(kind: str, worker: str) -> str:
    """Where `worker` (`name/rank`) publishes events of this kind; `*` for any kind, and for any worker."""
    name, _, rank = worker.partition("/")
    return f"{EVENTS}.{kind}.{name}.{rank or '*'}"


def decode_event(subject: str, data: bytes) -> Event | None:
    """The event that was published; None for anything else, and for what its subject does not agree with."""
    try:
        event = _events.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return event if subject == event_subject(kind_of(type(event)), event.worker) else None


def decode_request(data: bytes, kind: type[_T]) -> _T:
    """A request's arguments; no data stands for none. Raises ConfigError."""
    if len(data) > MAX_REQUEST:
        raise ConfigError("request", f"{len(data)} bytes; at most {MAX_REQUEST}")
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # msgspec skips unknown fields recursively, so a few KiB of brackets reach the interpreter's limit.
        raise ConfigError("request", str(error)) from None
