"""A file of arrays, built once and then memory-mapped by every process that asks for it.

Owns the file format, the lock that lets one process build while others wait, and the check that a file is whole.
It knows nothing of models, and it must never show a half-written or damaged file to a caller.
"""

from __future__ import annotations

import fcntl
import os
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

__all__ = ["ArrayFile", "cache_directory", "open_or_build"]

# magic, CRC-32 of the index, offset of the index, size of the index; then the arrays, then the index (JSON).
_HEADER = struct.Struct("<8sIQQ")
_MAGIC = b"KVSARR\x00\x01"
_ALIGN = 4096  # arrays start on pages, so that a mapped array touches none of its neighbours' pages


class _Entry(msgspec.Struct, frozen=True, eq=False):
    dtype: str
    shape: tuple[int, ...]
    offset: int
    checksum: int


class _Index(msgspec.Struct, frozen=True, eq=False):
    meta: str
    arrays: dict[str, _Entry]


class ArrayFile(msgspec.Struct, frozen=True, eq=False):
    """`arrays` by name, read-only and shared with every process that maps the file; `meta` is the builder's text."""

    meta: str
    arrays: dict[str, np.ndarray]


class _Damaged(Exception):
    """The file is not what its builder wrote."""


def cache_directory() -> Path:
    """Where built files live: $KVSTREAM_CACHE, else $XDG_CACHE_HOME/kvstream, else ~/.cache/kvstream."""
    if chosen := os.environ.get("KVSTREAM_CACHE"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvstream"


def open_or_build(
    path: Path,
    *,
    meta: Callable[[], str],
    arrays: Callable[[], Iterable[tuple[str, np.ndarray]]],
) -> ArrayFile:
    """Map the file at `path`; build it first if it is missing, truncated or damaged.

    `meta` and `arrays` are called only to build. Arrays are written as they are produced, so one is in memory at
    a time. Processes that start together build once: the others wait for the builder's lock, which the kernel
    drops if the builder dies. A rebuilt file replaces the old one by rename; processes that have the old one
    mapped keep it. Blocks (builds take seconds): call it from a thread, or before the loop starts.
    """
    if (found := _open(path)) is not None:
        return found
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(path.name + ".lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (found := _open(path)) is not None:  # somebody else built it while this process waited
            return found
        # The lock makes the name ours alone; what a killed builder left under it is overwritten.
        partial = path.with_name(path.name + ".partial")
        try:
            with open(partial, "wb") as out:
                _write(out, meta(), arrays())
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
        return _read(path)


def _open(path: Path) -> ArrayFile | None:
    try:
        return _read(path)
    except (FileNotFoundError, _Damaged):
        return None


def _write(out: BinaryIO, meta: str, arrays: Iterable[tuple[str, np.ndarray]]) -> None:
    entries: dict[str, _Entry] = {}
    out.write(bytes(_HEADER.size))
    for name, array in arrays:
        array = np.ascontiguousarray(array)
        out.write(bytes(-out.tell() % _ALIGN))
        entries[name] = _Entry(array.dtype.str, array.shape, out.tell(), _checksum(array))
        out.write(array.data)
    index = msgspec.json.encode(_Index(meta, entries))
    index_at = out.tell()
    out.write(index)
    out.seek(0)
    out.write(_HEADER.pack(_MAGIC, zlib.crc32(index), index_at, len(index)))
    out.flush()
    os.fsync(out.fileno())  # before the rename, or a crash could leave the final name on unwritten pages


def _read(path: Path) -> ArrayFile:
    if path.stat().st_size < _HEADER.size:
        raise _Damaged(path)
    flat = np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
    magic, crc, index_at, index_size = _HEADER.unpack(flat[: _HEADER.size].tobytes())
    # The index is the file's tail, so its bounds check is also the check for truncation.
    if magic != _MAGIC or index_at + index_size != flat.size:
        raise _Damaged(path)
    encoded = flat[index_at:].tobytes()
    if zlib.crc32(encoded) != crc:
        raise _Damaged(path)
    index = msgspec.json.decode(encoded, type=_Index)
    arrays: dict[str, np.ndarray] = {}
    for name, entry in index.arrays.items():
        dtype = np.dtype(entry.dtype)
        size = dtype.itemsize * int(np.prod(entry.shape, dtype=np.int64))
        array = flat[entry.offset : entry.offset + size].view(dtype).reshape(entry.shape)
        if _checksum(array) != entry.checksum:
            raise _Damaged(path)
        arrays[name] = array
    return ArrayFile(index.meta, arrays)


def _checksum(array: np.ndarray) -> int:
    """Sum of the array's bytes taken as 64-bit words, modulo 2**64.

    Not a hash: it finds lost, zeroed and overwritten pages, and it does so at memory speed (0.1 s for 540 MB),
    which is why every start can afford it. It also brings the whole file into the page cache.
    """
    data = array.reshape(-1).view(np.uint8)
    whole = data.size - data.size % 8
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    return (total + int.from_bytes(data[whole:].tobytes(), "little")) % 2**64
