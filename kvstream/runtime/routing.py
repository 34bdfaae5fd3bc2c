"""Where a stream goes: from what the user said (`to=`), or by a policy from what is known of the workers.

A policy is a pure function of what it is given; who is there, and how our own streams fared with them, is gathered
elsewhere. It never waits and never keeps state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast, overload

import msgspec

from kvstream.discovery.records import WorkerRecord, parse_worker
from kvstream.errors import ConfigError
from kvstream.runtime.checks import text

__all__ = [
    "Candidate",
    "Candidates",
    "LeastLoaded",
    "RouteRequest",
    "RoutingPolicy",
    "as_policy",
    "chosen",
    "named_candidates",
]


class RouteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The stream that wants a destination. `blocks` are the KV blocks of its prompt, `me` the source's own record."""

    stream: str
    tokens: int
    blocks: int
    share_class: str
    priority: int
    me: WorkerRecord


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its record in the registry tells, and as we have seen it ourselves.

    `record.load` is some tenths of a second old, the more workers there are the older: 2 s among 1,000. `streams` are
    our own live ones to it, `slots_used` how many of the `slots` of our connection are taken (0 of 0: there is none),
    `stalled` for how many seconds it has confirmed nothing that it owes. `age` is the time in seconds since it joined.
    `failures` counts how often in a row it refused our streams or was lost, and for `backoff` seconds from now it is
    better left alone for that. `suspect`: its lease is gone and it is not known yet whether it lives.
    """

    record: WorkerRecord
    streams: int = 0
    slots: int = 0
    slots_used: int = 0
    stalled: float = 0.0
    age: float = 3600.0
    failures: int = 0
    backoff: float = 0.0
    suspect: bool = False


class RoutingPolicy(Protocol):
    """What picks destinations: give one to `Runtime(routing=...)`, or to a single `send(to=...)`."""

    def route(
        self, request: RouteRequest, candidates: Sequence[Candidate], chance: Callable[[], float]
    ) -> Sequence[str]:
        """Worker ids (`record.id`) to try, in order; none when no candidate will do, which is then asked again when the
        registry has news, for a bounded time.

        `candidates` are all other workers that are known, fit or not, in the order in which they joined; each is made
        when it is looked at, so that a policy that looks at few costs little. `chance` gives random numbers from 0 to
        1; a policy that draws no others is repeatable. It runs on the event loop. What it raises is raised by entering
        the stream.
        """
        ...


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The default policy: of two workers drawn at random, the less loaded one, and so on until there are enough
    candidates. Drawing keeps many sources that see the same, slightly old picture from all running to the same worker
    (M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", IEEE TPDS 12(10), 2001).

    Fit are ready workers of our rank and layout that have `role` and enough free blocks. Load is the number of streams,
    and how full the slots towards it are, per free block. A worker that joined less than `warm_up` seconds ago counts
    as at least as loaded as the others are on average, less with time: what is empty because it is new must not attract
    everything. Suspect workers, and those to be left alone for a while, come last. Where there are more than `sample`
    workers, only so many are looked at, unless too few of them will do.
    """

    role: str = "decode"
    choices: int = 2
    candidates: int = 3
    warm_up: float = 10.0
    sample: int = 32

    def route(
        self, request: RouteRequest, candidates: Sequence[Candidate], chance: Callable[[], float]
    ) -> Sequence[str]:
        if len(candidates) > self.sample:
            drawn: dict[int, None] = {}
            while len(drawn) < self.sample:
                drawn[_draw(len(candidates), chance)] = None
            some = self._order(request, [candidates[index] for index in drawn], chance, doubtful=False)
            if len(some) == self.candidates:
                return some
        return self._order(request, candidates, chance, doubtful=True)

    def _order(
        self, request: RouteRequest, candidates: Iterable[Candidate], chance: Callable[[], float], *, doubtful: bool
    ) -> list[str]:
        fit = [candidate for candidate in candidates if self._fits(request, candidate.record)]
        loads = {candidate.record.id: _load(candidate) for candidate in fit}
        settled = [loads[candidate.record.id] for candidate in fit if candidate.age >= self.warm_up]
        average = sum(settled) / len(settled) if settled else 0.0
        for candidate in fit:
            newness = 1.0 - candidate.age / self.warm_up
            worker = candidate.record.id
            loads[worker] = max(loads[worker], average * newness)
        good = [candidate.record.id for candidate in fit if not candidate.suspect and not candidate.backoff]
        order: list[str] = []
        while good and len(order) < self.candidates:
            drawn: list[str] = []
            while len(drawn) < min(self.choices, len(good)):
                rest = [worker for worker in good if worker not in drawn]
                drawn.append(rest[_draw(len(rest), chance)])
            best = min(drawn, key=loads.__getitem__)
            order.append(best)
            good.remove(best)
        if doubtful:
            others = [candidate for candidate in fit if candidate.suspect or candidate.backoff]
            others.sort(key=lambda candidate: (candidate.suspect, candidate.backoff, candidate.record.id))
            order += [candidate.record.id for candidate in others]
        return order[: self.candidates]

    def _fits(self, request: RouteRequest, record: WorkerRecord) -> bool:
        return (
            self.role in record.roles
            and record.rank == request.me.rank
            and record.state == "ready"
            and record.fingerprint == request.me.fingerprint
            and record.load.free_blocks >= request.blocks
        )


