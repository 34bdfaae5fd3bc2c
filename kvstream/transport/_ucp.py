"""UCP's C interface as typed, thin functions, on the very libucp that UCXX loaded.

Owns the struct layouts (taken from ucp/api/ucp.h and ucp_def.h of UCX 1.21; UCP keeps them compatible through field
masks) and nothing else: no endpoint, no request and no memory belongs to this module. It must never release the GIL
while posting: with a Python compute thread in the process every release can cost a whole switch interval.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from collections.abc import Callable, Iterable
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    byref,
    c_char,
    c_char_p,
    c_int,
    c_int8,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
    cast,
    sizeof,
)
from typing import Any, ClassVar, Protocol
from typing import cast as as_type

from kvstream.errors import ConfigError

__all__ = [
    "AM_HANDLER",
    "CANCELED",
    "CONN_HANDLER",
    "ERR_HANDLER",
    "IN_PROGRESS",
    "OK",
    "SEND_HANDLER",
    "AmRecvParam",
    "Ucp",
    "UcxxWorker",
    "load",
]

OK = 0
UNREACHABLE = -6
IN_PROGRESS = 1
CANCELED = -16

_ERR_LAST = -100  # UCS_ERR_LAST: pointers at or above (void*)-100 are statuses

# ucs_status_t is a packed enum: one signed byte.
SEND_HANDLER = CFUNCTYPE(None, c_void_p, c_int8, c_void_p)
ERR_HANDLER = CFUNCTYPE(None, c_void_p, c_void_p, c_int8)
CONN_HANDLER = CFUNCTYPE(None, c_void_p, c_void_p)


class AmRecvParam(Structure):
    """ucp_am_recv_param_t."""

    _fields_: ClassVar = [("recv_attr", c_uint64), ("reply_ep", c_void_p)]
    recv_attr: int
    reply_ep: int | None

    FIELD_REPLY_EP = 1 << 0
    FLAG_RNDV = 1 << 17


AM_HANDLER = CFUNCTYPE(c_int8, c_void_p, c_void_p, c_size_t, c_void_p, c_size_t, POINTER(AmRecvParam))


class _SockaddrIn(Structure):
    _fields_: ClassVar = [
        ("family", c_uint16),
        ("port", c_uint8 * 2),
        ("addr", c_uint8 * 4),
        ("zero", c_uint8 * 8),
    ]


class _SockaddrStorage(Structure):
    _fields_: ClassVar = [("family", c_uint16), ("data", c_uint8 * 118), ("align", c_uint64)]
    family: int


class _UcsSockAddr(Structure):
    _fields_: ClassVar = [("addr", c_void_p), ("addrlen", c_uint32)]


class _ListenerParams(Structure):
    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("sockaddr", _UcsSockAddr),
        ("accept_cb", c_void_p),
        ("accept_arg", c_void_p),
        ("conn_cb", CONN_HANDLER),
        ("conn_arg", c_void_p),
    ]
    SOCK_ADDR = 1 << 0
    CONN_HANDLER = 1 << 2


class _ListenerAttr(Structure):
    _fields_: ClassVar = [("field_mask", c_uint64), ("sockaddr", _SockaddrStorage)]
    SOCKADDR = 1 << 0


class _ConnRequestAttr(Structure):
    _fields_: ClassVar = [("field_mask", c_uint64), ("client_address", _SockaddrStorage), ("client_id", c_uint64)]
    CLIENT_ADDR = 1 << 0


class _EpParams(Structure):
    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("err_mode", c_int),
        ("err_cb", ERR_HANDLER),
        ("err_arg", c_void_p),
        ("user_data", c_void_p),
        ("flags", c_uint),
        ("sockaddr", _UcsSockAddr),
        ("conn_request", c_void_p),
        ("name", c_char_p),
        ("local_sockaddr", _UcsSockAddr),
    ]
    ERR_HANDLING_MODE = 1 << 1
    ERR_HANDLER = 1 << 2
    SOCK_ADDR = 1 << 4
    FLAGS = 1 << 5
    CONN_REQUEST = 1 << 6
    FLAG_CLIENT_SERVER = 1 << 0
    ERR_MODE_PEER = 1


class _TransportEntry(Structure):
    _fields_: ClassVar = [("transport_name", c_char_p), ("device_name", c_char_p)]


class _EpAttr(Structure):
    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("name", c_char * 32),
        ("local_sockaddr", _SockaddrStorage),
        ("remote_sockaddr", _SockaddrStorage),
        ("entries", POINTER(_TransportEntry)),
        ("num_entries", c_uint),
        ("entry_size", c_size_t),
        ("user_data", c_void_p),
    ]
    TRANSPORTS = 1 << 3


class _MemMapParams(Structure):
    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("address", c_void_p),
        ("length", c_size_t),
        ("flags", c_uint),
        ("prot", c_uint),
        ("memory_type", c_int),
        ("exported_memh_buffer", c_void_p),
    ]
    ADDRESS = 1 << 0
    LENGTH = 1 << 1
    FLAGS = 1 << 2
    PROT = 1 << 3
    MEMORY_TYPE = 1 << 4
    TYPE_CUDA = 1
    FLAG_NONBLOCK = 1 << 0
    PROT_LOCAL = 3
    PROT_REMOTE_READ = 1 << 8
    PROT_REMOTE_WRITE = 1 << 9


class _AmHandlerParam(Structure):
    _fields_: ClassVar = [
        ("field_mask", c_uint64),
        ("id", c_uint),
        ("flags", c_uint32),
        ("cb", AM_HANDLER),
        ("arg", c_void_p),
    ]
    ID = 1 << 0
    FLAGS = 1 << 1
    CB = 1 << 2
    FLAG_WHOLE_MSG = 1 << 0


class _RequestParam(Structure):
    _fields_: ClassVar = [
        ("op_attr_mask", c_uint32),
        ("flags", c_uint32),
        ("request", c_void_p),
        ("cb", SEND_HANDLER),
        ("datatype", c_uint64),
        ("user_data", c_void_p),
        ("reply_buffer", c_void_p),
        ("memory_type", c_int),
        ("recv_info", c_void_p),
        ("memh", c_void_p),
    ]
    user_data: int | None

    CALLBACK = 1 << 1
    USER_DATA = 1 << 2
    FLAGS = 1 << 4
    MEMH = 1 << 8

    AM_REPLY = 1 << 0
    AM_EAGER = 1 << 1
    CLOSE_FORCE = 1 << 0


class UcxxWorker(Protocol):
    """What is used of ucxx's UCXWorker, which has no type information."""

    handle: int
    epoll_file_descriptor: int

    def init_blocking_progress_mode(self) -> None: ...
    def arm(self) -> bool: ...


