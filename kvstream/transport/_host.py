"""What this host looks like to a transport: its identity, its interfaces, and the right to read other processes.

Owns the few look-ups in /proc and ioctls behind that. It must never change anything on the host.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import select
import socket
import struct

import msgspec
import numpy as np
import numpy.typing as npt

from kvstream.errors import ConfigError

__all__ = ["Interface", "PeerMemory", "has_rdma", "host_id", "read_process", "resolve_interface"]

_SIOCGIFADDR = 0x8915
# CDLL, not PyDLL: engine threads may run while this one copies.
_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """Where to listen: `bind` is the address for the socket, `host` the one to publish, `devices` the names of the
    interfaces that UCX may use (empty: all)."""

    bind: str
    host: str
    devices: tuple[str, ...]
    scope: str


def host_id() -> str:
    """Equal for two processes exactly when they share one kernel (boot) and one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"


def has_rdma() -> bool:
    """Whether this host has an RDMA device that a process may see."""
    try:
        return bool(os.listdir("/sys/class/infiniband"))
    except OSError:
        return False


def resolve_interface(interface: str | None) -> Interface:
    """None: loopback only. Else an interface's name, one of this host's IPv4 addresses, or "all".

    Raises ConfigError naming the interfaces there are.
    """
    if interface is None:
        return Interface(bind="127.0.0.1", host="127.0.0.1", devices=("lo",), scope="loopback")
    addresses = _addresses()
    if interface == "all":
        outside = [address for address in addresses.values() if not ipaddress.ip_address(address).is_loopback]
        return Interface(bind="0.0.0.0", host=outside[0] if outside else "127.0.0.1", devices=(), scope="all")
    for name, address in addresses.items():
        if interface in (name, address):
            loopback = ipaddress.ip_address(address).is_loopback
            return Interface(bind=address, host=address, devices=(name,), scope="loopback" if loopback else address)
    known = ", ".join(f"{name} ({address})" for name, address in addresses.items())
    raise ConfigError(
        "data_interface", f"{interface!r} is no interface or IPv4 address of this host; there are: {known}, or 'all'"
    )


def _addresses() -> dict[str, str]:
    """The IPv4 address of each interface that has one, in the kernel's order."""
    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            try:
                reply = fcntl.ioctl(sock.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no IPv4 address
                continue
            found[name] = socket.inet_ntoa(reply[20:24])
    return found


class PeerMemory:
    """Another process's memory, read by address (process_vm_readv: one copy, made by the reader alone).

    It holds on to the process by a pidfd, so that a number that was given to another process is not read for the peer.
    """

    _MAX_RUNS = 1024  # IOV_MAX

    def __init__(self, pid: int) -> None:
        """Raises OSError when there is no such process."""
        self._pid = ctypes.c_int(pid)
        self._pidfd = os.pidfd_open(pid)
        self._poll = select.poll()
        self._poll.register(self._pidfd, select.POLLIN)

    @property
    def alive(self) -> bool:
        return self._pidfd >= 0 and not self._poll.poll(0)

    def read(
        self, remote: npt.NDArray[np.uint64], remote_run: int, local: npt.NDArray[np.uint64], local_run: int
    ) -> None:
        """Copy runs of `remote_run` bytes at the addresses `remote` over there to runs of `local_run` bytes at `local`;
        the same number of bytes in all. Raises OSError when not all could be read, or the process has ended."""
        run = min(remote_run, local_run)
        remote, local = _cut(remote, remote_run, run), _cut(local, local_run, run)
        # In the order of the remote memory, so that neighbours there are one run: each costs the kernel a look-up.
        order = np.argsort(remote, kind="stable")
        remote, local = remote[order], local[order]
        for start in range(0, len(local), self._MAX_RUNS):
            window = slice(start, start + self._MAX_RUNS)
            theirs, ours = _vectors(remote[window], run), _vectors(local[window], run)
            size = len(local[window]) * run
            count = _readv(
                self._pid,
                ctypes.c_void_p(ours.ctypes.data), ctypes.c_ulong(len(ours)),
                ctypes.c_void_p(theirs.ctypes.data), ctypes.c_ulong(len(theirs)),
                ctypes.c_ulong(0),
            )  # fmt: skip
            if count != size:
                code = ctypes.get_errno() if count < 0 else 0
                raise OSError(code, os.strerror(code) if code else f"{count} of {size} bytes could be read")
        if not self.alive:
            raise OSError(0, "the process has ended")

    def close(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def _cut(addresses: npt.NDArray[np.uint64], run: int, shorter: int) -> npt.NDArray[np.uint64]:
    """The same bytes as shorter runs, of a length that divides the present one."""
    if run == shorter:
        return addresses
    steps = np.arange(0, run, shorter, dtype=np.uint64)
    return (addresses[:, None] + steps).ravel()


def _vectors(addresses: npt.NDArray[np.uint64], run: int) -> npt.NDArray[np.uint64]:
    """An array of struct iovec, runs that are neighbours in sequence and in memory joined."""
    first = np.flatnonzero(addresses[1:] - addresses[:-1] != np.uint64(run)) + 1
    first = np.concatenate(([0], first))
    vectors = np.empty((len(first), 2), np.uint64)
    vectors[:, 0] = addresses[first]
    vectors[:, 1] = np.diff(first, append=len(addresses)) * run
    return vectors


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process(pid: int, address: int, nbytes: int) -> bytes:
    """Read another process's memory the way UCX's CMA transport does. Raises OSError (EPERM without ptrace rights)."""
    buffer = ctypes.create_string_buffer(nbytes)
    local = _IoVec(ctypes.addressof(buffer), nbytes)
    remote = _IoVec(address, nbytes)
    count = _readv(
        ctypes.c_int(pid), ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )  # fmt: skip
    if count != nbytes:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw
