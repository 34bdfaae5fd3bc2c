"""The serving end of `kvstream bench`: a worker that takes what a measuring end sends, into memory of a fixed size.

One measurement at a time owns that memory; it loses it when its worker leaves the registry, so that one that was killed
is not in the way of the next. Nothing a measuring end asks for makes this process grow.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvstream.cli.bench.protocol import (
    CONTROL_LAYOUT,
    PONG,
    ROLE,
    Close,
    Open,
    Part,
    Ping,
    Probe,
    Request,
    Verify,
    allocate,
    decode,
    digest,
    encode,
)
from kvstream.discovery import Left
from kvstream.discovery.broker import Broker
from kvstream.errors import ConfigError, Corrupted, KVStreamError, ProtocolError, Refused
from kvstream.log import get_logger
from kvstream.memory import KVPool
from kvstream.runtime.runtime import Runtime
from kvstream.runtime.sessions import Offer
from kvstream.transport.base import ByteView, Lane

__all__ = ["BenchServer"]

_REQUESTS = 8
"""Requests that may be under way at a time."""
_TABLE_SEED = 1
_RETRY_AFTER = 1.0


@dataclass(slots=True)
class _Session:
    """The worker that one measurement has opened, and its memory."""

    owner: str
    runtime: Runtime
    memory: ByteView
    pool: KVPool
    table: npt.NDArray[np.int64]

    async def take(self, offer: Offer) -> None:
        """The handler of the opened worker's offers."""
        try:
            request = decode(offer.metadata)
            if not isinstance(request, Part) or request.first + request.count > len(self.table):
                raise ProtocolError(f"{request} where a part of {len(self.table)} blocks is due")
            offer.accept(blocks=self.table[request.first : request.first + request.count])
        except KVStreamError as error:
            _refuse(offer, error)

    def verify(self, expected: str) -> None:
        """Compare, and set to zero, so that the next comparison sees what was written since. On any thread."""
        found = digest(self.pool, self.table)
        self.memory[:] = 0
        if found != expected:
            raise Corrupted(f"the bytes that arrived are not those that were sent: XXH3 {found}, not {expected}")


class BenchServer:
    """`memory`: all that measurements may use, in bytes. `run` serves until it is cancelled."""

    def __init__(
        self,
        name: str,
        broker: Broker,
        *,
        memory: int,
        lane: Lane | None = None,
        data_interface: str | None = None,
    ) -> None:
        self._name = name
        self._broker = broker
        self._lane: Lane | None = lane
        self._data_interface = data_interface
        # Pages are taken when first used: a measurement of little takes little.
        self._memory: ByteView = allocate(memory)
        self._session: _Session | None = None
        self._turn = asyncio.Lock()
        self._free = list(range(_REQUESTS))
        self._log = get_logger("bench", worker=name)
        self._runtime = self._worker(name, KVPool.allocate(CONTROL_LAYOUT, blocks=_REQUESTS), {ROLE})
        self._runtime.on_offer(self._answer)

    def _worker(self, name: str, pool: KVPool, roles: set[str]) -> Runtime:
        return Runtime(
            name,
            pool=pool,
            roles=roles,
            lanes=self._lane or "auto",
            data_interface=self._data_interface,
            broker=self._broker,
        )

    async def run(self, ready: Callable[[Runtime], None]) -> None:
        """Serve until cancelled; `ready` is called once the worker is registered. Raises what entering a Runtime
        raises."""
        async with AsyncExitStack() as stack:
            # After the worker has closed, when no request can open another one.
            stack.push_async_callback(self._close)
            await stack.enter_async_context(self._runtime)
            ready(self._runtime)
            async with self._runtime.registry.watch() as changes:
                async for change in changes:
                    if isinstance(change, Left):
                        async with self._turn:
                            if self._session is not None and self._session.owner == change.record.id:
                                await self._close()

    # -- requests

    async def _answer(self, offer: Offer) -> None:
        try:
            request = decode(offer.metadata)
            if isinstance(request, Ping):
                offer.refuse(PONG)
                return
            async with self._turn:
                await self._perform(request, offer.peer)
            await self._take(offer)
        except KVStreamError as error:
            if not offer.answered:
                _refuse(offer, error)

    async def _perform(self, request: Request, peer: str) -> None:
        if isinstance(request, Open):
            await self._open(request, peer)
        elif isinstance(request, Verify):
            await _in_thread(partial(self._session_of(peer).verify, request.digest))
        elif isinstance(request, Close):
            self._session_of(peer)
            await self._close()
        elif not isinstance(request, Probe):
            raise ProtocolError(f"{encode(request)} belongs to a worker that was opened")

    async def _take(self, offer: Offer) -> None:
        """Say yes, by taking the stream's only block."""
        if not self._free:
            raise Refused(f"{_REQUESTS} requests are under way", retry_after=_RETRY_AFTER)
        block = self._free.pop()
        try:
            await offer.accept(blocks=[block]).done()
        finally:
            self._free.append(block)

    async def _open(self, request: Open, peer: str) -> None:
        session, shape = self._session, request.shape
        if session is not None and session.owner != peer:
            raise Refused(f"{self._name} is busy: {session.owner} measures", retry_after=_RETRY_AFTER)
        if shape.nbytes > self._memory.nbytes:
            raise ConfigError(
                "--bytes",
                f"{shape.nbytes} wanted, {self._name} serves {self._memory.nbytes}; give less, or start"
                " `kvstream bench --serve` with more",
            )
        await self._close()
        memory = self._memory[: shape.nbytes]
        await _in_thread(partial(memory.fill, 0))
        pool = shape.pool(memory)
        runtime = self._worker(f"{self._name}-{request.token}", pool, set())
        opened = _Session(peer, runtime, memory, pool, shape.table(_TABLE_SEED))
        runtime.on_offer(opened.take)
        await runtime.__aenter__()
        self._session = opened
        self._log.info("opened", owner=peer, block_bytes=shape.block_bytes, nbytes=shape.nbytes)

    async def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.runtime.aclose()
            self._log.info("closed", owner=session.owner)

    def _session_of(self, peer: str) -> _Session:
        if self._session is None or self._session.owner != peer:
            raise Refused(f"{peer} has nothing open at {self._name}")
        return self._session


async def _in_thread(call: Callable[[], None]) -> None:
    """Run it to its end, also when this is cancelled: nobody else may have the memory before that."""
    task = asyncio.ensure_future(asyncio.to_thread(call))
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait((task,))
        raise


def _refuse(offer: Offer, error: KVStreamError) -> None:
    retry_after = error.retry_after if isinstance(error, Refused) else None
    offer.refuse(str(error)[:1000], retry_after=retry_after)