class RequestParams:
    """The request parameters of one worker: the same for each operation but for the key that its callback gets."""

    def __init__(self, callback: Callable[..., Any]) -> None:
        def params(flags: int) -> _RequestParam:
            mask = _RequestParam.CALLBACK | _RequestParam.USER_DATA | (_RequestParam.FLAGS if flags else 0)
            return _RequestParam(op_attr_mask=mask, flags=flags, cb=callback)

        self.plain = params(0)
        self.message = params(_RequestParam.AM_REPLY | _RequestParam.AM_EAGER)
        self.close = params(_RequestParam.CLOSE_FORCE)


class Ucp:
    """The loaded library. Handles are plain integers; a post returns (status, request): request 0 when it has its
    final status already, in which case the callback is not called."""

    def __init__(self, ucp_path: str, ucs_path: str) -> None:
        self.path = ucp_path
        lib = ctypes.PyDLL(ucp_path)
        ucs = ctypes.PyDLL(ucs_path)

        def function(name: str, restype: Any, *argtypes: Any, library: ctypes.PyDLL = lib) -> Any:
            found = getattr(library, name)
            found.restype = restype
            found.argtypes = argtypes
            return found

        status = c_int8
        params = POINTER(_RequestParam)
        self._status_string = function("ucs_status_string", c_char_p, c_int8, library=ucs)
        self._set_option = function("ucs_global_opts_set_value", status, c_char_p, c_char_p, library=ucs)
        self._get_version = function("ucp_get_version", None, POINTER(c_uint), POINTER(c_uint), POINTER(c_uint))
        self._listener_create = function(
            "ucp_listener_create", status, c_void_p, POINTER(_ListenerParams), POINTER(c_void_p)
        )
        self._listener_query = function("ucp_listener_query", status, c_void_p, POINTER(_ListenerAttr))
        self._listener_reject = function("ucp_listener_reject", status, c_void_p, c_void_p)
        self._listener_destroy = function("ucp_listener_destroy", None, c_void_p)
        self._conn_request_query = function("ucp_conn_request_query", status, c_void_p, POINTER(_ConnRequestAttr))
        self._ep_create = function("ucp_ep_create", status, c_void_p, POINTER(_EpParams), POINTER(c_void_p))
        self._ep_query = function("ucp_ep_query", status, c_void_p, POINTER(_EpAttr))
        self._ep_close = function("ucp_ep_close_nbx", c_void_p, c_void_p, params)
        self._ep_flush = function("ucp_ep_flush_nbx", c_void_p, c_void_p, params)
        self._am_send = function(
            "ucp_am_send_nbx", c_void_p, c_void_p, c_uint, c_void_p, c_size_t, c_void_p, c_size_t, params
        )
        self._set_am_handler = function("ucp_worker_set_am_recv_handler", status, c_void_p, POINTER(_AmHandlerParam))
        self._mem_map = function("ucp_mem_map", status, c_void_p, POINTER(_MemMapParams), POINTER(c_void_p))
        self._mem_unmap = function("ucp_mem_unmap", status, c_void_p, c_void_p)
        self._rkey_pack = function("ucp_rkey_pack", status, c_void_p, c_void_p, POINTER(c_void_p), POINTER(c_size_t))
        self._rkey_buffer_release = function("ucp_rkey_buffer_release", None, c_void_p)
        self._rkey_unpack = function("ucp_ep_rkey_unpack", status, c_void_p, c_char_p, POINTER(c_void_p))
        self._rkey_ptr = function("ucp_rkey_ptr", status, c_void_p, c_uint64, POINTER(c_void_p))
        self._put = function("ucp_put_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, params)
        self._get = function("ucp_get_nbx", c_void_p, c_void_p, c_void_p, c_size_t, c_uint64, c_void_p, params)

        self.worker_progress: Callable[[int], int] = function("ucp_worker_progress", c_uint, c_void_p)
        """One step of a worker: 0 when there was nothing to do."""
        self.request_free: Callable[[int], None] = function("ucp_request_free", None, c_void_p)
        self.rkey_destroy: Callable[[int], None] = function("ucp_rkey_destroy", None, c_void_p)
        self.listener_destroy: Callable[[int], None] = self._listener_destroy

    # -- library

    @property
    def version(self) -> str:
        major, minor, release = c_uint(), c_uint(), c_uint()
        self._get_version(byref(major), byref(minor), byref(release))
        return f"{major.value}.{minor.value}.{release.value}"

    def error(self, status: int) -> str:
        """UCX's words for a status."""
        text: bytes = self._status_string(status)
        return text.decode()

    def set_option(self, name: str, value: str) -> None:
        """Set a global UCS option of this process (not one of a context, and not the environment)."""
        self._set_option(name.encode(), value.encode())

    # -- listening and endpoints

    def listen(self, worker: int, host: str, port: int, handler: Any) -> tuple[int, int]:
        """Listen on an IPv4 address. Returns (status, listener)."""
        address = _sockaddr(host, port)
        params = _ListenerParams(
            field_mask=_ListenerParams.SOCK_ADDR | _ListenerParams.CONN_HANDLER,
            sockaddr=_UcsSockAddr(ctypes.addressof(address), sizeof(address)),
            conn_cb=handler,
        )
        listener = c_void_p()
        status = self._listener_create(worker, byref(params), byref(listener))
        return status, listener.value or 0

    def listener_port(self, listener: int) -> int:
        attr = _ListenerAttr(field_mask=_ListenerAttr.SOCKADDR)
        if self._listener_query(listener, byref(attr)) != OK:
            return 0
        return _host_port(attr.sockaddr)[1]

    def reject(self, listener: int, request: int) -> None:
        self._listener_reject(listener, request)

    def client_address(self, request: int) -> str:
        attr = _ConnRequestAttr(field_mask=_ConnRequestAttr.CLIENT_ADDR)
        if self._conn_request_query(request, byref(attr)) != OK:
            return "unknown"
        host, port = _host_port(attr.client_address)
        return f"{host}:{port}"

    def connect(self, worker: int, host: str, port: int, handler: Any) -> tuple[int, int]:
        """Begin to connect to a listener. Returns (status, endpoint); failure comes through the error handler."""
        address = _sockaddr(host, port)
        params = _EpParams(
            field_mask=_EpParams.SOCK_ADDR | _EpParams.FLAGS | _EpParams.ERR_HANDLING_MODE | _EpParams.ERR_HANDLER,
            err_mode=_EpParams.ERR_MODE_PEER,
            err_cb=handler,
            flags=_EpParams.FLAG_CLIENT_SERVER,
            sockaddr=_UcsSockAddr(ctypes.addressof(address), sizeof(address)),
        )
        endpoint = c_void_p()
        status = self._ep_create(worker, byref(params), byref(endpoint))
        return status, endpoint.value or 0

    def accept(self, worker: int, request: int, handler: Any) -> tuple[int, int]:
        """Turn a connection request into an endpoint. Returns (status, endpoint)."""
        params = _EpParams(
            field_mask=_EpParams.CONN_REQUEST | _EpParams.ERR_HANDLING_MODE | _EpParams.ERR_HANDLER,
            err_mode=_EpParams.ERR_MODE_PEER,
            err_cb=handler,
            conn_request=request,
        )
        endpoint = c_void_p()
        status = self._ep_create(worker, byref(params), byref(endpoint))
        return status, endpoint.value or 0

    def transports(self, endpoint: int) -> tuple[tuple[str, str], ...]:
        """(transport, device) of each lane the endpoint uses; empty when UCX can't tell (not connected yet)."""
        entries = (_TransportEntry * 32)()
        attr = _EpAttr(
            field_mask=_EpAttr.TRANSPORTS,
            entries=cast(entries, POINTER(_TransportEntry)),
            num_entries=len(entries),
            entry_size=sizeof(_TransportEntry),
        )
        if self._ep_query(endpoint, byref(attr)) != OK:
            return ()
        found = entries[: attr.num_entries]
        return tuple(((e.transport_name or b"").decode(), (e.device_name or b"").decode()) for e in found)

    # -- operations

    def set_am_handler(self, worker: int, am_id: int, handler: Any) -> int:
        params = _AmHandlerParam(
            field_mask=_AmHandlerParam.ID | _AmHandlerParam.FLAGS | _AmHandlerParam.CB,
            id=am_id,
            flags=_AmHandlerParam.FLAG_WHOLE_MSG,
            cb=handler,
        )
        return self._set_am_handler(worker, byref(params))

    def send(self, endpoint: int, am_id: int, message: bytes, params: RequestParams, key: int) -> tuple[int, int]:
        """Post an active message. `message` has to live until the final status."""
        params.message.user_data = key
        return _posted(self._am_send(endpoint, am_id, None, 0, message, len(message), params.message))

    def put(
        self, endpoint: int, local: int, nbytes: int, remote: int, rkey: int, params: RequestParams, key: int
    ) -> tuple[int, int]:
        params.plain.user_data = key
        return _posted(self._put(endpoint, local, nbytes, remote, rkey, params.plain))

    def get(
        self, endpoint: int, local: int, nbytes: int, remote: int, rkey: int, params: RequestParams, key: int
    ) -> tuple[int, int]:
        params.plain.user_data = key
        return _posted(self._get(endpoint, local, nbytes, remote, rkey, params.plain))

    def get_all(
        self, endpoint: int, gets: Iterable[tuple[int, int, int, int]], params: RequestParams, key: int
    ) -> tuple[int, int]:
        """Post gets, each (local, nbytes, remote, rkey), under one key. Returns (status, how many are in progress): OK,
        or the first one's that failed at once, after which no more are posted."""
        params.plain.user_data = key
        post, plain = self._get, byref(params.plain)
        pending = 0
        for local, nbytes, remote, rkey in gets:
            status = _posted(post(endpoint, local, nbytes, remote, rkey, plain))[0]
            if status == IN_PROGRESS:
                pending += 1
            elif status != OK:
                return status, pending
        return OK, pending

    def flush(self, endpoint: int, params: RequestParams, key: int) -> tuple[int, int]:
        params.plain.user_data = key
        return _posted(self._ep_flush(endpoint, params.plain))

    def force_close(self, endpoint: int, params: RequestParams, key: int) -> tuple[int, int]:
        params.close.user_data = key
        return _posted(self._ep_close(endpoint, params.close))

    # -- memory

    def map_memory(
        self, context: int, address: int, nbytes: int, *, remote_write: bool, gpu: bool = False
    ) -> tuple[int, int]:
        """Register memory that peers may read, and write where `remote_write`: as far as the transport can keep them
        from it, as RDMA can and CMA can't. Returns (status, memory handle). Pages are not touched by it."""
        mask = _MemMapParams.ADDRESS | _MemMapParams.LENGTH | _MemMapParams.FLAGS | _MemMapParams.PROT
        params = _MemMapParams(
            field_mask=mask | (_MemMapParams.MEMORY_TYPE if gpu else 0),
            memory_type=_MemMapParams.TYPE_CUDA if gpu else 0,
            address=address,
            length=nbytes,
            flags=_MemMapParams.FLAG_NONBLOCK,
            prot=_MemMapParams.PROT_LOCAL
            | _MemMapParams.PROT_REMOTE_READ
            | (_MemMapParams.PROT_REMOTE_WRITE if remote_write else 0),
        )
        memory = c_void_p()
        status = self._mem_map(context, byref(params), byref(memory))
        return status, memory.value or 0

    def unmap_memory(self, context: int, memory: int) -> int:
        return self._mem_unmap(context, memory)

    def pack_rkey(self, context: int, memory: int) -> tuple[int, bytes]:
        buffer, size = c_void_p(), c_size_t()
        status = self._rkey_pack(context, memory, byref(buffer), byref(size))
        if status != OK:
            return status, b""
        packed = ctypes.string_at(buffer, size.value)
        self._rkey_buffer_release(buffer)
        return status, packed

    def unpack_rkey(self, endpoint: int, packed: bytes) -> tuple[int, int]:
        rkey = c_void_p()
        # UCX reads lengths out of the buffer and trusts them: zeros after a short one end its reading.
        status = self._rkey_unpack(endpoint, packed + bytes(1024), byref(rkey))
        return status, rkey.value or 0

    def map_remote(self, rkey: int, address: int) -> int:
        """Map the memory behind a remote key into this process, as CUDA IPC can. Returns the status alone."""
        pointer = c_void_p()
        return self._rkey_ptr(rkey, address, byref(pointer))

    # -- through ucxx

    def open_worker(self, options: dict[str, str], gpu_options: dict[str, str] | None = None) -> tuple[int, UcxxWorker]:
        """A context of its own with one worker, in blocking-progress mode. Returns (context handle, worker).

        `gpu_options` are of UCX's module for CUDA, without which they are left out: it is loaded with the process's
        first context, and only where there is a CUDA driver.
        """
        ucxx = _ucxx()
        features = (ucxx.Feature.AM, ucxx.Feature.RMA, ucxx.Feature.WAKEUP)
        context = ucxx.UCXContext(options, feature_flags=features)
        if gpu_options:
            with contextlib.suppress(ucxx.UCXInvalidParamError):
                context = ucxx.UCXContext({**options, **gpu_options}, feature_flags=features)
        worker = as_type(UcxxWorker, ucxx.UCXWorker(context))
        worker.init_blocking_progress_mode()
        # The worker keeps its context alive.
        return int(context.handle), worker

    def describe_context(self, options: dict[str, str]) -> str:
        """UCX's own account of a context with these options: a line "resource ... transport/device" for each."""
        return str(_ucxx().UCXContext(options, feature_flags=(_ucxx().Feature.RMA,)).info)


def load() -> Ucp:
    """Load UCX by way of ucxx. Raises ConfigError when it is not installed. Takes most of a second the first time."""
    _ucxx()
    paths: dict[str, str] = {}
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            name = os.path.basename(path)
            if name.startswith(("libucp.so", "libucs.so", "libucp-", "libucs-")):
                paths.setdefault(name[:6], "/" + path)
    if "libucp" not in paths or "libucs" not in paths:
        raise ConfigError("transport", "ucxx is installed but loaded no libucp; reinstall 'kvstream-runtime[cpu]'")
    ucp = Ucp(paths["libucp"], paths["libucs"])
    if "UCX_LOG_LEVEL" not in os.environ:
        # A lost peer is an event here, not a fault: it arrives as a status, and is logged by whom it concerns.
        ucp.set_option("LOG_LEVEL", "fatal")
    return ucp


def _ucxx() -> Any:
    try:
        import ucxx._lib.libucxx as ucxx  # pyright: ignore[reportMissingImports]  # optional dependency
    except ImportError as error:
        raise ConfigError(
            "transport",
            f"ucxx is not installed ({error}); pip install 'kvstream-runtime[cpu]', or [cu12] or [cu13] with a GPU",
        ) from error
    return ucxx


def _posted(result: int | None) -> tuple[int, int]:
    if result is None:
        return OK, 0
    if result >= (1 << 64) + _ERR_LAST:
        return result - (1 << 64), 0
    return IN_PROGRESS, result


def _sockaddr(host: str, port: int) -> _SockaddrIn:
    return _SockaddrIn(
        family=socket.AF_INET,
        port=(c_uint8 * 2)(*port.to_bytes(2, "big")),
        addr=(c_uint8 * 4)(*socket.inet_aton(host)),
    )


def _host_port(storage: _SockaddrStorage) -> tuple[str, int]:
    raw = bytes(storage)
    if storage.family != socket.AF_INET:
        return "unknown", 0
    return socket.inet_ntoa(raw[4:8]), int.from_bytes(raw[2:4], "big")
