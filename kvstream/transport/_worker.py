"""A UCP worker on the event loop: its listener, its endpoints, its operations and their completions.

Owns every raw UCX handle of one worker and the order in which they end: an endpoint's handle is used by nobody after
its force-close, and all are gone before the worker is. It knows nothing of lanes, slots or the protocol above, and
must never call upwards from within UCX: what UCX's callbacks bring is noted there and handled after the progress step.
"""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvstream.errors import ConfigError, PeerLost
from kvstream.transport import _ucp
from kvstream.transport._progress import Pump
from kvstream.transport.base import MAX_MESSAGE, Slab

__all__ = ["Endpoint", "Region", "UcpWorker"]

_AM_ID = 75
_UCXX_AM_ID = 0
"""Active messages of kvstream; ucxx has taken 0 on its workers."""

_SHUTDOWN_STEPS = 1000


class _Operation:
    """What was posted under one key: one request, or several that count as one."""

    __slots__ = ("done", "endpoint", "keep", "left", "status")

    def __init__(self, endpoint: Endpoint, done: Callable[[int], None], keep: object) -> None:
        self.endpoint = endpoint
        self.done = done
        self.keep = keep  # what has to stay alive until the final status
        self.left = 1
        self.status = _ucp.OK


class _State:
    """The raw handles. Apart from UcpWorker so that they can be ended after it is gone (at interpreter exit)."""

    def __init__(self, ucp: _ucp.Ucp, options: dict[str, str], gpu_options: dict[str, str] | None) -> None:
        self.ucp = ucp
        self.context, worker = ucp.open_worker(options, gpu_options)
        self.ucxx_worker: _ucp.UcxxWorker | None = worker
        self.worker = int(worker.handle)
        self.descriptor = int(worker.epoll_file_descriptor)
        self.listener = 0
        self.endpoints: dict[int, Endpoint] = {}
        self.rkeys: set[int] = set()
        self.memories: set[int] = set()
        self.operations: dict[int, _Operation] = {}
        self.next_key = 1
        self.messages: deque[tuple[Endpoint, bytes | None]] = deque()
        self.failures: deque[tuple[Endpoint, int]] = deque()
        self.completions: deque[tuple[int, int, int]] = deque()
        self.requests: deque[int] = deque()
        # The callbacks live exactly as long as these handles: UCX holds pointers into them.
        self.on_send = _ucp.SEND_HANDLER(self._completed)
        self.on_error = _ucp.ERR_HANDLER(self._failed)
        self.on_request = _ucp.CONN_HANDLER(self._requested)
        self.on_message = _ucp.AM_HANDLER(self._received)
        self.params = _ucp.RequestParams(self.on_send)
        self.on_stray = _ucp.AM_HANDLER(_drop_message)
        # UCXX's own handler would print what strangers send to its id on stderr.
        ucp.set_am_handler(self.worker, _UCXX_AM_ID, self.on_stray)
        status = ucp.set_am_handler(self.worker, _AM_ID, self.on_message)
        if status != _ucp.OK:
            raise ConfigError("transport", f"UCX has no active messages here: {ucp.error(status)}")

    # -- UCX calls these, within a progress step or a post

    def _completed(self, request: int, status: int, key: int | None) -> None:
        self.completions.append((key or 0, status, request))

    def _failed(self, _arg: int | None, handle: int, status: int) -> None:
        endpoint = self.endpoints.get(handle)
        if endpoint is not None:
            self.failures.append((endpoint, status))

    def _requested(self, request: int, _arg: int | None) -> None:
        self.requests.append(request)

    def _received(
        self, _arg: int | None, _header: int | None, _header_length: int, data: int | None, length: int, param: Any
    ) -> int:
        received = param.contents
        endpoint = self.endpoints.get(received.reply_ep or 0) if received.recv_attr & received.FIELD_REPLY_EP else None
        if endpoint is not None:
            # A message announced for a rendezvous has no bytes here, and one of this size is none of ours.
            whole = not received.recv_attr & received.FLAG_RNDV and length <= MAX_MESSAGE
            self.messages.append((endpoint, ctypes.string_at(data or 0, length) if whole else None))
        return _ucp.OK

    def arm(self) -> bool:
        return self.ucxx_worker is None or self.ucxx_worker.arm()

    def shutdown(self) -> None:
        """Destroy all of it, without telling anybody: at interpreter exit there is no loop to be told on."""
        worker, self.ucxx_worker = self.ucxx_worker, None
        if worker is None:
            return
        for handle in self.endpoints:
            self.ucp.force_close(handle, self.params, 0)
        self.endpoints.clear()
        for _ in range(_SHUTDOWN_STEPS):
            if not self.ucp.worker_progress(self.worker):
                break
        while self.completions:
            self.ucp.request_free(self.completions.popleft()[2])
        for rkey in self.rkeys:
            self.ucp.rkey_destroy(rkey)
        self.rkeys.clear()
        for memory in self.memories:
            self.ucp.unmap_memory(self.context, memory)
        self.memories.clear()
        if self.listener:
            while self.requests:
                self.ucp.reject(self.listener, self.requests.popleft())
            self.ucp.listener_destroy(self.listener)
            self.listener = 0
        # The last reference to the ucxx object: with it go the worker and its context.
        del worker

    def complete(self) -> None:
        """Hand out final statuses."""
        while self.completions:
            key, status, request = self.completions.popleft()
            self.ucp.request_free(request)
            self.end(key, status)

    def end(self, key: int, status: int) -> None:
        operation = self.operations[key]
        operation.left -= 1
        if operation.status == _ucp.OK:
            operation.status = status
        if operation.left <= 0:
            del self.operations[key]
            operation.endpoint.operation_ended()
            operation.done(operation.status)


