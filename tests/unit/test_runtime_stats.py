"""What a runtime tells of itself, and the cap on memory that a peer's broken connections keep."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvstream import Refused, Runtime, RuntimeConfig
from kvstream.transport.inproc import InprocConnection
from tests.conftest import LAYOUT, Cluster

TOKENS = LAYOUT.block_tokens


async def pair(cluster: Cluster, config: RuntimeConfig | None = None) -> tuple[Runtime, Runtime]:
    source = await cluster.worker("prefill-0", roles=("prefill",), config=config)
    return source, await cluster.worker("decode-0", config=config)


async def test_stats_name_each_stream_and_what_it_waits_for(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    assert source.stats().streams == ()
    async with destination.receive("r", blocks=[1], tokens=TOKENS) as rx:
        assert [(state.stream, state.waits_for) for state in destination.stats().streams] == [("r", "offer")]
        async with source.send("r", blocks=[1], tokens=TOKENS, to="decode-0", share_class="gold") as tx:
            tx.layer_ready(0)
            assert await anext(aiter(rx)) == 0
            (state,) = source.stats().streams
            assert (state.stream, state.direction, state.peer) == ("r", "send", "decode-0/0")
            assert (state.waits_for, state.share_class) == ("engine", "gold")
            (peer,) = source.stats().peers
            assert (peer.peer, peer.direction, peer.streams, peer.slots) == ("decode-0/0", "send", 1, 4)
            stats = destination.stats()
            assert [(s.stream, s.direction, s.waits_for) for s in stats.streams] == [("r", "receive", "chunk")]
            assert stats.staging_limit >= stats.staging_used
            for layer in range(1, LAYOUT.layers):
                tx.layer_ready(layer)
            await tx.done()
        await rx.done()
    stats = destination.stats()
    assert (stats.streams, stats.ended) == ((), (("done", 1),))
    assert (stats.stalls, stats.protocol_errors, stats.offers_refused) == (0, 0, 0)


async def test_offers_that_nobody_answers_are_counted(cluster: Cluster) -> None:
    source, destination = await pair(cluster)
    async with source.send("r", blocks=[1], tokens=TOKENS, to="decode-0"):
        while not destination.stats().offers_waiting:
            await asyncio.sleep(0)
        assert destination.stats().tokens_waiting == TOKENS


async def test_a_stall_is_logged_with_the_peer_that_is_waited_for(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig(slots=4, slot_bytes=1024, beat_interval=0.01, stall_timeout=60.0, stall_warning=0.02)
    source, destination = await pair(cluster, config)
    told = asyncio.Event()

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "credit stall" in record.getMessage():
                told.set()

    logger, handler = logging.getLogger("kvstream.streams"), Told()
    logger.addHandler(handler)
    try:
        async with destination.receive("r", blocks=[1], tokens=TOKENS):
            async with source.send("r", blocks=[1], tokens=TOKENS, to="decode-0") as tx:
                while not tx.peer:
                    await asyncio.sleep(0)
                for connection in cluster.network.connections:
                    cluster.network.freeze(connection)
                tx.layer_ready(0)
                async with asyncio.timeout(10):
                    await told.wait()
                (peer,) = source.stats().peers
                assert peer.stalled > 0
                assert source.stats().stalls >= 1
                for connection in cluster.network.connections:
                    cluster.network.thaw(connection)
    finally:
        logger.removeHandler(handler)
    (record, *_) = [record for record in caplog.records if "credit stall" in record.getMessage()]
    assert "decode-0/0" in record.getMessage()


async def break_all(cluster: Cluster, *runtimes: Runtime) -> None:
    for connection in cluster.network.connections:
        cluster.network.break_link(connection)
    for runtime in runtimes:
        links = runtime._streams.links
        while links._links or links._fences:
            await asyncio.sleep(0)


@pytest.mark.parametrize("dialed", [True, False], ids=["source", "destination"])
async def test_a_peer_that_keeps_too_much_unfenced_memory_gets_nothing_new(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, dialed: bool
) -> None:
    """Either side refuses by what its own ends of the broken connections keep."""
    config = RuntimeConfig(slots=4, slot_bytes=1024, quarantine_limit=4096)
    source, destination = await pair(cluster, config)
    other = await cluster.worker("decode-1", config=config)

    async def stream(name: str, to: Runtime) -> None:
        async with to.receive(name, blocks=[1], tokens=TOKENS) as rx:
            async with source.send(name, blocks=[1], tokens=TOKENS, to=to.name) as tx:
                for layer in range(LAYOUT.layers):
                    tx.layer_ready(layer)
                await tx.done()
            await rx.done()

    held = 4096
    await stream("a", destination)
    with monkeypatch.context() as patch:
        patch.setattr(InprocConnection, "quarantined", property(lambda self: held if self.dialed is dialed else 0))
        await break_all(cluster, source, destination)
        (found,) = (source if dialed else destination).stats().quarantined
        assert (found.peer, found.bytes) == ("decode-0/0" if dialed else "prefill-0/0", 4096)
        await stream("b", destination)  # as much as may be
        held = 4097
        await break_all(cluster, source, destination)
        with pytest.raises(Refused, match="quarantine_limit") as caught:
            await stream("c", destination)
        assert caught.value.retry_after
        await stream("d", other)  # the others are not concerned
    await stream("e", destination)
    assert source.stats().quarantined == destination.stats().quarantined == ()
