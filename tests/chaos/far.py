"""A worker of tests.integration.worker that is started by a command, such as `ip netns exec`: it connects to its test.

python -m tests.chaos.far SOCKET NAME URL LANE INTERFACE CONFIG
"""

from __future__ import annotations

import sys
from multiprocessing.connection import Client, Connection
from typing import cast

import msgspec
import uvloop

from kvstream import RuntimeConfig
from tests.integration.worker import serve


def main(socket: str, name: str, url: str, lane: str, interface: str, config: str) -> None:
    with Client(socket, "AF_UNIX") as pipe:
        settings = msgspec.json.decode(config, type=RuntimeConfig)
        uvloop.run(serve(cast("Connection", pipe), name, url, lane, settings, interface))


if __name__ == "__main__":
    main(*sys.argv[1:])
