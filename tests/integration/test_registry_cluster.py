"""The registry on a NATS cluster of three: the lease table has three copies, and losing one server, the leader or not,
loses no worker."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path

import pytest

from kvstream.discovery import EmbeddedServer, Joined, Left, NatsBroker, Registry
from kvstream.discovery.credentials import NatsTarget
from kvstream.discovery.nats import _Link
from kvstream.errors import BrokerUnavailable, ConfigError
from tests.integration.test_registry_nats import record

TTL = 3.0
ELECTION = 15.0
"""NATS elects a new leader after 4 to 9 s without a word of the old one."""


class Node(EmbeddedServer):
    """One server of a cluster. Servers of a cluster must know each other's ports, so those are chosen beforehand."""

    def __init__(self, number: int, ports: list[int], directory: Path) -> None:
        super().__init__(environ={"XDG_RUNTIME_DIR": str(directory)})
        self.name = f"n{number}"
        self.password = "cluster"
        self._ports = ports
        self._number = number

    def _config(self, directory: Path) -> str:
        lines = [line for line in super()._config(directory).splitlines() if not line.startswith("server_name")]
        others = [port for number, port in enumerate(self._ports) if number != self._number]
        routes = ", ".join(f'"nats-route://127.0.0.1:{port}"' for port in others)
        lines.append(f'server_name: "{self.name}"')
        lines.append(f'cluster {{ name: "test", listen: "127.0.0.1:{self._ports[self._number]}", routes: [{routes}] }}')
        return "\n".join(lines)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[list[Node]]:
    for _ in range(3):
        ports = free_ports(3)
        nodes = [Node(number, ports, directory) for number in range(3)]
        async with AsyncExitStack() as stack:
            started = await asyncio.gather(*map(stack.enter_async_context, nodes), return_exceptions=True)
            failed = [error for error in started if isinstance(error, BaseException)]
            if not failed:
                yield nodes
                return
        # Somebody else took one of the ports.
    raise failed[0]


async def connect(nodes: list[Node], *, timeout: float = 30.0) -> NatsBroker:
    """Connect as soon as the cluster can serve."""
    target = NatsTarget(urls=tuple(node.url for node in nodes), source="the test")
    async with asyncio.timeout(timeout):
        while True:
            try:
                return await NatsBroker.connect(target, rng=random.Random(1))
            except BrokerUnavailable:
                await asyncio.sleep(0.1)


async def leader_of(broker: NatsBroker, *, besides: str = "") -> tuple[str, int]:
    """The server that leads the lease table, and the number of copies."""
    async with asyncio.timeout(ELECTION + 15):
        while True:
            link = broker._link
            if link is not None:
                try:
                    reply = await link.request("$JS.API.STREAM.INFO.KV_kvstream", b"", timeout=1.0)
                except (TimeoutError, BrokerUnavailable):
                    continue
                info = json.loads(reply.data or b"{}")
                leader = info.get("cluster", {}).get("leader", "")
                if leader not in ("", besides):
                    return leader, info["config"]["num_replicas"]
            await asyncio.sleep(0.1)


async def seen_by_a_newcomer(nodes: list[Node]) -> list[str]:
    async with await connect(nodes) as broker, Registry(broker, rng=random.Random(9), ttl=TTL) as registry:
        return [worker.id for worker in registry.workers()]


@pytest.mark.timeout(180)
async def test_a_cluster_loses_its_leader_and_nobody_is_lost(tmp_path: Path) -> None:
    async with running(tmp_path) as nodes, AsyncExitStack() as stack:
        registries: list[Registry] = []
        for i in range(4):
            broker = await stack.enter_async_context(await connect(nodes))
            registries.append(await stack.enter_async_context(Registry(broker, rng=random.Random(i), ttl=TTL)))
        *workers, viewer = registries
        changes = await stack.enter_async_context(viewer.watch())
        for i, worker in enumerate(workers):
            await worker.register(record(f"w{i}", i))
            async with asyncio.timeout(20):
                assert isinstance(await anext(changes), Joined)
        broker = viewer._broker
        assert isinstance(broker, NatsBroker)

        leader, copies = await leader_of(broker)
        assert copies == 3
        (dead,) = [node for node in nodes if node.name == leader]
        await dead.kill()
        new, _ = await leader_of(broker, besides=leader)
        assert new != leader
        await _all_works(nodes, workers, viewer)

        await dead.start()
        others = [node for node in nodes if node.name not in (new, dead.name)]
        await others[0].kill()
        await _all_works(nodes, workers, viewer)

        left: list[object] = []

        async def follow() -> None:
            async for change in changes:
                if isinstance(change, Left):
                    left.append(change)

        task = asyncio.create_task(follow())
        await asyncio.sleep(TTL)
        task.cancel()
        await asyncio.wait({task})
        assert left == []
        assert [worker.id for worker in viewer.workers()] == ["w0/0", "w1/0", "w2/0"]


async def _all_works(nodes: list[Node], workers: list[Registry], viewer: Registry) -> None:
    """Each worker can change its record within an election and a lease, and newcomers find all."""
    async with asyncio.timeout(ELECTION + TTL + 20):
        for worker in workers:
            while True:
                try:
                    await worker.update(state="draining")
                    await worker.update(state="ready")
                    break
                except BrokerUnavailable:
                    pass
        while not all(record.state == "ready" for record in viewer.workers()):
            await asyncio.sleep(0.05)
        while await seen_by_a_newcomer(nodes) != ["w0/0", "w1/0", "w2/0"]:
            await asyncio.sleep(0.1)
    assert all(worker.registered for worker in workers)
    assert [worker.id for worker in viewer.workers()] == ["w0/0", "w1/0", "w2/0"]


async def test_a_snapshot_of_a_replica_that_is_behind_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A follower answers direct gets too, with what it has."""
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        target = NatsTarget(urls=(server.url,), source="the test")
        async with await NatsBroker.connect(target, rng=random.Random(1)) as broker:
            await broker.put("w.x.0", b"1", ttl=60, revision=0)
            last = await broker.last_revision(broker._link)  # type: ignore[arg-type]
            broker.replicated = True
            asked: list[int] = []

            async def ahead(_link: _Link) -> int:
                asked.append(last + 1 if len(asked) < 2 else last)
                return asked[-1]

            monkeypatch.setattr(broker, "last_revision", ahead)
            async with asyncio.timeout(20), broker.watch() as events:
                event = await anext(events)
            assert asked == [last + 1, last + 1, last]
            assert getattr(event, "value", None) == b"1"


async def test_more_copies_than_servers_is_a_clear_error(tmp_path: Path) -> None:
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        target = NatsTarget(urls=(server.url,), source="the test", replicas=3)
        with pytest.raises((BrokerUnavailable, ConfigError), match=r"3 copies .*KVSTREAM_NATS_REPLICAS"):
            await NatsBroker.connect(target, rng=random.Random(1))
