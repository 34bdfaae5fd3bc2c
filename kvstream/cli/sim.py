"""`kvstream sim`: run simulated clusters by their seeds, and make what fails small.

Owns the options, the spreading of seeds over processes, and what is printed. Exit code 0: no violation, 1: some.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import cast, get_args

import msgspec

from kvstream.errors import ConfigError
from kvstream.sim.plan import Profile, Scenario, Schedule, generate, read_schedule
from kvstream.sim.run import Result
from kvstream.sim.run import run as run_scenario
from kvstream.sim.shrink import shrink
from kvstream.sim.timeline import Timeline

__all__ = ["add_arguments", "run"]

_MAX_SEEDS = 1_000_000


class _Job(msgspec.Struct, frozen=True):
    """What a process of the pool gets, beside the seed."""

    workers: int
    streams: int
    faults: Profile | Schedule


class _Summary(msgspec.Struct, frozen=True):
    """The JSON of many seeds."""

    seeds: int
    failed: list[Result]
    streams: int
    ends: dict[str, int]
    virtual_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--seed", type=int, default=0, metavar="S", help="the seed of the run (default: 0)")
    which.add_argument("--seeds", metavar="A..B", help="all seeds from A to B, on all cores")
    parser.add_argument("--workers", type=int, default=8, metavar="W")
    parser.add_argument("--streams", type=int, default=40, metavar="N")
    parser.add_argument(
        "--faults", default="harsh", metavar="WHAT", help="none, mild, harsh (default), or a file: TOML or JSON"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="write the run for chrome://tracing or Perfetto")
    parser.add_argument("--shrink", type=Path, metavar="FILE", help="write the smallest schedule that still fails")


def run(args: argparse.Namespace) -> int:
    faults = cast("Profile", args.faults) if args.faults in get_args(Profile) else read_schedule(args.faults)
    job = _Job(args.workers, args.streams, faults)
    scenario = _scenario(job, args.seed)  # also a check of the arguments
    if args.seeds is None:
        return _one(scenario, args)
    if args.timeline or args.shrink:
        raise ConfigError("seeds", "--timeline and --shrink are for one --seed")
    return _many(job, _seeds(args.seeds), json=args.json)


def _scenario(job: _Job, seed: int) -> Scenario:
    return generate(seed, workers=job.workers, streams=job.streams, faults=job.faults)


def _one(scenario: Scenario, args: argparse.Namespace) -> int:
    timeline = Timeline() if args.timeline else None
    result = run_scenario(scenario, timeline=timeline)
    if timeline is not None:
        _write(args.timeline, timeline.encode(), "timeline")
    if args.json:
        print(msgspec.json.encode(result).decode())
    else:
        print(_line(result))
        for violation in result.violations:
            print(f"  {violation}")
    if args.shrink and result.violations:
        small = shrink(scenario)
        schedule = Schedule(faults=small.faults, streams=tuple(stream.name for stream in small.streams))
        _write(args.shrink, msgspec.json.format(msgspec.json.encode(schedule)), "shrink")
        if not args.json:
            print(f"{len(small.faults)} faults and {len(small.streams)} streams are enough:")
            print(f"  kvstream sim --seed {scenario.seed} --workers {args.workers} --streams {args.streams}", end="")
            print(f" --faults {args.shrink}")
    return 1 if result.violations else 0


def _many(job: _Job, seeds: range, *, json: bool) -> int:
    failed: list[Result] = []
    ends: dict[str, int] = {}
    streams, virtual = 0, 0.0
    for result in _results(job, seeds):
        streams += result.streams
        virtual += result.virtual_s
        for code, count in result.ends.items():
            ends[code] = ends.get(code, 0) + count
        if result.violations:
            failed.append(result)
            if not json:
                print(_line(result))
                print(f"  {result.violations[0]}", flush=True)
    if json:
        print(msgspec.json.encode(_Summary(len(seeds), failed, streams, ends, virtual)).decode())
    else:
        counts = ", ".join(f"{count} {code}" for code, count in sorted(ends.items()))
        print(f"{len(seeds)} seeds, {streams} streams ({counts}), {virtual:.0f} virtual seconds: ", end="")
        print(f"{len(failed)} with violations")
    return 1 if failed else 0


def _results(job: _Job, seeds: range) -> Iterator[Result]:
    """In the order of the seeds, from as many processes as there are cores."""
    processes = min(len(seeds), len(os.sched_getaffinity(0)))
    # Spawned, so that each begins clean and an interrupt finds no inherited locks.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap(_work, [(job, seed) for seed in seeds], chunksize=4)


def _work(task: tuple[_Job, int]) -> Result:
    job, seed = task
    return run_scenario(_scenario(job, seed))


def _seeds(text: str) -> range:
    first, dots, last = text.partition("..")
    if not (dots and first.isdecimal() and last.isdecimal() and 0 <= int(last) - int(first) < _MAX_SEEDS):
        raise ConfigError("seeds", f"must be A..B with whole numbers A <= B, is {text!r}")
    return range(int(first), int(last) + 1)


def _line(result: Result) -> str:
    ends = ", ".join(f"{count} {code}" for code, count in result.ends.items())
    return (
        f"seed {result.seed}: {len(result.violations)} violations, {result.streams} streams ({ends}), "
        f"{result.virtual_s:.1f} virtual seconds, log {result.log_hash}"
    )


def _write(path: Path, data: bytes, field: str) -> None:
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(field, f"{path} can't be written: {error.strerror}") from error
