"""The registry and the NATS broker against what happens to real servers and connections."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import uvloop

from kvstream.discovery import (
    Changed,
    Conflict,
    DataAddress,
    EmbeddedServer,
    Joined,
    LeaseEvent,
    Left,
    Registry,
    Suspect,
    Synced,
    WorkerRecord,
    connect_broker,
    resolve_target,
    shared_server,
)
from kvstream.discovery.credentials import NatsTarget, refresh_target
from kvstream.discovery.nats import NatsBroker
from kvstream.discovery.server_file import process_start, read_server_file
from kvstream.errors import BrokerUnavailable, ConfigError, UnknownWorker
from tests.timing import Late, in_time, timed

TTL = 1.0


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}


@pytest.fixture
async def server(environ: dict[str, str]) -> AsyncIterator[EmbeddedServer]:
    async with EmbeddedServer(environ=environ) as running:
        yield running


async def connect(server: EmbeddedServer, *, url: str | None = None, **options: Any) -> NatsBroker:
    target = NatsTarget(urls=(url or server.url,), source="the test")
    return await NatsBroker.connect(target, rng=random.Random(1), **options)


def record(name: str, incarnation: int = 1) -> WorkerRecord:
    return WorkerRecord(
        name=name,
        incarnation=f"{incarnation:032x}",
        key="00",
        address=DataAddress(transport="inproc", host="127.0.0.1", port=1, host_id="h"),
        pid=os.getpid(),
        host="h",
        started=0.0,
    )


async def down_and_up(broker: NatsBroker, timeout: float = 30) -> None:
    """Wait until the broker has noticed a loss and is connected again."""
    async with asyncio.timeout(timeout):
        lost = asyncio.Event()
        remove = broker.on_connection(lambda up: None if up else lost.set())
        if broker.connected:
            await lost.wait()
        remove()
        await broker.wait_connected()


async def works(broker: NatsBroker, timeout: float = 20) -> None:
    """A full round: lease, watch, service."""
    async with asyncio.timeout(timeout), broker.watch() as events:
        with suppress(Conflict):
            await broker.put("t.works", os.urandom(4), ttl=60, revision=0)
        while not isinstance(await anext(events), Synced):
            pass

        async def echo(_subject: str, data: bytes) -> bytes:
            return data

        async with await broker.serve("kvstream.works", echo):
            assert await broker.request("kvstream.works", b"x", timeout=10) == b"x"


# -- connecting


@timed
async def test_wrong_credentials_are_a_clear_error_at_once(server: EmbeddedServer) -> None:
    """nats.py 352, 997: wrong credentials were retried in silence."""
    started = time.monotonic()
    with pytest.raises(ConfigError, match="refuses the credentials of the test") as caught:
        await connect(server, url=f"nats://kvstream:not-it@127.0.0.1:{server.port}")
    in_time(time.monotonic() - started, 2)
    assert "not-it" not in str(caught.value)
    with pytest.raises(ConfigError, match="refuses the credentials"):
        await connect(server, url=f"nats://127.0.0.1:{server.port}")


@timed
async def test_an_unreachable_server_is_a_clear_error_within_two_seconds(server: EmbeddedServer) -> None:
    port = server.port
    await server.kill()
    started = time.monotonic()
    with pytest.raises(
        BrokerUnavailable, match=rf"nats://127\.0\.0\.1:{port}.*can't be reached: .*[Cc]onnect"
    ) as caught:
        await connect(server)
    assert server.password not in str(caught.value)
    assert re.search("; check the address in the test and .*`kvstream server`", str(caught.value))
    # One that takes connections and says nothing.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with pytest.raises(BrokerUnavailable, match=r"no answer within 1\.5 s"):
            await connect(server, url=f"nats://127.0.0.1:{silent.getsockname()[1]}")
    in_time(time.monotonic() - started, 2)


async def test_tls_is_not_given_up_for_plaintext(server: EmbeddedServer) -> None:
    with pytest.raises(ConfigError, match="does not offer TLS"):
        await connect(server, url=server.url.replace("nats://", "tls://"))


class LimitedServer(EmbeddedServer):
    """One user may do everything, another little; with or without JetStream."""

    jetstream = True

    def _config(self, directory: Path) -> str:
        lines = [line for line in super()._config(directory).splitlines() if not line.startswith("authorization")]
        if not self.jetstream:
            lines = [line for line in lines if not line.startswith("jetstream")]
        allowed = (
            '"$JS.API.STREAM.INFO.KV_kvstream", "$JS.API.DIRECT.GET.KV_kvstream", "$JS.API.DIRECT.GET.KV_kvstream.>"'
        )
        lines.append(
            f'authorization {{ users: [ {{user: "kvstream", password: "{self.password}"}}, {{user: "limited", '
            f'password: "pw", permissions: {{publish: [{allowed}], subscribe: ["_INBOX.>", "kvstream.ev.>"]}}}} ] }}'
        )
        return "\n".join(lines)


async def test_a_denied_subject_is_an_error_that_says_so_and_not_a_timeout(environ: dict[str, str]) -> None:
    async with LimitedServer(environ=environ) as server, await connect(server):
        async with await connect(server, url=f"nats://limited:pw@127.0.0.1:{server.port}", timeout=60.0) as broker:
            async with asyncio.timeout(20):
                with pytest.raises(ConfigError, match="permissions violation for publish"):
                    await broker.put("w.Decode-0.0", b"", ttl=1, revision=0)
            # What it may do goes on.
            async with broker.watch() as events:
                assert isinstance(await anext(events), Synced)


async def test_a_server_without_jetstream_is_a_clear_error(environ: dict[str, str]) -> None:
    server = LimitedServer(environ=environ)
    server.jetstream = False
    async with server:
        with pytest.raises(ConfigError, match="JetStream is not enabled"):
            await connect(server)


# -- losing the connection


class Proxy:
    """A TCP proxy that can freeze its connections (they stay open and nothing moves) or cut them."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.connections = 0
        self._frozen: list[asyncio.Event] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Proxy]:
        listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = listener.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)
            for writer in self._writers:
                writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        flowing = asyncio.Event()
        flowing.set()
        self._frozen.append(flowing)
        self._writers += [writer, server_writer]
        for pair in ((reader, server_writer), (server_reader, writer)):
            task = asyncio.create_task(self._pump(*pair, flowing))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, flowing: asyncio.Event) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    def freeze(self) -> None:
        for flowing in self._frozen:
            flowing.clear()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()


