"""Random models of any size with SmolLM2's structure, for where its weights can't be had, and for tests.

Owns their making. Answers mean nothing, but they depend on every layer's KV cache, so a transfer that loses or
swaps bytes still changes them.
"""

from __future__ import annotations

import numpy as np

from .tokenizer import ByteTokenizer
from .weights import LayerWeights, ModelConfig, Weights

__all__ = ["synthetic_weights"]


def synthetic_weights(
    *,
    layers: int = 8,
    hidden: int = 192,
    heads: int = 6,
    kv_heads: int = 3,
    ffn: int = 512,
    vocab: int = ByteTokenizer.vocab,
    seed: int = 0,
) -> Weights:
    """A model of the given shape, the same for the same arguments in every process (and NumPy release line).

    Every matrix keeps the variance of its input (entries of std 1/sqrt(in)); Q and K are three times that, so
    that attention picks tokens out rather than averaging over all, and embeddings are small, so that the layers
    and not the last token's own embedding decide what comes next.
    """
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise ValueError(f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}: must divide, with an even head size")
    head_dim = hidden // heads
    rng = np.random.Generator(np.random.PCG64(seed))

    def matrix(rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    def layer() -> LayerWeights:
        q, k = matrix(hidden, hidden, 3.0), matrix(kv_heads * head_dim, hidden, 3.0)
        v = matrix(kv_heads * head_dim, hidden)
        return LayerWeights(
            attn_norm=np.ones(hidden, np.float32),
            qkv=np.concatenate([q, k, v]),
            attn_out=matrix(hidden, hidden, 2.0),
            ffn_norm=np.ones(hidden, np.float32),
            gate_up=matrix(2 * ffn, hidden),
            down=matrix(hidden, ffn),
        )

    config = ModelConfig(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        eos=ByteTokenizer.eos,
    )
    embedding = matrix(vocab, hidden, 0.5)
    return Weights(config, embedding, np.ones(hidden, np.float32), tuple(layer() for _ in range(layers)))
