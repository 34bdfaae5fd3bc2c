"""Scenarios as data: the workers, what their users do, and what goes wrong when. A run is a function of one of these.

Owns the generator that makes a scenario from a seed, and the file form of fault schedules. It starts nothing. Each
stream and fault is drawn from a generator of its own, so that leaving some out (to shrink a failing scenario) does not
change the others.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from kvstream.config import RuntimeConfig
from kvstream.errors import ConfigError
from kvstream.layout import KVLayout
from kvstream.sim.rng import derive, number
from kvstream.transport.base import LANES, Lane

__all__ = [
    "Answer",
    "Fault",
    "FaultKind",
    "Profile",
    "Receiver",
    "Scenario",
    "Schedule",
    "StreamPlan",
    "WorkerPlan",
    "generate",
    "read_schedule",
]

Profile = Literal["none", "mild", "harsh"]

LAYOUT = KVLayout(layers=3, kv_heads=1, head_dim=8, block_tokens=4, dtype="uint8")
"""Blocks of 64 bytes, the least that can be lent."""

FaultKind = Literal[
    "kill",
    "leave",
    "freeze",
    "slow",
    "lag",
    "cut",
    "break",
    "broker_down",
    "broker_freeze",
    "broker_late",
    "broker_reset",
    "clash",
    "cancel",
]

_Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class WorkerPlan(msgspec.Struct, frozen=True, kw_only=True):
    """`blocks`: of its pool. `lanes` that it allows. `reads_memory`: whether it may read other processes' memory."""

    name: str
    host: str
    roles: tuple[str, ...]
    blocks: int
    lanes: tuple[Lane, ...]
    reads_memory: bool
    staging_limit: int


class Receiver(msgspec.Struct, frozen=True, kw_only=True):
    """A `receive` on `worker`, called at `at`. `pause`: the user's time for each layer; `action` at `action_at`."""

    worker: str
    at: float
    deadline: float
    first_token: int = 0
    pause: float = 0.0
    action: Literal["run", "cancel", "abandon", "fail"] = "run"
    action_at: float = 0.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker's offer handler does, after `delay`, with a stream that nobody receives there."""

    kind: Literal["accept", "refuse", "ignore", "raise", "raise_late"] = "ignore"
    delay: float = 0.0
    first_token: int = 0
    pause: float = 0.0


class StreamPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A stream from `source` to the first of `to` that takes it (empty: whoever the default policy names).

    Its prompt is computed in `chunks` pieces, `gap` seconds a layer. `action` ends it early, `action_at` seconds after
    the `action_after`th layer of a chunk began (an engine that fails does so at once).
    """

    name: str
    seed: int
    source: str
    to: tuple[str, ...]
    at: float
    tokens: int
    deadline: float
    chunks: int = 1
    gap: float = 0.0
    growing: bool = False
    action: Literal["run", "cancel", "abandon", "fail", "reroute"] = "run"
    order: tuple[str, ...] = ()
    """Where a `reroute` orders it; empty: to another of its candidates."""
    action_after: int = 1
    action_at: float = 0.0
    share: str = ""
    priority: int = 0
    retry: bool = False
    choices: int = 0
    """How many workers its own policy draws from, where it has no `to`; 0: the runtime's policy."""
    receivers: tuple[Receiver, ...] = ()
    answer: Answer = Answer()


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong at `at` (virtual seconds), mostly `lasts` seconds long. With `on`, the name of a frame
    ("End", for example), it waits from then on for the next such frame that `who[0]` sends or gets, and begins when
    that is sent (`late`: has arrived).

    | kind            | what happens                                                                              |
    |-----------------|-------------------------------------------------------------------------------------------|
    | `kill`          | the process of worker `who[0]` vanishes; a new one starts after `lasts` (0: never)        |
    | `leave`         | it closes its runtime in order; a new one starts after `lasts` (0: never)                 |
    | `freeze`        | it is stopped; `flag`: when it goes on, overdue timers fire before what came in           |
    | `slow`          | each of its callbacks takes `value` seconds                                               |
    | `lag`           | messages and bytes from and to it take `value` times as long                              |
    | `cut`           | no way between `who` and `other` (empty: everybody else; "broker" is a name too)          |
    | `break`         | every connection of `who[0]`, or only those with `who[1]` if it is named, is lost;        |
    |                 | with `value` again after so many seconds each, as long as it lasts                        |
    | `broker_down`   | the broker restarts; `flag`: it has forgotten its leases                                  |
    | `broker_freeze` | the broker is stopped                                                                     |
    | `broker_late`   | events of leases come up to `value` seconds late, half of them twice                      |
    | `broker_reset`  | the broker's session with worker `who[0]` breaks                                          |
    | `clash`         | a second process tries to take the name of `who[0]`, which is stopped for `value` seconds |
    | `cancel`        | the users of all that worker `who[0]` sends and receives cancel at once                   |
    """

    kind: FaultKind
    at: _Seconds
    on: str = ""
    who: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    lasts: _Seconds = 0.0
    value: _Seconds = 0.0
    flag: bool = False
    late: bool = False


class Schedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a file of faults holds. `streams`: only these run; None means all."""

    faults: tuple[Fault, ...] = ()
    streams: tuple[str, ...] | None = None


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a run depends on. `bandwidth` (bytes per second), `leisure` (seconds) and `hiccups` (a share) are
    the network's conditions."""

    seed: int
    bandwidth: float = 50e6
    leisure: float = 50e-6
    hiccups: float = 0.0
    config: RuntimeConfig
    workers: tuple[WorkerPlan, ...]
    streams: tuple[StreamPlan, ...]
    faults: tuple[Fault, ...]
    layout: KVLayout = LAYOUT


