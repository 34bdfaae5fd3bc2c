"""What others put on the subjects that a worker listens to: counted and dropped, whatever it is; and what a worker may
not put there, because the server would end its connection for it."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from kvstream.discovery import Changed, EmbeddedServer, Joined, LeaseEvent, NatsBroker, Registry, Synced
from kvstream.discovery.credentials import NatsTarget
from kvstream.errors import ConfigError, KVStreamError, Refused
from tests.integration.test_registry_nats import record, works


class SmallServer(EmbeddedServer):
    """Takes messages of up to 4 KiB, headers included."""

    def _config(self, directory: Path) -> str:
        return super()._config(directory).replace("max_payload: 1MB", "max_payload: 4KB")


@asynccontextmanager
async def connected(server: EmbeddedServer) -> AsyncIterator[NatsBroker]:
    target = NatsTarget(urls=(server.url,), source="the test")
    # No probe: what ends a connection here is a defect.
    async with await NatsBroker.connect(target, rng=random.Random(1), probe=600.0) as broker:
        yield broker


class Rude:
    """A client that sends bytes as they are."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, server: EmbeddedServer) -> AsyncIterator[Rude]:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            login = {"user": server.user, "pass": server.password, "headers": True, "verbose": False}
            writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
            rude = cls(reader, writer)
            await rude.taken()
            yield rude
        finally:
            writer.transport.abort()

    def publish(self, subject: bytes, data: bytes, *, headers: bytes = b"", reply: bytes = b"") -> None:
        to = subject + (b" " + reply if reply else b"")
        if headers:
            self._writer.write(
                b"HPUB %s %d %d\r\n%s%s\r\n" % (to, len(headers), len(headers) + len(data), headers, data)
            )
        else:
            self._writer.write(b"PUB %s %d\r\n%s\r\n" % (to, len(data), data))

    async def taken(self) -> None:
        """Wait until the server has taken all that was sent. An -ERR of it fails the test."""
        self._writer.write(b"PING\r\n")
        async with asyncio.timeout(20):
            while (line := await self._reader.readline()).rstrip() != b"PONG":
                assert line.startswith(b"INFO "), line


def lines(**headers: str) -> bytes:
    """A header block."""
    return b"NATS/1.0\r\n" + b"".join(f"{k.replace('_', '-')}: {v}\r\n".encode() for k, v in headers.items()) + b"\r\n"


HEADERS = [
    b"\x00",
    b"NATS/1.0",
    b"NATS/1.0\r\n",
    b"NATS/1.0 \xff\xfe\xfd \xff\r\n\r\n",
    b"NATS/1.0 200 \xff\xfe\r\n\r\n",
    b"NATS/1.0\r\n" + b"\xff: \xff\r\n" * 20 + b"\r\n",
    b"NATS/1.0\r\n:\r\n\r\n\r\n:",
    b"x" * 300,
]
EVENTS = [
    lines(Nats_Subject="$KV.kvstream.w.a.0"),
    lines(Nats_Subject="$KV.kvstream.w.a.0", Nats_Sequence="-1"),
    lines(Nats_Subject="$KV.kvstream.w.a.0", Nats_Sequence="²"),
    lines(Nats_Subject="$KV.kvstream.w.a.0", Nats_Sequence="٣"),
    lines(Nats_Subject="$KV.kvstream.w.a.0", Nats_Sequence="9" * 30),
    lines(Nats_Subject="$KV.kvstream.w.a.0", Nats_Sequence="9" * 5000),
    lines(Nats_Subject="$KV.kvstream.", Nats_Sequence="5"),
    lines(Nats_Subject="$KV.kvstream.w..0", Nats_Sequence="5"),
    lines(Nats_Subject="$KV.kvstream.w.\ufffd.0", Nats_Sequence="5"),
    lines(Nats_Subject="$KV.other.w.a.0", Nats_Sequence="5"),
]


