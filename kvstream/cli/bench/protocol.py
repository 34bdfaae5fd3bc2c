"""What the two ends of `kvstream bench` say to each other, and the memory they agree on.

A request is the metadata of a stream that the measuring end offers: taking the stream means yes, refusing it means no
and why. It owns these messages and the shapes of the pools, and does no I/O.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from kvstream.errors import ConfigError, ProtocolError
from kvstream.layout import KVLayout
from kvstream.memory import KVPool
from kvstream.transport.base import ByteView

__all__ = [
    "CONCURRENT",
    "CONTROL_LAYOUT",
    "LAYERS",
    "MAX_BLOCK_BYTES",
    "PONG",
    "ROLE",
    "Close",
    "Open",
    "Part",
    "Ping",
    "Probe",
    "Request",
    "Shape",
    "Verify",
    "allocate",
    "decode",
    "digest",
    "encode",
]

ROLE = "bench"
"""The role in the registry by which a worker that serves measurements is known."""

CONTROL_LAYOUT = KVLayout(layers=1, kv_heads=1, head_dim=64, block_tokens=16, dtype="float16")
"""One KV block of 4 KiB: what the streams carry that are requests."""

LAYERS = 16
CONCURRENT = 4
"""Streams at a time, where several are measured."""
PONG = "pong: no stream is wanted"
MAX_BLOCK_BYTES = 4 << 20

_BLOCK_TOKENS = 16
_UNIT = 64
"""A block is a whole number of these: 16 tokens of K and V, two bytes each."""

_BlockBytes = Annotated[int, msgspec.Meta(ge=_UNIT, le=MAX_BLOCK_BYTES, multiple_of=_UNIT)]
_Token = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{8}\Z")]
_Digest = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{16}\Z")]
_Index = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Shape(msgspec.Struct, frozen=True):
    """A pool for one block size: `blocks` KV blocks of `block_bytes` in each of `layers` layers."""

    block_bytes: _BlockBytes
    layers: Annotated[int, msgspec.Meta(ge=1, le=LAYERS)]
    blocks: _Count

    @classmethod
    def fit(cls, block_bytes: int, nbytes: int) -> Shape:
        """The shape of at most `nbytes` that gives each of the concurrent streams a block at least. Raises
        ConfigError."""
        if block_bytes % _UNIT or not _UNIT <= block_bytes <= MAX_BLOCK_BYTES:
            raise ConfigError(
                "--block-bytes", f"must be a multiple of {_UNIT} up to {MAX_BLOCK_BYTES} bytes, is {block_bytes}"
            )
        layers = min(LAYERS, nbytes // (CONCURRENT * block_bytes))
        if not layers:
            raise ConfigError(
                "--bytes", f"{nbytes} bytes hold fewer than {CONCURRENT} blocks of {block_bytes}; give more"
            )
        blocks = nbytes // (layers * block_bytes)
        return cls(block_bytes, layers, blocks - blocks % CONCURRENT)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool."""
        return self.block_bytes * self.layers * self.blocks

    @property
    def layout(self) -> KVLayout:
        """float16, K and V apart."""
        head_dim = self.block_bytes // _UNIT
        return KVLayout(layers=self.layers, kv_heads=1, head_dim=head_dim, block_tokens=_BLOCK_TOKENS, dtype="float16")

    def tokens(self, blocks: int) -> int:
        """Tokens of that many whole blocks."""
        return blocks * _BLOCK_TOKENS

    def pool(self, slab: ByteView) -> KVPool:
        """A pool in the first `nbytes` of the slab."""
        layout = self.layout
        layers = slab[: self.nbytes].view(layout.np_dtype).reshape(self.layers, self.blocks, *layout.block_shape)
        return KVPool.wrap(layout, list(layers))

    def table(self, seed: int) -> npt.NDArray[np.int64]:
        """All blocks in an order that has nothing to do with their addresses."""
        return np.random.default_rng(seed).permutation(self.blocks)


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """Refused at once with PONG: one message there, one back."""


class Probe(msgspec.Struct, frozen=True, tag="probe"):
    """Taken as it is: one block."""


class Open(msgspec.Struct, frozen=True, tag="open"):
    """Start a worker with a pool of this shape under the name `NAME-token`; one that was opened before is closed."""

    token: _Token
    shape: Shape


class Part(msgspec.Struct, frozen=True, tag="part"):
    """On the worker that was opened: take this into the blocks `first` to `first + count - 1` of its table."""

    first: _Index
    count: _Count


class Verify(msgspec.Struct, frozen=True, tag="verify"):
    """Refuse unless the bytes of all blocks, in the order of the table, have this digest; then set them to zero."""

    digest: _Digest


class Close(msgspec.Struct, frozen=True, tag="close"):
    """Close the worker that was opened."""


Request = Ping | Probe | Open | Part | Verify | Close


def encode(request: Request) -> Any:
    """A request as a stream's metadata."""
    return msgspec.to_builtins(request)


def decode(metadata: Any) -> Request:
    """The request of an offer. Raises ProtocolError."""
    try:
        return msgspec.convert(metadata, type=Request)
    except msgspec.ValidationError as error:
        raise ProtocolError(f"not a request of kvstream bench, or of another version's: {error}") from error


def allocate(nbytes: int) -> ByteView:
    """Memory to measure with, whose pages are taken when they are first used. Raises ConfigError naming --bytes."""
    try:
        return np.empty(nbytes, np.uint8)
    except (MemoryError, ValueError) as error:
        raise ConfigError("--bytes", f"{nbytes} bytes can't be had here ({error}); give less") from error


def digest(pool: KVPool, table: npt.NDArray[np.int64]) -> str:
    """XXH3 of these blocks, layer after layer, in the order of the table. Not for the loop:
    about 0.1 ms a MiB."""
    hashed = xxhash.xxh3_64()
    for layer in range(pool.layout.layers):
        hashed.update(memoryview(pool.layer(layer)[table].view(np.uint8).reshape(-1)))
    return hashed.hexdigest()
