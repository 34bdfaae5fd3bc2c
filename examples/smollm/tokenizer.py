"""Text to token ids and back: SmolLM2's byte-level BPE, a plain byte tokenizer for synthetic models, the chat format.

Owns everything about text. It must never know about weights or KV memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import tokenizers

__all__ = ["BpeTokenizer", "ByteTokenizer", "Tokenizer", "bpe_json", "chat"]

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_SPECIAL = (3, 4)  # GGUF token types: control, user-defined


class Tokenizer(Protocol):
    """What an engine's caller needs of a tokenizer. `eos` ends an answer."""

    @property
    def eos(self) -> int: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens left out, incomplete UTF-8 replaced."""
        ...


def chat(prompt: str, system: str = SYSTEM) -> str:
    """One user turn in SmolLM2-Instruct's chat format, up to where the assistant's answer begins."""
    return f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def bpe_json(*, tokens: Sequence[str], merges: Sequence[str], types: Sequence[int]) -> str:
    """A `tokenizers` definition from a GGUF's vocabulary (pre-tokenizer "smollm"), as JSON.

    Built here once and stored: parsing a GGUF's vocabulary takes seconds, loading this takes a tenth of one.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    bpe = tokenizers.Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    bpe.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, types, strict=True) if kind in _SPECIAL]
    )
    return bpe.to_str()


class BpeTokenizer:
    """Byte-level BPE. Special tokens written out in the text (`<|im_end|>`) become their ids; no BOS is added."""

    def __init__(self, definition: str, *, eos: int) -> None:
        self._bpe = tokenizers.Tokenizer.from_str(definition)
        self.eos = eos

    def encode(self, text: str) -> list[int]:
        return self._bpe.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        return self._bpe.decode(list(ids), skip_special_tokens=True)


class ByteTokenizer:
    """One token per UTF-8 byte; id 256 ends a text. For models whose answers mean nothing anyway."""

    vocab = 257
    eos = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")
