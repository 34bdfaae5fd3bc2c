"""One run of a scenario from start to judgement.

Owns the phases: users and faults, then peace, in which everything has to come to rest; then every worker leaves, and
nothing may be left of it. A run depends on its scenario alone: not on time, hash seeds, addresses or what ran before.
"""

from __future__ import annotations

import gc
import logging
from collections import Counter

import msgspec

from kvstream.sim.cluster import Cluster, Life
from kvstream.sim.faults import Injector
from kvstream.sim.inspect import leftovers, peers, slot_faults, wait_faults
from kvstream.sim.loop import Livelock, Quiet
from kvstream.sim.plan import Scenario
from kvstream.sim.timeline import Timeline

__all__ = ["Result", "run"]

_CHECK_EVERY = 0.02
"""Virtual seconds between two looks into the runtimes."""
_STEPS = 500_000
_STEPS_EACH = 5_000
"""Callbacks that a run may take, and more for each worker and stream: over ten times what they need."""
_CLOSE_SECONDS = 15.0
"""A bound on leaving: the sum of the runtime's own."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """`ends`: how many sides of streams ended how. `log_hash` is of every event of the run, in order."""

    seed: int
    log_hash: str
    violations: list[str]
    streams: int
    ends: dict[str, int]
    virtual_s: float
    steps: int


def run(scenario: Scenario, *, timeline: Timeline | None = None) -> Result:
    """Run a scenario. It never raises for what goes wrong within: that is what `violations` are for."""
    logger = logging.getLogger("kvstream")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    # A collection runs finalizers at a moment that depends on what else this interpreter has done.
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return _Run(scenario, timeline).result()
    finally:
        logger.setLevel(level)
        if collecting:
            gc.enable()


class _Run:
    def __init__(self, scenario: Scenario, timeline: Timeline | None) -> None:
        self._scenario = scenario
        self._cluster = Cluster(scenario)
        self._ledger = self._cluster.ledger
        self._world = self._cluster.world
        self._world.max_steps = _STEPS + _STEPS_EACH * (len(scenario.workers) + len(scenario.streams))
        self._last_busy: Life | None = None
        if timeline is not None:
            self._ledger.listeners.append(timeline.note)

    def result(self) -> Result:
        try:
            self._play()
        except (Quiet, Livelock) as error:
            self._ledger.violation(f"the run came to a stop: {error}")
        self._ledger.judge()
        ends = Counter(side.code or "live" for side in self._ledger.sides)
        virtual = self._world.now
        violations = list(self._ledger.violations)
        log_hash = self._ledger.log_hash
        self._cluster.buried = True
        self._world.bury()
        return Result(
            seed=self._scenario.seed,
            log_hash=log_hash,
            violations=violations,
            streams=len(self._scenario.streams),
            ends=dict(sorted(ends.items())),
            virtual_s=round(virtual, 6),
            steps=self._world.steps,
        )

    def _play(self) -> None:
        cluster, world, config = self._cluster, self._world, self._scenario.config
        cluster.start()
        injector = Injector(cluster)
        self._watch()
        last = max((stream.at for stream in self._scenario.streams), default=0.0)
        last = max([last, *(receiver.at for stream in self._scenario.streams for receiver in stream.receivers)])
        # A deadline is at most 4.5 s away from the last start, and a fault's end pushes what it held up.
        horizon = max([last, *(fault.at + fault.lasts for fault in self._scenario.faults)]) + 12.0
        world.run(lambda: world.now > last and injector.over and not self._busy(), until=horizon)
        injector.disarm()
        for life in self._living():
            if self._users(life):
                self._ledger.violation(f"{life.name}: {self._users(life)} users are still waiting")
        # Peace: what ended has to be answered, given up or forgotten, and leases and tables have to settle.
        world.run(lambda: False, until=world.now + 2 * config.stall_timeout + 2 * config.lease_ttl + 2.0)
        self._check_rest()
        for life in self._living():
            cluster.leave(life)
        end = world.now + _CLOSE_SECONDS
        world.run(lambda: all(life.over for life in self._living()), until=end)
        world.run(lambda: False, until=world.now + 0.1)
        self._check_gone()

    def _living(self) -> list[Life]:
        return [life for life in self._cluster.all_lives.values() if life.process.alive]

    def _users(self, life: Life) -> int:
        """Tasks beside the worker's own."""
        return len(life.tasks) - (not life.over)

    def _busy(self) -> bool:
        # Asked at every step of the clock: who was busy then mostly still is.
        last = self._last_busy
        if last is not None and last.process.alive and self._users(last):
            return True
        lives = self._cluster.all_lives.values()
        self._last_busy = next((life for life in lives if life.process.alive and self._users(life)), None)
        return self._last_busy is not None

    # -- invariants

    def _watch(self) -> None:
        """Look into every runtime, again and again."""
        for life in self._living():
            if life.runtime is not None:
                for fault in (*slot_faults(life.runtime), *wait_faults(life.runtime)):
                    self._ledger.violation(f"{life.name}: {fault}")
        # The larger the cluster, the rarer: a look costs as much as it has links.
        self._world.fabric.call_later(_CHECK_EVERY * max(1.0, len(self._scenario.workers) / 8), self._watch)

    def _check_rest(self) -> None:
        """Without streams and faults nothing is held, and everybody knows everybody."""
        up = {life: life.runtime for life in self._living() if life.runtime is not None}
        there = {runtime.record.id: runtime.incarnation for runtime in up.values() if runtime.registry.registered}
        holders = [runtime.record.id for runtime in up.values() if runtime.registry.registered]
        if len(set(holders)) != len(holders):
            self._ledger.violation(f"at rest, one name has several holders: {sorted(holders)}")
        for life, runtime in up.items():
            for what in leftovers(runtime):
                self._ledger.violation(f"{life.name}: at rest, {what}")
            if life.transport is not None and life.transport.unfenced:
                self._ledger.violation(f"{life.name}: at rest, {life.transport.unfenced} lost connections are unfenced")
            known = peers(runtime)
            if known != there:
                differing = sorted(worker for worker in {**known, **there} if known.get(worker) != there.get(worker))
                self._ledger.violation(f"{life.name}: at rest, its registry is wrong about {differing}")
        for name, life in self._cluster.lives.items():
            rivals = [rival for rival in self._cluster.rivals.values() if rival.plan.name == name]
            if any(rival.runtime is not None for rival in rivals):
                continue
            if life.process.alive and not life.over and life.runtime is None and not life.leaving.is_set():
                self._ledger.violation(f"{life.name}: at rest, it has not come up")

    def _check_gone(self) -> None:
        """After everybody has left in order nothing is left behind."""
        for life in self._living():
            if not life.over:
                self._ledger.violation(f"{life.name}: does not close within {_CLOSE_SECONDS} s")
                continue
            left = sorted(task.get_name() for task in life.process.tasks())
            if left:
                self._ledger.violation(f"{life.name}: {len(left)} tasks are left after closing")
            if life.budget.used or life.budget.quarantined:
                self._ledger.violation(f"{life.name}: {life.budget.used} bytes of staging are not given back")
            if life.pool.free_blocks != life.pool.blocks:
                self._ledger.violation(f"{life.name}: {life.pool.blocks - life.pool.free_blocks} blocks are not free")
            life.pool.check_left(range(life.pool.blocks))
            if life.last_runtime is not None:
                for what in leftovers(life.last_runtime):
                    self._ledger.violation(f"{life.name}: after closing, {what}")