def read_schedule(path: str) -> Schedule:
    """A schedule from a TOML or JSON file. Raises ConfigError naming what is wrong."""
    try:
        data = Path(path).read_bytes()
        if path.endswith(".toml"):
            return msgspec.convert(tomllib.loads(data.decode()), Schedule, strict=False)
        return msgspec.json.decode(data, type=Schedule)
    except OSError as error:
        raise ConfigError(
            "faults", f"{path} can't be read ({error.strerror}); use mild, harsh, none or a file"
        ) from error
    except (msgspec.MsgspecError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("faults", f"{path} is no fault schedule: {error}") from error


def generate(seed: int, *, workers: int, streams: int, faults: Profile | Schedule) -> Scenario:
    """The scenario of a seed. Raises ConfigError for numbers that make none, and for faults on workers not there."""
    if workers < 2:
        raise ConfigError("workers", f"must be at least 2, is {workers}")
    if streams < 0:
        raise ConfigError("streams", f"must not be negative, is {streams}")
    rng = derive(seed, "cluster")
    config = RuntimeConfig(
        slots=rng.choice((1, 2, 3, 4)),
        slot_bytes=rng.choice((64, 128, 256)),
        lend_bytes=rng.choice((64, 64, 64, 1 << 20)),
        get_lend_bytes=rng.choice((64, 64, 1 << 20)),
        lend_chunk=rng.choice((128, 512)),
        group_bytes=rng.choice((1 << 20, 1 << 20, 128, 1)),
        share_weights={"gold": 4.0},
        short_bytes=rng.choice((1 << 25, 1024)),
        stream_share=rng.choice((0.75, 1.0, 0.3)),
        moves=rng.choice((16, 16, 2, 1)),
        peer_moves=rng.choice((8, 8, 1)),
        max_receiving=rng.choice((256, 256, 2)),
        max_pending_tokens=rng.choice((1 << 24, 1 << 24, 60)),
        reservation_timeout=rng.choice((60.0, 60.0, 0.8)),
        checksums=rng.random() < 0.2,
        max_streams=rng.choice((16384, 16384, 8)),
        max_pending_offers=rng.choice((1024, 1024, 3)),
        offer_wait=rng.choice((0.3, 1.0)),
        # Orders come from outside of the cluster; what they do to streams is a matter of faults here.
        control=False,
        deadline=3.0,
        connect_timeout=rng.choice((0.5, 1.0)),
        end_wait=rng.choice((0.05, 0.3)),
        close_wait=1.0,
        beat_interval=rng.choice((0.1, 0.25)),
        stall_timeout=rng.choice((0.5, 1.5)),
        reroute_timeout=rng.choice((0.3, 1.0)),
        max_reroutes=rng.choice((8, 8, 1)),
        resume_timeout=rng.choice((1.0, 0.3, 0.05)),
        idle_timeout=rng.choice((0.5, 2.0)),
        lease_ttl=2,
    )
    # A larger cluster has more to do at a time, not longer.
    span = max(6.0, streams / max(8, workers))
    plans = tuple(_worker(seed, n, workers) for n in range(workers))
    sources = [plan.name for plan in plans if "prefill" in plan.roles]
    targets = [plan.name for plan in plans if "decode" in plan.roles]
    made = tuple(_stream(seed, n, span, sources, targets) for n in range(streams))
    if isinstance(faults, Schedule):
        _check(faults, [plan.name for plan in plans], [plan.name for plan in made])
        schedule = faults.faults
        if faults.streams is not None:
            made = tuple(plan for plan in made if plan.name in faults.streams)
    else:
        schedule = _faults(seed, faults, span, [plan.name for plan in plans])
    return Scenario(
        seed=seed,
        bandwidth=rng.choice((50e6, 1e6, 1e5)),
        leisure=rng.choice((50e-6, 3e-3, 20e-3)),
        hiccups=rng.choice((0.0, 0.03)),
        config=config,
        workers=plans,
        streams=made,
        faults=schedule,
    )


def _check(schedule: Schedule, workers: Sequence[str], streams: Sequence[str]) -> None:
    for fault in schedule.faults:
        for name in (*fault.who, *fault.other):
            if name not in workers and name != "broker":
                raise ConfigError("faults", f"there is no worker {name!r}; there are {workers[0]} to {workers[-1]}")
        needed = {"broker_down": 0, "broker_freeze": 0, "broker_late": 0}.get(fault.kind, 1)
        if len(fault.who) < needed or (fault.kind != "cut" and "broker" in fault.who):
            raise ConfigError("faults", f"{fault.kind} needs {needed} worker(s) in `who`, has {fault.who}")
        if fault.on and (fault.on not in _FRAMES or not fault.who):
            raise ConfigError("faults", f"`on` of a {fault.kind} on {fault.who} must be one of {', '.join(_FRAMES)}")
    for name in schedule.streams or ():
        if name not in streams:
            raise ConfigError("faults", f"there is no stream {name!r}; there are {len(streams)}, s0 and on")


def _worker(seed: int, n: int, workers: int) -> WorkerPlan:
    rng = derive(seed, "worker", n)
    hosts = derive(seed, "hosts").choice((1, max(1, workers // 4)))
    roles = (("prefill",), ("decode",))[n % 2] if n < 2 or rng.random() < 0.6 else ("decode", "prefill")
    lanes: tuple[Lane, ...] = LANES
    if rng.random() < 0.3:
        # `put` works between any two, so any two have a lane in common.
        lanes = tuple(lane for lane in LANES if lane == "put" or rng.random() < 0.3)
    return WorkerPlan(
        name=f"w{n}",
        host=f"h{rng.randrange(hosts)}",
        roles=roles,
        blocks=rng.choice((24, 48, 96)),
        lanes=lanes,
        reads_memory=rng.random() < 0.95,
        staging_limit=rng.choice((1 << 20, 1 << 20, 4096)),
    )


def _stream(seed: int, n: int, span: float, sources: Sequence[str], targets: Sequence[str]) -> StreamPlan:
    rng = derive(seed, "stream", n)
    # Half of them in rushes, and more of them between the first workers than between the last.
    rush = derive(seed, "rush", rng.randrange(4)).uniform(0.3, span)
    at = rng.choice((rush + rng.expovariate(10), rng.uniform(0.3, span)))
    tokens = rng.choice((1, rng.randint(1, 12), rng.randint(1, 48)))
    deadline = rng.choice((0.2, 1.0, 3.0, 3.0))
    source = sources[int(len(sources) * rng.random() ** 2)]
    others = [name for name in targets if name != source]
    first = others[int(len(others) * rng.random() ** 2)]
    others.remove(first)
    to = (first, *rng.sample(others, min(len(others), rng.choice((0, 0, 1, 2, 3)))))
    first_token = rng.choice((0, 0, 0, rng.randint(0, tokens)))
    pause = rng.choice((0.0, 0.0, rng.expovariate(20)))
    receivers: tuple[Receiver, ...] = ()
    answer = Answer()
    if rng.random() < 0.6:
        receivers = tuple(_receiver(rng.randint(0, 1 << 62), name, at, deadline, first_token, pause) for name in to)
    else:
        if rng.random() < 0.3:
            to = ()
        answer = Answer(
            kind=rng.choice(("accept", "accept", "accept", "accept", "refuse", "ignore", "raise", "raise_late")),
            delay=rng.choice((0.0, 0.0, rng.expovariate(5))),
            first_token=first_token,
            pause=pause,
        )
    return StreamPlan(
        name=f"s{n}",
        seed=number(seed, "content", n),
        source=source,
        to=to,
        at=at,
        tokens=tokens,
        deadline=deadline,
        chunks=rng.choice((1, 1, 2, 3)),
        gap=rng.choice((0.0, 0.002, rng.expovariate(20), rng.uniform(0.03, 0.3))),
        growing=rng.random() < 0.2,
        action=rng.choices(("run", "reroute", "cancel", "abandon", "fail"), (60, 14, 11, 11, 4))[0],
        order=tuple(rng.sample(others, min(len(others), rng.choice((0, 1, 2))))),
        action_after=rng.choice((1, rng.randint(1, 3 * LAYOUT.layers))),
        action_at=rng.choice((rng.expovariate(2e4), rng.expovariate(200), rng.expovariate(3))),
        share=rng.choice(("", "", "gold", "iron")),
        priority=rng.choice((0, 0, rng.randint(-10, 10))),
        retry=rng.random() < 0.4,
        choices=rng.choice((0, 0, 1)),
        receivers=receivers,
        answer=answer,
    )


def _receiver(seed: int, worker: str, at: float, deadline: float, first_token: int, pause: float) -> Receiver:
    rng = derive(seed)
    return Receiver(
        worker=worker,
        at=max(0.3, at + rng.choice((-0.2, -0.01, 0.0, 0.01, rng.uniform(-0.3, 0.5)))),
        deadline=deadline * rng.choice((0.5, 1.0, 1.5)),
        first_token=first_token,
        pause=pause,
        action=rng.choices(("run", "cancel", "abandon", "fail"), (84, 6, 6, 4))[0],
        action_at=rng.choice((rng.expovariate(2e4), rng.expovariate(200), rng.expovariate(3))),
    )


_CUT_OFF = 4
"""Workers that one fault parts from all others, at most: many such faults at a time would leave no way at all."""
_FRAMES = ("Challenge", "Hello", "Welcome", "Offer", "Accept", "Ready", "Confirm", "End")
"""What a fault can wait for."""

_HARSH: tuple[FaultKind, ...] = (
    "kill",
    "kill",
    "kill",
    "leave",
    "freeze",
    "freeze",
    "slow",
    "lag",
    "lag",
    "cut",
    "cut",
    "break",
    "break",
    "break",
    "break",
    "break",
    "broker_down",
    "broker_freeze",
    "broker_late",
    "broker_reset",
    "clash",
    "cancel",
    "cancel",
)
_MILD: tuple[FaultKind, ...] = (
    "leave",
    "freeze",
    "slow",
    "lag",
    "cut",
    "break",
    "break",
    "broker_reset",
    "broker_down",
)


def _faults(seed: int, profile: Profile, span: float, workers: Sequence[str]) -> tuple[Fault, ...]:
    if profile == "none":
        return ()
    rng = derive(seed, "faults", profile)
    scale = max(1.0, len(workers) / 8)
    count = round(rng.randint(2, 5) * scale) if profile == "mild" else round(rng.randint(8, 20) * scale)
    made = [_fault(number(seed, "fault", profile, n), profile, span, workers) for n in range(count)]
    # There are more workers to go wrong in a larger cluster, but still one broker.
    made = [fault for fault in made if fault.who or rng.random() * scale < 1]
    return tuple(sorted(made, key=lambda fault: fault.at))


def _fault(seed: int, profile: Profile, span: float, workers: Sequence[str]) -> Fault:
    rng = derive(seed)
    kind = rng.choice(_MILD if profile == "mild" else _HARSH)
    at = rng.uniform(0.5, span)
    # Short enough to be ridden out, or longer than the time-outs.
    lasts = rng.choice((rng.uniform(0.01, 0.3), rng.uniform(0.3, 1.0) if profile == "mild" else rng.uniform(0.3, 4.0)))
    who: tuple[str, ...] = (rng.choice(workers),)
    other: tuple[str, ...] = ()
    value = 0.0
    match kind:
        case "kill" | "leave" | "clash":
            lasts = rng.choice((0.0, lasts)) if profile == "harsh" else lasts
            value = rng.choice((0.0, rng.uniform(0.0, 5.0))) if kind == "clash" else 0.0
        case "slow":
            value = rng.choice((20e-6, 200e-6, 2e-3))
        case "lag":
            value = rng.choice((10.0, 100.0, 1000.0))
        case "cut":
            if rng.random() < 0.3:
                who, other = (rng.choice(workers),), ("broker",)
            elif rng.random() < 0.5:
                who = tuple(rng.sample(workers, rng.randint(1, max(1, min(len(workers) // 2, _CUT_OFF)))))
            else:
                pair = rng.sample(workers, 2)
                who, other = (pair[0],), (pair[1],)
        case "cancel":
            lasts = 0.0
        case "break":
            who = tuple(rng.sample(workers, rng.choice((1, 1, 2))))
            value = rng.choice((0.0, rng.uniform(0.001, 0.05)))
            lasts = min(lasts, 1.0) if value else 0.0
        case "broker_down" | "broker_freeze" | "broker_late":
            who = ()
            value = rng.choice((0.01, 0.3, 1.0)) if kind == "broker_late" else 0.0
        case "freeze" | "broker_reset":
            pass
    on = ""
    if kind in ("kill", "freeze", "cut", "break", "cancel") and rng.random() < 0.6:
        on = rng.choice((*_FRAMES, "Ready", "End"))
    return Fault(
        kind=kind,
        at=at,
        on=on,
        who=who,
        other=other,
        lasts=lasts,
        value=value,
        flag=rng.random() < 0.5,
        late=rng.random() < 0.5,
    )
