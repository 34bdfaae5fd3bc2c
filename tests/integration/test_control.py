"""Control against a real NATS server and real workers: the commands, the example, the documentation, the schemas."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from kvstream import (
    BrokerUnavailable,
    ConfigError,
    ControlClient,
    KVPool,
    KVStreamError,
    PeerLost,
    Runtime,
    UnknownStream,
    UnknownWorker,
)
from kvstream.discovery import EmbeddedServer, NatsBroker, resolve_target
from kvstream.discovery.control import KINDS, OPERATIONS, StreamEnded, WorkerLeft
from tests.conftest import LAYOUT
from tests.timing import in_time, timed

ROOT = Path(__file__).parents[2]
SECONDS = 40.0


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        yield server


Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(server: EmbeddedServer, tmp_path: Path) -> Iterator[Start]:
    """Starts Python processes on that server; they are gone after the test."""
    kept = {k: v for k, v in os.environ.items() if "NATS" not in k and k != "PYTHONASYNCIODEBUG"}
    environ = kept | {"PYTHONPATH": str(ROOT), "KVSTREAM_NATS_URL": server.url, "COLUMNS": "80"}
    with ExitStack() as stack:

        def start(*args: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, *args],
                    env=environ,
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


async def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return await asyncio.to_thread(process.stdout.readline)


async def worker(start: Start, *args: str) -> subprocess.Popen[str]:
    process = start("-m", "tests.integration.control_worker", *args)
    assert await line_of(process) == "ready\n", process.communicate()[1]
    return process


async def output(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = await asyncio.to_thread(process.communicate, timeout=SECONDS)
    return process.returncode, out, err


async def command(start: Start, *args: str) -> tuple[int, str, str]:
    return await output(start("-m", "kvstream", *args))


async def until_streaming(control: ControlClient, name: str = "r-1") -> None:
    async with asyncio.timeout(SECONDS):
        while len([one for one in await control.streams(stream=name) if one.layers_done]) < 2:
            await asyncio.sleep(0.02)


async def test_the_commands_against_running_workers(server: EmbeddedServer, start: Start) -> None:
    await asyncio.gather(worker(start, "decode-0"), worker(start, "decode-1"))
    source = await worker(start, "prefill-0", "decode-0")
    events = start("-m", "kvstream", "events", "--json", "--worker", "decode-0", "--count", "3")
    async with await ControlClient.connect(server.url) as control:
        await until_streaming(control)
        code, out, _ = await command(start, "streams", "--json")
        assert code == 0
        streams = json.loads(out)["streams"]
        assert {(one["worker"], one["stream"], one["role"]) for one in streams} == {
            ("prefill-0/0", "r-1", "source"),
            ("decode-0/0", "r-1", "destination"),
        }
        code, out, _ = await command(start, "streams")
        assert out.splitlines()[0].split()[:3] == ["STREAM", "WORKER", "ROLE"]
        assert out.splitlines()[1].split()[:4] == ["r-1", "prefill-0/0", "source", "decode-0/0"]
        # The stream never ends by itself.
        code, out, err = await command(start, "drain", "decode-0", "--budget", "0.2", "--json")
        assert (code, err) == (5, "")
        assert {"finished": 0, "cancelled": 1}.items() <= json.loads(out).items()
        listed = json.loads((await command(start, "workers", "--json"))[1])["workers"]
        assert {one["name"]: one["state"] for one in listed}["decode-0"] == "draining"
        assert (await command(start, "drain", "decode-0"))[0] == 0
        assert (await command(start, "drain", "decode-0", "--undo"))[1] == "decode-0 takes streams again\n"
        assert (await control.info("decode-0")).state == "ready"
        told = [json.loads(line)["event"] for line in (await output(events))[1].splitlines()]
        assert told == ["draining", "stream-ended", "draining"]
        for args, words in (
            (("drain", "decode-9"), "kvstream: worker: 'decode-9' is not registered; known: decode-0/0"),
            (("reroute", "r-9", "--to", "decode-1"), "kvstream: stream: no worker that answers knows 'r-9'"),
        ):
            code, out, err = await command(start, *args)
            assert (code, out) == (2, ""), err
            assert err.startswith(words)
            assert err.count("\n") == 1
        source.send_signal(signal.SIGTERM)
        assert (await output(source))[0] == 0


async def test_a_stream_is_cancelled_by_the_command(server: EmbeddedServer, start: Start) -> None:
    await worker(start, "decode-0")
    await worker(start, "prefill-0", "decode-0")
    async with await ControlClient.connect(server.url) as control, control.events("stream-ended") as events:
        await until_streaming(control)
        assert await command(start, "cancel", "r-1") == (0, "cancelled r-1\n", "")
        async with asyncio.timeout(SECONDS):
            ends = [await anext(events) for _ in range(2)]
        assert {end.code for end in ends if isinstance(end, StreamEnded)} == {"cancelled"}
        assert {end.worker for end in ends} == {"prefill-0/0", "decode-0/0"}


async def test_a_worker_that_is_stopped_or_killed_is_told(server: EmbeddedServer, start: Start) -> None:
    stopped, killed = await asyncio.gather(worker(start, "decode-0"), worker(start, "decode-1"))
    async with await ControlClient.connect(server.url) as control, control.events("left", "suspect", "lost") as events:
        assert len(await control.workers()) == 2
        stopped.send_signal(signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            left = await anext(events)
        assert isinstance(left, WorkerLeft)
        assert (left.worker, left.drained) == ("decode-0/0", False)
        killed.kill()
        async with asyncio.timeout(SECONDS):
            kinds = [type(event).__struct_config__.tag for event in (await anext(events), await anext(events))]
        assert kinds == ["suspect", "lost"]


@timed
def test_workers_are_listed_soon_after_their_start(tmp_path: Path) -> None:
    """`kvstream server & worker & worker & kvstream workers`: from the start of everything to both being listed."""
    kept = {k: v for k, v in os.environ.items() if "NATS" not in k and k != "PYTHONASYNCIODEBUG"}
    runtime = tmp_path / f"run{random.random()}"
    runtime.mkdir(mode=0o700)
    environ = kept | {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)}
    began = time.monotonic()
    with ExitStack() as stack:
        for args in (("kvstream", "server"), *(("tests.integration.control_worker", name) for name in ("a", "b"))):
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-m", *args], env=environ, stdout=subprocess.DEVNULL)
            )
            stack.callback(process.kill)
        names: list[str] = []
        while names != ["a", "b"] and time.monotonic() < began + SECONDS:
            listing = subprocess.run(
                [sys.executable, "-m", "kvstream", "workers", "--json"], env=environ, capture_output=True, check=False
            )
            names = [one["name"] for one in json.loads(listing.stdout or b'{"workers": []}')["workers"]]
        assert names == ["a", "b"]
        # Three interpreters that import UCX and NumPy start on whatever CPUs there are.
        in_time(time.monotonic() - began, 12.0, "the listing of both workers")


async def test_the_orchestrator_example_empties_a_worker(server: EmbeddedServer, start: Start) -> None:
    await asyncio.gather(worker(start, "decode-0"), worker(start, "decode-1"))
    await worker(start, "prefill-0", "decode-0")
    async with await ControlClient.connect(server.url) as control:
        await until_streaming(control)
        example = str(ROOT / "examples" / "orchestrator.py")
        code, out, err = await output(start("-W", "error", example, "--retire", "decode-0", "--budget", "1"))
        assert (code, err) == (0, "")
        assert "decode-0/0 is empty after" in out
        assert re.search(r"^r-1: (stays on decode-0/0|from decode-0/0 to decode-1/0)", out, re.MULTILINE), out
        assert re.search(r"prefill-0/0: ready, .*; next request to decode-", out), out
        assert (await control.info("decode-0")).state == "draining"
        code, _, err = await output(start(example, "--retire", "decode-9"))
        assert code == 1
        assert err.startswith("orchestrator: worker: 'decode-9' is not registered")


# -- a runtime here, on a real server


@pytest.fixture
async def here(server: EmbeddedServer) -> AsyncIterator[tuple[Runtime, ControlClient, NatsBroker]]:
    async with AsyncExitStack() as stack:
        pool = KVPool.allocate(LAYOUT, blocks=16)
        runtime = await stack.enter_async_context(Runtime("w", roles={"decode"}, pool=pool, nats=server.url))
        control = await stack.enter_async_context(await ControlClient.connect(server.url))
        target = await resolve_target(server.url)
        broker = await stack.enter_async_context(await NatsBroker.connect(target, rng=random.Random(1)))
        yield runtime, control, broker


async def test_the_service_is_one_of_nats_services(here: tuple[Runtime, ControlClient, NatsBroker]) -> None:
    runtime, _, broker = here
    link = broker._require()
    for verb in ("PING", "INFO", "STATS"):
        for subject in (f"$SRV.{verb}", f"$SRV.{verb}.kvstream", f"$SRV.{verb}.kvstream.{runtime.incarnation}"):
            answer = json.loads(await broker.request(subject, b"", timeout=5))
            assert answer["type"] == f"io.nats.micro.v1.{verb.lower()}_response"
            assert (answer["name"], answer["id"]) == ("kvstream", runtime.incarnation)
            # As a client of such services reads it.
            read = {"PING": ServicePing, "INFO": ServiceInfo, "STATS": ServiceStats}[verb].from_dict(answer)
            assert read.metadata["worker"] == "w/0"
            assert re.fullmatch(r"\d+\.\d+\.\d+", answer["version"])
            if verb != "PING":
                assert [endpoint["name"] for endpoint in answer["endpoints"]] == [one.name for one in OPERATIONS]
    # A client in another language sees an error by the headers of the protocol.
    message = await link.request("kvstream.w.w.0.cancel", b'{"stream": "r"}', timeout=5)
    assert message.headers is not None
    assert message.headers["Nats-Service-Error-Code"] == "400"
    assert "'r' is not live" in message.headers["Nats-Service-Error"]
    assert message.headers["Kvstream-Error"] == "unknown_stream"


async def test_an_answer_that_is_too_large_is_an_error_and_no_silence(
    here: tuple[Runtime, ControlClient, NatsBroker],
) -> None:
    _, _, broker = here

    async def large(_subject: str, _data: bytes) -> bytes:
        return bytes(2 << 20)

    async with await broker.serve("kvstream.test", large):
        with pytest.raises(KVStreamError, match="its answer can't be sent: data: 2097152 bytes"):
            await broker.request("kvstream.test", b"", timeout=5)


async def test_control_is_back_after_the_server_was(
    server: EmbeddedServer, here: tuple[Runtime, ControlClient, NatsBroker]
) -> None:
    runtime, control, _ = here
    async with control.events("draining") as events:
        await server.kill()
        await server.start()
        async with asyncio.timeout(SECONDS):
            while True:
                # Connected again is one thing, that all subscriptions stand again another.
                try:
                    await control.drain("w", 0)
                    assert (await asyncio.wait_for(anext(events), 0.3)).worker == "w/0"
                except (BrokerUnavailable, PeerLost, UnknownWorker, TimeoutError):
                    await asyncio.sleep(0.05)
                    continue
                break
    assert runtime.state == "draining"
    with pytest.raises(UnknownStream):
        await control.cancel("r")


async def test_garbage_on_every_subject_harms_nothing(here: tuple[Runtime, ControlClient, NatsBroker]) -> None:
    runtime, control, broker = here
    link = broker._require()
    rng = random.Random(5)
    subjects = [f"kvstream.w.w.0.{one.name}" for one in OPERATIONS] + [f"kvstream.all.{one.name}" for one in OPERATIONS]
    subjects += ["kvstream.w.w.0.nonsense", "$SRV.NONSENSE", "$SRV.PING.kvstream", "kvstream.event.joined.w.0"]
    for subject in subjects:
        for data in (b"\xff\x00", b"[[[[", rng.randbytes(2000), b'{"nonsense": 1}'):
            # With nobody to answer to, and with somebody.
            await link.publish(subject, data)
            await link.publish(subject, data, reply=link.new_inbox())
    with pytest.raises(ConfigError):
        await broker.request("kvstream.w.w.0.drain", b"garbage", timeout=5)
    assert (await control.info("w")).state == runtime.state == "ready"
    assert (await control.stats("w")).malformed > 0


# -- the documentation


def tool(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schemas_are_those_of_the_types() -> None:
    wanted = tool("control_schemas").schemas()
    there = {path.name: path.read_text() for path in (ROOT / "docs" / "schemas").glob("*.json")}
    assert there == wanted, "run tools/control_schemas.py"
    for text in wanted.values():
        for name in re.findall(r'"#/\$defs/(\w+)"', text):
            assert name in json.loads(text)["$defs"]


def test_the_documentation_names_every_operation_and_event() -> None:
    text = (ROOT / "docs" / "control.md").read_text()
    for operation in OPERATIONS:
        assert f"| `{operation.name}` |" in text
        assert f"schemas/{operation.name}.json" in text
    for kind in KINDS:
        assert f"`{kind}`" in text
