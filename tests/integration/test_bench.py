"""`kvstream bench`: real processes as a user runs them, and both ends in this one for what has to be provoked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstream
from kvstream import ConfigError, KVPool, Refused, Runtime, UnknownWorker
from kvstream.cli.bench.measuring import Plan, measure
from kvstream.cli.bench.protocol import CONTROL_LAYOUT, Close, Open, Part, Ping, Probe, Shape, Verify, digest, encode
from kvstream.cli.bench.serving import BenchServer
from kvstream.discovery import EmbeddedServer, MemoryBroker, MemoryBrokerServer

ROOT = Path(kvstream.__file__).parents[1]
SECONDS = 30.0

Process = asyncio.subprocess.Process
Start = Callable[..., Awaitable[Process]]


# -- processes


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts `kvstream bench ARGS`, all on one NATS server; the processes are gone after the test."""
    processes: list[Process] = []
    async with EmbeddedServer() as server:

        async def start(*args: str) -> Process:
            command = (sys.executable, "-m", "kvstream", "bench", *args, "--nats", server.url)
            process = await asyncio.create_subprocess_exec(
                *command,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            processes.append(process)
            return process

        try:
            yield start
        finally:
            for process in processes:
                if process.returncode is None:
                    process.kill()
                await process.communicate()


async def line_of(process: Process) -> str:
    assert process.stdout is not None
    return (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()


async def ended(process: Process) -> tuple[int, str, str]:
    """Exit code, the rest of stdout, stderr."""
    out, err = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def in_the_middle(start: Start, to: str) -> Process:
    """A measurement that will take long, once it moves bytes."""
    process = await start("--to", to, "--bytes", "4M", "--block-bytes", "4K", "--rounds", "1000")
    while "1 stream" not in (line := await line_of(process)):
        assert line, await ended(process)
    return process


async def test_two_processes(start: Start) -> None:
    """A measurement that is ended in its middle leaves the server to the next; that one measures everything."""
    serving = await start("--serve", "bob", "--bytes", "8M", "--json")
    here = json.loads(await line_of(serving))
    assert here["name"] == "bob/0"
    assert here["pid"] == serving.pid

    unfinished = await in_the_middle(start, "bob")
    unfinished.send_signal(signal.SIGTERM)
    code, _, err = await ended(unfinished)
    assert (code, err) == (128 + signal.SIGTERM, "")

    measuring = await start("--to", "bob/0", "--bytes", "1M", "--block-bytes", "4K", "64KiB", "--rounds", "2", "--json")
    code, out, err = await ended(measuring)
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    link = report["link"]
    assert (link["to"], link["same_host"], link["lane"]) == ("bob/0", True, "shared")
    assert "tcp/lo" in link["transports"]
    assert 0 < link["first_byte_ms"]["median"] <= link["first_byte_ms"]["max"]
    assert 0 < link["round_trip_us"]["median"] <= link["round_trip_us"]["p99"]
    assert [(row["block_bytes"], row["nbytes"], row["rounds"]) for row in report["rows"]] == [
        (4 << 10, 1 << 20, 2),
        (64 << 10, 1 << 20, 2),
    ]
    assert all(row["gbps"] > 0 and row["concurrent_gbps"] > 0 for row in report["rows"])
    assert report["verified"] is True
    assert report["concurrent"] == 4

    serving.send_signal(signal.SIGINT)
    assert await ended(serving) == (0, "", "")


async def test_a_server_that_is_terminated_ends_cleanly_and_the_measurement_says_so(start: Start) -> None:
    serving = await start("--serve", "bob", "--bytes", "8M")
    assert "kvstream bench --to bob" in await line_of(serving)
    measuring = await in_the_middle(start, "bob")
    serving.send_signal(signal.SIGTERM)
    assert await ended(serving) == (0, "", "")
    code, _, err = await ended(measuring)
    assert code == 1, err
    assert err.startswith("kvstream: ")
    assert err.count("\n") == 1, err


async def test_an_unknown_worker(start: Start) -> None:
    code, out, err = await ended(await start("--to", "nobody"))
    assert (code, out) == (2, "")
    assert err.startswith("kvstream: to: 'nobody' is not registered")
    assert err.count("\n") == 1, err


# -- both ends in this process


@asynccontextmanager
async def serving(hub: MemoryBrokerServer, memory: int = 1 << 20) -> AsyncIterator[BenchServer]:
    """A server named bob."""
    async with MemoryBroker(hub) as broker:
        server = BenchServer("bob", broker, memory=memory)
        ready = asyncio.Event()
        task = asyncio.create_task(server.run(lambda _: ready.set()))
        try:
            await asyncio.wait_for(ready.wait(), SECONDS)
            yield server
        finally:
            task.cancel()
            await asyncio.wait({task})


@pytest.fixture
async def hub() -> AsyncIterator[MemoryBrokerServer]:
    hub = MemoryBrokerServer()
    async with serving(hub):
        yield hub


class Client:
    """A worker that sends requests."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._count = 0

    async def ask(self, request: Any, to: str = "bob", blocks: list[int] | None = None, tokens: int = 16) -> None:
        self._count += 1
        name = f"{self.runtime.name}-{self._count}"
        async with self.runtime.send(name, blocks=blocks or [0], tokens=tokens, to=to, metadata=request) as tx:
            for layer in range(self.runtime.pool.layout.layers):
                tx.layer_ready(layer)
            await tx.done()


async def client(stack: AsyncExitStack, hub: MemoryBrokerServer, name: str, pool: KVPool | None = None) -> Client:
    broker = await stack.enter_async_context(MemoryBroker(hub))
    pool = pool or KVPool.allocate(CONTROL_LAYOUT, blocks=1)
    return Client(await stack.enter_async_context(Runtime(name, pool=pool, broker=broker)))


def plan(**changes: Any) -> Plan:
    return Plan(**{"to": "bob", "shapes": [Shape.fit(4096, 1 << 18)], "rounds": 1, "pings": 5, **changes})


async def test_text_comes_as_it_is_measured(hub: MemoryBrokerServer) -> None:
    said: list[str] = []
    async with MemoryBroker(hub) as broker:
        report = await measure(plan(lane="put"), broker, said.append)
    assert report.link.lane == "put"
    assert not report.link.direct_reads
    assert [check.name for check in report.checks if check.name != "round trip"] == []  # put was asked for
    head, row = said
    assert "bob/0 on this host" in head
    assert "put" in head
    assert "4 KiB" in row


async def test_what_can_not_be_measured_to_is_said(hub: MemoryBrokerServer) -> None:
    async with AsyncExitStack() as stack:
        await client(stack, hub, "decode-0")
        broker = await stack.enter_async_context(MemoryBroker(hub))
        with pytest.raises(ConfigError, match=r"decode-0/0 \(no roles\).*kvstream bench --serve"):
            await measure(plan(to="decode-0"), broker, print)
        with pytest.raises(UnknownWorker, match="nobody"):
            await measure(plan(to="nobody"), broker, print)
        with pytest.raises(Refused, match=r"--bytes: 2097152 wanted, bob serves 1048576"):
            await measure(plan(shapes=[Shape.fit(4096, 2 << 20)]), broker, lambda _: None)


async def test_one_measurement_at_a_time_and_one_that_leaves_makes_room(hub: MemoryBrokerServer) -> None:
    shape = Shape.fit(4096, 1 << 18)
    async with AsyncExitStack() as stack:
        second = await client(stack, hub, "second")
        async with AsyncExitStack() as life_of_first:
            first = await client(life_of_first, hub, "first")
            await first.ask(encode(Open("0" * 8, shape)))
            await second.runtime.registry.wait_for(f"bob-{'0' * 8}", SECONDS)
            with pytest.raises(Refused, match="busy: first/0 measures"):
                await second.ask(encode(Open("1" * 8, shape)))
            with pytest.raises(Refused, match="second/0 has nothing open"):
                await second.ask(encode(Verify("0" * 16)))
            with pytest.raises(Refused, match="second/0 has nothing open"):
                await second.ask(encode(Close()))
            changes = aiter(await stack.enter_async_context(second.runtime.registry.watch()))
        async with asyncio.timeout(SECONDS):
            # It may have left before the watch was first asked, which then does not mention it.
            while second.runtime.registry.lookup(f"bob-{'0' * 8}/0") is not None:
                await anext(changes)
        await second.ask(encode(Open("1" * 8, shape)))


async def test_bytes_that_differ_are_found(hub: MemoryBrokerServer) -> None:
    shape = Shape.fit(4096, 1 << 18)
    table = shape.table(0)
    pool = shape.pool(np.random.default_rng(0).integers(0, 256, shape.nbytes, np.uint8))
    to, blocks = f"bob-{'0' * 8}", [int(block) for block in table]
    async with AsyncExitStack() as stack:
        control = await client(stack, hub, "control")
        data = await client(stack, hub, "data", pool)
        await control.ask(encode(Open("0" * 8, shape)))
        await data.runtime.registry.wait_for(to, SECONDS)
        whole = encode(Part(0, shape.blocks))
        await data.ask(whole, to, blocks, shape.tokens(shape.blocks))
        await control.ask(encode(Verify(digest(pool, table))))
        with pytest.raises(Refused, match="not those that were sent"):  # they have been set to zero
            await control.ask(encode(Verify(digest(pool, table))))
        half = shape.blocks // 2
        await data.ask(encode(Part(0, half)), to, blocks[:half], shape.tokens(half))
        with pytest.raises(Refused, match="not those that were sent"):
            await control.ask(encode(Verify(digest(pool, table))))
        with pytest.raises(Refused, match="where a part of"):
            await data.ask(encode(Part(1, shape.blocks)), to, blocks, shape.tokens(shape.blocks))
        with pytest.raises(Refused, match="where a part of"):
            await data.ask(encode(Probe()), to, blocks, shape.tokens(shape.blocks))
        await control.ask(encode(Close()))


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (None, "not a request of kvstream bench"),
        ({"type": "format"}, "not a request of kvstream bench"),
        ({"type": "open", "token": "../x", "shape": {"block_bytes": 64, "layers": 1, "blocks": 1}}, "not a request"),
        ({"type": "open", "token": "0" * 8, "shape": {"block_bytes": 65, "layers": 1, "blocks": 1}}, "not a request"),
        (encode(Part(0, 1)), "belongs to a worker that was opened"),
        (encode(Ping()), "pong"),
    ],
)
async def test_what_is_refused(hub: MemoryBrokerServer, request_: Any, reason: str) -> None:
    async with AsyncExitStack() as stack:
        one = await client(stack, hub, "one")
        with pytest.raises(Refused, match=reason):
            await one.ask(request_)
        await one.ask(encode(Probe()))


async def test_a_request_that_is_given_up_anywhere_leaves_the_server_whole(hub: MemoryBrokerServer) -> None:
    shape = Shape.fit(4096, 1 << 18)
    async with AsyncExitStack() as stack:
        one = await client(stack, hub, "one")
        await one.ask(encode(Probe()))
        for number, turns in enumerate((0, 3, 10, 30, 100, 300)):
            asking = asyncio.create_task(one.ask(encode(Open(f"{number:08}", shape))))
            for _ in range(turns):
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
        await one.ask(encode(Open("f" * 8, shape)))
        empty = shape.pool(np.zeros(shape.nbytes, np.uint8))
        await one.ask(encode(Verify(digest(empty, shape.table(0)))))
        names = {record.name for record in one.runtime.registry.workers()}
        assert {name for name in names if name.startswith("bob-")} == {f"bob-{'f' * 8}"}
        for _ in range(20):  # no request's block was lost
            await one.ask(encode(Probe()))
