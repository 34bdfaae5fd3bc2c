"""What lies between simulated processes: latency, shared bandwidth, partitions, and who can be reached.

Owns the order and the time of everything that crosses from one process to another. A message that can't cross now is
kept, as retransmission would, and goes on when the way is open again. It knows nothing of connections or brokers and
never calls into a process but by that process's own loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstream.sim.loop import Process, World

if TYPE_CHECKING:
    from random import Random

__all__ = ["Channel", "Network", "Node", "Partition"]

Observer = Callable[..., None]


@dataclass(eq=False, slots=True)
class Node:
    """A process on the network. `host` names the machine it runs on: processes of one host share memory. `label` is
    the name that partitions and slowdowns go by, the same for all lives of a worker."""

    process: Process
    host: str
    label: str

    @property
    def name(self) -> str:
        return self.process.name


@dataclass(eq=False, slots=True)
class Partition:
    """No way between the nodes named in `one` and all that are named in `other` (empty: everybody else)."""

    one: frozenset[str]
    other: frozenset[str] = frozenset()

    def cuts(self, a: str, b: str) -> bool:
        if a in self.one:
            return b in self.other if self.other else b not in self.one
        if b in self.one:
            return a in self.other if self.other else True
        return False


@dataclass(slots=True)
class _Pipe:
    """The wire between two hosts, one way; bulk shares it, first come, first served."""

    free_at: float = 0.0


@dataclass(slots=True)
class Conditions:
    """How fast the network is: seconds and bytes per second."""

    local_latency: float = 20e-6
    latency: float = 150e-6
    jitter: float = 0.5
    """Mean of the exponential part of a latency, as a share of it."""
    hiccups: float = 0.0
    """Share of messages that take up to 20 ms longer, and hold up those behind them."""
    bandwidth: float = 50e6
    """Between hosts; within one it is eight times as much."""
    leisure: float = 50e-6
    """Mean time that a read of another process's memory takes, where it takes any."""
    slowdown: dict[str, float] = field(default_factory=dict[str, float])
    """Factors on latency and transfer time, by label."""


class Network:
    """`observe(kind, *fields)` hears of all that happens, in order."""

    def __init__(self, world: World, conditions: Conditions | None = None, observe: Observer | None = None) -> None:
        self.world = world
        self.conditions = conditions or Conditions()
        self.observe: Observer = observe or _ignore
        self._partitions: list[Partition] = []
        self._pipes: dict[tuple[str, str], _Pipe] = {}
        self._blocked: list[tuple[Node, Node, Callable[[], object]]] = []

    def node(self, process: Process, host: str, label: str = "") -> Node:
        """Put a process on the network."""
        return Node(process, host, label or process.name)

    # -- partitions

    def cut(self, one: Collection[str], other: Collection[str] = ()) -> Partition:
        """Part the nodes named; everything between them waits until `heal`."""
        partition = Partition(frozenset(one), frozenset(other))
        self._partitions.append(partition)
        return partition

    def heal(self, partition: Partition) -> None:
        """The way is open again; what waited goes on, in the order in which it came."""
        if partition in self._partitions:
            self._partitions.remove(partition)
        waiting, self._blocked = self._blocked, []
        for source, target, go_on in waiting:
            self.cross(source, target, go_on)

    def reachable(self, source: Node, target: Node) -> bool:
        return not any(partition.cuts(source.label, target.label) for partition in self._partitions)

    def cross(self, source: Node, target: Node, go_on: Callable[[], object]) -> None:
        """Call `go_on` now, or when there is a way again from `source` to `target`."""
        if self.reachable(source, target):
            go_on()
        else:
            self._blocked.append((source, target, go_on))

    # -- time

    def latency(self, source: Node, target: Node, rng: Random) -> float:
        """How long one small message takes now."""
        conditions = self.conditions
        base = conditions.local_latency if source.host == target.host else conditions.latency
        taken = (base + rng.expovariate(1.0) * base * conditions.jitter) * self._slowdown(source, target)
        if conditions.hiccups and rng.random() < conditions.hiccups:
            taken += rng.uniform(0, 0.02)
        return taken

    def transfer(self, source: Node, target: Node, nbytes: int) -> float:
        """Reserve the wire for `nbytes` and return how long from now the last of them takes to have left."""
        key = (source.host, target.host)
        pipe = self._pipes.get(key)
        if pipe is None:
            pipe = self._pipes[key] = _Pipe()
        bandwidth = self.conditions.bandwidth * (8 if source.host == target.host else 1)
        now = self.world.now
        pipe.free_at = max(now, pipe.free_at) + nbytes / bandwidth * self._slowdown(source, target)
        return pipe.free_at - now

    def _slowdown(self, source: Node, target: Node) -> float:
        factors = self.conditions.slowdown
        if not factors:
            return 1.0
        return max(factors.get(source.label, 1.0), factors.get(target.label, 1.0))

    def after(self, delay: float, call: Callable[[], object]) -> None:
        """Call in `delay` seconds, from outside of every process."""
        self.world.fabric.call_later(delay, call)


class Channel:
    """Messages one way between two nodes: in order, each after a latency of its own, kept while there is no way."""

    __slots__ = ("_armed", "_broken", "_last", "_queue", "_rng", "_source", "_target", "network")

    def __init__(self, network: Network, source: Node, target: Node, rng: Random) -> None:
        self.network = network
        self._source = source
        self._target = target
        self._rng = rng
        self._queue: deque[tuple[float, Callable[[], object]]] = deque()
        self._last = 0.0
        self._armed = False
        self._broken = False

    def __len__(self) -> int:
        """Messages under way."""
        return len(self._queue)

    @property
    def stuck(self) -> bool:
        """Whether nothing gets through now."""
        return not self.network.reachable(self._source, self._target)

    def put(self, deliver: Callable[[], object], *, extra: float = 0.0) -> None:
        """Send: `deliver` is called, outside of every process, when the message has arrived."""
        if self._broken:
            return
        when = self.network.world.now + self.network.latency(self._source, self._target, self._rng) + extra
        self._last = max(self._last, when)
        self._queue.append((self._last, deliver))
        self._arm()

    def cut(self) -> None:
        """What is under way never arrives, nor does anything that is sent from now on."""
        self._broken = True
        self._queue.clear()

    def cut_short(self) -> None:
        """Only the first part of what is under way arrives: the rest is lost with a connection that is reset."""
        keep = self._rng.randint(0, len(self._queue))
        while len(self._queue) > keep:
            self._queue.pop()

    def _arm(self) -> None:
        if not self._armed and self._queue:
            self._armed = True
            self.network.world.fabric.call_at(self._queue[0][0], self._pump)

    def _pump(self) -> None:
        self.network.cross(self._source, self._target, self._deliver)

    def _deliver(self) -> None:
        self._armed = False
        now = self.network.world.now
        while self._queue and self._queue[0][0] <= now:
            self._queue.popleft()[1]()
        self._arm()


def _ignore(*_: object) -> None:
    pass
