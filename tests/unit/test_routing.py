"""Routing: policies as pure functions, what they are told, and whole runtimes that follow them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec
import pytest

from kvstream import ConfigError, KVLayout, KVPool, Offer, PeerLost, Refused, Runtime, RuntimeConfig
from kvstream.discovery import DataAddress, Load, WorkerRecord
from kvstream.errors import Cancelled, LayoutMismatch
from kvstream.runtime.peers import Peers
from kvstream.runtime.routing import Candidate, Candidates, LeastLoaded, RouteRequest
from tests.conftest import LAYOUT, Cluster

TOKENS = LAYOUT.block_tokens


def record(name: str, *, streams: int = 0, free: int = 100, **more: object) -> WorkerRecord:
    values: dict[str, object] = {
        "name": name,
        "incarnation": "0" * 32,
        "key": "00",
        "roles": ("decode",),
        "address": DataAddress(transport="inproc", host="", port=1, host_id=""),
        "fingerprint": "f",
        "pid": 1,
        "host": "h",
        "load": Load(streams, free, 100),
        "started": 0.0,
    } | more
    return msgspec.convert(values, WorkerRecord)


def candidate(name: str, *, streams: int = 0, free: int = 100, **more: object) -> Candidate:
    known = {key: more.pop(key) for key in list(more) if key in WorkerRecord.__struct_fields__}
    return Candidate(record=record(name, streams=streams, free=free, **known), **more)  # type: ignore[arg-type]


ME = record("me", roles=["prefill"])


def request(blocks: int = 10) -> RouteRequest:
    return RouteRequest(stream="s", tokens=40, blocks=blocks, share_class="", priority=0, me=ME)


def route(*candidates: Candidate, policy: LeastLoaded | None = None, seed: int = 1, blocks: int = 10) -> list[str]:
    chance = random.Random(seed).random
    return [worker[:-2] for worker in (policy or LeastLoaded()).route(request(blocks), candidates, chance)]


def first_choices(*candidates: Candidate, rounds: int = 1000) -> Counter[str]:
    rng = random.Random(7)
    policy = LeastLoaded()
    return Counter(policy.route(request(), candidates, rng.random)[0][:-2] for _ in range(rounds))


# ---------------------------------------------------------------------- the default policy


@pytest.mark.parametrize(
    "unfit",
    [
        candidate("x", roles=["prefill"]),
        candidate("x", rank=1),
        candidate("x", state="draining"),
        candidate("x", fingerprint="another"),
        candidate("x", free=9),
    ],
    ids=["role", "rank", "draining", "layout", "room"],
)
def test_only_those_that_fit_are_taken(unfit: Candidate) -> None:
    assert route(unfit, candidate("y", streams=50)) == ["y"]
    assert route(unfit) == []


def test_of_two_the_less_loaded_comes_first_whatever_is_drawn() -> None:
    for seed in range(20):
        assert route(candidate("a", streams=3), candidate("b", streams=1), seed=seed) == ["b", "a"]


@pytest.mark.parametrize(
    ("light", "heavy"),
    [
        ({"streams": 1}, {"streams": 2}),
        ({"free": 90}, {"free": 40}),
        ({"streams": 10, "free": 100}, {"streams": 10, "free": 50}),
        ({}, {"slots": 4, "slots_used": 4}),
    ],
)
def test_what_counts_as_load(light: dict[str, int], heavy: dict[str, int]) -> None:
    assert route(candidate("a", **heavy), candidate("b", **light)) == ["b", "a"]  # type: ignore[arg-type]


def test_our_own_streams_count_before_the_registry_knows_of_them() -> None:
    busy = Candidate(record=record("a", streams=0), streams=5)
    assert route(busy, candidate("b", streams=2)) == ["b", "a"]


def test_candidates_are_different_and_no_more_than_asked_for() -> None:
    workers = [candidate(f"w{n}", streams=n) for n in range(10)]
    for seed in range(50):
        order = route(*workers, seed=seed)
        assert len(order) == len(set(order)) == 3
    assert len(route(*workers, policy=LeastLoaded(candidates=1))) == 1


def test_many_sources_with_the_same_picture_do_not_run_to_the_same_worker() -> None:
    """Each sees the same old loads: one worker a little less loaded than nine others."""
    workers = [candidate(f"w{n}", streams=5 if n else 4) for n in range(10)]
    counts = first_choices(*workers)
    assert counts["w0"] < 300  # one tenth by chance, all of them if everybody took the least loaded
    assert min(counts[f"w{n}"] for n in range(10)) > 40


def test_the_most_loaded_of_many_is_never_first() -> None:
    workers = [candidate(f"w{n}", streams=n) for n in range(10)]
    assert first_choices(*workers)["w9"] == 0


def test_an_empty_newcomer_does_not_attract_everything() -> None:
    others = [candidate(f"w{n}", streams=20) for n in range(3)]
    fresh = first_choices(*others, candidate("new", streams=0, age=0.0))
    warm = first_choices(*others, candidate("new", streams=0, age=60.0))
    assert 150 < fresh["new"] < 350  # as if it were one of the others
    assert warm["new"] > 450  # every time that it is drawn


def crowd(policy: Callable[[Sequence[Candidate]], Sequence[str]], records: list[WorkerRecord]) -> tuple[list[str], int]:
    """What a policy says to so many workers, and how many it has looked at."""
    looked: set[str] = set()

    def view(record: WorkerRecord) -> Candidate:
        looked.add(record.id)
        return Candidate(record=record)

    return list(policy(Candidates(records, view))), len(looked)


def test_of_very_many_only_a_sample_is_looked_at() -> None:
    chance = random.Random(3).random
    firsts: Counter[str] = Counter()
    for _ in range(1000):
        order, looked = crowd(
            lambda candidates: LeastLoaded().route(request(), candidates, chance), [record(f"w{n}") for n in range(200)]
        )
        assert (len(order), looked) == (3, 32)
        firsts[order[0]] += 1
    assert len(firsts) > 180
    assert max(firsts.values()) < 30


def test_few_that_fit_are_found_among_very_many() -> None:
    records = [record(f"w{n}", free=0) for n in range(500)] + [record("a"), record("b", streams=9)]
    order, looked = crowd(
        lambda candidates: LeastLoaded().route(request(), candidates, random.Random(1).random), records
    )
    assert (order, looked) == (["a/0", "b/0"], 502)


def test_candidates_are_a_sequence() -> None:
    records = [record(f"w{n}") for n in range(5)]
    candidates = Candidates(records, lambda each: Candidate(record=each))
    assert [each.record.name for each in candidates] == [f"w{n}" for n in range(5)]
    assert [each.record.name for each in candidates[1:3]] == ["w1", "w2"]
    assert candidates[-1].record.name == "w4"


def test_who_is_to_be_left_alone_or_is_suspect_comes_last() -> None:
    assert route(
        candidate("suspect", suspect=True),
        candidate("later", backoff=2.0),
        candidate("soon", backoff=0.5),
        candidate("busy", streams=90),
        policy=LeastLoaded(candidates=4),
    ) == ["busy", "soon", "later", "suspect"]
    assert route(candidate("suspect", suspect=True)) == ["suspect"]


def test_the_same_chances_give_the_same_order() -> None:
    workers = [candidate(f"w{n}", streams=n % 3) for n in range(10)]
    assert route(*workers, seed=5) == route(*workers, seed=5)
    assert route(*workers, policy=LeastLoaded(choices=1), seed=5) != route(*workers, seed=6)


def test_a_chance_of_one_draws_the_last() -> None:
    assert LeastLoaded().route(request(), [candidate("a"), candidate("b")], lambda: 1.0) == ["b/0", "a/0"]


# ---------------------------------------------------------------------- what is remembered of peers


def test_a_peer_that_fails_is_left_alone_for_longer_each_time() -> None:
    peers = Peers()
    peers.seen(record("a"), 0.0)
    now, waits = 0.0, []
    for _ in range(8):
        peers.failed("a/0", PeerLost("gone"), now)
        failures, wait = peers.backoff("a/0", now)
        waits.append(round(wait, 3))
        now += wait
    assert failures == 8
    assert waits == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert peers.backoff("a/0", now)[1] == 0.0
    peers.took("a/0")
    assert peers.backoff("a/0", now) == (0, 0.0)


def test_what_many_streams_run_into_together_counts_once() -> None:
    peers = Peers()
    peers.seen(record("a"), 0.0)
    for _ in range(100):
        peers.failed("a/0", PeerLost("gone"), 1.0)
    assert peers.backoff("a/0", 1.0) == (1, pytest.approx(0.1))


def test_advice_to_come_back_later_is_taken() -> None:
    peers = Peers()
    peers.seen(record("a"), 0.0)
    peers.failed("a/0", Refused("busy", retry_after=2.0), 0.0)
    assert peers.backoff("a/0", 0.5) == (1, 1.5)
    peers.failed("a/0", Refused("busy", retry_after=1e6), 0.0)
    assert peers.backoff("a/0", 0.0) == (1, 5.0)


@pytest.mark.parametrize("error", [Cancelled("no"), ConfigError("tokens", "differ"), LayoutMismatch("differs")])
def test_what_is_wrong_with_a_stream_does_not_count_against_the_peer(error: Exception) -> None:
    peers = Peers()
    peers.seen(record("a"), 0.0)
    peers.failed("a/0", error, 0.0)  # type: ignore[arg-type]
    assert peers.backoff("a/0", 0.0) == (0, 0.0)


def test_another_incarnation_is_another_worker_and_who_left_is_forgotten() -> None:
    peers = Peers()
    peers.seen(record("a"), 0.0)
    peers.failed("a/0", PeerLost("gone"), 0.0)
    peers.seen(record("a"), 1.0)
    assert peers.backoff("a/0", 0.0)[0] == 1
    peers.seen(record("a", incarnation="1" * 32), 2.0)
    assert peers.backoff("a/0", 0.0)[0] == 0
    assert peers.age(record("a", incarnation="1" * 32, started=1e9), 5.0, 1e9) == 3.0
    peers.left("a/0")
    assert len(peers) == 0
    peers.failed("a/0", PeerLost("late"), 9.0)
    assert len(peers) == 0


def test_the_age_is_what_we_have_seen_or_what_the_worker_says_whichever_is_more() -> None:
    peers = Peers()
    assert peers.age(record("a", started=1000.0), 50.0, 1060.0) == 60.0
    assert peers.age(record("b", started=2000.0), 50.0, 1060.0) == 0.0  # its clock is ahead
    assert peers.age(record("b", started=2000.0), 57.0, 1067.0) == 7.0


# ---------------------------------------------------------------------- through whole runtimes


class Fixed:
    """A policy that says what it is told to say, and notes what it was asked."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[RouteRequest, list[Candidate]]] = []

    def route(
        self, request: RouteRequest, candidates: Sequence[Candidate], chance: Callable[[], float]
    ) -> Sequence[str]:
        assert 0.0 <= chance() <= 1.0
        self.asked.append((request, list(candidates)))
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def takes_everything(runtime: Runtime) -> None:
    @runtime.on_offer
    async def _(offer: Offer) -> None:
        async with offer.accept(blocks=[int(offer.stream[1:]) % 32]) as rx:
            await rx.done()


