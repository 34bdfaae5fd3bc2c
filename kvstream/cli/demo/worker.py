"""A worker process of the demo: a runtime, an engine on its own thread, and a pipe to the coordinator.

It prefills or decodes as it is asked, and ends when its stdin closes, so that it never outlives the coordinator.
Nothing but messages goes to stdout, and the loop's thread never computes.
"""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvstream import KVPool, KVStreamError, Offer, ProtocolError, ReceiveStream, Refused, Runtime
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
from kvstream.cli.logs import configure_logging
from kvstream.cli.loop import run_loop

if TYPE_CHECKING:
    from examples.smollm.engine import Engine
    from examples.smollm.loading import Model

__all__ = ["main"]

T = TypeVar("T")

_PR_SET_PDEATHSIG: Final = 1

MAX_PROMPT: Final = 1024
"""Longest prompt in tokens; a longer one is cut. Those of the demo are shorter in SmolLM2's tokens, not in bytes."""

SEQUENCES: Final = 2
"""Sequences of the greatest length that the pool has room for."""

PROGRESS_INTERVAL: Final = 0.1
"""Least time between two messages that are only for the display, in seconds."""


class _Link:
    """The pipes to the coordinator: commands in, messages out."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._failure_told = False

    @classmethod
    async def open(cls) -> Self:
        """Take stdin and stdout over. What libraries print to stdout goes to stderr from here on."""
        loop = asyncio.get_running_loop()
        out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        reader = asyncio.StreamReader(limit=MAX_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        transport, protocol = await loop.connect_write_pipe(
            lambda: asyncio.StreamReaderProtocol(asyncio.StreamReader()), out
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
            pass  # The coordinator is gone. stdin says so as well, and that ends this process.

    async def fail(self, errors: BaseExceptionGroup[KVStreamError]) -> None:
        """Tell, once, why this process can't go on: the first error in groups of groups."""
        if self._failure_told:
            return
        self._failure_told = True
        error: KVStreamError | BaseExceptionGroup[KVStreamError] = errors
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        await self.send(Failed(f"{type(error).__name__}: {error}"))