class Region:
    """Memory registered with one worker's context. `unregister` once every operation on it has its final status."""

    def __init__(self, state: _State, memory: Slab, *, writable: bool) -> None:
        self._state = state
        self.address = memory.address
        self._keep: object = memory.owner
        status, self._handle = state.ucp.map_memory(
            state.context, self.address, memory.nbytes, remote_write=writable, gpu=memory.gpu
        )
        if status != _ucp.OK:
            raise ConfigError("staging", f"UCX can't register {memory.nbytes} bytes: {state.ucp.error(status)}")
        status, self.rkey = state.ucp.pack_rkey(state.context, self._handle)
        if status != _ucp.OK:
            state.ucp.unmap_memory(state.context, self._handle)
            raise ConfigError("staging", f"UCX can't share {memory.nbytes} bytes: {state.ucp.error(status)}")
        state.memories.add(self._handle)

    def unregister(self) -> None:
        self._keep = None
        # Otherwise the worker has ended, and this with it.
        if self._handle in self._state.memories:
            self._state.memories.remove(self._handle)
            self._state.ucp.unmap_memory(self._state.context, self._handle)


class Endpoint:
    """A connected, or connecting, UCX endpoint with error handling.

    `on_message` and `on_failure` are set by the owner at once after creation; they are called from the loop, never
    from within a call of the owner. Every operation's `done` is called once with a final status, also after `close`;
    a post that has its final status at once calls it before it returns.
    """

    def __init__(self, worker: UcpWorker, state: _State, handle: int, peer_address: str) -> None:
        self.worker = worker
        self.peer_address = peer_address
        self.on_message: Callable[[bytes | None], None] = _ignore
        self.on_failure: Callable[[str], None] = _ignore
        self._state = state
        self._handle = handle
        self._operations = 0
        self._rkeys: list[int] = []
        self._final: list[asyncio.Future[None]] = []
        state.endpoints[handle] = self

    @property
    def open(self) -> bool:
        return self._handle != 0

    @property
    def settled(self) -> bool:
        """Closed, and every operation has its final status."""
        return self._handle == 0 and self._operations == 0

    def transports(self) -> tuple[tuple[str, str], ...]:
        """(transport, device) of every lane in use."""
        return self._state.ucp.transports(self._handle) if self._handle else ()

    def unpack_rkey(self, packed: bytes) -> int:
        """A remote key for put and get; it lives as long as the endpoint. Raises PeerLost when it makes no sense."""
        if not self._handle:
            raise PeerLost(f"{self.peer_address} is closed")
        with self.worker.around():
            status, rkey = self._state.ucp.unpack_rkey(self._handle, packed)
        if status != _ucp.OK:
            raise PeerLost(f"{self.peer_address}: unusable remote key: {self._state.ucp.error(status)}")
        self._rkeys.append(rkey)
        self._state.rkeys.add(rkey)
        return rkey

    def map_remote(self, rkey: int, address: int) -> int:
        """Whether the peer's memory at `address` can be mapped into this process: a status."""
        with self.worker.around():
            return self._state.ucp.map_remote(rkey, address)

    def send(self, message: bytes, done: Callable[[int], None]) -> None:
        key = self._begin(done, message)
        self._posted(key, *self._state.ucp.send(self._handle, _AM_ID, message, self._state.params, key))

    def put(self, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        key = self._begin(done, None)
        self._posted(key, *self._state.ucp.put(self._handle, local, nbytes, remote, rkey, self._state.params, key))

    def get(self, local: int, nbytes: int, remote: int, rkey: int, done: Callable[[int], None]) -> None:
        key = self._begin(done, None)
        self._posted(key, *self._state.ucp.get(self._handle, local, nbytes, remote, rkey, self._state.params, key))

    def get_all(self, gets: Iterable[tuple[int, int, int, int]], done: Callable[[int], None]) -> None:
        """Several gets, each (local, nbytes, remote, rkey), with one `done`: OK, or the first other status, when all of
        them have their final one. After one that fails at once the rest is not posted."""
        key = self._begin(done, None)
        operation = self._state.operations[key]
        with self.worker.around():
            status, operation.left = self._state.ucp.get_all(self._handle, gets, self._state.params, key)
        self.worker.kick()
        if status != _ucp.OK or not operation.left:
            operation.left += 1
            self._state.end(key, status)

    def flush(self, done: Callable[[int], None]) -> None:
        """What was posted before is at the peer once `done` is called with OK."""
        key = self._begin(done, None)
        self._posted(key, *self._state.ucp.flush(self._handle, self._state.params, key))

    def close(self) -> None:
        """Force-close: the peer gets an error, own operations end, the handle is not used again. Idempotent."""
        if not self._handle:
            return
        key = self._begin(_ignore, None)
        handle, self._handle = self._handle, 0
        del self._state.endpoints[handle]
        self._posted(key, *self._state.ucp.force_close(handle, self._state.params, key))

    def when_settled(self) -> asyncio.Future[None]:
        """Resolves when the endpoint is closed and each of its operations has its final status."""
        future: asyncio.Future[None] = self.worker.loop.create_future()
        if self.settled:
            future.set_result(None)
        else:
            self._final.append(future)
        return future

    def _begin(self, done: Callable[[int], None], keep: object) -> int:
        if not self._handle:
            raise PeerLost(f"{self.peer_address} is closed")
        state = self._state
        key = state.next_key
        state.next_key += 1
        state.operations[key] = _Operation(self, done, keep)
        self._operations += 1
        return key

    def _posted(self, key: int, status: int, _request: int) -> None:
        self.worker.kick()
        if status != _ucp.IN_PROGRESS:
            self._state.end(key, status)

    def operation_ended(self) -> None:
        self._operations -= 1
        if self.settled:
            for rkey in self._rkeys:
                if rkey in self._state.rkeys:  # otherwise the worker has ended, and the key with it
                    self._state.rkeys.remove(rkey)
                    self._state.ucp.rkey_destroy(rkey)
            self._rkeys.clear()
            waiting, self._final = self._final, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


class UcpWorker:
    """A context and worker with `options` (UCX's names without the prefix), driven by the loop's readiness.

    What it does with memory of a GPU, and its progress, happens within `around()`: UCX goes by the thread's current
    CUDA context. `gpu_options` are those that only a UCX with CUDA knows.
    """

    def __init__(
        self,
        ucp: _ucp.Ucp,
        loop: asyncio.AbstractEventLoop,
        options: dict[str, str],
        *,
        around: Callable[[], AbstractContextManager[object]] = nullcontext,
        gpu_options: Mapping[str, str] | None = None,
    ) -> None:
        self.ucp = ucp
        self.loop = loop
        self.around = around
        self.port = 0
        """Where it listens; 0: it does not."""
        self.on_endpoint: Callable[[Endpoint], None] | None = None
        """Gets each endpoint that comes in, from the loop; without it they are rejected."""
        with around():
            self._state = state = _State(ucp, options, dict(gpu_options or {}))
        # Also without an aclose the handles have to go before the interpreter takes the callbacks away.
        self._finalizer = weakref.finalize(self, state.shutdown)
        progress, handle = ucp.worker_progress, state.worker
        self._pump = Pump(
            loop,
            state.descriptor,
            step=lambda: progress(handle) != 0,
            settle=self._settle,
            arm=state.arm,
            around=around,
        )

    def kick(self) -> None:
        self._pump.kick()

    def turn(self) -> asyncio.Future[None]:
        """Resolves when one more round of progress is over: what UCX put off until its next step is done then."""
        return self._pump.turn()

    def error(self, status: int) -> str:
        return self.ucp.error(status)

    def listen(self, host: str, port: int) -> None:
        """Listen on an IPv4 address and a port (0: any) until the worker is closed. Raises ConfigError when it can't
        be had, PeerLost when the worker has ended.

        UCX can't stop listening alone: its thread would follow a request that is on its way to the listener that was.
        """
        state = self._open_state()
        status, listener = self.ucp.listen(state.worker, host, port, state.on_request)
        if status != _ucp.OK:
            raise ConfigError("data_interface", f"UCX can't listen on {host}:{port}: {self.error(status)}")
        state.listener = listener
        self.port = self.ucp.listener_port(listener)

    def connect(self, host: str, port: int) -> Endpoint:
        """Begin to connect. A refusal comes as the endpoint's failure. Raises PeerLost when it can't even begin."""
        state = self._open_state()
        status, handle = self.ucp.connect(state.worker, host, port, state.on_error)
        if status != _ucp.OK:
            raise PeerLost(f"{host}:{port} can't be reached: {self.error(status)}")
        return Endpoint(self, state, handle, f"{host}:{port}")

    def register(self, memory: Slab, *, writable: bool = False) -> Region:
        """Register memory for peers to read, and to write where `writable`. Raises ConfigError when UCX can't."""
        with self.around():
            return Region(self._state, memory, writable=writable)

    def close(self) -> None:
        """Close what is open and destroy the worker. Idempotent. Afterwards nothing of it is in flight."""
        for endpoint in tuple(self._state.endpoints.values()):
            endpoint.close()
        self._pump.close()
        self._state.complete()
        self._finalizer()
        for key, operation in tuple(self._state.operations.items()):
            operation.left = 1
            self._state.end(key, _ucp.CANCELED)

    def _open_state(self) -> _State:
        if self._state.ucxx_worker is None:
            raise PeerLost("this worker is closed")
        return self._state

    def _settle(self) -> None:
        state = self._state
        state.complete()
        while state.messages:
            endpoint, message = state.messages.popleft()
            if endpoint.open:
                endpoint.on_message(message)
        while state.failures:
            endpoint, status = state.failures.popleft()
            if endpoint.open:
                endpoint.on_failure(self.error(status))
        while state.requests:
            self._accept(state.requests.popleft())

    def _accept(self, request: int) -> None:
        state = self._state
        peer = self.ucp.client_address(request)
        if self.on_endpoint is None:
            self.ucp.reject(state.listener, request)
            return
        status, handle = self.ucp.accept(state.worker, request, state.on_error)
        # A dialer that is gone again is not an event: nobody here has heard of it.
        if status == _ucp.OK:
            self.on_endpoint(Endpoint(self, state, handle, peer))


def _drop_message(*_: object) -> int:
    return _ucp.OK


def _ignore(_: object) -> None:
    return None
