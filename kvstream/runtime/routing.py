"""Where a stream goes: from what the user said (`to=`), or by a policy from what is known of the workers.

A policy is a pure function of what it is given; who is there, and how our own streams fared with them, is gathered
elsewhere. It never waits and never keeps state of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import msgspec

from kvstream.discovery.records import WorkerRecord, parse_worker
from kvstream.errors import ConfigError
from kvstream.runtime.checks import text

__all__ = ["Candidate", "LeastLoaded", "RouteRequest", "RoutingPolicy", "as_policy", "chosen", "named_candidates"]


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

    `record.load` is up to a few tenths of a second old. `streams` are our own live ones to it, `slots_used` how many of
    the `slots` of our connection are taken (0 of 0: there is none), `stalled` for how many seconds it has confirmed
    nothing that it owes. `age` is the time in seconds since it joined. `failures` counts how often in a row it refused
    our streams or was lost, and for `backoff` seconds from now it is better left alone for that. `suspect`: its lease
    is gone and it is not known yet whether it lives.
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

        `candidates` are all other workers that are known, fit or not, by name. `chance` gives random numbers from 0 to
        1; a policy that draws no others is repeatable. What it raises is raised by entering the stream.
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
    everything. Suspect workers, and those to be left alone for a while, come last.
    """

    role: str = "decode"
    choices: int = 2
    candidates: int = 3
    warm_up: float = 10.0

    def route(
        self, request: RouteRequest, candidates: Sequence[Candidate], chance: Callable[[], float]
    ) -> Sequence[str]:
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
            drawn = [good[min(int(chance() * len(good)), len(good) - 1)]]
            while len(drawn) < min(self.choices, len(good)):
                rest = [worker for worker in good if worker not in drawn]
                drawn.append(rest[min(int(chance() * len(rest)), len(rest) - 1)])
            best = min(drawn, key=loads.__getitem__)
            order.append(best)
            good.remove(best)
        doubtful = [candidate for candidate in fit if candidate.suspect or candidate.backoff]
        doubtful.sort(key=lambda candidate: (candidate.suspect, candidate.backoff, candidate.record.id))
        order += [candidate.record.id for candidate in doubtful]
        return order[: self.candidates]

    def _fits(self, request: RouteRequest, record: WorkerRecord) -> bool:
        return (
            self.role in record.roles
            and record.rank == request.me.rank
            and record.state == "ready"
            and record.fingerprint == request.me.fingerprint
            and record.load.free_blocks >= request.blocks
        )


def _load(candidate: Candidate) -> float:
    """Streams, and a busy connection as one more, per free block: half the size is twice the load."""
    load = candidate.record.load
    streams = max(load.streams, candidate.streams)
    pressure = candidate.slots_used / candidate.slots if candidate.slots else 0.0
    return (1.0 + streams + pressure) / max(load.free_blocks, 1)


def as_policy(to: object) -> RoutingPolicy | None:
    """What was given, if it is a policy."""
    return cast("RoutingPolicy", to) if callable(getattr(to, "route", None)) else None


def named_candidates(to: object, rank: int) -> list[str]:
    """Worker ids from names in the order given. A name without a rank means the rank that is our own."""
    names: list[object] = [to] if isinstance(to, str) else list(to) if isinstance(to, list | tuple) else []  # pyright: ignore[reportUnknownArgumentType] - checked below
    if not names:
        raise ConfigError(
            "to", f"must name a worker, or several, or be a routing policy, or None for the default; is {to!r}"
        )
    ids: list[str] = []
    for worker_name in names:
        name, its_rank = parse_worker(text("to", worker_name, 160), "to")
        worker = f"{name}/{rank if its_rank is None else its_rank}"
        if worker in ids:
            raise ConfigError("to", f"{worker} is named twice")
        ids.append(worker)
    return ids


def chosen(policy: RoutingPolicy, answer: object, rank: int) -> list[str]:
    """A policy's answer, checked. Raises ConfigError naming the policy."""
    if not isinstance(answer, list | tuple):
        raise ConfigError("to", f"{type(policy).__name__}.route must return a list of worker ids, not {answer!r}")
    return named_candidates(cast("list[object]", answer), rank) if answer else []
