"""What a KV cache looks like in memory: shapes, dtypes, sizes, and the fingerprint two workers compare.

This file owns `KVLayout` and `Shard`, both pure values. It never touches memory, a device or the network, and
nothing in it depends on the process it runs in: equal layouts have equal fingerprints everywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

import ml_dtypes
import msgspec
import numpy as np

from kvstream.errors import ConfigError

__all__ = ["KVLayout", "Order", "Parts", "Shard", "describe_mismatch"]

Order = Literal["NHD", "HND"]
Parts = Literal["split", "packed", "latent"]

# NumPy has neither bfloat16 nor the fp8 formats; ml_dtypes registers them as NumPy dtypes.
_DTYPES: Final[Mapping[str, np.dtype[Any]]] = MappingProxyType(
    {
        "float32": np.dtype(np.float32),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
        "int8": np.dtype(np.int8),
        "uint8": np.dtype(np.uint8),
    }
)

# Far above any model in use; they keep a mistyped or hostile number from becoming an allocation.
_MAX_LAYERS: Final = 4096
_MAX_HEADS: Final = 4096
_MAX_HEAD_DIM: Final = 65536
_MAX_BLOCK_TOKENS: Final = 65536
_MAX_BLOCK_BYTES: Final = 1 << 30
_MAX_RANKS: Final = 65536

_FINGERPRINT_FORMAT: Final = "kvstream-layout-1"


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The layout of a paged KV cache, as one rank holds it.

    With T = `block_tokens`, H = `kv_heads` and D = `head_dim`, one KV block of one layer has the shape

    | parts    | order "NHD"  | order "HND"  |                                              |
    |----------|--------------|--------------|----------------------------------------------|
    | "split"  | (2, T, H, D) | (2, H, T, D) | all of K, then all of V                      |
    | "packed" | (T, H, 2D)   | (H, T, 2D)   | K and V side by side in the last axis        |
    | "latent" | (T, D)       | (T, D)       | multi-head latent attention: one shared part |

    A latent cache has no heads: `kv_heads` must be 1 and `head_dim` is the whole latent width (rope part
    included). Raises ConfigError naming the field.
    """

    layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: str
    order: Order = "NHD"
    parts: Parts = "split"

    def __post_init__(self) -> None:
        _check_int("layers", self.layers, 1, _MAX_LAYERS)
        _check_int("kv_heads", self.kv_heads, 1, _MAX_HEADS)
        _check_int("head_dim", self.head_dim, 1, _MAX_HEAD_DIM)
        _check_int("block_tokens", self.block_tokens, 1, _MAX_BLOCK_TOKENS)
        _check_choice("dtype", self.dtype, tuple(_DTYPES))
        _check_choice("order", self.order, get_args(Order))
        _check_choice("parts", self.parts, get_args(Parts))
        if self.parts == "latent" and self.kv_heads != 1:
            raise ConfigError("kv_heads", f"a latent cache has no heads, so this must be 1, not {self.kv_heads}")
        if self.block_bytes > _MAX_BLOCK_BYTES:
            raise ConfigError(
                "block_tokens",
                f"a block of one layer would have {self.block_bytes} bytes, above the limit of {_MAX_BLOCK_BYTES}",
            )

    @property
    def np_dtype(self) -> np.dtype[Any]:
        """The element type as a NumPy dtype (ml_dtypes for bfloat16 and fp8)."""
        return _DTYPES[self.dtype]

    @property
    def block_shape(self) -> tuple[int, ...]:
        """Shape of one KV block in one layer, in elements of `dtype` (see the class)."""
        if self.parts == "latent":
            return (self.block_tokens, self.head_dim)
        rows = (self.block_tokens, self.kv_heads) if self.order == "NHD" else (self.kv_heads, self.block_tokens)
        return (2, *rows, self.head_dim) if self.parts == "split" else (*rows, 2 * self.head_dim)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, K and V together."""
        halves = 1 if self.parts == "latent" else 2
        return halves * self.kv_heads * self.head_dim * self.np_dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block in one layer."""
        return self.block_tokens * self.token_bytes

    def blocks_for(self, tokens: int) -> int:
        """KV blocks that hold `tokens` tokens, the last one perhaps in part."""
        _check_int("tokens", tokens, 0, None)
        return -(-tokens // self.block_tokens)

    def bytes(self, tokens: int) -> int:
        """Bytes that `tokens` tokens occupy over all layers, in whole blocks: what a stream of them moves."""
        return self.layers * self.blocks_for(tokens) * self.block_bytes

    def fingerprint(self) -> str:
        """32 hex digits that are equal exactly where the layouts are equal, in every process and release.

        BLAKE2b over every field as `name=value` in declaration order, behind the name of this format.
        """
        fields = (f"{name}={getattr(self, name)}" for name in self.__struct_fields__)
        canonical = "\n".join((_FINGERPRINT_FORMAT, *fields))
        return hashlib.blake2b(canonical.encode("ascii"), digest_size=16).hexdigest()


class Shard(msgspec.Struct, frozen=True):
    """Which part of a model's KV cache one worker holds: its tensor- and pipeline-parallel rank.

    Raises ConfigError naming the field.
    """

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    def __post_init__(self) -> None:
        _check_int("tp_size", self.tp_size, 1, _MAX_RANKS)
        _check_int("tp_rank", self.tp_rank, 0, self.tp_size - 1)
        _check_int("pp_size", self.pp_size, 1, _MAX_RANKS)
        _check_int("pp_rank", self.pp_rank, 0, self.pp_size - 1)

    @property
    def rank(self) -> int:
        """Rank in the group, tensor-parallel ranks counting fastest."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def size(self) -> int:
        """Number of ranks in the group."""
        return self.tp_size * self.pp_size


def describe_mismatch(a: KVLayout, b: KVLayout) -> str:
    """The fields in which `a` and `b` differ, as "block_tokens 16 != 32, dtype float16 != int8"; empty where equal."""
    pairs = ((name, getattr(a, name), getattr(b, name)) for name in a.__struct_fields__)
    return ", ".join(f"{name} {left} != {right}" for name, left, right in pairs if left != right)


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    # bool is an int to Python, and NumPy's integers would print differently in a fingerprint.
    allowed = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if type(value) is not int:
        raise ConfigError(field, f"must be {allowed}, not {value!r}")
    if value < low or (high is not None and value > high):
        raise ConfigError(field, f"must be {allowed}, not {value}")


def _check_choice(field: str, value: object, allowed: tuple[str, ...]) -> None:
    # `value in allowed` alone would let a NumPy string or a str subclass with its own text through.
    if type(value) is not str or value not in allowed:
        raise ConfigError(field, f"must be one of {', '.join(allowed)}, not {value!r}")
