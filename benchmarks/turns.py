"""Contenders that take turns: each measures once, then all again, so that a machine that changes its speed changes it
for everybody. What comes out is medians over all rounds, with their spread.

A contender that fails says why and is not asked again; the others go on, and what it measured before still counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from benchmarks.contenders import Rounds

__all__ = ["Contender", "Measured", "median_gbps", "take_turns"]

Contender = Callable[[], Rounds]
"""Measures some rounds in processes of its own; RuntimeError says why it can't."""


def _nothing() -> None:
    return None


@dataclass(slots=True)
class Measured:
    """All turns of one contender. `error` is empty where each of them ended well."""

    turns: list[Rounds] = field(default_factory=list)
    error: str = ""

    def gbps(self, nbytes: int) -> float | None:
        """Median over the rounds of all turns, of `nbytes` each; None where there is none."""
        return median_gbps([second for turn in self.turns for second in turn.seconds], nbytes)

    def spread(self, nbytes: int) -> tuple[float, float] | None:
        """The slowest and the fastest round, in GB/s."""
        seconds = [second for turn in self.turns for second in turn.seconds]
        if not seconds:
            return None
        return round(nbytes / max(seconds) / 1e9, 2), round(nbytes / min(seconds) / 1e9, 2)

    def cpu_s_per_gb(self, nbytes: int) -> float | None:
        """CPU seconds of both processes per GB moved, median over turns."""
        if not self.turns:
            return None
        return round(statistics.median(turn.cpu for turn in self.turns) / (nbytes / 1e9), 3)

    def lag_p99_ms(self) -> float | None:
        """The worst turn's event-loop lag."""
        return round(max(turn.lag_p99 for turn in self.turns), 2) if self.turns else None


def median_gbps(seconds: list[float], nbytes: int) -> float | None:
    """GB/s (1e9 bytes) of the median round."""
    return round(nbytes / statistics.median(seconds) / 1e9, 3) if seconds else None


def take_turns(
    contenders: Mapping[str, Contender], turns: int, before: Callable[[], None] = _nothing
) -> dict[str, Measured]:
    """Let each contender measure, `turns` times; `before` is called at the beginning of each turn."""
    results = {name: Measured() for name in contenders}
    for _ in range(turns):
        before()
        for name, measure in contenders.items():
            result = results[name]
            if result.error:
                continue
            try:
                result.turns.append(measure())
            except RuntimeError as error:
                result.error = str(error)
    return results
