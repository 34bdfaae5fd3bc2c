"""What the command line says to a benchmark; each one takes what concerns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """`quick` cuts rounds and sizes to see that all works: its figures mean nothing. `transport` "tcp" keeps everybody
    off shared memory and direct reads, as between two hosts."""

    quick: bool = False
    transport: Literal["auto", "tcp"] = "auto"