async def test_garbage_on_every_subject_is_counted_and_dropped(tmp_path: Path) -> None:
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server, connected(server) as broker:
        async with Registry(broker, rng=random.Random(1), ttl=600) as registry, registry.watch() as changes:
            await registry.register(record("a"))
            assert isinstance(await anext(changes), Joined)
            losses: list[bool] = []
            broker.on_connection(losses.append)
            link = broker._link
            assert link is not None
            ping = f"kvstream.w.a.0.ping.{record('a').incarnation}".encode()
            inbox = link._inbox.encode()
            async with Rude.connected(server) as rude:
                for subject in (b"kvstream.ev.w.a.0", b"kvstream.ev.x", b"kvstream.ev.\xff\xfe", ping, inbox + b".7"):
                    rude.publish(subject, b"")
                    rude.publish(subject, bytes(range(256)), reply=b"nobody")
                    for headers in HEADERS + EVENTS:
                        rude.publish(subject, b"garbage", headers=headers)
                        rude.publish(subject, b"garbage", headers=headers, reply=b"nobody.\xff")
                        rude.publish(subject, b"garbage", headers=headers, reply=b"nobody.*")
                await rude.taken()
            # What comes after it has come by the same way, so all of that has been seen by now.
            other = record("b", 2)
            async with connected(server) as second, Registry(second, rng=random.Random(2), ttl=600) as theirs:
                await theirs.register(other)
                async with asyncio.timeout(20):
                    assert await anext(changes) == Joined(other)
                assert (
                    await second.request(ping.decode(), b"\xff" * 1000, timeout=20) == record("a").incarnation.encode()
                )
            assert registry.registered and losses == [] and broker._link is link
            assert broker.garbage > 100
            # The table still takes what is true: no forged revision stands before it.
            before = registry.lookup("a")
            await registry.update(state="draining")
            async with asyncio.timeout(20):
                while not isinstance(change := await anext(changes), Changed):
                    pass
            assert change.old == before and change.record.state == "draining"
            await works(broker)


async def test_keys_of_others_in_the_table_hide_none_of_ours(tmp_path: Path) -> None:
    """More of them than fit into one page of the snapshot."""
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server, connected(server) as broker:
        async with Rude.connected(server) as rude:
            for number in range(1200):
                rude.publish(b"$KV.kvstream.not/a/key/%d" % number, b"")
            await rude.taken()
        await broker.put("w.x.0", b"ours", ttl=60, revision=0)
        async with asyncio.timeout(20), broker.watch() as events:
            event = await anext(events)
            assert isinstance(event, LeaseEvent) and event.value == b"ours"
            assert isinstance(await anext(events), Synced)
        assert broker.garbage >= 1200


async def test_a_probe_that_is_denied_is_no_busy_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    probes = 0
    async with EmbeddedServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server:
        target = NatsTarget(urls=(server.url,), source="the test")
        async with await NatsBroker.connect(target, rng=random.Random(1), probe=0.1) as broker:
            link = broker._link
            assert link is not None

            async def denied(*_arguments: object, **_options: object) -> None:
                nonlocal probes
                probes += 1
                raise ConfigError("nats", "denied")

            monkeypatch.setattr(link, "request", denied)
            await asyncio.sleep(0.5)
            assert 1 <= probes <= 6
            assert broker._link is link


async def test_a_payload_over_the_servers_limit_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    """A server ends the connection of whoever sends one. Its limit is on headers and data together."""
    async with SmallServer(environ={"XDG_RUNTIME_DIR": str(tmp_path)}) as server, connected(server) as broker:
        losses: list[bool] = []
        broker.on_connection(losses.append)

        async def answer(_subject: str, data: bytes) -> bytes:
            size = int(data)
            if size < 0:
                raise Refused("x" * -size, retry_after=1.0)
            return bytes(size)

        async with await broker.serve("kvstream.test", answer), broker.watch() as events:
            async with asyncio.timeout(20):
                assert isinstance(await anext(events), Synced)
            # Byte for byte: all that is not refused here, the server takes.
            revision, taken = 0, 0
            for size in range(3990, 4100):
                try:
                    revision = await broker.put("w.x.0", bytes(size), ttl=60, revision=revision)
                except ConfigError as error:
                    assert re.match(rf"data: {size} bytes, and \d+ of headers, for .* than the 4096 ", str(error))
                else:
                    taken = size
            assert 3990 < taken < 4096 - 50
            async with asyncio.timeout(20):
                while not (isinstance(event := await anext(events), LeaseEvent) and event.revision == revision):
                    pass
            assert event.value == bytes(taken)
            with pytest.raises(ConfigError, match=r"data: .*5000 bytes.*4096"):
                await broker.request("kvstream.test", bytes(5000), timeout=20)
            # An answer that is too large is the requester's to know, and so is an error with too long a text.
            assert await broker.request("kvstream.test", b"4096", timeout=20) == bytes(4096)
            with pytest.raises(KVStreamError, match="4097 bytes"):
                await broker.request("kvstream.test", b"4097", timeout=20)
            with pytest.raises(Refused, match="x" * 100) as caught:
                await broker.request("kvstream.test", b"-10000", timeout=20)
            assert caught.value.retry_after == 1.0
        assert losses == []
        with pytest.raises(ConfigError, match=r"data: .*bytes.*4096"):
            async with Registry(broker, rng=random.Random(1), ttl=60) as registry:
                await registry.register(
                    msgspec.structs.replace(record("a"), roles=tuple(f"{i:064}" for i in range(100)))
                )
