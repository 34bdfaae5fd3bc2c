"""What systemd is told of a worker: ready, stopping, alive. By the protocol of sd_notify(3), without its library.

It does nothing where no NOTIFY_SOCKET is set, and nothing that fails here ever reaches the worker: a service manager
that does not listen must not end it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

from kvstream.log import get_logger

__all__ = ["Notifier"]


class Notifier:
    """Created on the running loop. `environ` has what systemd sets: NOTIFY_SOCKET, and WATCHDOG_USEC if it watches."""

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._log = get_logger("notify")
        address = environ.get("NOTIFY_SOCKET", "")
        # "@" begins a name in the abstract namespace.
        self._address = "\0" + address[1:] if address.startswith("@") else address
        watched = environ.get("WATCHDOG_USEC", "")
        mine = environ.get("WATCHDOG_PID", str(pid)) == str(pid)
        self._interval = int(watched) / 2e6 if watched.isdigit() and mine and address else 0.0
        """Seconds between signs of life: half of what systemd waits for one."""
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """The worker is registered and serves. From now on the loop gives signs of life, if systemd wants them."""
        self._send("READY=1")
        self._alive()

    def stopping(self) -> None:
        self._send("STOPPING=1")

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _alive(self) -> None:
        if self._interval:
            self._send("WATCHDOG=1")
            self._timer = self._loop.call_later(self._interval, self._alive)

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK) as out:
                out.sendto(state.encode(), self._address)
        except OSError as error:
            self._log.warning("systemd not told", state=state, why=str(error))
