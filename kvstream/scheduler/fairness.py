"""The order of work: weighted shares between classes, then between a class's short and long streams, then by due time.

Pure data structures of logarithmic cost, without clock or I/O; they know nothing of slots or links. The shares are
those of start-time fair queueing: P. Goyal, H. M. Vin, H. Cheng, "Start-time Fair Queuing: A Scheduling Algorithm for
Integrated Services Packet Switching Networks", SIGCOMM 1996, with the hierarchy of its section on link sharing.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

__all__ = ["Backlog", "FairQueue", "Group", "Order", "Shares"]

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

Order = tuple[float, int, int]
"""Sort key of work within a group: when it is due, the age of its stream, its chunk."""

Group = tuple[str, bool]
"""What shares are given to: a class, and whether the stream is short."""

_SLACK = 64
_MEMORY = 1024


class Shares(Generic[K]):
    """The arithmetic of start-time fair queueing. Every flow has a start tag: what it has been served, divided by its
    weight, but never less than the virtual time at which it began to wait. The least start tag goes first."""

    def __init__(self) -> None:
        self._virtual = 0.0
        self._waiting: dict[K, tuple[float, int]] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._finish: dict[K, float] = {}
        self._limit = _SLACK
        self._count = 0

    def wait(self, flow: K) -> None:
        """The flow has work from now on; nothing happens when it had some already."""
        if flow not in self._waiting:
            self._start(flow, max(self._virtual, self._finish.get(flow, 0.0)))

    def rest(self, flow: K) -> None:
        """The flow has no more work."""
        self._waiting.pop(flow, None)

    def waits(self, flow: K) -> bool:
        """Whether the flow has work."""
        return flow in self._waiting

    def next(self) -> K | None:
        """The flow that is to be served; None when none has work."""
        while self._heap:
            start, count, flow = self._heap[0]
            if self._waiting.get(flow) == (start, count):
                return flow
            heapq.heappop(self._heap)
        return None

    def charge(self, flow: K, amount: float) -> None:
        """A flow that has work was served: so much work, divided by its weight."""
        start, _ = self._waiting[flow]
        self._virtual = max(self._virtual, start)
        self._finish[flow] = start + amount
        self._start(flow, start + amount)
        if len(self._finish) > self._limit:
            self._forget()

    def _forget(self) -> None:
        """Keep memory bounded: peers name flows as they like. What has fallen behind the virtual time starts there
        anyway; of others those are kept that owe most, which can give away no more than the last item of a flow."""
        owing = ((flow, finish) for flow, finish in self._finish.items() if finish > self._virtual)
        self._finish = dict(heapq.nlargest(_MEMORY, owing, key=lambda entry: entry[1]))
        self._limit = _SLACK + 2 * len(self._finish)

    def _start(self, flow: K, start: float) -> None:
        self._count += 1
        self._waiting[flow] = start, self._count
        heapq.heappush(self._heap, (start, self._count, flow))


class Backlog(Generic[T]):
    """A heap in which entries may die: the dead are passed over, and swept out before they outnumber the others."""

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self._alive = alive
        self._heap: list[tuple[Order, int, T]] = []
        self._limit = _SLACK
        self._count = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, order: Order, item: T) -> None:
        self._count += 1
        heapq.heappush(self._heap, (order, self._count, item))
        if len(self._heap) > self._limit:
            self._heap = [entry for entry in self._heap if self._alive(entry[2])]
            heapq.heapify(self._heap)
            self._limit = _SLACK + 2 * len(self._heap)

    def pop(self) -> T | None:
        """The first that is alive, or None."""
        while self._heap:
            item = heapq.heappop(self._heap)[2]
            if self._alive(item):
                return item
        return None


class _Class(Generic[T]):
    """The work of one class. Its short and its long streams get half of its turns each while both have work, so that
    neither ever waits for all of the other."""

    def __init__(self, alive: Callable[[T], bool]) -> None:
        self.halves = (Backlog(alive), Backlog(alive))
        self.turns = Shares[bool]()


class FairQueue(Generic[T]):
    """Work of all classes. A class that is not among `weights` has the weight 1.

    `pop` takes what is next; if it is then really done, `charge` says how much it was. What was popped and not charged
    costs its class nothing.
    """

    def __init__(self, weights: Mapping[str, float], alive: Callable[[T], bool]) -> None:
        self._weights = dict(weights)
        self._alive = alive
        self._classes: dict[str, _Class[T]] = {}
        self._shares = Shares[str]()
        self._limit = _SLACK

    def push(self, group: Group, order: Order, item: T) -> None:
        share, short = group
        queue = self._classes.get(share)
        if queue is None:
            queue = self._class(share)
        queue.halves[short].push(order, item)
        queue.turns.wait(short)
        self._shares.wait(share)

    def pop(self) -> T | None:
        """What is to be done next, or None."""
        # A class or half that is found empty rests from then on. Later than it ran dry, but no sooner than another one
        # was served: its start tag was the least, so it has gained nothing by the delay.
        while (share := self._shares.next()) is not None:
            queue = self._classes[share]
            while (short := queue.turns.next()) is not None:
                item = queue.halves[short].pop()
                if item is not None:
                    return item
                queue.turns.rest(short)
            self._shares.rest(share)
        return None

    def _class(self, share: str) -> _Class[T]:
        if len(self._classes) > self._limit:
            # Idle ones are kept for the sake of whose turn it is, but not all that peers have ever named.
            self._classes = {name: queue for name, queue in self._classes.items() if self._shares.waits(name)}
            self._limit = _SLACK + 2 * len(self._classes)
        queue = self._classes[share] = _Class(self._alive)
        return queue

    def charge(self, group: Group, blocks: int) -> None:
        """What the last `pop` returned, of this group, was given its turn for that many blocks."""
        share, short = group
        self._classes[share].turns.charge(short, blocks)
        self._shares.charge(share, blocks / self._weights.get(share, 1.0))
