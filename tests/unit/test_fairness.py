"""The order of work as data structures: shares by weight, short and long, due times, turns set aside with a link."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from kvstream.scheduler.fairness import Backlog, FairQueue, Group, Order, Shares
from kvstream.scheduler.turns import Turns


def always(item: object) -> bool:
    return True


def served(queue: FairQueue[str], groups: dict[str, Group], blocks: int, cost: int = 1) -> Counter[str]:
    """Serve items that always have more to do, until so many blocks are done."""
    counts: Counter[str] = Counter()
    while counts.total() < blocks:
        item = queue.pop()
        assert item is not None
        queue.charge(groups[item], cost)
        counts[item] += cost
        queue.push(groups[item], (0.0, 0, 0), item)
    return counts


def backlog(weights: dict[str, float], groups: dict[str, Group]) -> FairQueue[str]:
    queue = FairQueue[str](weights, always)
    for item, group in groups.items():
        queue.push(group, (0.0, 0, 0), item)
    return queue


def test_classes_with_work_are_served_by_weight() -> None:
    groups: dict[str, Group] = {"a": ("a", False), "b": ("b", False), "c": ("c", False)}
    assert served(backlog({"a": 3.0, "b": 2.0}, groups), groups, 600) == {"a": 300, "b": 200, "c": 100}


def test_the_size_of_what_is_served_counts() -> None:
    queue = FairQueue[str]({}, always)
    counts: Counter[str] = Counter()
    cost = {"large": 10, "small": 1}
    for item in cost:
        queue.push((item, False), (0.0, 0, 0), item)
    while counts.total() < 1100:
        item = queue.pop()
        assert item is not None
        queue.charge((item, False), cost[item])
        counts[item] += cost[item]
        queue.push((item, False), (0.0, 0, 0), item)
    assert abs(counts["large"] - counts["small"]) <= 20


def test_who_was_away_has_saved_nothing_up_and_lost_nothing() -> None:
    groups: dict[str, Group] = {"a": ("a", False)}
    queue = backlog({}, groups)
    served(queue, groups, 1000)
    groups["b"] = ("b", False)
    queue.push(groups["b"], (0.0, 0, 0), "b")
    counts = served(queue, groups, 100)
    assert abs(counts["a"] - counts["b"]) <= 2


def test_a_class_that_comes_and_goes_gets_no_more_than_its_share() -> None:
    queue = backlog({}, {"steady": ("steady", False)})
    counts: Counter[str] = Counter()
    waiting = False
    for _ in range(1000):
        if not waiting:
            queue.push(("fickle", False), (0.0, 0, 0), "fickle")
        item = queue.pop()
        assert item is not None
        waiting = item != "fickle"  # it has nothing more to do until the next round
        queue.charge((item, False), 1)
        counts[item] += 1
        if item == "steady":
            queue.push(("steady", False), (0.0, 0, 0), "steady")
    assert abs(counts["fickle"] - counts["steady"]) <= 2


def test_short_and_long_streams_of_a_class_share_what_the_class_gets() -> None:
    groups: dict[str, Group] = {"long": ("a", False), "short": ("a", True), "other": ("b", False)}
    counts = served(backlog({}, groups), groups, 400)
    assert counts == {"long": 100, "short": 100, "other": 200}
    del groups["short"]
    assert served(backlog({}, groups), groups, 400) == {"long": 200, "other": 200}


def test_within_a_group_the_earliest_goes_first() -> None:
    queue = FairQueue[int]({}, always)
    orders: list[Order] = [(float(n % 7), n, 0) for n in range(50)]
    for number, order in enumerate(orders):
        queue.push(("a", False), order, number)
    found: list[Order] = []
    while (item := queue.pop()) is not None:
        queue.charge(("a", False), 1)
        found.append(orders[item])
    assert found == sorted(orders)


def test_what_is_popped_and_not_done_costs_nothing() -> None:
    groups: dict[str, Group] = {"a": ("a", False), "b": ("b", False)}
    queue = backlog({}, groups)
    for _ in range(100):
        assert queue.pop() == "a"
        queue.push(groups["a"], (0.0, 0, 0), "a")
    assert served(queue, groups, 100) == {"a": 50, "b": 50}


def test_the_dead_are_passed_over_and_swept_out() -> None:
    dead: set[int] = set()
    backlog = Backlog[int](lambda item: item not in dead)
    for number in range(100_000):
        backlog.push((float(number), 0, 0), number)
        if number % 1000:
            dead.add(number)
    assert len(backlog) < 1000
    assert [backlog.pop() for _ in range(101)] == [*range(0, 100_000, 1000), None]


def test_classes_without_work_are_forgotten() -> None:
    """Peers name classes as they like: what they once named must not stay."""
    shares = Shares[str]()
    for number in range(10_000):
        shares.wait(f"tenant-{number}")
        flow = shares.next()
        assert flow is not None
        shares.charge(flow, 1.0)
        shares.rest(flow)
    assert len(shares._finish) < 2500
    assert len(shares._waiting) == 0
    queue = FairQueue[str]({}, always)
    for number in range(10_000):
        group = f"tenant-{number}", True
        queue.push(group, (0.0, 0, 0), "x")
        assert queue.pop() == "x"
        queue.charge(group, 1)
        assert queue.pop() is None
    assert len(queue._classes) < 200


@pytest.mark.parametrize("seed", range(20))
def test_the_lag_between_two_classes_is_bounded_whatever_comes(seed: int) -> None:
    """The theorem of the algorithm: over any interval in which both have work, what two classes got, divided by their
    weights, differs by no more than one largest item of each."""
    rng = random.Random(seed)
    weights = {name: rng.choice([0.5, 1.0, 3.0, 10.0]) for name in "abc"}
    queue = FairQueue[str](weights, always)
    largest = 20
    work: Counter[str] = Counter()
    for name in weights:
        queue.push((name, False), (0.0, 0, 0), name)
    for _ in range(2000):
        item = queue.pop()
        assert item is not None
        cost = rng.randint(1, largest)
        queue.charge((item, False), cost)
        work[item] += cost
        queue.push((item, False), (0.0, 0, 0), item)
        for one, heavy in weights.items():
            for two, light in weights.items():
                lag = work[one] / heavy - work[two] / light
                assert lag <= largest / heavy + largest / light + 1e-6


# ---------------------------------------------------------------------- turns


@dataclass(slots=True, eq=False)
class Wish:
    name: str
    link: Gate
    due: float = 0.0
    group: Group = ("", False)
    gone: bool = False

    @property
    def link_id(self) -> int:
        return self.link.id

    @property
    def order(self) -> Order:
        return self.due, 0, 0

    def alive(self) -> bool:
        return not self.gone

    def open(self) -> bool:
        return self.link.room > 0


@dataclass(slots=True)
class Gate:
    id: int
    room: int


def run(turns: Turns[Wish]) -> list[str]:
    """Serve until nobody can be."""
    found: list[str] = []
    while (wish := turns.pop()) is not None:
        wish.link.room -= 1
        turns.charge(wish, 1)
        found.append(wish.name)
    return found


def test_a_link_without_room_holds_up_nobody_else() -> None:
    turns = Turns[Wish]({})
    shut, wide = Gate(1, 0), Gate(2, 10)
    for number in range(3):
        turns.push(Wish(f"shut-{number}", shut, due=0.0))
        turns.push(Wish(f"wide-{number}", wide, due=1.0))
    assert run(turns) == ["wide-0", "wide-1", "wide-2"]
    assert turns.waits_for_room(1)
    assert not turns.waits_for_room(2)


def test_room_goes_to_the_most_urgent_whenever_it_began_to_wait() -> None:
    turns = Turns[Wish]({})
    gate = Gate(1, 0)
    for due in (5.0, 1.0, 9.0, 3.0):
        turns.push(Wish(f"{due}", gate, due=due))
    found: list[str] = []
    for _ in range(4):
        gate.room += 1
        turns.room(1)
        found += run(turns)
    assert found == ["1.0", "3.0", "5.0", "9.0"]
    assert not turns.waits_for_room(1)


def test_much_room_at_once_serves_all_of_a_group() -> None:
    turns = Turns[Wish]({})
    gate = Gate(1, 0)
    for due in range(5):
        turns.push(Wish(f"{due}", gate, due=due))
    gate.room = 4
    turns.room(1)
    assert run(turns) == ["0", "1", "2", "3"]


def test_room_is_shared_by_weight_though_it_comes_one_by_one() -> None:
    """The classes are found empty between two slots; that must not cost the heavier one its share."""
    turns = Turns[Wish]({"a": 3.0})
    gate = Gate(1, 0)
    counts: Counter[str] = Counter()
    for name in "ab":
        turns.push(Wish(name, gate, group=(name, False)))
    for _ in range(400):
        gate.room += 1
        turns.room(1)
        (name,) = run(turns)
        counts[name] += 1
        turns.push(Wish(name, gate, group=(name, False)))
    assert abs(counts["a"] - 300) <= 2


def test_room_that_comes_one_by_one_is_shared_by_short_and_long() -> None:
    turns = Turns[Wish]({})
    gate = Gate(1, 0)
    counts: Counter[str] = Counter()
    turns.push(Wish("long", gate, group=("", False)))
    for number in range(200):
        turns.push(Wish("short", gate, due=-number, group=("", True)))
        gate.room += 1
        turns.room(1)
        (name,) = run(turns)
        counts[name] += 1
        if name == "long":
            turns.push(Wish("long", gate, group=("", False)))
    assert abs(counts["long"] - 100) <= 2


def test_who_gave_up_while_set_aside_is_passed_over() -> None:
    turns = Turns[Wish]({})
    gate = Gate(1, 0)
    wishes = [Wish(str(n), gate, due=n) for n in range(3)]
    for wish in wishes:
        turns.push(wish)
    wishes[0].gone = wishes[1].gone = True
    gate.room = 1
    turns.room(1)
    assert run(turns) == ["2"]


def test_a_lost_link_is_forgotten() -> None:
    turns = Turns[Wish]({})
    turns.push(Wish("a", Gate(1, 0)))
    turns.forget(1)
    turns.room(1)
    assert not turns.waits_for_room(1)
    assert turns.pop() is None
