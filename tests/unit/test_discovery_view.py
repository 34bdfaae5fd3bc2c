"""LeaseView: the merge of snapshot and live events, and the difference to what a watcher was told."""

from __future__ import annotations

import asyncio

import hypothesis.strategies as st
from hypothesis import given, settings

from kvstream.discovery.broker import Lease, LeaseEvent, LeaseView, Synced


def put(key: str, value: bytes, revision: int) -> LeaseEvent:
    return LeaseEvent(key, value, revision, "put")


def gone(key: str, revision: int) -> LeaseEvent:
    return LeaseEvent(key, None, revision, "expired")


async def drain(view: LeaseView) -> list[LeaseEvent | Synced]:
    view.close()
    return [event async for event in view]


async def test_live_events_wait_for_the_snapshot_and_newer_ones_win() -> None:
    view = LeaseView()
    view.begin()
    view.apply(put("a", b"old", 1))
    view.apply(put("b", b"new", 9))
    view.apply(gone("c", 8))
    view.finish({"a": Lease(5, b"a5"), "b": Lease(2, b"b2"), "c": Lease(3, b"c3")})
    assert await drain(view) == [put("a", b"a5", 5), put("b", b"new", 9), Synced()]


async def test_an_older_live_event_does_not_undo_a_newer_one() -> None:
    view = LeaseView()
    view.finish({"a": Lease(5, b"a5")})
    view.apply(put("a", b"a4", 4))
    view.apply(gone("a", 3))
    assert await drain(view) == [put("a", b"a5", 5), Synced()]


async def test_a_resync_may_count_anew_and_tells_the_difference_only() -> None:
    view = LeaseView()
    view.finish({key: Lease(100, b"1") for key in "abcd"})
    for _ in range(5):
        await anext(view)
    view.begin()
    view.apply(gone("d", 3))
    view.finish({"a": Lease(1, b"1"), "b": Lease(2, b"2")})
    view.apply(put("a", b"3", 3))
    assert await drain(view) == [
        LeaseEvent("c", None, 0, "missing"),
        LeaseEvent("d", None, 3, "expired"),
        put("b", b"2", 2),
        Synced(),
        put("a", b"3", 3),
    ]


async def test_what_comes_and_goes_unseen_is_no_event_and_costs_nothing() -> None:
    view = LeaseView()
    view.finish({})
    for i in range(1000):
        view.apply(put(f"k{i}", b"", 2 * i + 1))
        view.apply(gone(f"k{i}", 2 * i + 2))
    assert len(view._due) == 1  # pyright: ignore[reportPrivateUsage]
    assert await drain(view) == [Synced()]


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.sampled_from([b"1", b"2"])),
        st.tuples(st.just("gone"), st.sampled_from("abc"), st.just(b"")),
        st.tuples(st.just("resync"), st.just(""), st.just(b"")),
        st.tuples(st.just("begin"), st.just(""), st.just(b"")),
        st.tuples(st.just("read"), st.just(""), st.just(b"")),
    ),
    max_size=60,
)


@given(OPERATIONS)
@settings(max_examples=150, deadline=None)
def test_a_reader_always_ends_with_the_table(operations: list[tuple[str, str, bytes]]) -> None:
    async def run() -> None:
        view = LeaseView()
        table: dict[str, Lease] = {}
        told: dict[str, bytes] = {}

        def tell(event: LeaseEvent | Synced) -> None:
            if isinstance(event, Synced):
                return
            # Every event is news: it never repeats what was told.
            assert told.get(event.key) != event.value
            if event.value is None:
                del told[event.key]
            else:
                told[event.key] = event.value

        view.finish({})
        for revision, (kind, key, value) in enumerate(operations, 1):
            if kind == "put":
                table[key] = Lease(revision, value)
                view.apply(put(key, value, revision))
            elif kind == "gone" and table.pop(key, None) is not None:
                view.apply(gone(key, revision))
            elif kind == "resync":
                view.begin()
                view.finish(table)
            elif kind == "begin":
                view.begin()
            elif kind == "read" and view._due:  # pyright: ignore[reportPrivateUsage]
                tell(await anext(view))
        view.finish(table)
        for event in await drain(view):
            tell(event)
        assert told == {key: lease.value for key, lease in table.items()}

    asyncio.run(run())