@pytest.mark.parametrize("full", [False, True])
@timed
async def test_a_frozen_connection_is_replaced(server: EmbeddedServer, full: bool) -> None:
    """nats.py 671, PR 914: a peer frozen with full socket buffers blocked the reconnect for ever."""
    async with Proxy(server.port).running() as proxy:
        url = server.url.replace(str(server.port), str(proxy.port))
        async with await connect(server, url=url, probe=0.2, timeout=0.3) as broker, broker.watch() as events:
            assert isinstance(await anext(events), Synced)
            client: Any = broker._link._client  # type: ignore[union-attr]
            old = client._transport
            tasks = [client._reading_task, client._flusher_task, client._ping_interval_task]
            tasks += [subscription._wait_for_msgs_task for subscription in client._subs.values()]
            proxy.freeze()
            replaced = asyncio.ensure_future(down_and_up(broker))
            if full:
                puts = (broker.put(f"t.{i}", bytes(16384), ttl=60, revision=0) for i in range(1000))
                results = await asyncio.gather(*puts, return_exceptions=True)
                assert all(isinstance(result, BrokerUnavailable) for result in results)
            await replaced
            await works(broker)
            if proxy.connections > 2:
                raise Late("an answer: the next connection was replaced too")
            # The old socket is not left to a peer that takes nothing any more.
            assert old._io_writer.transport.get_extra_info("socket").fileno() == -1
            _, running = await asyncio.wait(tasks, timeout=20)
            assert not running, "nats-py's tasks are left behind"


async def test_dropped_news_are_made_good_at_once(server: EmbeddedServer) -> None:
    """nats-py drops what a busy subscriber does not take in time and only says so: the table is read again. dynamo PR
    7072: there the repair of a gap went round in circles; here it starts from what the snapshot says, once."""
    async with await connect(server) as publisher, await connect(server) as broker, broker.watch() as events:
        assert isinstance(await anext(events), Synced)
        revisions = [await publisher.put(f"t.{i}", b"old", ttl=60, revision=0) for i in range(100)]
        known = {}
        async with asyncio.timeout(20):
            while len(known) < 100:
                event = await anext(events)
                assert isinstance(event, LeaseEvent)
                known[event.key] = event.value
        client: Any = broker._link._client  # type: ignore[union-attr]
        (news,) = [one for one in client._subs.values() if one.subject == "kvstream.ev.>"]
        news._pending_queue._maxsize = 1
        puts = (publisher.put(f"t.{i}", b"new", ttl=60, revision=revisions[i]) for i in range(100))
        await asyncio.gather(*puts)
        synced = 0
        async with asyncio.timeout(20):  # before the next comparison would be due anyway
            while set(known.values()) != {b"new"}:
                event = await anext(events)
                if isinstance(event, Synced):
                    synced += 1
                else:
                    known[event.key] = event.value
            while not synced:
                assert isinstance(await anext(events), Synced)
                synced += 1
        assert synced <= 3
        news._pending_queue._maxsize = 0
        revision = await publisher.put("t.after", b"", ttl=60, revision=0)
        async with asyncio.timeout(20):
            while isinstance(event := await anext(events), Synced):
                pass
        assert event == LeaseEvent("t.after", b"", revision, "put")


