"""The byte account of a holder: never over its budget, whatever order promises, ends, pins and reads come in."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, precondition, rule

from kvstream.errors import ConfigError, Refused
from kvstream.holder.shelf import Place, Shelf

BUDGET = 100


@dataclass(eq=False)
class Thing:
    place: Place
    pins: int = 0
    reads: int = 0

    @property
    def size(self) -> int:
        return self.place.size


class ShelfMachine(RuleBasedStateMachine):
    """A holder in miniature, beside a plain account of what is where."""

    promised = Bundle("promised")

    def __init__(self) -> None:
        super().__init__()
        self.shelf = Shelf(BUDGET)
        self.kept: list[Thing] = []
        """Least recently used first."""
        self.leaving: list[Thing] = []
        self.on_their_way = 0

    def taken(self) -> int:
        return self.on_their_way + sum(thing.size for thing in (*self.kept, *self.leaving))

    @rule(target=promised, size=st.integers(1, BUDGET + 10))
    def offer(self, size: int) -> object:
        free = BUDGET - self.taken()
        can_go = [thing for thing in self.kept if not thing.pins and not thing.reads]
        try:
            victims = self.shelf.victims(size, self.kept, 0.5)
        except Refused as error:
            assert free + sum(thing.size for thing in can_go) < size
            assert error.retry_after == (None if size > BUDGET else 0.5)
            with pytest.raises(Refused):
                self.shelf.promise(size)
            return multiple()
        expected: list[Thing] = []
        while free + sum(thing.size for thing in expected) < size:
            expected.append(can_go[len(expected)])
        assert victims == expected, "least recently used first, and none more than it takes"
        for thing in victims:
            self.kept.remove(thing)
            self.shelf.give_back(thing.place)
        place = self.shelf.promise(size)
        self.on_their_way += size
        return place

    @rule(place=consumes(promised))
    def came_whole(self, place: Place) -> None:
        self.shelf.keep(place)
        self.on_their_way -= place.size
        self.kept.append(Thing(place))
        with pytest.raises(ConfigError):
            self.shelf.keep(place)

    @rule(place=consumes(promised))
    def failed_or_expired(self, place: Place) -> None:
        self.shelf.give_back(place)
        self.on_their_way -= place.size
        with pytest.raises(ConfigError):
            self.shelf.give_back(place)
        with pytest.raises(ConfigError):
            self.shelf.keep(place)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def fetched(self, data: st.DataObject) -> None:
        thing = data.draw(st.sampled_from(self.kept))
        thing.reads += 1
        self.kept.remove(thing)
        self.kept.append(thing)

    @precondition(lambda self: any(thing.reads for thing in self.kept))
    @rule(data=st.data())
    def fetch_ends(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([thing for thing in self.kept if thing.reads])).reads -= 1

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), pins=st.sampled_from([0, 1, 2]))
    def pinned(self, data: st.DataObject, pins: int) -> None:
        data.draw(st.sampled_from(self.kept)).pins = pins

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def expires(self, data: st.DataObject) -> None:
        thing = data.draw(st.sampled_from(self.kept))
        self.kept.remove(thing)
        if thing.reads:
            self.leaving.append(thing)
        else:
            self.shelf.give_back(thing.place)

    @precondition(lambda self: self.leaving)
    @rule()
    def leaves(self) -> None:
        self.shelf.give_back(self.leaving.pop().place)

    @invariant()
    def the_account_is_exact(self) -> None:
        assert self.shelf.used == self.taken() <= BUDGET
        assert self.shelf.promised == self.on_their_way


TestShelf = ShelfMachine.TestCase
TestShelf.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
