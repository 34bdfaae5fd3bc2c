"""One name in, one runnable model out. Owns the choice between SmolLM2 and the synthetic stand-in."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvstream.errors import ConfigError
from kvstream.layout import KVLayout

from .synthetic import synthetic_weights
from .tokenizer import ByteTokenizer, Tokenizer
from .weights import Weights, load_gguf, smollm2_path

__all__ = ["Model", "load_model"]


class Model(msgspec.Struct, frozen=True, eq=False):
    """A model with all that a worker needs to run it."""

    name: str
    weights: Weights
    tokenizer: Tokenizer

    def layout(self, block_tokens: int = 16, dtype: str = "bfloat16") -> KVLayout:
        """The layout of this model's KV cache: 12 KiB per block and layer with the defaults, for SmolLM2."""
        config = self.weights.config
        return KVLayout(
            layers=config.layers,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            block_tokens=block_tokens,
            dtype=dtype,
        )


def load_model(name: Literal["smollm2", "synthetic"]) -> Model:
    """Load by name. Blocks: seconds the first time "smollm2" is loaded on a machine, 0.3 s after that.

    ConfigError, with what to install, if the weights of "smollm2" are not there; "synthetic" always is.
    """
    if name == "smollm2":
        weights, tokenizer = load_gguf(smollm2_path())
        return Model(name, weights, tokenizer)
    if name == "synthetic":
        return Model(name, synthetic_weights(), ByteTokenizer())
    raise ConfigError("model", f"{name!r} is not a model: choose 'smollm2' or 'synthetic'")
