"""Two workers as on two hosts, in network namespaces of one machine, whose link goes down: when it is back, the stream
goes on where it was; when it stays down, at another worker. Needs root, for `ip netns`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path

import msgspec
import pytest

from kvstream import KVPool, Runtime, RuntimeConfig
from kvstream.discovery import EmbeddedServer
from tests.chaos.test_reroute import accepted, fill, prefill, said
from tests.integration.worker import BLOCKS, LAYOUT, Worker

TOKENS = 2000
CONFIG = RuntimeConfig(stall_timeout=1.0, reroute_timeout=0.5, resume_timeout=15.0, connect_timeout=1.0)
DOWN = 3.0


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def possible() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    name = f"kvs{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True).returncode == 0
    if made:
        ip("netns", "del", name)
    return made


pytestmark = [pytest.mark.chaos, pytest.mark.skipif(not possible(), reason="needs root and `ip netns`")]


@dataclass
class Far:
    """The other host: a namespace at the end of a cable, and the addresses at both ends."""

    space: str
    here: str
    there: str

    def link(self, state: str) -> None:
        ip("netns", "exec", self.space, "ip", "link", "set", "far", state)


@pytest.fixture
def far() -> Iterator[Far]:
    space = cable = f"kvs{os.getpid()}"
    net = f"10.213.{os.getpid() % 250}"
    far = Far(space, f"{net}.1", f"{net}.2")
    ip("netns", "add", space)
    try:
        ip("link", "add", cable, "type", "veth", "peer", "name", "far", "netns", space)
        ip("addr", "add", f"{far.here}/24", "dev", cable)
        ip("link", "set", cable, "up")
        ip("netns", "exec", space, "ip", "addr", "add", f"{far.there}/24", "dev", "far")
        for device in ("lo", "far"):
            ip("netns", "exec", space, "ip", "link", "set", device, "up")
        yield far
    finally:
        ip("netns", "del", space)


@contextlib.asynccontextmanager
async def worker(folder: Path, name: str, url: str, address: str, *inside: str) -> AsyncIterator[Worker]:
    socket = str(folder / name)
    config = msgspec.json.encode(CONFIG).decode()
    with Listener(socket, "AF_UNIX") as listener:
        command = [*inside, sys.executable, "-m", "tests.chaos.far", socket, name, url, "put", address, config]
        process = await asyncio.create_subprocess_exec(*command)
        pipe = await asyncio.to_thread(listener.accept)
    try:
        with pipe:
            it = Worker(None, pipe)
            assert await it.answer() == "ready"
            yield it
            it.tell("quit")
            async with asyncio.timeout(10):
                await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.fixture
async def server(far: Far, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[EmbeddedServer]:
    monkeypatch.setenv("KVSTREAM_NATS_ALLOW_PLAINTEXT", "1")
    async with EmbeddedServer(host=far.here) as running:
        yield running


@pytest.mark.timeout(60)
async def test_a_stream_goes_on_when_the_link_is_back(far: Far, server: EmbeddedServer, tmp_path: Path) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
    fill(pool, blocks, random.Random(7))
    inside = "ip", "netns", "exec", far.space
    async with (
        Runtime("prefill-0", pool=pool, nats=server.url, lanes="put", config=CONFIG, data_interface=far.here) as source,
        worker(tmp_path, "decode-0", server.url, far.there, *inside) as other,
    ):
        async with source.send("r", blocks=blocks, tokens=TOKENS, to="decode-0") as tx:
            for layer in range(3):
                tx.layer_ready(layer)
            await accepted(tx)
            async with asyncio.timeout(10):
                while source.stats().streams[0].chunks_confirmed == 0 or source.stats().peers[0].slots_used:
                    await asyncio.sleep(0.01)
            far.link("down")
            try:
                running = asyncio.create_task(prefill(tx, pool, blocks, 0.01))
                await asyncio.sleep(DOWN)
                assert not running.done()
            finally:
                far.link("up")
            report = await running
        await said(other, ended={"done": 1})
    lost, last = report.epochs
    print(
        f"link down for {DOWN} s; went on {last.began - report.opened:.2f} s after it was opened, {last.resent} again"
    )
    assert (lost.peer, last.peer) == ("decode-0/0", "decode-0/0")
    # Three layers were in place. What was announced into the dead link is sent again, and nothing else.
    assert last.resent <= LAYOUT.layers - 3


@pytest.mark.timeout(60)
async def test_a_stream_goes_elsewhere_when_the_link_stays_down(
    far: Far, server: EmbeddedServer, tmp_path: Path
) -> None:
    pool = KVPool.allocate(LAYOUT, blocks=BLOCKS)
    blocks = pool.acquire(LAYOUT.blocks_for(TOKENS))
    fill(pool, blocks, random.Random(8))
    inside = "ip", "netns", "exec", far.space
    async with (
        Runtime("prefill-0", pool=pool, nats=server.url, lanes="put", config=CONFIG, data_interface=far.here) as source,
        worker(tmp_path, "decode-0", server.url, far.there, *inside),
        worker(tmp_path, "decode-1", server.url, far.here) as near,
    ):
        async with source.send("r", blocks=blocks, tokens=TOKENS, to=["decode-0", "decode-1"]) as tx:
            tx.layer_ready(0)
            await accepted(tx)
            far.link("down")
            try:
                report = await prefill(tx, pool, blocks, 0.01)
            finally:
                far.link("up")
        await said(near, ended={"done": 1})
    assert [epoch.peer for epoch in report.epochs] == ["decode-0/0", "decode-1/0"]