def _draw(count: int, chance: Callable[[], float]) -> int:
    return min(int(chance() * count), count - 1)


def _load(candidate: Candidate) -> float:
    """Streams, and a busy connection as one more, per free block: half the size is twice the load."""
    load = candidate.record.load
    streams = max(load.streams, candidate.streams)
    pressure = candidate.slots_used / candidate.slots if candidate.slots else 0.0
    return (1.0 + streams + pressure) / max(load.free_blocks, 1)


class Candidates(Sequence[Candidate]):
    """Workers as a policy sees them, each made when it is looked at."""

    def __init__(self, records: Sequence[WorkerRecord], view: Callable[[WorkerRecord], Candidate]) -> None:
        self._records = records
        self._view = view

    def __len__(self) -> int:
        return len(self._records)

    @overload
    def __getitem__(self, index: int) -> Candidate: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Candidate]: ...
    def __getitem__(self, index: int | slice) -> Candidate | Sequence[Candidate]:
        if isinstance(index, slice):
            return Candidates(self._records[index], self._view)
        return self._view(self._records[index])


def as_policy(to: object) -> RoutingPolicy | None:
    """What was given, if it is a policy."""
    return cast("RoutingPolicy", to) if callable(getattr(to, "route", None)) else None


def named_candidates(to: object, rank: int, field: str = "to") -> list[str]:
    """Worker ids from names in the order given. A name without a rank means the rank that is our own."""
    names: list[object] = [to] if isinstance(to, str) else list(to) if isinstance(to, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType] - checked below
    if not names:
        also = ", or be a routing policy, or None for the default" if field == "to" else ""
        raise ConfigError(field, f"must name a worker, or several{also}; is {to!r}")
    ids: list[str] = []
    for worker_name in names:
        name, its_rank = parse_worker(text(field, worker_name, 160), field)
        worker = f"{name}/{rank if its_rank is None else its_rank}"
        if worker in ids:
            raise ConfigError(field, f"{worker} is named twice")
        ids.append(worker)
    return ids


def chosen(policy: RoutingPolicy, answer: object, rank: int) -> list[str]:
    """A policy's answer, checked. Raises ConfigError naming the policy."""
    if not isinstance(answer, list | tuple):
        raise ConfigError("to", f"{type(policy).__name__}.route must return a list of worker ids, not {answer!r}")
    return named_candidates(cast("list[object]", answer), rank) if answer else []
