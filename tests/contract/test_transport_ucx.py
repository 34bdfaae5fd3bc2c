"""The UCX transport passes the contract on each lane, on the loop of production, with both ends in one process."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from transport_suite import Harness, TransportSuite, move, pattern

from kvstream.errors import ConfigError, Corrupted, PeerLost, ProtocolError
from kvstream.transport import _ucp, ucx
from kvstream.transport._worker import Endpoint, UcpWorker
from kvstream.transport.base import LANES, Lane, StagingBudget
from kvstream.transport.ucx import UcxConnection, UcxTransport, probe_lanes


def transport(*lanes: Lane, **kwargs: object) -> UcxTransport:
    return UcxTransport(budget=StagingBudget(1 << 26), lanes=lanes or LANES, **kwargs)


@pytest.fixture(params=LANES)
def lane(request: pytest.FixtureRequest) -> Lane:
    return request.param


Make = Callable[..., Awaitable[Harness]]


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes a started pair of transports: make(*lanes, or every lane, **options of both)."""
    async with AsyncExitStack() as stack:

        async def make(*lanes: Lane, **kwargs: object) -> Harness:
            harness = Harness(transport(*lanes, **kwargs), transport(*lanes, **kwargs), lanes[0] if lanes else "shared")
            stack.push_async_callback(harness.aclose)
            await harness.start()
            return harness

        yield make


@pytest.fixture
async def harness(make: Make, lane: Lane) -> Harness:
    return await make(lane)


class TestContract(TransportSuite):
    pass


@pytest.fixture
async def both(make: Make) -> Harness:
    """Transports that allow every lane."""
    return await make()


async def dial(harness: Harness, *lanes: Lane) -> tuple[UcxConnection, UcxConnection]:
    assert harness.address is not None
    dialed = await harness.source.dial(harness.address, lanes)
    accepted = await harness._accepted.get()
    assert isinstance(dialed, UcxConnection)
    assert isinstance(accepted, UcxConnection)
    return dialed, accepted


# -- which lane


@pytest.mark.parametrize(
    ("allowed", "chosen"),
    [
        (LANES, "shared"),
        (("put", "get", "shared"), "shared"),
        (("get", "put"), "get"),
        (("put",), "put"),
        (("shared", "put"), "shared"),
    ],
)
async def test_the_lane_is_the_first_that_works(both: Harness, allowed: tuple[Lane, ...], chosen: Lane) -> None:
    source, destination = await dial(both, *allowed)
    source.open_lane(destination.accept_lane(source.offer_lanes(allowed, 2, 100), LANES))
    assert source.lane == destination.lane == chosen
    assert ("cma" in source.describe()) == (chosen == "get")


async def altered(source: UcxConnection, offered: tuple[Lane, ...], **changes: object) -> bytes:
    offer = msgspec.msgpack.decode(source.offer_lanes(offered, 2, 100), type=ucx._Offer)
    return msgspec.msgpack.encode(msgspec.structs.replace(offer, **changes))


@pytest.mark.parametrize("changes", [{"host_id": "another"}, {"pid": 1 << 30}, {"fd": 0}, {"nonce": bytes(16)}])
async def test_shared_memory_that_is_not_the_peers_is_not_used(both: Harness, changes: dict[str, object]) -> None:
    source, destination = await dial(both, "shared", "put")
    offer = await altered(source, ("shared", "put"), **changes)
    with pytest.raises(ConfigError, match=r"shared: .*memory|shared: .*host"):
        destination.accept_lane(offer, ("shared",))
    destination.accept_lane(offer, ("shared", "put"))
    assert destination.lane == "put"


@pytest.mark.parametrize("changes", [{"pid": 1 << 30}, {"nonce": bytes(16)}])
async def test_get_is_proven_before_it_is_used(both: Harness, changes: dict[str, object]) -> None:
    source, destination = await dial(both, "get")
    with pytest.raises(ConfigError, match=r"get: .*(ptrace|not the peer's memory)"):
        destination.accept_lane(await altered(source, ("get",), **changes), ("get",))
    assert both.destination.budget.used == 0


async def test_get_never_runs_over_tcp(make: Make) -> None:
    harness = await make("get", options={"TLS": "tcp"})
    source, destination = await dial(harness, "get")
    with pytest.raises(ConfigError, match="get: UCX uses tcp"):
        source.offer_lanes(("get",), 2, 100)
    # Nor when the source believes it would.
    offer = await altered(source, ("put",), lanes=("get", "put"))
    with pytest.raises(ConfigError, match="get: UCX uses tcp"):
        destination.accept_lane(offer, ("get",))
    destination.accept_lane(offer, ("get", "put"))
    assert destination.lane == "put"


async def test_put_never_runs_where_writes_cannot_be_fenced(both: Harness) -> None:
    source, destination = await dial(both, "get")
    with pytest.raises(ConfigError, match=r"put: .*fence"):
        source.offer_lanes(("put",), 2, 100)
    offer = await altered(source, ("get",), lanes=("put",))
    with pytest.raises(ConfigError, match=r"put: .*fence"):
        destination.accept_lane(offer, ("put",))


# -- listening


def listening() -> dict[str, str]:
    """The address behind each socket on which this process listens, by inode."""
    own: set[str] = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:  # the directory itself
            continue
    found: dict[str, str] = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                found[fields[9]] = fields[1].partition(":")[0]
    return found


@pytest.mark.parametrize("interface", [None, "lo", "127.0.0.1"])
async def test_listens_on_loopback_only(interface: str | None) -> None:
    quiet = transport(interface=interface)
    before = listening()
    address = await quiet.start(lambda _: None)
    opened = {inode: where for inode, where in listening().items() if inode not in before}
    assert opened
    assert set(opened.values()) == {"0100007F"}  # 127.0.0.1, as the kernel prints it
    assert (address.host, address.scope) == ("127.0.0.1", "loopback")
    await quiet.aclose()
    assert listening() == before


