"""Two processes, one of which is killed, frozen or simply gone: the other lives, knows it at once, and its memory is
its own after the fence."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from transport_puppet import SLOT_BYTES, SLOTS, WAYS, lane_of, open_transport, stream, take

from kvstream.errors import PeerLost
from kvstream.transport.base import Connection, ListenAddress
from kvstream.transport.ucx import UcxConnection
from tests.timing import Death

pytestmark = pytest.mark.chaos

PUPPET = Path(__file__).with_name("transport_puppet.py")
CANARY = 0xEE


class Puppet:
    """The other process. `expect` waits for a word of it; whatever it writes to stderr fails the test.

    Not by the loop's own subprocesses: uvloop forks and runs code before exec, and a fork of a process in which UCX has
    threads may find one of their locks taken for ever. subprocess uses vfork.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], stdout: asyncio.StreamReader, pipe: asyncio.BaseTransport
    ) -> None:
        self.process = process
        self._stdout = stdout
        self._pipe = pipe

    @classmethod
    async def start(cls, role: str, way: str, how: str = "aclose", address: ListenAddress | None = None) -> Puppet:
        command = [sys.executable, str(PUPPET), role, way, how]
        if address is not None:
            command.append(msgspec.json.encode(address).decode())
        pipe = subprocess.PIPE
        # In asyncio's debug mode slow callbacks are told on stderr.
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONASYNCIODEBUG"}
        process = await asyncio.to_thread(subprocess.Popen, command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ)
        loop = asyncio.get_running_loop()
        stdout = asyncio.StreamReader()
        reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdout), process.stdout)
        return cls(process, stdout, reading)

    async def line(self) -> str:
        async with asyncio.timeout(20):
            return (await self._stdout.readline()).decode().strip()

    async def expect(self, word: str) -> None:
        while (line := await self.line()) != word:
            assert line, f"the puppet ended, expecting {word}"
            assert line != "bad", "wrong bytes passed every check"

    async def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    async def end(self) -> int:
        """Close its stdin, read what is left and return its exit status."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        async with asyncio.timeout(20):
            assert b"bad" not in await self._stdout.read()
        return await asyncio.to_thread(self.process.wait, 20)

    async def cleanup(self) -> None:
        self.process.kill()
        await asyncio.to_thread(self.process.wait, 20)
        assert self.process.stderr is not None
        assert self.process.stdin is not None
        noise = self.process.stderr.read()
        self.process.stderr.close()
        self.process.stdin.close()
        self._pipe.close()
        await asyncio.sleep(0)  # the pipe closes on the next turn
        assert noise == b"", noise.decode(errors="replace")


StartPuppet = Callable[..., Awaitable[Puppet]]


@pytest.fixture
async def puppets() -> AsyncIterator[StartPuppet]:
    # A stack: what one of them gets wrong must not keep another one alive, whose pipe would keep uvloop from closing.
    async with AsyncExitStack() as stack:

        async def start(*arguments: object, **kwargs: object) -> Puppet:
            puppet = await Puppet.start(*arguments, **kwargs)  # type: ignore[arg-type]
            stack.push_async_callback(puppet.cleanup)
            return puppet

        yield start


class Side:
    """This process's end: a transport and what happened on its connections."""

    def __init__(self, way: str) -> None:
        self.way = way
        self.transport, self.memory = open_transport(way)
        self.address: ListenAddress | None = None
        self.connections: asyncio.Queue[UcxConnection] = asyncio.Queue()
        self.moved = 0
        self.bad = 0
        self.losses: list[tuple[float, Exception]] = []
        self._changed = asyncio.Event()

    async def start(self) -> None:
        self.address = await self.transport.start(self._accept)

    def _accept(self, connection: Connection) -> None:
        assert isinstance(connection, UcxConnection)
        take(connection, self.way, self.memory, self._moved, self._lost, self._bad)
        self.connections.put_nowait(connection)

    async def next_connection(self) -> UcxConnection:
        async with asyncio.timeout(20):
            return await self.connections.get()

    async def stream_to(self, puppet: Puppet) -> UcxConnection:
        address = msgspec.json.decode(await puppet.line(), type=ListenAddress)
        connection = await self.transport.dial(address, (lane_of(self.way),))
        assert isinstance(connection, UcxConnection)
        stream(connection, self.way, self.memory, self._moved, self._lost)
        return connection

    def _moved(self) -> None:
        self.moved += 1
        self._changed.set()

    def _bad(self) -> None:
        self.bad += 1

    def _lost(self, error: Exception) -> None:
        self.losses.append((asyncio.get_running_loop().time(), error))
        self._changed.set()

    async def until(self, ready: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not ready():
                self._changed.clear()
                await self._changed.wait()

    async def until_moved(self, count: int) -> None:
        await self.until(lambda: self.moved >= count or bool(self.losses))
        assert self.losses == []
        assert self.bad == 0


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
async def side(way: str) -> AsyncIterator[Side]:
    side = Side(way)
    await side.start()
    yield side
    await side.transport.aclose()
    assert (side.transport.budget.used, side.transport.budget.quarantined) == (0, 0)
    assert side.bad == 0


async def kill(puppet: Puppet, side: Side) -> None:
    """Kill it; the loss is told, once, at once: within milliseconds after the kernel's word of the death, and a second
    on a busy machine. What else could find it out takes longer."""
    death = Death(puppet.process.pid)
    await side.until(lambda: bool(side.losses))
    ((when, error),) = side.losses
    assert isinstance(error, PeerLost)
    assert when - await death.seen() < 1


async def test_a_killed_source(side: Side, puppets: StartPuppet) -> None:
    puppet = await puppets("source", side.way, address=side.address)
    connection = await side.next_connection()
    await side.until_moved(20)
    await kill(puppet, side)
    await connection.fence()
    assert side.transport.budget.used == 0
    assert len(side.losses) == 1
    # And this process serves the next one.
    await puppets("source", side.way, address=side.address)
    await side.next_connection()
    side.losses.clear()
    await side.until_moved(side.moved + 20)


async def test_a_killed_destination(side: Side, puppets: StartPuppet) -> None:
    puppet = await puppets("destination", side.way)
    connection = await side.stream_to(puppet)
    await side.until_moved(20)
    await kill(puppet, side)
    await connection.fence()
    assert side.transport.budget.used == 0
    assert len(side.losses) == 1
    connection = await side.stream_to(await puppets("destination", side.way))
    side.losses.clear()
    await side.until_moved(side.moved + 20)


async def test_a_frozen_source_writes_nothing_after_the_fence(side: Side, puppets: StartPuppet) -> None:
    puppet = await puppets("source", side.way, address=side.address)
    connection = await side.next_connection()
    await side.until_moved(30)
    own = connection._own
    memory = None if own is None else own.memory
    del own
    await puppet.freeze()
    async with asyncio.timeout(20):
        await connection.fence()
    assert side.transport.budget.used == 0
    if lane_of(side.way) == "shared":
        assert memory is None  # nothing of ours for anybody to write to
    else:
        assert memory is not None
        memory[:] = CANARY
    side.memory[:] = CANARY  # what was lent is read into it
    puppet.process.send_signal(signal.SIGCONT)
    await puppet.expect("lost")
    assert await puppet.end() == 0
    assert memory is None or bool((memory == CANARY).all())
    assert bool((side.memory == CANARY).all())


async def test_a_frozen_destination_believes_nothing_after_the_fence(side: Side, puppets: StartPuppet) -> None:
    puppet = await puppets("destination", side.way)
    connection = await side.stream_to(puppet)
    await side.until_moved(30)
    own = connection._own
    assert own is not None
    budget = side.transport.budget
    await puppet.freeze()
    connection.close()
    assert budget.used == own.memory.nbytes  # closing frees nothing
    async with asyncio.timeout(20):
        await connection.fence()
    assert budget.used == 0
    for slot in range(SLOTS):
        own.data(slot, SLOT_BYTES)[:] = CANARY
    side.memory[:] = CANARY
    puppet.process.send_signal(signal.SIGCONT)
    await puppet.expect("lost")
    assert await puppet.end() == 0  # it would have said "bad"


async def test_a_frozen_listener_keeps_a_dial_waiting_and_nothing_else(side: Side, puppets: StartPuppet) -> None:
    puppet = await puppets("destination", side.way)
    address = msgspec.json.decode(await puppet.line(), type=ListenAddress)
    await puppet.freeze()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await side.transport.dial(address, (lane_of(side.way),))
    puppet.process.send_signal(signal.SIGCONT)
    connection = await side.transport.dial(address, (lane_of(side.way),))
    stream(connection, side.way, side.memory, side._moved, side._lost)
    await side.until_moved(5)
    assert await puppet.end() == 0


@pytest.mark.parametrize("how", ["aclose", "fence", "abandon"])
@pytest.mark.parametrize("role", ["source", "destination"])
async def test_a_process_ends_cleanly_in_mid_transfer(side: Side, puppets: StartPuppet, role: str, how: str) -> None:
    if role == "source":
        puppet = await puppets("source", side.way, how, address=side.address)
        await side.next_connection()
    else:
        puppet = await puppets("destination", side.way, how)
        await side.stream_to(puppet)
    await side.until_moved(5)
    assert await puppet.end() == 0
    await side.until(lambda: bool(side.losses))
    assert len(side.losses) == 1
