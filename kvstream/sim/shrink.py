"""Makes a failing scenario small: the fewest faults and streams with which it still fails (delta debugging).

Owns the search. What it leaves out, it leaves out whole; everything else stays as it was, since no stream and no fault
draws from another's chances.
Source: A. Zeller and R. Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002 (ddmin).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from kvstream.sim.plan import Fault, Scenario, StreamPlan
from kvstream.sim.run import Result, run

__all__ = ["shrink"]

_T = TypeVar("_T")


def shrink(scenario: Scenario, *, budget: int = 200, attempt: Callable[[Scenario], Result] = run) -> Scenario:
    """The smallest scenario found, in at most `budget` runs, that still has a violation. One that has none is returned
    as it is."""
    left = budget

    def fails(candidate: Scenario) -> bool:
        nonlocal left
        if left <= 0:
            return False
        left -= 1
        return bool(attempt(candidate).violations)

    if not fails(scenario):
        return scenario
    while True:
        before = scenario
        scenario = _fewer_faults(scenario, fails)
        scenario = _fewer_streams(scenario, fails)
        if scenario == before or left <= 0:
            return scenario


def _fewer_faults(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    def with_some(faults: Sequence[Fault]) -> Scenario:
        return msgspec.structs.replace(scenario, faults=tuple(faults))

    return with_some(_minimal(scenario.faults, lambda some: fails(with_some(some))))


def _fewer_streams(scenario: Scenario, fails: Callable[[Scenario], bool]) -> Scenario:
    def with_some(streams: Sequence[StreamPlan]) -> Scenario:
        return msgspec.structs.replace(scenario, streams=tuple(streams))

    return with_some(_minimal(scenario.streams, lambda some: fails(with_some(some))))


def _minimal(items: Sequence[_T], fails: Callable[[Sequence[_T]], bool]) -> Sequence[_T]:
    """ddmin, by complements: drop ever smaller pieces while what remains fails."""
    if items and fails(()):
        return ()
    size = len(items) // 2
    while size:
        at = 0
        while at < len(items):
            rest = [*items[:at], *items[at + size :]]
            if rest and fails(rest):
                items = rest
            else:
                at += size
        size //= 2
    return items
