"""A worker's connections to itself, before there are others: UCX chooses its protocols on them.

Owns what happens at a worker's start so that its first peer need not wait for it: UCX selects protocols when it sees a
configuration of an endpoint for the first time, which takes tens of milliseconds of both sides, and keeps them for the
worker's life. It must leave nothing behind, and never be what keeps a worker from starting.
"""

from __future__ import annotations

import asyncio

from kvstream.errors import PeerLost
from kvstream.transport import _ucp
from kvstream.transport._worker import Endpoint, UcpWorker

__all__ = ["converse"]

_MESSAGE = b"kvstream warms up"


async def converse(dialer: UcpWorker, listener: UcpWorker, host: str) -> None:
    """Connect `dialer` to `listener` (they may be one, and accept nobody yet), send a message each way, and close.
    `host` is the IPv4 address by which the listener is dialed.

    What UCX chooses for that is what a peer's connection uses: messages each way, and puts. Others that come in
    meanwhile are sent away. Raises PeerLost when it can't be done; the caller sets the deadline. Cancelled, it has
    closed what it opened, and the workers reach the final statuses by themselves.
    """
    connected: asyncio.Future[Endpoint] = dialer.loop.create_future()
    heard: asyncio.Future[Endpoint] = dialer.loop.create_future()
    answered: asyncio.Future[Endpoint] = dialer.loop.create_future()
    ends: list[Endpoint] = []

    def follow(endpoint: Endpoint, message: asyncio.Future[Endpoint]) -> None:
        ends.append(endpoint)
        endpoint.on_message = lambda found: _resolve(message, endpoint) if found == _MESSAGE else None

    def failed(reason: str) -> None:
        for future in (connected, heard, answered):
            if not future.done():
                future.set_exception(PeerLost(f"the worker can't connect to itself: {reason}"))
                future.exception()  # only one of them is awaited

    def ended(status: int) -> None:
        if status != _ucp.OK:
            failed(dialer.error(status))

    def flushed(status: int) -> None:
        ended(status)
        _resolve(connected, dialed)

    listener.on_endpoint = lambda endpoint: follow(endpoint, heard)
    try:
        dialed = dialer.connect(host, listener.port)
        dialed.on_failure = failed
        follow(dialed, answered)
        dialed.flush(flushed)
        await connected
        dialed.send(_MESSAGE, ended)
        (await heard).send(_MESSAGE, ended)
        await answered
    finally:
        listener.on_endpoint = None
        for end in ends:
            end.close()
    for end in ends:
        await end.when_settled()
    # UCX takes an endpoint's socket apart in the step after its close.
    await dialer.turn()
    if listener is not dialer:
        await listener.turn()


def _resolve(future: asyncio.Future[Endpoint], endpoint: Endpoint) -> None:
    if not future.done():
        future.set_result(endpoint)
