"""The arithmetic of a Llama decoder as pure functions on float32 arrays: nothing here holds state or knows of paging.

`xp` is the array module, numpy or cupy. Sources: RMSNorm (Zhang and Sennrich 2019), rotary embedding (Su et al.
2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020), as put together by LLaMA
(Touvron et al. 2023).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

__all__ = ["attention", "bfloat16_bits", "from_bfloat16_bits", "rms_norm", "rope", "rope_tables", "swiglu"]

Array = Any

_QUERY_TILE = 128


def rms_norm(xp: Any, x: Array, weight: Array, eps: float) -> Array:
    """x / rms(x) * weight over the last axis. x: (tokens, hidden)."""
    scale = xp.sqrt(xp.mean(xp.square(x), axis=-1, keepdims=True) + np.float32(eps))
    return x / scale * weight


def rope_tables(xp: Any, positions: Array, head_dim: int, theta: float) -> tuple[Array, Array]:
    """Cosines and sines of the rotary angles, each (tokens, 1, head_dim // 2), to be used for all layers.

    Angles are computed in float64: at position 8000 a float32 angle is already off in its third decimal.
    """
    frequencies = theta ** (-xp.arange(0, head_dim, 2, dtype=xp.float64) / head_dim)
    angles = positions.astype(xp.float64)[:, None, None] * frequencies
    return xp.cos(angles).astype(xp.float32), xp.sin(angles).astype(xp.float32)


def rope(xp: Any, x: Array, cos: Array, sin: Array) -> Array:
    """Rotate neighbouring pairs (0, 1), (2, 3), ... of each head. x: (tokens, heads, head_dim).

    GGUF stores Q and K permuted for this pairing. The other convention in use (first half with second half)
    gives a model that still answers easy questions, so only a likelihood test tells the two apart.
    """
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = xp.empty_like(x)
    turned[..., 0::2] = even * cos - odd * sin
    turned[..., 1::2] = even * sin + odd * cos
    return turned


def attention(xp: Any, q: Array, k: Array, v: Array, start: int) -> Array:
    """Causal grouped-query attention of tokens start..start+n over tokens 0..start+n.

    q: (n, heads, head_dim); k, v: (start + n, kv_heads, head_dim). Returns (n, heads * head_dim).
    Query heads g*k .. g*k + g-1 use KV head k. Queries are taken in tiles, so scores need
    heads * tile * tokens floats rather than heads * tokens**2, and keys after a tile are never multiplied.
    """
    n, heads, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    k, v = k.transpose(1, 2, 0), v.transpose(1, 0, 2)
    # (kv_heads, group, n, head_dim), scaled here where there is least to multiply
    q = (q * np.float32(1 / math.sqrt(head_dim))).reshape(n, kv_heads, group, head_dim).transpose(1, 2, 0, 3)
    out = xp.empty((n, kv_heads, group, head_dim), dtype=xp.float32)
    future = xp.triu(xp.full((_QUERY_TILE, _QUERY_TILE), -xp.inf, dtype=xp.float32), 1)
    for a in range(0, n, _QUERY_TILE):
        b = min(a + _QUERY_TILE, n)
        seen, tile = start + b, b - a
        scores = q[:, :, a:b].reshape(kv_heads, group * tile, head_dim) @ k[:, :, :seen]
        scores.reshape(kv_heads, group, tile, seen)[..., seen - tile :] += future[:tile, :tile]
        scores -= scores.max(axis=-1, keepdims=True)
        xp.exp(scores, out=scores)
        mixed = scores @ v[:, :seen]
        mixed /= scores.sum(axis=-1, keepdims=True)
        out[a:b] = mixed.reshape(kv_heads, group, tile, head_dim).transpose(2, 0, 1, 3)
    return out.reshape(n, heads * head_dim)


def swiglu(xp: Any, x: Array, gate_up: Array, down: Array) -> Array:
    """down(silu(gate(x)) * up(x)), with gate and up stacked in one (2 * ffn, hidden) matrix."""
    gate, up = xp.split(x @ gate_up.T, 2, axis=-1)
    with np.errstate(over="ignore"):  # exp overflows to inf for gates below -88, where silu is 0 as it should be
        return (gate / (1 + xp.exp(-gate)) * up) @ down.T


def bfloat16_bits(xp: Any, x: Array) -> Array:
    """Round finite float32 to bfloat16, to nearest even, as uint16 bit patterns: they need no bfloat16 dtype."""
    bits = x.view(xp.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(xp.uint16)


def from_bfloat16_bits(xp: Any, bits: Array) -> Array:
    """The float32 values of bfloat16 bit patterns; exact."""
    return (bits.astype(xp.uint32) << 16).view(xp.float32)