class _Compute:
    """The engine's thread: one job at a time, and a flag that ends the running one within about a layer's time."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._stop = threading.Event()
        self.stopped: Callable[[], bool] = self._stop.is_set

    async def __call__(self, job: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, job)

    def stop(self) -> None:
        self._stop.set()

    async def close(self) -> None:
        self._stop.set()
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)


class _Worker:
    """Both roles: which one this process has is in its setup."""

    def __init__(
        self, setup: Setup, link: _Link, compute: _Compute, model: Model, engine: Engine, pool: KVPool
    ) -> None:
        self._setup = setup
        self._link = link
        self._compute = compute
        self._model = model
        self._engine = engine
        self._pool = pool
        self._runtime = Runtime(setup.name, roles={setup.role}, pool=pool, lanes=setup.lane)
        self._group = asyncio.TaskGroup()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving = False  # the group takes no more tasks, while the runtime still hands out offers
        self._rng = random.Random(setup.name)  # the same tables in each run, and others in each process

    async def serve(self) -> None:
        """Do what the coordinator asks until it closes the pipe. Raises an ExceptionGroup of what failed."""
        if self._setup.role == "decode":
            self._runtime.on_offer(self._take)
        async with self._runtime:
            try:
                async with self._group:
                    await self._obey()
            except* KVStreamError as errors:
                await self._link.fail(errors)  # now, since leaving may take a while
                raise

    async def _obey(self) -> None:
        try:
            await self._link.send(Ready(self._pool.layout.layers))
            while (command := await self._link.command()) is not None:
                if isinstance(command, Prefill):
                    self._start(self._prefill(command))
                elif isinstance(command, Baseline):
                    self._start(self._baseline(command))
        finally:
            self._leaving = True
        for task in self._tasks:
            task.cancel()
        self._compute.stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(self._run(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BaseException:
            self._leaving = True  # before the group knows, which shuts down for whatever this is
            raise

    # -- prefill

    async def _prefill(self, command: Prefill) -> None:
        engine, stopped = self._engine, self._compute.stopped
        tokens = await self._compute(lambda: self._encode(command.text))
        with self._blocks(len(tokens)) as blocks:
            async with self._runtime.send(
                command.stream, blocks=blocks, tokens=len(tokens), to=command.to, deadline=command.deadline
            ) as tx:

                def job() -> tuple[float, int, float]:
                    began = time.monotonic()
                    first = engine.prefill(tokens, blocks, on_layer=tx.layer_ready, stop=stopped)
                    return began, first, time.monotonic()

                began, first, ended = await self._compute(job)
                report = await tx.done(first)
            checksums = await self._compute(lambda: _checksums(self._pool, blocks))
        await self._link.send(
            Prefilled(
                stream=command.stream,
                tokens=len(tokens),
                destination=report.peer.partition("/")[0],
                lane=report.lane,
                bytes=report.bytes,
                began=began,
                ended=ended,
                ready=report.layer_times,
                checksums=checksums,
            )
        )

    async def _baseline(self, command: Baseline) -> None:
        engine, stopped, new_tokens = self._engine, self._compute.stopped, self._setup.new_tokens
        eos = self._model.tokenizer.eos
        tokens = await self._compute(lambda: self._encode(command.text))
        with self._blocks(len(tokens) + new_tokens) as blocks:

            def job() -> tuple[float, list[int]]:
                first = engine.prefill(tokens, blocks, stop=stopped)
                at = time.monotonic()
                return at, engine.generate(first, len(tokens), blocks, new_tokens, eos=eos, stop=stopped)

            first_token, answer = await self._compute(job)
        await self._link.send(Baselined(command.stream, first_token, tuple(answer)))

    def _encode(self, text: str) -> list[int]:
        return self._model.tokenizer.encode(example.prompt_text(self._model, text))[:MAX_PROMPT]

    # -- decode

    async def _take(self, offer: Offer) -> None:
        if self._leaving:
            offer.refuse("leaving")
            return
        layout = self._pool.layout
        try:
            blocks = self._acquire(offer.tokens + self._setup.new_tokens)
        except Refused as error:
            offer.refuse(str(error))
            return
        try:
            rx = offer.accept(blocks[: layout.blocks_for(offer.tokens)])
        except Refused:
            self._pool.release(blocks)
            return
        self._start(self._decode(rx, blocks))

    async def _decode(self, rx: ReceiveStream, blocks: list[int]) -> None:
        engine, tokenizer, pool = self._engine, self._model.tokenizer, self._pool
        try:
            async with rx:
                told = 0.0
                async for layer in rx:
                    if (now := time.monotonic()) - told >= PROGRESS_INTERVAL:
                        told = now
                        await self._link.send(Arrived(rx.stream, self._setup.name, layer + 1))
                report = await rx.done()
            first = rx.payload
            if not isinstance(first, int):
                raise ProtocolError(f"stream {rx.stream}: its payload is no token but {first!r}")
            first_token = time.monotonic()
            await self._link.send(FirstToken(rx.stream))
            # Before generating: the answer's KV goes on in the last block of the prompt.
            checksums = await self._compute(lambda: _checksums(pool, blocks[: pool.layout.blocks_for(rx.tokens)]))
            answer = await self._compute(
                lambda: engine.generate(
                    first,
                    rx.tokens,
                    blocks,
                    self._setup.new_tokens,
                    eos=tokenizer.eos,
                    stop=self._compute.stopped,
                )
            )
        finally:
            pool.release(blocks)
        await self._link.send(
            Decoded(
                stream=rx.stream,
                worker=self._setup.name,
                first_token=first_token,
                arrived=report.layer_times,
                checksums=checksums,
                answer=tuple(answer),
                text=tokenizer.decode(answer),
            )
        )

    # -- blocks

    @contextmanager
    def _blocks(self, tokens: int) -> Generator[list[int]]:
        blocks = self._acquire(tokens)
        try:
            yield blocks
        finally:
            self._pool.release(blocks)

    def _acquire(self, tokens: int) -> list[int]:
        """Room for so many tokens, in a shuffled table: in a pool that has been in use for a while none is in order."""
        blocks = self._pool.acquire(self._pool.layout.blocks_for(tokens))
        self._rng.shuffle(blocks)
        return blocks


def _checksums(pool: KVPool, blocks: Sequence[int]) -> tuple[str, ...]:
    """BLAKE2b of each layer's bytes of these blocks, in table order."""
    table: npt.NDArray[np.intp] = pool.check_blocks(blocks)
    scratch = np.empty(len(table) * pool.layout.block_bytes, np.uint8)

    def checksum(layer: int) -> str:
        pool.pack(layer, table, scratch)
        return hashlib.blake2b(scratch.data, digest_size=16).hexdigest()

    return tuple(checksum(layer) for layer in range(pool.layout.layers))


def _prepare(setup: Setup) -> tuple[Model, Engine, KVPool]:
    """Blocks, for seconds the first time that a machine loads the model."""
    model = example.load_model(setup.model)
    layout = model.layout(dtype=setup.dtype)
    pool = KVPool.allocate(layout, blocks=SEQUENCES * layout.blocks_for(MAX_PROMPT + setup.new_tokens))
    return model, example.make_engine(model, pool), pool


async def _main() -> int:
    async with AsyncExitStack() as stack:
        link = await _Link.open()
        setup = await link.command()
        if not isinstance(setup, Setup):
            return 0
        compute = _Compute()
        stack.push_async_callback(compute.close)
        status = 0
        try:
            model, engine, pool = await compute(lambda: _prepare(setup))
            await _Worker(setup, link, compute, model, engine, pool).serve()
        except* KVStreamError as errors:
            await link.fail(errors)
            status = 1
        return status


def main() -> int:
    """The process's entry. Its command line has the worker's name, for `ps`; everything else comes over stdin."""
    _die_with_parent()
    # Ctrl-C is the coordinator's. Who sends this process one by its pid wants it to end, without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    configure_logging("warning", "console")
    return run_loop(_main())


def _die_with_parent() -> None:
    """However the coordinator ends, and whatever this process computes at that moment, it does not outlive it. (The end
    of stdin says the same, but only a process that has time to listen hears it.)"""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main())
