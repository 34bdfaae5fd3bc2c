"""Who may work next, over all links: a fair queue of turns, less those whose link has no room for them at present.

A turn whose link has no free slot is set aside with its link, and the first of each group comes back when a slot does:
no event costs more than the logarithm of what waits, and a peer that takes nothing holds up nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

from kvstream.scheduler.fairness import Backlog, FairQueue, Group, Order

__all__ = ["Turn", "Turns"]


class Turn(Protocol):
    """A stream's wish to have a chunk moved."""

    @property
    def link_id(self) -> int: ...
    @property
    def group(self) -> Group: ...
    @property
    def order(self) -> Order: ...
    def alive(self) -> bool:
        """Whether the wish still stands; once it does not, it never will."""
        ...

    def open(self) -> bool:
        """Whether its link has room for it now."""
        ...


T = TypeVar("T", bound=Turn)


def _alive(turn: Turn) -> bool:
    return turn.alive()


class Turns(Generic[T]):
    """`weights` are those of the classes; see FairQueue."""

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._queue = FairQueue[T](weights, _alive)
        self._aside: dict[int, dict[Group, Backlog[T]]] = {}

    def push(self, turn: T) -> None:
        if turn.open():
            self._queue.push(turn.group, turn.order, turn)
        else:
            self._set_aside(turn)

    def pop(self) -> T | None:
        """The first turn whose link has room, or None."""
        while (turn := self._queue.pop()) is not None:
            if turn.open():
                return turn
            self._set_aside(turn)
        return None

    def charge(self, turn: T, blocks: int) -> None:
        """What the last `pop` returned has taken its turn, and its slot, for so many blocks."""
        self._queue.charge(turn.group, blocks)
        if turn.open():
            self._bring_back(turn.link_id, turn.group)

    def room(self, link_id: int) -> None:
        """The link has room again."""
        for group in list(self._aside.get(link_id, ())):
            self._bring_back(link_id, group)

    def forget(self, link_id: int) -> None:
        """The link is gone."""
        self._aside.pop(link_id, None)

    def waits_for_room(self, link_id: int) -> bool:
        """Whether anything is set aside until this link has room."""
        return link_id in self._aside

    def _set_aside(self, turn: T) -> None:
        groups = self._aside.setdefault(turn.link_id, {})
        backlog = groups.get(turn.group)
        if backlog is None:
            backlog = groups[turn.group] = Backlog(_alive)
        backlog.push(turn.order, turn)

    def _bring_back(self, link_id: int, group: Group) -> None:
        groups = self._aside.get(link_id, {})
        backlog = groups.get(group)
        if backlog is None:
            return
        turn = backlog.pop()
        if turn is not None:
            self._queue.push(group, turn.order, turn)
        if not len(backlog):
            del groups[group]
            if not groups:
                del self._aside[link_id]
