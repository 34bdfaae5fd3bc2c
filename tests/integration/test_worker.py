"""`kvstream worker` as a user runs it: real processes, a real server, real transports, signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvstream
from kvstream import KVLayout, KVPool, KVStreamError, Missed, PeerLost, Refused, Runtime
from kvstream.discovery import EmbeddedServer

ROOT = Path(kvstream.__file__).parents[1]
SECONDS = 30.0
LAYOUT = KVLayout(layers=4, kv_heads=2, head_dim=64, block_tokens=16, dtype="bfloat16")
BLOCK = LAYOUT.layers * LAYOUT.block_bytes

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
async def server() -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer() as running:
        yield running


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts `kvstream worker --json ARGS` with a layout file; it is gone after the test."""
    lines = (f"{name} = {json.dumps(getattr(LAYOUT, name))}" for name in LAYOUT.__struct_fields__)
    (tmp_path / "layout.toml").write_text("\n".join(lines))
    kept = {name: value for name, value in os.environ.items() if "NATS_" not in name and "KVSTREAM" not in name}
    environ = {**kept, "PYTHONPATH": f"{ROOT}:{tmp_path}", "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    with ExitStack() as stack:

        def start(*args: str, **more: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "kvstream", "worker", "--json", "--layout", "layout.toml", *args],
                    env={**environ, **more},
                    cwd=tmp_path,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


async def ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What the worker says when it is ready."""
    assert process.stdout is not None
    line = await asyncio.to_thread(process.stdout.readline)
    if not line:
        assert process.stderr is not None
        pytest.fail(f"the worker ended: {process.stderr.read()}")
    return json.loads(line)


async def end(process: subprocess.Popen[str], *numbers: signal.Signals) -> tuple[int, str]:
    """Send signals; the exit code, and what was said on stderr."""
    for number in numbers:
        process.send_signal(number)
    _, err = await asyncio.to_thread(process.communicate, timeout=SECONDS)
    return process.returncode, err


def pool(blocks: int = 64, seed: int = 1) -> KVPool:
    made = KVPool.allocate(LAYOUT, blocks=blocks)
    for layer in range(LAYOUT.layers):
        view = made.layer(layer).view(np.uint8)
        view[...] = np.random.default_rng(seed + layer).integers(0, 256, view.shape, np.uint8)
    return made


async def put(source: Runtime, stream: str, blocks: list[int], *, to: str = "cache-0", **options: Any) -> None:
    async with source.send(stream, blocks=blocks, tokens=len(blocks) * 16, to=to, deadline=20.0, **options) as tx:
        for layer in range(LAYOUT.layers):
            tx.layer_ready(layer)
        await tx.done({"of": stream})


def same(one: KVPool, mine: list[int], other: KVPool, theirs: list[int]) -> bool:
    return all(
        one.layer(layer)[mine].tobytes() == other.layer(layer)[theirs].tobytes() for layer in range(LAYOUT.layers)
    )


async def http(port: int, path: str) -> str:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    return answer.split(" ")[1] + " " + answer.rpartition("\r\n")[2].strip()


@pytest.fixture
def heard() -> Iterator[socket.socket]:
    """A socket as systemd's, in the abstract namespace."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(f"\0kvstream-test-{os.getpid()}")
        listening.settimeout(5)
        yield listening


async def test_a_worker_holds_for_others(server: EmbeddedServer, start: Start, heard: socket.socket) -> None:
    """Exact bytes through another process, twice at the same time; a typed miss for what had to go; exit 0 at once."""
    systemd = heard.getsockname().decode().replace("\0", "@")
    process = start("--name", "cache-0", "--blocks", "12", "--health", "0", "--nats", server.url, NOTIFY_SOCKET=systemd)
    told = await ready(process)
    assert heard.recv(100) == b"READY=1"
    assert (told["name"], told["roles"], told["pid"]) == ("cache-0", ["cache"], process.pid)
    assert await http(told["health"], "/readyz") == "200 ready"
    assert await http(told["health"], "/livez") == "200 alive"
    source_pool, first_pool, second_pool = pool(), pool(seed=9), pool(seed=99)
    async with (
        Runtime("prefill-0", pool=source_pool, nats=server.url) as source,
        Runtime("decode-0", pool=first_pool, nats=server.url) as first,
        Runtime("decode-1", pool=second_pool, nats=server.url) as second,
    ):
        mine, theirs = [7, 2, 9, 30, 1], [3, 60, 4, 11, 5]
        await put(source, "a", mine)

        async def get(runtime: Runtime) -> object:
            async with runtime.fetch("a", blocks=theirs, source="cache-0", deadline=20.0) as rx:
                await rx.done()
            return rx.payload

        assert await asyncio.gather(get(first), get(second)) == [{"of": "a"}] * 2
        assert same(source_pool, mine, first_pool, theirs)
        assert same(source_pool, mine, second_pool, theirs)
        await put(source, "b", mine)
        await put(source, "c", mine)
        with pytest.raises(Missed, match="'a' is not held here: its hold has been evicted"):
            await first.fetch("a", blocks=theirs, source="cache-0")
        with pytest.raises(Refused, match="more than this holder keeps in all"):
            await put(source, "d", list(range(13)))
        began = time.monotonic()
        assert await end(process, signal.SIGTERM) == (0, "")
        assert time.monotonic() - began < 5
        assert heard.recv(100) == b"STOPPING=1"
        with pytest.raises(KVStreamError):
            await first.fetch("b", blocks=theirs, source="cache-0", deadline=2.0)


async def test_a_holder_within_its_budget_over_real_transports(server: EmbeddedServer, start: Start) -> None:
    process = start("--name", "cache-0", "--blocks", "32", "--option", f"budget={20 * BLOCK}", "--nats", server.url)
    await ready(process)
    source_pool, sizes = pool(), np.random.default_rng(3).integers(1, 9, 120)
    async with Runtime("prefill-0", pool=source_pool, nats=server.url) as source:
        for number, size in enumerate(sizes):
            await put(source, f"s{number}", list(range(size)))
            if number % 10 == 9:
                await source.fetch(f"s{number - 1}", blocks=list(range(63, 53, -1)), source="cache-0")
                last = int(sizes[number - 1])
                assert same(source_pool, list(range(last)), source_pool, list(range(63, 63 - last, -1)))
                record = source.registry.lookup("cache-0")
                assert record is not None
                assert record.load.free_blocks >= 12
    assert await end(process, signal.SIGTERM) == (0, "")


async def test_the_holder_is_killed_in_mid_fetch(server: EmbeddedServer, start: Start) -> None:
    """The asker hears of it at once; and a new life of that worker holds nothing, and says so."""
    process = start("--name", "cache-0", "--blocks", "64", "--nats", server.url)
    await ready(process)
    asker_pool = pool()
    async with Runtime("decode-0", pool=asker_pool, nats=server.url) as asker:
        await put(asker, "a", list(range(32)))
        move, moved = asker._streams.move, asyncio.Event()
        asker._streams.move = lambda command: moved.set()  # type: ignore[method-assign] - nothing comes of it
        fetch = asyncio.ensure_future(asker.fetch("a", blocks=list(range(32, 64)), source="cache-0"))
        async with asyncio.timeout(10):
            await moved.wait()
        process.kill()
        async with asyncio.timeout(5):
            with pytest.raises(PeerLost):
                await fetch
        asker._streams.move = move  # type: ignore[method-assign]
        assert not asker._streams._written.any()
        again = start("--name", "cache-0", "--blocks", "64", "--nats", server.url)
        await ready(again)
        with pytest.raises(Missed, match="never was"):
            await asker.fetch("a", blocks=list(range(32, 64)), source="cache-0", deadline=10.0)
        assert await end(again, signal.SIGTERM) == (0, "")


async def test_the_asker_is_killed_in_mid_fetch(server: EmbeddedServer, start: Start, tmp_path: Path) -> None:
    """The holder goes on, and what was being read can be evicted again."""
    _engines(tmp_path)
    source_pool = pool()
    async with Runtime("cache-0", pool=source_pool, nats=server.url) as holder:
        hold = holder.hold("a", blocks=list(range(32)), tokens=512)
        asker = start("--name", "asker", "--blocks", "64", "--engine", "engines:Asks", "--nats", server.url)
        await ready(asker)
        async with asyncio.timeout(10):
            while not hold.reads:
                await asyncio.sleep(0.001)
        asker.kill()
        async with asyncio.timeout(5):
            while hold.reads:
                await asyncio.sleep(0.001)
        hold.release()
        assert hold.over


async def test_signals_and_exit_codes(server: EmbeddedServer, start: Start, tmp_path: Path) -> None:
    """A name that is taken, a server that is not there, SIGINT, SIGKILL, and at once again under the same name."""
    first = start("--name", "a", "--blocks", "4", "--nats", server.url)
    told = await ready(first)
    code, err = await end(start("--name", "a", "--blocks", "4", "--nats", server.url))
    assert code == 3
    assert f"a/0 is held by another living worker: host {os.uname().nodename}, pid {first.pid}" in err
    code, err = await end(start("--name", "b", "--blocks", "4", "--nats", "nats://127.0.0.1:1"))
    assert (code, err.count("\n")) == (4, 1)
    code, err = await end(start("--name", "b", "--blocks", "4", "--nats", server.url, "--option", "bugdet=1"))
    assert code == 2
    assert "did you mean 'budget'?" in err
    assert await end(first, signal.SIGINT) == (0, "")
    second = start("--name", "a", "--blocks", "4", "--nats", server.url)
    assert (await ready(second))["incarnation"] != told["incarnation"]
    assert (await end(second, signal.SIGKILL))[0] == -signal.SIGKILL
    third = start("--name", "a", "--blocks", "4", "--nats", server.url)
    await ready(third)
    assert await end(third, signal.SIGTERM) == (0, "")


ENGINES = """
import asyncio, sys

class Stubborn:
    '''Takes longer to drain than it may.'''
    def __init__(self, seconds=60.0): self.seconds = seconds
    async def start(self, runtime): pass
    async def drain(self, budget):
        print("draining", flush=True)
        await asyncio.sleep(self.seconds)
    async def close(self): print("closed", file=sys.stderr, flush=True)

class Broken:
    async def start(self, runtime): raise ValueError("broken engine")
    async def close(self): print("closed", file=sys.stderr, flush=True)

class Slow:
    async def start(self, runtime):
        print("starting", flush=True)
        await asyncio.sleep(60)
    async def close(self): print("closed", file=sys.stderr, flush=True)

class Asks:
    '''Fetches, and never takes what comes.'''
    async def start(self, runtime):
        runtime._streams.move = lambda command: None
        self.task = asyncio.ensure_future(runtime.fetch("a", blocks=list(range(32)), source="cache-0"))
    async def close(self): self.task.cancel()
"""


def _engines(tmp_path: Path) -> None:
    (tmp_path / "engines.py").write_text(textwrap.dedent(ENGINES))


async def test_a_worker_that_is_told_to_stop_finishes_what_it_has(server: EmbeddedServer, start: Start) -> None:
    """dynamo 4917: drain waits for transfers. Nothing new comes in meanwhile."""
    process = start("--name", "cache-0", "--blocks", "4", "--nats", server.url, "--health", "0")
    told = await ready(process)
    async with Runtime("prefill-0", pool=pool(), nats=server.url) as source:
        async with source.send("a", blocks=[0], tokens=16, to="cache-0", deadline=20.0) as tx:
            tx.layer_ready(0)
            async with asyncio.timeout(10):
                while not tx.peer:
                    await asyncio.sleep(0.001)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(10):
                while await http(told["health"], "/readyz") != "503 draining":
                    await asyncio.sleep(0.01)
            with pytest.raises(Refused, match="draining"):
                await put(source, "b", [1])
            for layer in range(1, LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
    assert await end(process) == (0, "")


async def test_a_worker_that_leaves_a_stream_unfinished_says_so(server: EmbeddedServer, start: Start) -> None:
    process = start("--name", "cache-0", "--blocks", "4", "--nats", server.url, "--drain", "0.1")
    await ready(process)
    async with Runtime("prefill-0", pool=pool(), nats=server.url) as source:
        async with source.send("a", blocks=[0], tokens=16, to="cache-0") as tx:
            async with asyncio.timeout(10):
                while not tx.peer:
                    await asyncio.sleep(0.001)
            code, err = await end(process, signal.SIGTERM)
            with pytest.raises(KVStreamError):
                await tx._report()
    assert code == 5
    assert "left with work unfinished" in err


async def test_of_two_that_race_for_a_name_one_wins(server: EmbeddedServer, start: Start) -> None:
    both = [start("--name", "a", "--blocks", "4", "--nats", server.url) for _ in range(2)]
    waits = [asyncio.create_task(asyncio.to_thread(process.wait, SECONDS)) for process in both]
    (ended, *_), _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    assert ended.result() == 3
    (winner,) = (process for process in both if process.poll() is None)
    await ready(winner)
    assert await end(winner, signal.SIGTERM) == (0, "")
    await asyncio.wait(waits)


async def test_a_worker_stays_while_the_broker_is_away(server: EmbeddedServer, start: Start) -> None:
    process = start("--name", "a", "--blocks", "4", "--nats", server.url, "--health", "0")
    told = await ready(process)
    await server.kill()
    async with asyncio.timeout(10):
        while await http(told["health"], "/readyz") != "200 ready, though the broker can't be reached":
            await asyncio.sleep(0.05)
    await server.start()
    async with asyncio.timeout(20):
        while await http(told["health"], "/readyz") != "200 ready":
            await asyncio.sleep(0.05)
    assert (await end(process, signal.SIGTERM))[0] == 0


async def test_an_engine_drains_within_its_budget(server: EmbeddedServer, start: Start, tmp_path: Path) -> None:
    _engines(tmp_path)
    common = ("--name", "a", "--blocks", "4", "--nats", server.url, "--engine", "engines:Stubborn", "--health", "0")
    process = start(*common, "--option", "seconds=0.01")
    await ready(process)
    assert await end(process, signal.SIGTERM) == (0, "closed\n")

    process = start(*common, "--drain", "0.1")
    await ready(process)
    code, err = await end(process, signal.SIGTERM)
    assert code == 5
    assert "closed\n" in err
    assert "left with work unfinished" in err

    process = start(*common)
    told = await ready(process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "draining\n"
    assert await http(told["health"], "/readyz") == "503 draining"
    assert await http(told["health"], "/livez") == "200 alive"
    began = time.monotonic()
    assert await end(process, signal.SIGINT) == (5, "closed\n")
    assert time.monotonic() - began < 10


async def test_an_engine_that_fails_or_is_stopped_while_it_starts(
    server: EmbeddedServer, start: Start, tmp_path: Path
) -> None:
    _engines(tmp_path)
    code, err = await end(start("--name", "a", "--blocks", "4", "--nats", server.url, "--engine", "engines:Broken"))
    assert code == 1
    assert "ValueError: broken engine" in err
    assert "closed\n" in err
    process = start("--name", "a", "--blocks", "4", "--nats", server.url, "--engine", "engines:Slow")
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "starting\n"
    assert await end(process, signal.SIGTERM) == (0, "closed\n")


async def test_a_worker_that_is_fenced_ends(server: EmbeddedServer, start: Start) -> None:
    """It was stopped for so long that its name went to another one: it must not go on under it."""
    process = start("--name", "a", "--blocks", "4", "--nats", server.url, KVSTREAM_RUNTIME_LEASE_TTL="1")
    await ready(process)
    process.send_signal(signal.SIGSTOP)
    other = start("--name", "a", "--blocks", "4", "--nats", server.url, KVSTREAM_RUNTIME_LEASE_TTL="1")
    await ready(other)
    process.send_signal(signal.SIGCONT)
    code, err = await end(process)
    assert code == 3, err
    assert await end(other, signal.SIGTERM) == (0, "")