async def test_an_answer_behind_many_messages_is_no_loss(
    server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is busy with news gets to the answer late; as long as anything comes, the server lives."""
    async with await connect(server, probe=0.05) as broker:
        link = broker._link
        assert link is not None
        unanswered = 0
        flowing = True

        async def answers(_subject: str, _timeout: float) -> bool:
            nonlocal unanswered
            if flowing:
                await link.request("t.nobody", b"", timeout=10)
            unanswered += 1
            return False

        monkeypatch.setattr(link, "answers", answers)
        async with asyncio.timeout(20):
            while unanswered < 5:
                await asyncio.sleep(0.01)
            assert broker._link is link
            replaced = asyncio.ensure_future(down_and_up(broker))
            flowing = False
            await replaced
        assert broker._link is not link


async def test_a_cut_connection_is_replaced_at_once(server: EmbeddedServer) -> None:
    async with Proxy(server.port).running() as proxy:
        # No probe finds it out.
        url = server.url.replace(str(server.port), str(proxy.port))
        async with await connect(server, url=url, probe=600.0) as broker:
            for _ in range(3):
                replaced = asyncio.ensure_future(down_and_up(broker, 20))
                await asyncio.sleep(0)
                proxy.cut()
                await replaced
                await works(broker)


async def test_a_connected_zombie_is_replaced_at_once(server: EmbeddedServer) -> None:
    """nats.py 671: the read loop had ended and the client went on as connected."""
    async with await connect(server, probe=600.0) as broker:
        replaced = asyncio.ensure_future(down_and_up(broker, 20))
        await asyncio.sleep(0)
        broker._link._client._reading_task.cancel()  # type: ignore[union-attr]
        await replaced
        await works(broker)


async def test_refused_credentials_on_a_reconnect_are_tried_again_and_told_once(
    server: EmbeddedServer, caplog: pytest.LogCaptureFixture
) -> None:
    tries: asyncio.Queue[None] = asyncio.Queue()

    async def refresh(target: NatsTarget) -> NatsTarget:
        tries.put_nowait(None)
        return target

    async with await connect(server, refresh=refresh) as broker:
        good = server.password
        server.password = "another"
        await server.restart()
        while not tries.empty():
            tries.get_nowait()
        async with asyncio.timeout(30):
            for _ in range(4):
                await tries.get()
        assert not broker.connected
        warnings = [entry.getMessage() for entry in caplog.records if entry.levelno == logging.WARNING]
        (told,) = [text for text in warnings if "refuses the credentials" in text]
        assert "; correct them" in told and good not in told
        server.password = good
        await server.restart()
        async with asyncio.timeout(30):
            await broker.wait_connected()
        await works(broker)


async def test_a_worker_returns_to_a_shared_server_that_restarts_elsewhere(environ: dict[str, str]) -> None:
    """The server file names another port and other credentials then."""

    async def join(stack: AsyncExitStack) -> Registry:
        target = await resolve_target(None, environ=environ, wait=0)
        refresh = partial(refresh_target, environ=environ)
        broker = await stack.enter_async_context(
            await NatsBroker.connect(target, rng=random.Random(1), refresh=refresh)
        )
        return await stack.enter_async_context(Registry(broker, rng=random.Random(2), ttl=TTL))

    async with AsyncExitStack() as stack:
        async with shared_server(environ=environ) as first:
            worker = await join(stack)
            await worker.register(record("w"))
            assert worker.connected
            lost = asyncio.Event()
            worker._broker.on_connection(lambda up: None if up else lost.set())
        async with asyncio.timeout(20):
            await lost.wait()
        assert not worker.connected
        async with shared_server(environ=environ) as second:
            assert (first.port, first.password) != (second.port, second.password)
            viewer = await join(stack)
            assert (await viewer.wait_for("w", 20)).id == "w/0"
            assert worker.connected
            await stack.aclose()


async def test_a_wait_without_a_broker_says_so(server: EmbeddedServer) -> None:
    async with await connect(server) as broker, Registry(broker, rng=random.Random(1)) as registry:
        with pytest.raises(UnknownWorker) as caught:
            await registry.wait_for("nobody", 0.01)
        assert "NATS" not in str(caught.value)
        lost = asyncio.Event()
        broker.on_connection(lambda up: None if up else lost.set())
        await server.kill()
        async with asyncio.timeout(20):
            await lost.wait()
        with pytest.raises(UnknownWorker, match="NATS can't be reached right now"):
            await registry.wait_for("nobody", 0.01)


@pytest.mark.parametrize("full", [False, True])
@timed
async def test_leaving_a_frozen_server_is_bounded(server: EmbeddedServer, full: bool) -> None:
    """A lease that can't be given back runs out by itself."""
    server.resume()
    broker = await connect(server)
    registry = Registry(broker, rng=random.Random(1))
    await registry.start()
    await registry.register(record("w"))
    server.pause()
    if full:
        puts = [asyncio.ensure_future(broker.put(f"t.{i}", bytes(16384), ttl=60, revision=0)) for i in range(2000)]
        await asyncio.sleep(0.1)
    left = time.monotonic()
    await registry.unregister()
    await registry.aclose()
    await broker.aclose()
    took = time.monotonic() - left
    if full:
        await asyncio.wait(puts)
        assert all(isinstance(put.exception(), BrokerUnavailable) for put in puts)
    in_time(took, 2)


@asynccontextmanager
async def fleet(server: EmbeddedServer, size: int, **options: Any) -> AsyncIterator[tuple[list[Registry], Registry]]:
    async with AsyncExitStack() as stack:
        registries: list[Registry] = []
        for i in range(size + 1):
            broker = await stack.enter_async_context(await connect(server, **options))
            registry = Registry(broker, rng=random.Random(i), ttl=TTL)
            registries.append(await stack.enter_async_context(registry))
        *workers, viewer = registries
        for i, registry in enumerate(workers):
            await registry.register(record(f"w{i}", i))
        for i in range(size):
            await viewer.wait_for(f"w{i}", 20)
        yield workers, viewer


@pytest.mark.parametrize("options", [{}, {"probe": 0.2, "timeout": 0.3}], ids=["unnoticed", "noticed"])
@timed
async def test_a_frozen_broker_loses_nobody(server: EmbeddedServer, options: dict[str, float]) -> None:
    """dynamo 3493, on a broker that is stopped for longer than the leases and then goes on."""
    async with fleet(server, 5, **options) as (workers, viewer), viewer.watch() as changes:
        for _ in range(5):
            assert isinstance(await anext(changes), Joined)
        server.pause()
        await asyncio.sleep(TTL * 1.8)
        assert len(viewer.workers()) == 5
        server.resume()
        seen: list[object] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(TTL * 1.8):
                async for change in changes:
                    seen.append(change)
        if not all(isinstance(change, Suspect | Changed) for change in seen):
            raise Late(f"an answer or a renewal: {seen}")
        assert len(viewer.workers()) == 5
        assert all(worker.registered for worker in workers)


@timed
async def test_a_freeze_that_ends_before_it_is_noticed_counts_as_a_break(server: EmbeddedServer) -> None:
    """Others may have noticed it, and may not be back yet."""
    async with await connect(server, probe=0.2, timeout=60.0) as broker:
        loop = asyncio.get_running_loop()
        losses: list[bool] = []
        broker.on_connection(losses.append)
        before = broker.steady_since
        for _ in range(3):
            heard = broker._link.heard  # type: ignore[union-attr]
            async with asyncio.timeout(20):
                while broker._link.heard == heard:  # type: ignore[union-attr]
                    await asyncio.sleep(0.01)
        quiet = broker.steady_since
        server.pause()
        await asyncio.sleep(0.6)
        server.resume()
        resumed = loop.time()
        async with asyncio.timeout(20):
            while broker.steady_since == quiet:
                await asyncio.sleep(0.01)
        assert resumed - 0.01 <= broker.steady_since <= loop.time()
        assert losses == []
        if quiet != before:
            raise Late("an answer: the silence was taken for a break")


async def test_file_storage_keeps_leases_over_a_restart(server: EmbeddedServer) -> None:
    async with await connect(server, storage="file") as broker, broker.watch() as events:
        assert isinstance(await anext(events), Synced)
        revision = await broker.put("w.x.0", b"kept", ttl=60, revision=0)
        assert await anext(events) == LeaseEvent("w.x.0", b"kept", revision, "put")
        replaced = asyncio.ensure_future(down_and_up(broker))
        await server.restart()
        await replaced
        async with asyncio.timeout(20):
            assert isinstance(await anext(events), Synced)
        assert await broker.put("w.x.0", b"kept", ttl=60, revision=revision) > revision


async def test_more_leases_than_one_request_may_ask_for(server: EmbeddedServer) -> None:
    async with await connect(server) as broker:
        for start in range(0, 1500, 100):
            await asyncio.gather(
                *(broker.put(f"t.{i}", b"%d" % i, ttl=60, revision=0) for i in range(start, start + 100))
            )
        async with asyncio.timeout(30), broker.watch() as events:
            seen = [await anext(events) for _ in range(1501)]
        assert isinstance(seen[-1], Synced)
        assert {event.value for event in seen[:-1] if isinstance(event, LeaseEvent)} == {b"%d" % i for i in range(1500)}


def test_under_uvloop(environ: dict[str, str]) -> None:
    async def main() -> None:
        async with EmbeddedServer(environ=environ) as server:
            async with fleet(server, 2) as (workers, viewer), viewer.watch() as changes:
                for _ in range(2):
                    assert isinstance(await anext(changes), Joined)
                await workers[0].unregister()
                assert isinstance(await anext(changes), Left)
                replaced = [asyncio.ensure_future(down_and_up(registry._broker)) for registry in (*workers, viewer)]  # type: ignore[arg-type]
                await server.restart()
                await asyncio.gather(*replaced)
                await works(viewer._broker)  # type: ignore[arg-type]
                assert viewer.lookup("w1") is not None

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# -- the embedded server


def alive(pid: int) -> bool:
    return process_start(pid) is not None


async def end_of(pid: int, timeout: float = 20) -> None:
    """Wait for the end of a process that need not be our child."""
    descriptor = os.pidfd_open(pid)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ended.set)
    try:
        async with asyncio.timeout(timeout):
            await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def test_files_are_private_and_secrets_are_on_no_command_line(
    server: EmbeddedServer, environ: dict[str, str], tmp_path: Path
) -> None:
    assert server.pid is not None
    assert server.password.encode() not in Path(f"/proc/{server.pid}/cmdline").read_bytes()
    assert server.password.encode() not in Path(f"/proc/{server.pid}/environ").read_bytes()
    assert server.password not in repr(server)
    (directory,) = (tmp_path / "kvstream").glob("nats-*")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE((directory / "nats.conf").stat().st_mode) == 0o600
    listening = subprocess.run(
        ["cat", f"/proc/{server.pid}/net/tcp"], capture_output=True, text=True, check=True
    ).stdout
    (line,) = [line for line in listening.splitlines() if f":{server.port:04X} 00000000:0000 0A" in line]
    assert "0100007F" in line, "it must listen on loopback only"


