"""Liveness and readiness of a worker over HTTP: GET /livez and /readyz, for whoever restarts and routes.

It answers these two and nothing else, with one short text and a closed connection. Every request is bounded in size and
time, and so is the number of those that are open at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

from kvstream.errors import ConfigError

__all__ = ["Readiness", "health_server"]

_MAX_REQUEST = 8192
_MAX_OPEN = 64
_SECONDS = 5.0


class Readiness(NamedTuple):
    """Whether new work should come here, and why (not)."""

    ready: bool
    text: str


@contextlib.asynccontextmanager
async def health_server(host: str, port: int, readiness: Callable[[], Readiness]) -> AsyncGenerator[int]:
    """Serve on that port (0: any free one) while the context is open; gives the port. Raises ConfigError."""
    server = _Health(readiness)
    try:
        listener = await asyncio.start_server(server.serve, host, port, limit=_MAX_REQUEST)
    except OSError as error:
        raise ConfigError("health", f"can't listen on {host}:{port}: {error.strerror}; use another port") from None
    try:
        yield listener.sockets[0].getsockname()[1]
    finally:
        listener.close()
        await server.close()


class _Health:
    def __init__(self, readiness: Callable[[], Readiness]) -> None:
        self._readiness = readiness
        self._tasks: dict[asyncio.Task[None], None] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._tasks) >= _MAX_OPEN:
            writer.transport.abort()
            return
        self._tasks[task] = None
        try:
            async with asyncio.timeout(_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._answer(head))
                await writer.drain()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            # Whoever asks this way gets no answer.
            writer.transport.abort()
        finally:
            del self._tasks[task]
            writer.close()

    def _answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        if path not in (b"/livez", b"/readyz"):
            status, text = "404 Not Found", "there are /livez and /readyz"
        elif method not in (b"GET", b"HEAD"):
            status, text = "405 Method Not Allowed", "use GET"
        elif path == b"/livez":
            status, text = "200 OK", "alive"
        else:
            ready, text = self._readiness()
            status = "200 OK" if ready else "503 Service Unavailable"
        body = f"{text}\n".encode()
        lines = (
            f"HTTP/1.1 {status}",
            "Content-Type: text/plain; charset=utf-8",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "Connection: close",
        )
        return "\r\n".join((*lines, "", "")).encode() + (b"" if method == b"HEAD" else body)

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
