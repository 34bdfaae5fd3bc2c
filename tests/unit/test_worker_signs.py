"""What a worker process says of itself to those who watch it: HTTP health, and systemd's notifications."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from kvstream import ConfigError
from kvstream.cli.worker import health
from kvstream.cli.worker.health import Readiness, health_server
from kvstream.cli.worker.notify import Notifier


@pytest.fixture
async def port() -> AsyncIterator[int]:
    async with health_server("127.0.0.1", 0, lambda: Readiness(False, "draining")) as port:
        yield port


async def ask(port: int, request: bytes) -> tuple[str, str]:
    """The status line and the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    async with asyncio.timeout(10):
        answer = (await reader.read()).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return head.partition("\r\n")[0], body


@pytest.mark.parametrize(
    ("request_line", "status", "body"),
    [
        ("GET /livez HTTP/1.1", "200 OK", "alive\n"),
        ("GET /readyz?verbose HTTP/1.1", "503 Service Unavailable", "draining\n"),
        ("HEAD /livez HTTP/1.0", "200 OK", ""),
        ("POST /livez HTTP/1.1", "405 Method Not Allowed", "use GET\n"),
        ("GET / HTTP/1.1", "404 Not Found", "there are /livez and /readyz\n"),
        ("nonsense", "404 Not Found", "there are /livez and /readyz\n"),
    ],
)
async def test_health_answers(port: int, request_line: str, status: str, body: str) -> None:
    answer = await ask(port, f"{request_line}\r\nHost: x\r\n\r\n".encode())
    assert answer == (f"HTTP/1.1 {status}", body)


async def test_a_request_that_is_too_long_or_never_ends_gets_no_answer(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises((ConnectionError, AssertionError)):
        async with asyncio.timeout(3):  # before its time would be over
            assert (await ask(port, b"GET /livez HTTP/1.1\r\n" + b"x" * 20000))[0]
    monkeypatch.setattr(health, "_SECONDS", 0.05)
    with pytest.raises((ConnectionError, AssertionError)):
        assert (await ask(port, b"GET /livez"))[0]
    assert (await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))[1] == "alive\n"


async def test_the_number_of_open_requests_is_bounded(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "_MAX_OPEN", 1)
    _, first = await asyncio.open_connection("127.0.0.1", port)
    with pytest.raises((ConnectionError, AssertionError)):
        for _ in range(100):  # until the first one has been taken note of
            assert (await ask(port, b"GET /livez HTTP/1.1\r\n\r\n"))[1]
    first.close()
    await first.wait_closed()


async def test_closing_ends_open_requests() -> None:
    async with health_server("127.0.0.1", 0, lambda: Readiness(True, "ready")) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await ask(port, b"GET /readyz HTTP/1.1\r\n\r\n")
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()
    await writer.wait_closed()


async def test_a_port_that_is_taken(port: int) -> None:
    with pytest.raises(ConfigError, match=f"health: can't listen on 127.0.0.1:{port}"):
        async with health_server("127.0.0.1", port, lambda: Readiness(True, "")):
            pass


# -- systemd


@pytest.fixture(params=["file", "abstract"])
def systemd(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """A socket as systemd's, and its address as systemd gives it."""
    name = str(tmp_path / "notify") if request.param == "file" else f"@kvstream-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind("\0" + name[1:] if name.startswith("@") else name)
        heard.settimeout(5)
        yield heard, name


async def test_systemd_is_told(systemd: tuple[socket.socket, str]) -> None:
    heard, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "40000", "WATCHDOG_PID": "7"}, 7)
    assert notifier._interval == 0.02, "half of what systemd waits"
    notifier.ready()
    assert heard.recv(100) == b"READY=1"
    for _ in range(3):
        assert await asyncio.to_thread(heard.recv, 100) == b"WATCHDOG=1"
    notifier.stopping()
    told = [heard.recv(100)]
    while told[-1] != b"STOPPING=1":
        told.append(heard.recv(100))
    notifier.close()


@pytest.mark.parametrize("watch", [{}, {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "8"}, {"WATCHDOG_USEC": "x"}])
async def test_no_signs_of_life_for_who_wants_none(systemd: tuple[socket.socket, str], watch: dict[str, str]) -> None:
    heard, name = systemd
    notifier = Notifier({"NOTIFY_SOCKET": name, **watch}, 7)
    notifier.ready()
    assert notifier._timer is None
    assert heard.recv(100) == b"READY=1"
    notifier.close()


@pytest.mark.parametrize("environ", [{}, {"NOTIFY_SOCKET": "/nowhere"}, {"NOTIFY_SOCKET": "/" + "x" * 300}])
async def test_nobody_listens(environ: dict[str, str]) -> None:
    notifier = Notifier(environ, 7)
    notifier.ready()
    notifier.stopping()
    notifier.close()
