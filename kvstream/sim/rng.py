"""Where the simulator's randomness comes from: generators derived from the seed by name.

Each stream, fault, process and connection draws from a generator of its own, so that leaving one out of a scenario
changes nothing for the others. Nothing here may depend on `hash()`, the clock or the machine.
"""

from __future__ import annotations

import hashlib
import random

__all__ = ["derive", "number"]


def number(seed: int, *names: str | int) -> int:
    """A 64-bit number that the seed and the names alone decide."""
    text = "\0".join((str(seed), *map(str, names)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def derive(seed: int, *names: str | int) -> random.Random:
    """The generator of that name."""
    return random.Random(number(seed, *names))
