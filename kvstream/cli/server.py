"""`kvstream server`: this user's NATS server, in the foreground, until SIGINT or SIGTERM.

Owns the command's life: one server a user, its address and credentials in the server file, nothing left behind at the
end. It must never show a credential.
"""

from __future__ import annotations

import argparse
import os
import socket

import msgspec

from kvstream.cli.loop import run_loop, until_signalled
from kvstream.discovery import shared_server
from kvstream.discovery.credentials import redact
from kvstream.discovery.server_file import server_file_path
from kvstream.errors import BrokerUnavailable, ConfigError

__all__ = ["add_arguments", "run"]


class _Running(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. `pid` is this process's, which ends the server; `file` holds the credentials."""

    url: str
    port: int
    pid: int
    file: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=0, metavar="N", help="port on 127.0.0.1 (default: any free one)")
    parser.add_argument("--json", action="store_true", help="print where it runs as one JSON object")


def run(args: argparse.Namespace) -> int:
    return run_loop(_serve(args.port, as_json=args.json))


async def _serve(port: int, *, as_json: bool) -> int:
    await until_signalled(_hold(port, as_json=as_json))
    return 0


async def _hold(port: int, *, as_json: bool) -> None:
    _check_port(port)
    async with shared_server(port) as server:
        here = _Running(url=redact(server.url), port=server.port, pid=os.getpid(), file=str(server_file_path()))
        if as_json:
            print(msgspec.json.encode(here).decode(), flush=True)
        else:
            print(f"NATS at {here.url} (pid {here.pid}); credentials in {here.file}", flush=True)
        await server.wait()
        raise BrokerUnavailable(f"nats-server ended by itself: {' '.join(server.log[-3:])}")


def _check_port(port: int) -> None:
    """Say what is wrong with the port before nats-server says it in thirty lines."""
    if not 0 <= port <= 65535:
        raise ConfigError("--port", f"{port} is no port; use 0 (any free one) to 65535")
    if not port:
        return
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ConfigError("--port", f"can't listen on 127.0.0.1:{port}: {error.strerror}; use another") from None
