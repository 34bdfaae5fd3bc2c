"""Which lanes really work between two processes of this host: by moving bytes over each of them and comparing.

Owns the processes of that and what they say to each other. UCX runs in these only, so that whatever it does (abort
included) is a finding and never the end of the caller. The two ends are siblings, because Yama lets a process read its
own descendants and a worker's peers are none. It must never wait without a bound or leave a process behind.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import IO, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvstream.cli.logs import configure_logging
from kvstream.cli.loop import run_loop
from kvstream.errors import Corrupted, KVStreamError, PeerLost
from kvstream.transport.base import LANES, ByteView, Connection, Lane, Lent, ListenAddress, StagingBudget
from kvstream.transport.ucx import LaneReport, UcxTransport, probe_lanes

__all__ = ["LaneResult", "ProbeFailed", "TransferReport", "probe_library", "probe_transfers"]

CHUNKS = 8
CHUNK_BYTES = 1 << 20
ROUND_TRIPS = 200
LANE_SECONDS = 4.0
"""Bound on one lane, from dialing it to its last byte."""
CLOSE_SECONDS = 1.0

_T = TypeVar("_T")


class ProbeFailed(KVStreamError):
    """A process of the probe found that it can't work here, ended early, or did not end in time."""


class LaneResult(msgspec.Struct, frozen=True, kw_only=True):
    """One lane. `error` is empty where all bytes came intact; `carriers` is what moved them; `round_trip_us` is the
    median for a small message and its answer on the lane's connection (0: not measured)."""

    lane: Lane
    carriers: str = ""
    error: str = ""
    round_trip_us: float = 0.0


class TransferReport(msgspec.Struct, frozen=True, tag="transfers"):
    """Each lane of the transport, in the order in which `auto` prefers them."""

    lanes: tuple[LaneResult, ...]


# -- between the probe's processes


class _Address(msgspec.Struct, frozen=True, tag="address"):
    address: ListenAddress


class _Library(msgspec.Struct, frozen=True, tag="library"):
    report: LaneReport


class _Failure(msgspec.Struct, frozen=True, tag="failure"):
    error: str


_Output = _Address | _Library | TransferReport | _Failure


class _Offer(msgspec.Struct, frozen=True, tag="offer"):
    lane: Lane
    offer: bytes


class _Answer(msgspec.Struct, frozen=True, tag="answer"):
    answer: bytes


class _Chunk(msgspec.Struct, frozen=True, tag="chunk"):
    number: int
    slot: int
    generation: int


class _Ping(msgspec.Struct, frozen=True, tag="ping"):
    pass


class _Taken(msgspec.Struct, frozen=True, tag="taken"):
    pass


class _Problem(msgspec.Struct, frozen=True, tag="problem"):
    error: str


_Message = _Offer | _Answer | _Chunk | _Ping | _Taken | _Problem

_message = msgspec.msgpack.Decoder(_Message)


def _pattern(number: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, CHUNK_BYTES, np.uint8)


# -- the caller's side


async def probe_library(timeout: float) -> LaneReport:
    """What the installed UCX says about itself. Raises ProbeFailed, also after `timeout` seconds."""
    async with _bounded(timeout), _child("library") as child:
        return _expect(await child.last_output(), _Library).report


async def probe_transfers(timeout: float) -> TransferReport:
    """Move bytes between two processes, over each lane. Raises ProbeFailed, also after `timeout` seconds."""
    async with _bounded(timeout), _child("destination") as destination:
        address = _expect(await destination.output(), _Address).address
        async with _child("source", msgspec.json.encode(address).decode()) as source:
            return _expect(await source.last_output(), TransferReport)


@asynccontextmanager
async def _bounded(timeout: float) -> AsyncGenerator[None]:
    try:
        async with asyncio.timeout(timeout):
            yield
    except TimeoutError:
        raise ProbeFailed(f"not finished within {timeout:g} s") from None