async def test_it_ends_with_its_context_and_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        async with EmbeddedServer(environ=environ) as server:
            pid = server.pid
            process = server._process
            server.pause()
            raise ZeroDivisionError
    assert process is not None and process.returncode != -signal.SIGKILL, "it must not take a SIGKILL"
    assert pid is not None and not alive(pid)
    assert list((tmp_path / "kvstream").iterdir()) == []


async def test_starting_can_be_cancelled(environ: dict[str, str], tmp_path: Path) -> None:
    for delay in (0, 0.005, 0.02, 0.03, 0.04):
        server = EmbeddedServer(environ=environ)
        task = asyncio.ensure_future(server.__aenter__())
        await asyncio.wait({task}, timeout=delay)
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            await server.__aexit__(None, None, None)
        assert server.pid is None
    assert list((tmp_path / "kvstream").iterdir()) == []


async def test_entering_a_server_twice_is_a_clear_error(
    server: EmbeddedServer, environ: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    pid = server.pid
    with pytest.raises(ConfigError, match=r"server: .*entered"):
        async with server:
            raise AssertionError
    assert server.pid == pid
    async with await connect(server):
        pass
    # Two at once: one gets it.
    other = EmbeddedServer(environ=environ)
    results = await asyncio.gather(other.__aenter__(), other.__aenter__(), return_exceptions=True)
    try:
        assert sorted(type(result).__name__ for result in results) == ["ConfigError", "EmbeddedServer"]
    finally:
        await other.__aexit__(None, None, None)
    # One after the other is fine.
    async with other, await connect(other):
        pass
    assert capfd.readouterr() == ("", "")


async def test_a_server_that_has_not_been_entered_has_no_url(environ: dict[str, str]) -> None:
    for server in (EmbeddedServer(environ=environ), EmbeddedServer(port=4222, environ=environ)):
        with pytest.raises(ConfigError, match=r"server: .*async with"):
            _ = server.url
        with pytest.raises(ConfigError, match=r"server: .*async with"):
            await server.start()
        with pytest.raises(ConfigError, match=r"server: .*async with"):
            await server.restart()
    async with EmbeddedServer(environ=environ) as server:
        await server.kill()
        assert f":{server.port}" in server.url, "it keeps its place while it is down"
    with pytest.raises(ConfigError, match=r"server: .*async with"):
        _ = server.url


@pytest.mark.parametrize("port", ["4222", None, 1.5, True, -1, 65536])
def test_a_port_that_is_none_is_a_clear_error(port: Any) -> None:
    with pytest.raises(ConfigError, match="port: "):
        EmbeddedServer(port=port)


async def test_a_port_that_is_taken_is_a_clear_error(server: EmbeddedServer, environ: dict[str, str]) -> None:
    with pytest.raises(BrokerUnavailable, match=r"did not start[\s\S]*address already in use"):
        async with EmbeddedServer(port=server.port, environ=environ):
            raise AssertionError


async def test_a_missing_binary_is_a_clear_error(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib import metadata

    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"kvstream-runtime\[server\]"):
        async with EmbeddedServer(environ=environ):
            raise AssertionError


async def test_the_shared_server_is_found_and_is_one(environ: dict[str, str], tmp_path: Path) -> None:
    async def start() -> str:
        try:
            async with shared_server(environ=environ) as server:
                started.set()
                await done.wait()
                return server.url
        except ConfigError as error:
            return str(error)

    started, done = asyncio.Event(), asyncio.Event()
    starts = [asyncio.ensure_future(start()) for _ in range(3)]
    # It is waited for.
    target = await resolve_target(None, environ=environ, wait=5)
    finished, running = await asyncio.wait(starts, timeout=0.5)
    assert len(finished) == 2 and all("a kvstream server of this user" in task.result() for task in finished)
    path = tmp_path / "kvstream" / "server.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    async with await NatsBroker.connect(target, rng=random.Random(1)) as broker:
        await works(broker)
    done.set()
    await asyncio.wait(running)
    assert read_server_file(environ) is None
    assert not path.exists()


async def test_connect_broker(environ: dict[str, str], server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSTREAM_NATS_URL", server.url)
    async with await connect_broker(rng=random.Random(1)) as broker:
        assert broker.connected
    async with await connect_broker(server.url, rng=random.Random(1)) as broker:
        assert broker.connected
    with pytest.raises(ConfigError, match="nats: "):
        await connect_broker(5, rng=random.Random(1))  # type: ignore[arg-type]


OWNER = """
import asyncio, sys
from kvstream.discovery import shared_server
async def main():
    async with shared_server() as server:
        print(server.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_owner_leaves_no_process_and_nothing_that_the_next_does_not_clean(
    environ: dict[str, str], tmp_path: Path
) -> None:
    """LMCache 4197: a killed process left files and shared memory behind."""
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", OWNER, stdout=asyncio.subprocess.PIPE, env={**os.environ, **environ}
    )
    try:
        assert owner.stdout is not None
        async with asyncio.timeout(20):
            pid = int(await owner.stdout.readline())
        assert alive(pid) and read_server_file(environ) is not None
        ended = asyncio.ensure_future(end_of(pid))
        await asyncio.sleep(0)
        owner.send_signal(signal.SIGKILL)
        await owner.wait()
        await ended
    finally:
        with suppress(ProcessLookupError):
            owner.kill()
        await owner.wait()
    assert read_server_file(environ) is None
    assert len(list((tmp_path / "kvstream").glob("nats-*"))) == 1
    async with shared_server(environ=environ):
        assert len(list((tmp_path / "kvstream").glob("nats-*"))) == 1
