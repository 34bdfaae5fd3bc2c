"""A worker that starts is ready for its first peer: what UCX chooses is chosen, and nothing of that is left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
import sys
from collections.abc import AsyncIterator

import pytest
from transport_suite import Harness, move, pattern, turns

from kvstream.errors import PeerLost
from kvstream.transport import _ucp, ucx
from kvstream.transport._host import PeerMemory
from kvstream.transport._warmup import converse
from kvstream.transport._worker import UcpWorker
from kvstream.transport.base import LANES, Connection, Lane, StagingBudget
from kvstream.transport.ucx import UcxTransport


def transport(*lanes: Lane, **kwargs: object) -> UcxTransport:
    return UcxTransport(budget=StagingBudget(1 << 26), lanes=lanes or LANES, **kwargs)


def unexpected(_: Connection) -> None:
    raise AssertionError("nobody has dialed")


def selections(capture: pytest.CaptureFixture[str]) -> list[str]:
    """What UCX has selected protocols for since the last call: it says so on the C library's stdout."""
    ctypes.CDLL(None).fflush(None)
    return [line for line in capture.readouterr().out.splitlines() if "cfg#" in line]


@pytest.mark.parametrize(("lane", "allowed"), [("shared", LANES), ("put", LANES), ("put", ("put",)), ("get", ("get",))])
async def test_the_first_connection_finds_the_protocols_selected(
    lane: Lane, allowed: tuple[Lane, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    options = {"PROTO_INFO": "y"}
    harness = Harness(transport(*allowed, options=options), transport(*allowed, options=options), lane)
    try:
        await harness.start()
        assert len(selections(capfd)) > 10
        pair = await harness.connect()
        for end, other in ((pair.source, pair.destination), (pair.destination, pair.source)):
            end.connection.send(b"message")
            await other.until(lambda other=other: bool(other.messages))
        # A short list where this fails: UCX prints a table for each.
        assert selections(capfd) == []
        if lane != "get":  # what reads is selected with the first read: 0.3 ms
            await move(pair, 0, pattern(0, 1000))
            assert selections(capfd) == []
    finally:
        await harness.aclose()


_FIRST_CONNECTION = """
import asyncio, sys
from test_transport_warmup import transport
from transport_suite import Harness, move, pattern

async def main():
    harness = Harness(transport(), transport(), "shared")
    await harness.start()
    data, compiled = pattern(0, 1000), []
    sys.addaudithook(lambda event, arguments: compiled.append(arguments[0]) if event == "compile" else None)
    await move(await harness.connect(), 0, data)
    print(compiled)
    await harness.aclose()

asyncio.run(main())
"""


def test_the_first_connection_finds_the_decoders_made() -> None:
    """msgspec evaluates the annotations of a type that it decodes for the first time, which compiles each of them."""
    command = [sys.executable, "-c", _FIRST_CONNECTION]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=15, check=True)
    assert result.stdout.splitlines()[-1:] == ["[]"]


async def test_a_worker_that_may_not_read_by_address_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_memory: PeerMemory, _pid: int) -> None:
        raise PermissionError("no pidfd")

    monkeypatch.setattr(PeerMemory, "__init__", denied)
    started = transport()
    address = await started.start(unexpected)
    assert address.port
    await started.aclose()


@pytest.fixture
async def worker() -> AsyncIterator[UcpWorker]:
    ucp = await asyncio.to_thread(_ucp.load)
    worker = UcpWorker(ucp, asyncio.get_running_loop(), {"TLS": "tcp", "NET_DEVICES": "lo"})
    worker.listen("127.0.0.1", 0)
    yield worker
    worker.close()


def is_bare(worker: UcpWorker) -> bool:
    state = worker._state
    return worker.on_endpoint is None and not (state.endpoints or state.operations or state.requests or state.memories)


@pytest.mark.parametrize("lanes", [LANES, ("get",)])
async def test_a_start_leaves_no_connection_and_no_descriptor(
    lanes: tuple[Lane, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nothing(*_: object) -> None:
        return

    async def descriptors() -> int:
        started = transport(*lanes)
        await started.start(unexpected)
        await turns()
        count = len(os.listdir("/proc/self/fd"))
        for one in (started._tcp, started._reader):
            assert one is None or not (one._state.endpoints or one._state.operations)
        assert not started._connections
        await started.aclose()
        return count

    await descriptors()  # what the library takes once
    warm = await descriptors()
    monkeypatch.setattr(ucx, "converse", nothing)
    assert warm == await descriptors()


async def test_a_conversation_leaves_nothing(worker: UcpWorker) -> None:
    await converse(worker, worker, "127.0.0.1")
    assert is_bare(worker)


@pytest.mark.parametrize("step", range(0, 60, 3))
async def test_a_cancelled_conversation_leaves_nothing(worker: UcpWorker, step: int) -> None:
    task = asyncio.ensure_future(converse(worker, worker, "127.0.0.1"))
    await turns(step)
    task.cancel()
    await asyncio.wait([task])
    assert not worker._state.endpoints
    async with asyncio.timeout(10):
        while worker._state.operations:
            await worker.turn()
        await converse(worker, worker, "127.0.0.1")
    assert is_bare(worker)


async def test_a_conversation_with_nobody_fails(worker: UcpWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "port", 1)  # nobody listens there
    async with asyncio.timeout(10):
        with pytest.raises(PeerLost, match="can't connect to itself"):
            await converse(worker, worker, "127.0.0.1")
    assert is_bare(worker)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_worker_that_cannot_be_warmed_up_starts(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object) -> None:
        if hangs:
            await asyncio.get_running_loop().create_future()
        raise PeerLost("no")

    monkeypatch.setattr(ucx, "converse", fail)
    monkeypatch.setattr(ucx, "_WARM_UP_SECONDS", 0.01)
    harness = Harness(transport(), transport(), "put")
    try:
        await harness.start()
        await move(await harness.connect(), 0, pattern(0, 100))
    finally:
        await harness.aclose()


async def test_a_transport_closed_while_it_starts_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = asyncio.Event()

    async def note(dialer: UcpWorker, listener: UcpWorker, host: str) -> None:
        entered.set()
        await converse(dialer, listener, host)

    monkeypatch.setattr(ucx, "converse", note)
    starting = transport("get")
    task = asyncio.ensure_future(starting.start(unexpected))
    await entered.wait()
    await starting.aclose()
    with pytest.raises(PeerLost, match="closed"):
        await task


async def test_a_cancelled_start_can_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    loading = transport("get")
    await loading.start(unexpected)
    await loading.aclose()
    before = len(os.listdir("/proc/self/fd"))
    entered = asyncio.Event()

    async def note(dialer: UcpWorker, listener: UcpWorker, host: str) -> None:
        entered.set()
        await converse(dialer, listener, host)

    monkeypatch.setattr(ucx, "converse", note)
    starting = transport("get")
    task = asyncio.ensure_future(starting.start(unexpected))
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await starting.aclose()
    assert len(os.listdir("/proc/self/fd")) == before
