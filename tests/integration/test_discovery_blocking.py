"""Discovery makes no blocking call on the event loop: start, register, restart of the broker, find, close."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path

from blockbuster import blockbuster_ctx

from kvstream.discovery import DataAddress, NatsBroker, Registry, WorkerRecord, resolve_target, shared_server
from kvstream.discovery.credentials import refresh_target


async def test_nothing_blocks_the_loop(tmp_path: Path) -> None:
    environ = {"XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path)}
    record = WorkerRecord(
        name="a",
        incarnation="0" * 32,
        key="00",
        address=DataAddress(transport="inproc", host="127.0.0.1", port=1, host_id="h"),
        pid=1,
        host="h",
        started=0.0,
    )
    async with shared_server(environ=environ) as server:
        # The server's own process is started and stopped outside: subprocess spawns block by nature.
        with blockbuster_ctx(scanned_modules=["kvstream"]):
            target = await resolve_target(None, environ=environ)
            refresh = partial(refresh_target, environ=environ)
            async with await NatsBroker.connect(target, rng=random.Random(1), refresh=refresh) as broker:
                async with Registry(broker, rng=random.Random(2), ttl=1.0) as registry:
                    await registry.register(record)
                    await registry.wait_for("a", 5)
                    lost = asyncio.Event()
                    broker.on_connection(lambda up: None if up else lost.set())
                    server.pause()
                    server.resume()
                    broker._link._client._reading_task.cancel()  # type: ignore[attr-defined]
                    async with asyncio.timeout(20):
                        await lost.wait()
                        await broker.wait_connected()
                    assert registry.lookup("a") == record
