"""UCX by itself: one one-sided operation a block, all posted at once, then a flush. Of kvstream only its binding.

On one host the destination gets, as the fastest descriptor lists do. Over TCP the source puts: there a reader that
closes ends the other process. Requests are released by UCX's own function, so that no Python runs for a completion.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec
import numpy as np

from benchmarks.contenders import Rounds, cpu_seconds, run_pair
from kvstream.transport import _ucp

__all__ = ["measure"]

_FILL = 7


def measure(block_bytes: int, total: int, rounds: int, *, tcp: bool = False) -> Rounds:
    """Move `total` bytes in shuffled blocks of `block_bytes`; see contenders.Rounds."""
    return run_pair(_active, _passive, block_bytes, total, rounds, tcp, timeout=120)


class _Side:
    """A context with one worker, and the endpoints that its listener has accepted."""

    def __init__(self, *, tcp: bool) -> None:
        self.ucp = _ucp.load()
        options = {"RNDV_THRESH": "inf", "NET_DEVICES": "lo"}
        self.context, self._ucxx = self.ucp.open_worker({**options, "TLS": "tcp"} if tcp else options)
        self.worker = int(self._ucxx.handle)
        self.descriptor = int(self._ucxx.epoll_file_descriptor)
        self.failure = 0
        self._requests: deque[int] = deque()
        self._statuses: list[int] = []
        # UCX keeps pointers into these.
        self.on_error = _ucp.ERR_HANDLER(self._failed)
        self.on_request = _ucp.CONN_HANDLER(lambda request, _: self._requests.append(request))
        self._on_flushed = _ucp.SEND_HANDLER(self._flushed)
        self._flush_params = _ucp.RequestParams(self._on_flushed)
        release = ctypes.PyDLL(self.ucp.path).ucp_request_free
        self.params = _ucp.RequestParams(ctypes.cast(release, _ucp.SEND_HANDLER))

    def register(self, buffer: np.ndarray) -> bytes:
        """Register the buffer; the key for the peer."""
        status, memory = self.ucp.map_memory(self.context, buffer.ctypes.data, buffer.nbytes, remote_write=True)
        self.check(status)
        status, key = self.ucp.pack_rkey(self.context, memory)
        self.check(status)
        return key

    def check(self, status: int) -> None:
        if status < 0:
            raise RuntimeError(f"UCX: {self.ucp.error(status)}")

    def progress(self) -> None:
        """One step; RuntimeError once an endpoint has failed."""
        self.ucp.worker_progress(self.worker)
        self.check(self.failure)

    def flush(self, endpoint: int) -> None:
        """Wait, polling, until all that was posted is done."""
        self._statuses.clear()
        status, request = self.ucp.flush(endpoint, self._flush_params, 0)
        self.check(status)
        if request:
            while not self._statuses:
                self.progress()
            self.ucp.request_free(request)
            self.check(self._statuses[0])

    def serve(self, pipe: Connection) -> None:
        """Accept and progress, asleep in between, until the pipe has something to say."""
        while True:
            while self.ucp.worker_progress(self.worker):
                pass
            while self._requests:
                status, _ = self.ucp.accept(self.worker, self._requests.popleft(), self.on_error)
                self.check(status)
            if self._ucxx.arm() and pipe.fileno() in select.select([self.descriptor, pipe.fileno()], [], [])[0]:
                return

    def _failed(self, _arg: int | None, _endpoint: int, status: int) -> None:
        self.failure = status

    def _flushed(self, _request: int, status: int, _key: int | None) -> None:
        self._statuses.append(status)


def _buffer(count: int, block_bytes: int, *, source: bool) -> np.ndarray:
    # Touched either way: the first write to a page is no part of moving it.
    return np.full((count, block_bytes), _FILL if source else 1, np.uint8)


def _passive(pipe: Connection, block_bytes: int, total: int, _rounds: int, tcp: bool) -> None:
    """The side that only has memory: the source of gets, the destination of puts."""
    side = _Side(tcp=tcp)
    buffer = _buffer(total // block_bytes, block_bytes, source=not tcp)
    key = side.register(buffer)
    status, listener = side.ucp.listen(side.worker, "127.0.0.1", 0, side.on_request)
    side.check(status)
    pipe.send((side.ucp.listener_port(listener), buffer.ctypes.data, key))
    side.serve(pipe)
    pipe.recv()
    if tcp:
        buffer[:] = 1  # what the warm-up has written is not to count
    cpu = cpu_seconds()
    pipe.send("go")
    side.serve(pipe)
    pipe.recv()
    pipe.send((cpu_seconds() - cpu, bool((buffer == _FILL).all())))
    side.serve(pipe)


def _active(pipe: Connection, block_bytes: int, total: int, rounds: int, tcp: bool, results: Connection) -> None:
    """The side that moves the bytes, and therefore knows when they are moved."""
    side = _Side(tcp=tcp)
    count = total // block_bytes
    buffer = _buffer(count, block_bytes, source=tcp)
    side.register(buffer)
    port, address, packed = pipe.recv()
    endpoint = _connect(side, port)
    status, rkey = side.ucp.unpack_rkey(endpoint, packed)
    side.check(status)
    rng = np.random.default_rng(0)
    local, remote = ((base + rng.permutation(count) * block_bytes).tolist() for base in (buffer.ctypes.data, address))
    post: Callable[..., tuple[int, int]] = side.ucp.put if tcp else side.ucp.get

    def one() -> float:
        start = time.perf_counter()
        for here, there in zip(local, remote, strict=True):
            status, _ = post(endpoint, here, block_bytes, there, rkey, side.params, 0)
            if status < 0:
                side.check(status)
        side.flush(endpoint)
        return time.perf_counter() - start

    first = one()
    if not tcp:
        buffer[:] = 1
    pipe.send("warm")
    pipe.recv()
    cpu = cpu_seconds()
    seconds = [one() for _ in range(rounds)]
    used = cpu_seconds() - cpu
    pipe.send("end")
    theirs, arrived = pipe.recv()
    if not (arrived and (buffer == _FILL).all()):
        raise RuntimeError("the bytes are not there")
    result = Rounds(seconds, (used + theirs) / rounds, setup=first)
    results.send(msgspec.to_builtins(result))


def _connect(side: _Side, port: int) -> int:
    status, endpoint = side.ucp.connect(side.worker, "127.0.0.1", port, side.on_error)
    side.check(status)
    side.flush(endpoint)
    return endpoint
