"""A worker process of the demo: a runtime, an engine on its own thread, and a pipe to the coordinator.

It prefills or decodes as it is asked, and ends when its stdin closes, so that it never outlives the coordinator. Nothing
but messages goes to stdout, and the loop's thread never computes.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import uvloop

from kvstream import KVPool, KVStreamError, Offer, ReceiveStream, Runtime
from kvstream.cli.demo import engine as example
from kvstream.cli.demo import messages
from kvstream.cli.demo.messages import (
    MAX_LINE,
    Arrived,
    Baseline,
    Baselined,
    Command,
    Decoded,
    Failed,
    FirstToken,
    Prefill,
    Prefilled,
    Ready,
    Setup,
    WorkerMessage,
)

if TYPE_CHECKING:
    from examples.smollm.engine import Engine
    from examples.smollm.loading import Model
    from kvstream.transport.base import Lane

__all__ = ["main"]

T = TypeVar("T")

MAX_PROMPT: Final = 1024
"""Longest prompt in tokens; a longer one is cut. SmolLM2's prompts of the demo are all shorter."""

SEQUENCES: Final = 2
"""Sequences that the pool has room for."""

PROGRESS_INTERVAL: Final = 0.1
"""Least time between two messages that are only for the display, in seconds."""


class _Link:
    """The pipe to the coordinator: commands in, messages out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls) -> _Link:
        """Take stdin and stdout. What libraries print to stdout goes to stderr from here on."""
        loop = asyncio.get_running_loop()
        out = os.dup(1)
        os.dup2(2, 1)
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), os.fdopen(out, "wb", buffering=0)
        )
        return cls(reader, asyncio.StreamWriter(transport, protocol, None, loop))

    async def command(self) -> Setup | Command | None:
        """The next one, or None when the coordinator has closed the pipe."""
        line = await self._reader.readline()
        return messages.decode_command(line) if line.endswith(b"\n") else None

    async def send(self, message: WorkerMessage) -> None:
        try:
            self._writer.write(messages.encode(message))
            await self._writer.drain()
        except ConnectionError:
            pass  # the coordinator is gone: stdin says so as well, and that ends this process


class _Worker:
    """What both roles have: model, pool, engine and its thread, runtime."""

    def __init__(
        self, setup: Setup, link: _Link, model: Model, engine: Engine, pool: KVPool, runtime: Runtime, compute: _Compute
    ) -> None:
        self._setup = setup
        self._link = link
        self._model = model
        self._engine = engine
        self._pool = pool
        self._runtime = runtime
        self._compute = compute
        self._tasks: asyncio.TaskGroup | None = None
        self._seed = random.Random(setup.name)

    async def serve(self) -> None:
        """Do what the coordinator asks, until it closes the pipe."""
        running: set[asyncio.Task[None]] = set()
        async with asyncio.TaskGroup() as tasks:

            def start(work: Any) -> None:
                task: asyncio.Task[None] = tasks.create_task(work)
                running.add(task)
                task.add_done_callback(running.discard)

            if self._setup.role == "decode":

                @self._runtime.on_offer
                async def _(offer: Offer) -> None:
                    start(self._decode(offer))

            await self._link.send(Ready(self._pool.layout.layers))
            while (command := await self._link.command()) is not None:
                if isinstance(command, Prefill):
                    start(self._reported(command.stream, self._prefill(command)))
                elif isinstance(command, Baseline):
                    start(self._baseline(command))
            self._compute.stop()
            for task in running:
                task.cancel()
