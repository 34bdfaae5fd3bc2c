"""Prefill and greedy decode over paged KV memory, which *is* a kvstream pool: what a worker process calls.

Owns the forward pass's use of pool, block tables and callbacks. Every key and value goes through the pool: what
attention reads is what a stream sends. It blocks and computes, so it must never run on an event loop's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvstream.errors import ConfigError, LayoutMismatch
from kvstream.layout import KVLayout

from . import model
from .weights import Weights

__all__ = ["Engine", "PagedMemory", "Stopped"]

Array = Any
Stop = Callable[[], bool]

_DTYPES = ("bfloat16", "float16", "float32")


class Stopped(Exception):
    """The caller's `stop` asked for it. Blocks given to the call hold a partial KV cache; the engine is unchanged."""


class PagedMemory(Protocol):
    """What the engine needs of `kvstream.KVPool`."""

    @property
    def layout(self) -> KVLayout: ...

    def layer(self, layer: int) -> Array:
        """(blocks, 2, block_tokens, kv_heads, head_dim); K at 0 and V at 1 of the second axis."""
        ...


class Engine:
    """Runs `weights` with `pool` as its KV memory, on the pool's device (NumPy for host memory, CuPy for a GPU).

    A sequence is its block table: token p lives in block `blocks[p // block_tokens]` at `p % block_tokens`. The
    engine keeps nothing between calls, so calls for different sequences may follow one another in any order, and
    the caller alone decides which blocks are whose. `stop` (say, `threading.Event().is_set`) is asked between
    layers; when it returns true the call raises Stopped, within about a layer's time.

    Raises LayoutMismatch if the pool's layout is not this model's, ConfigError if the engine can't compute with it.
    """

    def __init__(self, weights: Weights, pool: PagedMemory) -> None:
        config, layout = weights.config, pool.layout
        ours = (config.layers, config.kv_heads, config.head_dim)
        theirs = (layout.layers, layout.kv_heads, layout.head_dim)
        if ours != theirs:
            raise LayoutMismatch(f"pool: (layers, kv_heads, head_dim) is {theirs}, the model needs {ours}")
        if (layout.order, layout.parts) != ("NHD", "split"):
            raise ConfigError("layout", f"order={layout.order!r}, parts={layout.parts!r}: need 'NHD' and 'split'")
        if layout.dtype not in _DTYPES:
            raise ConfigError("layout.dtype", f"{layout.dtype!r} is not one of {', '.join(_DTYPES)}")
        memory = pool.layer(0)
        self._xp = _array_module(memory)
        if (memory.shape[1:], memory.itemsize) != (layout.block_shape, layout.np_dtype.itemsize):
            raise ConfigError(
                "pool", f"holds {memory.dtype} of shape {memory.shape}, not (blocks, *block_shape) arrays"
            )
        self._weights = weights.to(self._xp)
        self._pool = pool
        self._block_tokens = layout.block_tokens
        self._pool_blocks = int(memory.shape[0])
        self._bfloat16 = layout.dtype == "bfloat16"

    def prefill(
        self,
        tokens: Sequence[int],
        blocks: Sequence[int],
        *,
        on_layer: Callable[[int], None] | None = None,
        chunk: int | None = None,
        on_chunk_layer: Callable[[int, int, int], None] | None = None,
        stop: Stop | None = None,
    ) -> int:
        """Compute the KV cache of a prompt into `blocks`; return the first token of the answer.

        `on_layer(l)` is called as soon as layer l's keys and values of the whole prompt are in the pool (on a GPU:
        after the device has written them), before anything else of layer l is computed. With `chunk` the prompt is
        run in pieces of that many tokens, as engines do to bound a step; `on_chunk_layer(l, a, b)` then tells that
        tokens a..b of layer l are in the pool. Both are called on this thread; what they raise ends the call.
        """
        if not tokens:
            raise ValueError("tokens: a prompt has at least one token")
        if chunk is not None and chunk < 1:
            raise ValueError(f"chunk: at least 1 token, not {chunk}")
        step = chunk or len(tokens)
        last: Array = None
        for a in range(0, len(tokens), step):
            b = min(a + step, len(tokens))

            def written(layer: int, a: int = a, b: int = b) -> None:
                if on_chunk_layer is not None:
                    on_chunk_layer(layer, a, b)
                if on_layer is not None and b == len(tokens):
                    on_layer(layer)

            tell = written if on_layer is not None or on_chunk_layer is not None else None
            last = self._forward(tokens[a:b], a, blocks, last_only=True, written=tell, stop=stop)
        return self._greedy(last)

    def decode(self, token: int, position: int, blocks: Sequence[int], *, stop: Stop | None = None) -> int:
        """One greedy step: write `token`'s KV at `position`, attend to 0..position, return the next token."""
        return self._greedy(self._forward([token], position, blocks, last_only=True, stop=stop))

    def generate(
        self,
        first: int,
        tokens_count: int,
        blocks: Sequence[int],
        new_tokens: int,
        *,
        eos: int | None = None,
        on_token: Callable[[int], None] | None = None,
        stop: Stop | None = None,
    ) -> list[int]:
        """Continue greedily after a prompt of `tokens_count` tokens whose KV is in `blocks`.

        Returns at most `new_tokens` tokens, `first` (from prefill) among them; the answer ends early with `eos`.
        `on_token` is called with each token but the first. The KV of the last token is not written.
        `blocks` must have room for `tokens_count + new_tokens - 1` tokens.
        """
        answer = [first]
        while len(answer) < new_tokens and answer[-1] != eos:
            answer.append(self.decode(answer[-1], tokens_count + len(answer) - 1, blocks, stop=stop))
            if on_token is not None:
                on_token(answer[-1])
        return answer

    def log_likelihoods(self, tokens: Sequence[int], blocks: Sequence[int], *, stop: Stop | None = None) -> Array:
        """log p(token i+1 | tokens 0..i) for each i, (len(tokens) - 1,) float32 on the host: minus it is the NLL.

        Writes the KV of `tokens` into `blocks`, as prefill does.
        """
        hidden = self._forward(tokens, 0, blocks, last_only=False, stop=stop)[:-1]
        logits = hidden @ self._weights.embedding.T
        logits -= logits.max(axis=-1, keepdims=True)
        targets = self._xp.asarray(tokens[1:])
        chosen = logits[self._xp.arange(len(targets)), targets]
        return _to_host(chosen - self._xp.log(self._xp.exp(logits).sum(axis=-1)))

    def _forward(
        self,
        tokens: Sequence[int],
        start: int,
        blocks: Sequence[int],
        *,
        last_only: bool,
        written: Callable[[int], None] | None = None,
        stop: Stop | None = None,
    ) -> Array:
        """Run `tokens` at positions start.. through all layers; (tokens, hidden), or the last row alone.

        With `last_only` the last layer computes only the last token's output once all keys and values are written.
        """
        xp, w, config = self._xp, self._weights, self._weights.config
        stop_at = start + len(tokens)
        pages = -(-stop_at // self._block_tokens)
        if start < 0 or pages > len(blocks):
            raise ValueError(
                f"blocks: {len(blocks)} of {self._block_tokens} tokens don't hold positions {start}..{stop_at - 1}"
            )
        used = blocks[:pages]
        if min(used) < 0 or max(used) >= self._pool_blocks:  # NumPy would take -1 for the last block, CuPy anything
            raise ValueError(f"blocks: an id is not one of the pool's, 0..{self._pool_blocks - 1}")
        table = xp.asarray(used)
        positions = xp.arange(start, stop_at)
        page, offset = table[positions // self._block_tokens], positions % self._block_tokens
        cos, sin = model.rope_tables(xp, positions, config.head_dim, config.rope_theta)
        q_end = config.heads * config.head_dim
        k_end = q_end + config.kv_heads * config.head_dim

        x = w.embedding[xp.asarray(tokens)]
        for index, layer in enumerate(w.layers):
            if stop is not None and stop():
                raise Stopped(f"before layer {index} of {config.layers}, positions {start}..{stop_at - 1}")
            q, k, v = xp.split(
                model.rms_norm(xp, x, layer.attn_norm, config.norm_eps) @ layer.qkv.T, [q_end, k_end], axis=-1
            )
            keys, values = self._halves(index)
            k = model.rope(xp, k.reshape(len(tokens), config.kv_heads, -1), cos, sin)
            self._write(keys, page, offset, k)
            self._write(values, page, offset, v.reshape(k.shape))
            if written is not None:
                self._synchronize()
                written(index)
            q = model.rope(xp, q.reshape(len(tokens), config.heads, -1), cos, sin)
            first = start
            if last_only and index == config.layers - 1:
                q, x, first = q[-1:], x[-1:], stop_at - 1
            k, v = self._read(keys, table, stop_at), self._read(values, table, stop_at)
            x = x + model.attention(xp, q, k, v, first) @ layer.attn_out.T
            x = x + model.swiglu(xp, model.rms_norm(xp, x, layer.ffn_norm, config.norm_eps), layer.gate_up, layer.down)
        return model.rms_norm(xp, x, w.output_norm, config.norm_eps)

    def _halves(self, layer: int) -> tuple[Array, Array]:
        """Views of a layer's K and V, each (blocks, block_tokens, kv_heads, head_dim); bfloat16 as uint16 bits."""
        memory = self._pool.layer(layer)
        if self._bfloat16:
            memory = memory.view(self._xp.uint16)
        return memory[:, 0], memory[:, 1]

    def _write(self, half: Array, page: Array, offset: Array, x: Array) -> None:
        """Store x, (tokens, kv_heads, head_dim), at its tokens' places."""
        half[page, offset] = model.bfloat16_bits(self._xp, x) if self._bfloat16 else x

    def _read(self, half: Array, table: Array, count: int) -> Array:
        """The first `count` tokens' keys or values as float32, (count, kv_heads, head_dim)."""
        pages = half[table]
        if self._bfloat16:
            pages = model.from_bfloat16_bits(self._xp, pages)
        return pages.astype(self._xp.float32, copy=False).reshape(-1, *pages.shape[2:])[:count]

    def _greedy(self, hidden: Array) -> int:
        """The likeliest next token after the last row of `hidden`."""
        return int((self._weights.embedding @ hidden[-1]).argmax())

    def _synchronize(self) -> None:
        """Wait until the device has done what was asked of it: only then may another reader be told."""
        if self._xp is not np:
            self._xp.cuda.get_current_stream().synchronize()


def _array_module(array: Array) -> Any:
    if isinstance(array, np.ndarray):
        return np
    if type(array).__module__.partition(".")[0] == "cupy":
        import cupy

        return cupy
    raise ConfigError("pool", f"the engine computes on numpy or cupy memory, not {type(array).__qualname__}")


def _to_host(array: Array) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else array.get()