async def test_an_unknown_interface_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"data_interface: 'wlan9' .* lo \(127\.0\.0\.1\)"):
        await transport(interface="wlan9").start(lambda _: None)


async def test_a_port_that_is_taken_is_named(both: Harness) -> None:
    assert both.address is not None
    second = transport(port=both.address.port)
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{both.address.port}"):
        await second.start(lambda _: None)
    await second.aclose()


@pytest.mark.parametrize("host_id", ["another", None])
async def test_a_worker_on_loopback_cannot_dial_out(both: Harness, host_id: str | None) -> None:
    assert both.address is not None
    raw = {field: getattr(both.address, field) for field in both.address.__struct_fields__}
    outside = {**raw, "host_id": host_id or both.address.host_id, "host": "192.0.2.1", "scope": "192.0.2.1"}
    with pytest.raises(ConfigError, match="this worker uses loopback only"):
        await both.source.dial(type(both.address)(**outside), LANES)


async def test_ucxx_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ucxx._lib.libucxx", None)
    with pytest.raises(ConfigError, match=r"transport: ucxx is not installed .*pip install 'kvstream-runtime\[cpu\]'"):
        await transport().start(lambda _: None)


# -- the fence


async def test_memory_without_a_fence_stays_in_quarantine(
    make: Make, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(lane, fence_timeout=0.01)
    pair = await harness.connect()
    connection = pair.source.connection
    assert isinstance(connection, UcxConnection)
    settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    with monkeypatch.context() as patch:
        patch.setattr(type(connection._endpoint), "when_settled", lambda _: settled)
        await connection.fence()
        await connection.fence()
    budget = harness.source.budget
    assert connection.quarantined == budget.quarantined == budget.used > 0
    settled.set_result(None)
    await connection.fence()
    assert connection.quarantined == 0
    await pair.destination.connection.fence()
    harness.assert_budgets_returned()


async def test_closing_the_worker_frees_what_is_in_quarantine(
    make: Make, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = await make(lane, fence_timeout=0.01)
    await harness.connect()
    # UCX never reports the close.
    monkeypatch.setattr(ucx._ucp.Ucp, "force_close", lambda *_: (ucx._ucp.IN_PROGRESS, 1))
    async with asyncio.timeout(20):
        await harness.aclose()
    harness.assert_budgets_returned()


async def test_shared_slots_are_not_recognised_after_the_sources_fence(make: Make) -> None:
    harness = await make("shared")
    pair = await harness.connect()
    generation = await move(pair, 0, pattern(0, 100))
    await pair.source.connection.fence()
    # The destination may be in the middle of a scatter, and hear of it only afterwards.
    assert not pair.destination.connection.check(0, generation)


async def test_a_slot_that_is_being_sent_is_not_written(make: Make) -> None:
    harness = await make("put")
    pair = await harness.connect()
    source = pair.source.connection
    source.write_view(0)
    publishing = source.publish(0, 1000)
    assert not publishing.done()
    for use in (source.write_view, lambda slot: source.publish(slot, 1)):
        with pytest.raises(RuntimeError, match="still being sent"):
            use(0)
    await publishing
    source.write_view(0)


async def test_a_slot_announced_while_it_is_read_is_refused(make: Make) -> None:
    harness = await make("get")
    pair = await harness.connect()
    generation = await move(pair, 0, pattern(0, 100))
    first = pair.destination.connection.take(0, generation, 100)
    second = pair.destination.connection.take(0, generation, 100)
    results = await asyncio.gather(first, second, return_exceptions=True)
    assert not isinstance(results[0], BaseException)
    assert isinstance(results[1], ProtocolError)


async def test_a_slot_overwritten_while_it_is_read_is_not_believed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    harness = await make("get")
    pair = await harness.connect()
    generation = await move(pair, 0, pattern(0, 1000))
    reads = 0

    def get(endpoint: Endpoint, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        def overwritten(status: int) -> None:
            nonlocal reads
            reads += 1
            if reads == 1:  # the header came with the old generation, the bytes may be of the next content
                pair.source.connection.write_view(0)
            done(status)

        original(endpoint, local, nbytes, remote, rkey, overwritten)

    original = Endpoint.get
    monkeypatch.setattr(Endpoint, "get", get)
    with pytest.raises(Corrupted):
        await pair.destination.connection.take(0, generation, 1000)
    assert not pair.destination.connection.check(0, generation)
    assert reads == 2


# -- what doctor asks


async def test_probe_reports_what_works_here() -> None:
    report = await asyncio.to_thread(probe_lanes)
    assert report.ucx_version.count(".") == 2
    assert "tcp" in report.transports
    assert report.cma == ""
    assert report.library.endswith(".so") or ".so." in report.library


async def test_nobody_listens(both: Harness) -> None:
    assert both.address is not None
    await both.destination.aclose()
    async with asyncio.timeout(20):
        with pytest.raises(PeerLost, match="can't be reached"):
            await both.source.dial(both.address, LANES)


async def test_options_of_a_module_that_is_not_here_are_left_out() -> None:
    """Those for CUDA, without a CUDA driver; any others are an error."""
    ucp = _ucp.load()
    loop = asyncio.get_running_loop()
    worker = UcpWorker(ucp, loop, {"NET_DEVICES": "lo"}, gpu_options={"NO_MODULE_KNOWS_THIS": "y"})
    try:
        worker.listen("127.0.0.1", 0)
    finally:
        worker.close()
    with pytest.raises(Exception, match="Invalid parameter"):
        UcpWorker(ucp, loop, {"NO_MODULE_KNOWS_THIS": "y"})
