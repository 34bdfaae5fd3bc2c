"""Makes happen what a fault schedule says, at its time, and undoes it at its end.

Owns what is wrong at a moment, so that `heal` can end all of it. It acts from outside of every process.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kvstream.sim.cluster import Cluster, Life
from kvstream.sim.network import Node
from kvstream.sim.plan import Fault
from kvstream.wire import decode

__all__ = ["Injector"]


class Injector:
    """`over` when nothing is wrong any more and nothing will be."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._last = max((fault.at for fault in cluster.scenario.faults), default=0.0)
        self._undo: dict[int, Callable[[], None]] = {}
        self._armed: dict[int, Fault] = {}
        for number, fault in enumerate(cluster.scenario.faults):
            cluster.world.fabric.call_at(fault.at, self._arm if fault.on else self._begin, number, fault)

    @property
    def over(self) -> bool:
        return not self._undo and self._cluster.world.now > self._last

    def disarm(self) -> None:
        """What still waits for its frame does not happen any more."""
        self._armed.clear()
        self._cluster.board.tap = None

    def _arm(self, number: int, fault: Fault) -> None:
        self._armed[number] = fault
        self._cluster.board.tap = self._on_message

    def _on_message(self, source: Node, target: Node, message: bytes, arrived: bool) -> None:
        waiting = [
            (number, fault)
            for number, fault in self._armed.items()
            if fault.late == arrived and fault.who[0] in (source.label, target.label)
        ]
        if not waiting:
            return
        kinds = {type(frame).__name__ for frame in decode(message)[1]}
        for number, fault in waiting:
            if fault.on in kinds:
                del self._armed[number]
                # From outside: not in the middle of what a process is doing.
                self._cluster.world.fabric.call_soon(self._begin, number, fault)
        if not self._armed:
            self._cluster.board.tap = None

    def _begin(self, number: int, fault: Fault) -> None:
        cluster = self._cluster
        cluster.ledger.note("fault", fault.kind, fault.who, fault.other, fault.lasts, fault.value, fault.flag)
        undo = self._apply(fault)
        if undo is not None:
            self._undo[number] = undo
            cluster.world.fabric.call_later(fault.lasts, self._end, number)

    def _end(self, number: int) -> None:
        undo = self._undo.pop(number, None)
        if undo is not None:
            self._cluster.ledger.note("undo", number)
            undo()

    def _apply(self, fault: Fault) -> Callable[[], None] | None:
        """Do it; returns what undoes it, if that makes sense."""
        cluster = self._cluster
        match fault.kind:
            case "kill":
                return self._kill(cluster.lives[fault.who[0]], again=bool(fault.lasts))
            case "leave":
                return self._leave(cluster.lives[fault.who[0]], again=bool(fault.lasts))
            case "freeze":
                return self._freeze(cluster.lives[fault.who[0]], fault)
            case "slow":
                return self._slow(cluster.lives[fault.who[0]], fault)
            case "lag":
                slowdown = cluster.network.conditions.slowdown
                slowdown[fault.who[0]] = fault.value
                return partial(_forget, slowdown, fault.who[0])
            case "cut":
                return partial(cluster.network.heal, cluster.network.cut(fault.who, fault.other))
            case "break":
                return self._flap(fault) if fault.value else self._break({*fault.who})
            case "broker_down":
                cluster.broker.stop()
                return partial(cluster.broker.start, wipe=fault.flag)
            case "broker_freeze":
                cluster.broker.process.hold()
                return partial(cluster.broker.process.release, timers_first=fault.flag)
            case "broker_late":
                cluster.broker.lateness, cluster.broker.duplicates = fault.value, 0.5
                return self._prompt
            case "broker_reset":
                cluster.broker.reset(cluster.lives[fault.who[0]].node)
                return None
            case "clash":
                return self._clash(fault)
            case "cancel":
                life = cluster.lives[fault.who[0]]
                life.process.call_soon(life.cancel_all)
                return None

    def _prompt(self) -> None:
        self._cluster.broker.lateness = self._cluster.broker.duplicates = 0.0

    def _kill(self, life: Life, *, again: bool) -> Callable[[], None] | None:
        self._cluster.kill(life)
        return partial(self._restart, life) if again else None

    def _leave(self, life: Life, *, again: bool) -> Callable[[], None] | None:
        self._cluster.leave(life)
        return partial(self._restart, life) if again else None

    def _restart(self, life: Life) -> None:
        if self._cluster.lives[life.plan.name] is life:
            self._cluster.begin(life.plan.name)

    def _freeze(self, life: Life, fault: Fault) -> Callable[[], None] | None:
        if not life.process.alive:
            return None
        life.process.hold()
        self._disturb(life, fault.lasts)
        return partial(life.process.release, timers_first=fault.flag)

    def _clash(self, fault: Fault) -> Callable[[], None] | None:
        holder = self._cluster.lives[fault.who[0]]
        if fault.value and holder.process.alive:
            holder.process.hold()
            self._disturb(holder, fault.value)
            self._cluster.world.fabric.call_later(fault.value, holder.process.release)
        rival = self._cluster.rival(fault.who[0])
        return partial(self._cluster.leave, rival) if fault.lasts else None

    def _slow(self, life: Life, fault: Fault) -> Callable[[], None]:
        life.process.pace = fault.value
        self._disturb(life, fault.lasts)
        return partial(setattr, life.process, "pace", 0.0)

    def _disturb(self, life: Life, lasts: float) -> None:
        now = self._cluster.world.now
        self._cluster.ledger.disturbed.setdefault(life.name, []).append((now, now + lasts))

    def _flap(self, fault: Fault) -> Callable[[], None]:
        over = False

        def again() -> None:
            if not over:
                self._break({*fault.who})
                self._cluster.world.fabric.call_later(fault.value, again)

        def stop() -> None:
            nonlocal over
            over = True

        again()
        return stop

    def _break(self, who: set[str]) -> None:
        for link in list(self._cluster.board.links.values()):
            if who <= {end.node.label for end in link.ends}:
                self._cluster.board.break_link(link.number)


def _forget(slowdown: dict[str, float], label: str) -> None:
    slowdown.pop(label, None)
