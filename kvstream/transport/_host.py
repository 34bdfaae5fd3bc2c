"""What this host looks like to a transport: its identity, its interfaces, and the right to read other processes.

Owns the few look-ups in /proc and ioctls behind that. It must never change anything on the host.
"""

from __future__ import annotations

import ctypes
import fcntl
import ipaddress
import os
import socket
import struct

import msgspec

from kvstream.errors import ConfigError

__all__ = ["Interface", "has_rdma", "host_id", "read_process", "resolve_interface"]

_SIOCGIFADDR = 0x8915


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


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def read_process(pid: int, address: int, nbytes: int) -> bytes:
    """Read another process's memory the way UCX's CMA transport does. Raises OSError (EPERM without ptrace rights)."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(nbytes)
    local = _IoVec(ctypes.addressof(buffer), nbytes)
    remote = _IoVec(address, nbytes)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    count = libc.process_vm_readv(
        ctypes.c_int(pid), ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1),
        ctypes.c_ulong(0),
    )  # fmt: skip
    if count != nbytes:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return buffer.raw
