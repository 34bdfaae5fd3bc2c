"""What the command line says to a benchmark; each one takes what concerns it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeVar

__all__ = ["Options", "Scale"]

Scale = Literal["full", "quick", "tiny"]

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Options:
    """`scale`: "quick" cuts rounds and sizes, "tiny" amounts too, to see that all works: their figures mean nothing.
    `transport` "tcp" keeps everybody off shared memory and direct reads, as between two hosts."""

    scale: Scale = "full"
    transport: Literal["auto", "tcp"] = "auto"

    def pick(self, full: _T, quick: _T, tiny: _T) -> _T:
        """The value for the scale."""
        return {"full": full, "quick": quick, "tiny": tiny}[self.scale]
