"""Where a stream goes: from what the user said (`to=`), or from the registry by the default policy, to candidates."""

from __future__ import annotations

from collections.abc import Sequence

from kvstream.discovery.records import WorkerRecord, parse_worker
from kvstream.errors import ConfigError
from kvstream.runtime.checks import text

__all__ = ["default_candidates", "named_candidates"]


def named_candidates(to: str | Sequence[str], rank: int) -> list[str]:
    """Worker ids from names in the order given. A name without a rank means the rank that is our own."""
    names = [to] if isinstance(to, str) else list(to) if isinstance(to, list | tuple) else []
    if not names:
        raise ConfigError("to", f"must name a worker, or several, or be None for the default policy; is {to!r}")
    ids: list[str] = []
    for worker_name in names:
        name, its_rank = parse_worker(text("to", worker_name, 160), "to")
        worker = f"{name}/{rank if its_rank is None else its_rank}"
        if worker in ids:
            raise ConfigError("to", f"{worker} is named twice")
        ids.append(worker)
    return ids


def default_candidates(workers: Sequence[WorkerRecord], me: WorkerRecord, blocks: int) -> list[str]:
    """At most three decode workers of our rank and layout that are ready and have room: fewest streams first, then most
    free blocks, then by name."""
    fit = [
        w
        for w in workers
        if "decode" in w.roles
        and w.rank == me.rank
        and w.id != me.id
        and w.state == "ready"
        and w.fingerprint == me.fingerprint
        and w.load.free_blocks >= blocks
    ]
    fit.sort(key=lambda w: (w.load.streams, -w.load.free_blocks, w.id))
    return [w.id for w in fit[:3]]