class _Child:
    """A process of the probe: says one line of JSON, ends when its standard input does."""

    def __init__(self, role: str, process: asyncio.subprocess.Process, log: IO[bytes]):
        self._role = role
        self._process = process
        self._log = log

    async def output(self) -> _Output:
        """The line it says; raises ProbeFailed where it ends without."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if line:
            try:
                return msgspec.json.decode(line, type=_Output)
            except msgspec.MsgspecError as error:
                raise ProbeFailed(f"the {self._role} process said what is not understood: {error}") from error
        code = await self._process.wait()
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").strip().splitlines()
        raise ProbeFailed(f"the {self._role} process {how}: {words[-1] if words else 'it said nothing'}")

    async def last_output(self) -> _Output:
        """The line it says, after it has ended."""
        output = await self.output()
        self.end_input()
        await self._process.wait()
        return output

    def end_input(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    async def aclose(self) -> None:
        """Let it end, and kill it if it does not."""
        self.end_input()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._process.wait()
        finally:
            await self.kill()

    async def kill(self) -> None:
        """End it now. What is killed is gone at once, so this wait needs no bound."""
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def _child(role: str, argument: str = "") -> AsyncGenerator[_Child]:
    # A file rather than a pipe: it takes any amount of noise without anybody reading it.
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "kvstream.cli.lane_probe",
            str(os.getpid()),
            role,
            argument,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
        child = _Child(role, process, log)
        try:
            yield child
        except BaseException:
            # Too late, or not wanted any more: nothing that it still does is of use.
            await child.kill()
            raise
        await child.aclose()


def _expect(output: _Output, kind: type[_T]) -> _T:
    if isinstance(output, kind):
        return output
    raise ProbeFailed(output.error if isinstance(output, _Failure) else f"unexpected {type(output).__name__}")


# -- the child processes


async def _destination() -> None:
    """Listen, take what comes, compare it; until the standard input ends."""
    tasks: set[asyncio.Task[None]] = set()
    transport = UcxTransport(budget=StagingBudget(64 * CHUNK_BYTES))

    def accepted(connection: Connection) -> None:
        task = asyncio.create_task(_serve(connection))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    try:
        _say(_Address(await transport.start(accepted)))
        await asyncio.to_thread(sys.stdin.buffer.read)
    finally:
        await transport.aclose()
        # Their connections are lost now, which ends them.
        await asyncio.gather(*tasks)


async def _serve(connection: Connection) -> None:
    inbox = _Inbox(connection)
    try:
        while True:
            message = await inbox.get()
            if isinstance(message, _Ping):
                inbox.send(_Ping())
                continue
            try:
                inbox.send(await _take(connection, message))
            except PeerLost:
                raise
            except KVStreamError as error:
                inbox.send(_Problem(str(error)[:2000]))
    except PeerLost:
        pass
    finally:
        await connection.fence()


async def _take(connection: Connection, message: _Message) -> _Message:
    if isinstance(message, _Offer):
        return _Answer(connection.accept_lane(message.offer, (message.lane,)))
    if isinstance(message, _Chunk):
        view = await connection.take(message.slot, message.generation, CHUNK_BYTES)
        intact = not isinstance(view, Lent) and np.array_equal(view, _pattern(message.number))
        if not intact or not connection.check(message.slot, message.generation):
            raise Corrupted(f"chunk {message.number} of {CHUNK_BYTES} bytes did not arrive as it was sent")
        return _Taken()
    return _Problem(f"unexpected {type(message).__name__}")


async def _source(address: ListenAddress) -> None:
    """Try each lane on a connection of its own."""
    transport = UcxTransport(budget=StagingBudget(64 * CHUNK_BYTES))
    await transport.start(Connection.close)
    try:
        results: list[LaneResult] = []
        for lane in LANES:
            try:
                async with asyncio.timeout(LANE_SECONDS):
                    results.append(await _try_lane(transport, address, lane))
            except TimeoutError:
                results.append(LaneResult(lane=lane, error=f"not finished within {LANE_SECONDS:g} s"))
            except KVStreamError as error:
                results.append(LaneResult(lane=lane, error=str(error)))
    finally:
        await transport.aclose()
    _say(TransferReport(tuple(results)))


async def _try_lane(transport: UcxTransport, address: ListenAddress, lane: Lane) -> LaneResult:
    connection = await transport.dial(address, (lane,))
    inbox = _Inbox(connection)
    try:
        inbox.send(_Offer(lane, connection.offer_lanes((lane,), 2, CHUNK_BYTES)))
        connection.open_lane((await inbox.expect(_Answer)).answer)
        for number in range(CHUNKS):
            slot = number % connection.slots
            view: ByteView = connection.write_view(slot)
            view[:] = _pattern(number)
            inbox.send(_Chunk(number, slot, await connection.publish(slot, CHUNK_BYTES)))
            await inbox.expect(_Taken)
        return LaneResult(lane=lane, carriers=connection.describe(), round_trip_us=await _round_trip(inbox))
    finally:
        await connection.fence()


async def _round_trip(inbox: _Inbox) -> float:
    times: list[float] = []
    for _ in range(ROUND_TRIPS):
        begin = time.perf_counter()
        inbox.send(_Ping())
        await inbox.expect(_Ping)
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times) * 1e6, 1)


class _Inbox:
    """The messages of a connection, to be awaited; after the last one `get` raises the loss."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._messages: asyncio.Queue[bytes | Exception] = asyncio.Queue()
        put: Callable[[bytes | Exception], None] = self._messages.put_nowait
        connection.start(put, put)

    def send(self, message: _Message) -> None:
        self._connection.send(msgspec.msgpack.encode(message))

    async def get(self) -> _Message:
        item = await self._messages.get()
        if isinstance(item, Exception):
            raise item
        return _message.decode(item)

    async def expect(self, kind: type[_T]) -> _T:
        message = await self.get()
        if isinstance(message, kind):
            return message
        raise ProbeFailed(message.error if isinstance(message, _Problem) else f"unexpected {type(message).__name__}")


def _say(output: _Output) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(output) + b"\n")
    sys.stdout.buffer.flush()


def _main(parent: int, role: str, argument: str) -> None:
    # Ends with its parent, even if that one is killed.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    if os.getppid() != parent:
        return
    configure_logging("warning", "console")
    try:
        if role == "library":
            _say(_Library(probe_lanes()))
        elif role == "destination":
            run_loop(_destination())
        else:
            run_loop(_source(msgspec.json.decode(argument, type=ListenAddress)))
    except KVStreamError as error:
        _say(_Failure(str(error)))


if __name__ == "__main__":
    _main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