async def knows(source: Runtime, *names: str) -> None:
    """Wait until the source's registry has heard of these workers."""
    for name in names:
        await source.registry.wait_for(name, 5.0)


async def send(source: Runtime, name: str, to: object = None, **more: object) -> str:
    """Send a stream; who took it."""
    async with source.send(name, blocks=[0], tokens=TOKENS, to=to, **more) as tx:  # type: ignore[arg-type]
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        return (await tx.done()).peer


async def test_a_policy_of_the_users_picks_the_destination(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    for name in ("decode-0", "decode-1"):
        takes_everything(await cluster.worker(name))
    await knows(source, "decode-0", "decode-1")
    policy = Fixed(["decode-1", "decode-0"], ["decode-0/0"])
    assert await send(source, "s1", policy, share_class="gold", priority=3) == "decode-1/0"
    assert await send(source, "s2", policy) == "decode-0/0"
    asked, candidates = policy.asked[0]
    assert (asked.stream, asked.tokens, asked.blocks, asked.share_class, asked.priority) == ("s1", TOKENS, 1, "gold", 3)
    assert asked.me.id == "prefill-0/0"
    assert sorted(each.record.id for each in candidates) == ["decode-0/0", "decode-1/0"]
    connected = {each.record.id for each in policy.asked[1][1] if each.slots == 4}
    assert connected == {"decode-1/0"}


async def test_a_runtimes_own_policy_is_used_where_a_stream_names_none(cluster: Cluster) -> None:
    for name in ("decode-0", "decode-1"):
        takes_everything(await cluster.worker(name))
    policy = Fixed(["decode-1"])
    source = await cluster.worker("prefill-0", roles=("prefill",), routing=policy)
    assert await send(source, "s1") == "decode-1/0"
    assert await send(source, "s2", "decode-0") == "decode-0/0"
    assert len(policy.asked) == 1


@pytest.mark.parametrize("answer", ["decode-0", None, {"decode-0"}, [5], ["decode-0", "decode-0/0"], ["not a name!"]])
async def test_a_policy_that_answers_nonsense_is_a_config_error(cluster: Cluster, answer: object) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    with pytest.raises(ConfigError) as caught:
        await send(source, "s1", Fixed(answer))  # type: ignore[arg-type]
    assert caught.value.field == "to"
    assert source.stats().streams == ()


async def test_what_a_policy_raises_is_raised(cluster: Cluster) -> None:
    class Broken:
        def route(self, *_: object) -> Sequence[str]:
            raise LookupError("no idea")

    source = await cluster.worker("prefill-0", roles=("prefill",))
    with pytest.raises(LookupError):
        await send(source, "s1", Broken())


async def test_a_policy_that_finds_nobody_is_asked_again_when_there_is_news(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    asked = asyncio.Event()

    class Whoever:
        def route(self, _: RouteRequest, candidates: Sequence[Candidate], chance: object) -> Sequence[str]:
            asked.set()
            return [each.record.id for each in candidates]

    task = asyncio.create_task(send(source, "s1", Whoever()))
    await asked.wait()
    takes_everything(await cluster.worker("decode-0"))
    assert await task == "decode-0/0"


async def test_a_policy_that_finds_nobody_for_long_is_refused(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",), config=RuntimeConfig(connect_timeout=0.02))
    with pytest.raises(Refused, match="Fixed found no worker") as caught:
        await send(source, "s1", Fixed([]))
    assert caught.value.retry_after


async def test_who_refused_is_not_the_first_choice_for_a_while(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    full = await cluster.worker("decode-0", blocks=64)
    takes_everything(await cluster.worker("decode-1"))
    refused: list[str] = []

    @full.on_offer
    async def _(offer: Offer) -> None:
        refused.append(offer.stream)
        offer.refuse("full", retry_after=60.0)

    await knows(source, "decode-0", "decode-1")
    # Twice the free blocks: the default policy would always begin with decode-0.
    for number in range(5):
        assert await send(source, f"s{number}") == "decode-1/0"
    assert refused == ["s0"]


async def test_a_policy_is_told_of_refusals_and_of_our_own_streams(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    destination = await cluster.worker("decode-0")
    policy = Fixed(["decode-0"])

    @destination.on_offer
    async def _(offer: Offer) -> None:
        if offer.stream == "s0":
            offer.refuse("no", retry_after=2.0)

    await knows(source, "decode-0")
    with pytest.raises(Refused):
        await send(source, "s0", policy)
    async with source.send("s1", blocks=[0], tokens=TOKENS, to=policy):
        async with source.send("s2", blocks=[0], tokens=TOKENS, to=policy):
            pass
    (_, [first]), (_, [second]), (_, [third]) = policy.asked
    assert (first.failures, first.backoff, first.streams) == (0, 0.0, 0)
    assert (second.failures, second.streams) == (1, 0)
    assert 1.0 < second.backoff <= 2.0
    assert third.streams == 1
    assert source._streams.core.towards("decode-0/0")[0] == 0


async def test_a_worker_of_another_layout_is_not_picked(cluster: Cluster) -> None:
    source = await cluster.worker("prefill-0", roles=("prefill",))
    other = KVLayout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="float16")
    await cluster.worker("decode-0", pool=KVPool.allocate(other, blocks=1000))
    takes_everything(await cluster.worker("decode-1"))
    await knows(source, "decode-0", "decode-1")
    assert await send(source, "s1") == "decode-1/0"


@pytest.mark.parametrize("routing", [5, "least", object()])
def test_a_routing_that_is_no_policy_is_refused(routing: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Runtime("w", pool=KVPool.allocate(LAYOUT, blocks=4), routing=routing)  # type: ignore[arg-type]
    assert caught.value.field == "routing"
