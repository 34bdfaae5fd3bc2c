"""`kvstream doctor`: what works on this machine, what does not, and what to do about it.

Runs all checks at once, bounded in time, and shows them in a fixed order. A check that itself breaks is a failed check;
it must never take another one down, and the names of the checks are the same whatever happens.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from kvstream.cli import checks, trials
from kvstream.cli.checks import Check, Status
from kvstream.cli.loop import run_loop

__all__ = ["Group", "Report", "add_arguments", "all_groups", "render", "run", "run_checks"]

CHECK_SECONDS = 16.0
"""Bound on all checks together. They take two seconds on an idle machine; a busy one is not to be called broken."""

_COLOURS: dict[Status, str] = {"ok": "\x1b[32m", "warn": "\x1b[33m", "fail": "\x1b[31m"}
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints. `ok`: no check failed."""

    ok: bool
    checks: list[Check]


class Group(msgspec.Struct, frozen=True):
    """Checks that are made together: their names, and the call that makes them in that order."""

    names: tuple[str, ...]
    make: Callable[[], Awaitable[Sequence[Check]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help='print {"ok", "checks": [...]} as one JSON object')


def run(args: argparse.Namespace) -> int:
    begin = time.monotonic()
    found = run_loop(run_checks(all_groups(), CHECK_SECONDS))
    report = Report(all(check.status != "fail" for check in found), found)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        width = min(shutil.get_terminal_size((80, 24)).columns, 100)
        colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        print(render(found, width=width, colours=colours, seconds=time.monotonic() - begin))
    return 0 if report.ok else 1


def all_groups() -> tuple[Group, ...]:
    """All checks, in the order in which they are shown."""
    return (
        _in_thread("python", checks.check_python),
        _in_thread("kvstream", checks.check_kvstream),
        _in_thread("uvloop", checks.check_uvloop),
        Group(trials.UCX_CHECKS, trials.try_ucx),
        Group(trials.LANE_CHECKS, trials.try_lanes),
        _alone("cuda", trials.try_cuda),
        _alone("nats-server", trials.try_nats_binary),
        Group(trials.NATS_CHECKS, trials.try_nats),
        _in_thread("shared memory", checks.check_shared_memory),
        _in_thread("ptrace", checks.check_ptrace),
        _in_thread("memlock", checks.check_memlock),
        _in_thread("descriptors", checks.check_descriptors),
        _in_thread("cpus", checks.check_cpus),
        _in_thread("demo model", checks.check_demo_model),
    )


def _in_thread(name: str, check: Callable[[], Check]) -> Group:
    async def make() -> list[Check]:
        return [await asyncio.to_thread(check)]

    return Group((name,), make)


def _alone(name: str, check: Callable[[], Awaitable[Check]]) -> Group:
    async def make() -> list[Check]:
        return [await check()]

    return Group((name,), make)


async def run_checks(groups: Sequence[Group], timeout: float) -> list[Check]:
    """Make all checks, for at most `timeout` seconds; those that break or do not end are reported as failed."""
    tasks = [asyncio.ensure_future(group.make()) for group in groups]
    try:
        await asyncio.wait(tasks, timeout=timeout)
    finally:
        unfinished = [task for task in tasks if task.cancel()]
        if unfinished:
            await asyncio.wait(unfinished)
    found: list[Check] = []
    for group, task in zip(groups, tasks, strict=True):
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            found += [Check(name, "fail", f"not finished within {timeout:g} s") for name in group.names]
        elif error is not None:
            words = f"the check itself broke: {type(error).__name__}: {error}"
            found += [Check(name, "fail", words, "please report this") for name in group.names]
        else:
            found += task.result()
    return found


def render(found: Sequence[Check], *, width: int, colours: bool, seconds: float) -> str:
    """The checks as aligned text: status, name and what was found; below it, after an arrow, what to do."""
    column = max((len(check.name) for check in found), default=0)
    indent = " " * (6 + column + 2)
    lines: list[str] = []
    for check in found:
        colour, plain = (_COLOURS[check.status], _PLAIN) if colours else ("", "")
        text = _wrap(check.found, width - len(indent))
        lines.append(f"{colour}{check.status:<4}{plain}  {check.name:<{column}}  {text[0]}")
        lines += [indent + line for line in text[1:]]
        if check.remedy:
            dim, plain = (_DIM, _PLAIN) if colours and check.status == "ok" else ("", "")
            first, *rest = _wrap(check.remedy, width - len(indent) - 3)
            lines += [f"{indent}{dim}-> {first}{plain}", *(f"{indent}   {dim}{line}{plain}" for line in rest)]
    count = {status: sum(check.status == status for check in found) for status in _COLOURS}
    summary = (
        f"{len(found)} checks in {seconds:.1f} s: {count['ok']} ok, {count['warn']} to look at, {count['fail']} failed"
    )
    return "\n".join([*lines, "", summary])


def _wrap(text: str, width: int) -> list[str]:
    # Paths and commands are to be copied: they stay whole even where they are longer than a line.
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
