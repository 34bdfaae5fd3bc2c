"""The seams to the world that a simulation replaces: clock, randomness and ids. No other module of kvstream may use
`time`, `random`, `secrets` or `uuid` for decisions; a lint holds this."""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Seams"]


@dataclass(frozen=True, slots=True)
class Seams:
    """`clock` is monotonic, in seconds, and comparable between processes of one host; `wall` is Unix time."""

    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    token: Callable[[int], bytes] = secrets.token_bytes
    """Unpredictable bytes: incarnations, keys, nonces."""
    rng: random.Random = field(default_factory=random.Random)
    """Jitter; never security."""
