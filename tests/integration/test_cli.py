"""The commands as a user runs them: real processes, their output, exit codes and what they leave behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import kvstream
from kvstream.cli import lane_probe
from kvstream.cli.lane_probe import ProbeFailed, probe_library, probe_transfers
from kvstream.discovery import DataAddress, Load, NatsBroker, Registry, WorkerRecord, resolve_target
from tests.timing import TRIES, Late, in_time, timed

ROOT = Path(kvstream.__file__).parents[1]
SECONDS = 30.0

Environ = dict[str, str]
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def environ(tmp_path: Path) -> Environ:
    """An environment in which nothing of the user's is found, or touched."""
    kept = {name: value for name, value in os.environ.items() if "NATS_" not in name and name != "PYTHONPATH"}
    return {**kept, "XDG_RUNTIME_DIR": str(tmp_path), "HOME": str(tmp_path), "XDG_CONFIG_HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT), "COLUMNS": "80"}  # fmt: skip


@pytest.fixture
def start(environ: Environ, tmp_path: Path) -> Iterator[Start]:
    """Starts `kvstream ARGS` as a process, which is gone after the test."""
    with ExitStack() as stack:

        def start(*args: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-m", "kvstream", *args],
                    env=environ,
                    cwd=tmp_path,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            return process

        yield start


Result = subprocess.CompletedProcess[str]
Run = Callable[..., Result]


@pytest.fixture
def run(start: Start) -> Run:
    """Runs `kvstream ARGS` to its end."""

    def run(*args: str) -> Result:
        process = start(*args)
        out, err = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(args, process.returncode, out, err)

    return run


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> tuple[int, str, str]:
    """Signal a process; its exit code, and what it said since."""
    process.send_signal(number)
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out, err


def running(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for `kvstream server --json` to say where it runs."""
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        assert process.stderr is not None
        pytest.fail(f"the server ended: {process.stderr.read()}")
    return json.loads(line)


def nats_server_of(process: subprocess.Popen[str]) -> int:
    (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert Path(f"/proc/{child}/exe").resolve().name == "nats-server"
    return int(child)


def ended(pidfd: int) -> bool:
    """Wait, bounded, for the process behind the descriptor to end."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(SECONDS * 1000))


def patient(run: Run, *args: str) -> Result:
    """Run a command that gives up after a short time of its own: on a busy machine it is given another one."""
    for _ in range(TRIES):
        result = run(*args)
        said = " ".join((result.stdout + result.stderr).split())
        if not re.search("not finished within|no answer from NATS within|no snapshot of the registry", said):
            break
    return result


def clocked(run: Run, command: str, *args: str) -> tuple[Result, float]:
    """A command's result, and how long it took beyond what it takes to be loaded on this machine at this time."""
    started = time.monotonic()
    run(command, "--help")
    loaded = time.monotonic()
    result = run(command, *args)
    return result, time.monotonic() - loaded - (loaded - started)


def one_line(text: str) -> str:
    assert text.endswith("\n"), text
    assert text.count("\n") == 1, text
    return text.rstrip("\n")


# -- server


def test_server_says_where_it_runs_and_keeps_its_secret(start: Start, run: Run, tmp_path: Path) -> None:
    server = start("server", "--json")
    here = running(server)
    assert here == {
        "url": f"nats://127.0.0.1:{here['port']}",
        "port": here["port"],
        "pid": server.pid,
        "file": str(tmp_path / "kvstream" / "server.json"),
    }
    file = Path(here["file"])
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    password = json.loads(file.read_text())["password"]
    assert len(password) >= 32
    for process in (server.pid, nats_server_of(server)):
        assert password not in Path(f"/proc/{process}/cmdline").read_text()

    listed = patient(run, "workers", "--json")
    assert (listed.returncode, json.loads(listed.stdout), listed.stderr) == (0, {"workers": []}, "")

    code, out, err = end(server)
    assert (code, out, err) == (0, "", "")
    assert not file.exists()
    assert list(file.parent.glob("nats-*")) == []


def test_server_for_people(start: Start) -> None:
    server = start("server")
    assert server.stdout is not None
    line = one_line(server.stdout.readline())
    assert re.fullmatch(rf"NATS at nats://127\.0\.0\.1:\d+ \(pid {server.pid}\); credentials in /.*server\.json", line)
    assert end(server, signal.SIGINT) == (0, "", "")


def test_one_server_wins_a_race_and_the_others_name_it(start: Start) -> None:
    servers = [start("server", "--json") for _ in range(4)]
    losers: list[subprocess.Popen[str]] = []
    with ThreadPoolExecutor() as pool:
        waits = {pool.submit(server.wait, SECONDS): server for server in servers}
        for wait in as_completed(waits):
            assert wait.result() in (0, 2)
            if wait.result() == 0:
                break
            losers.append(waits[wait])
            if len(losers) == 3:
                # Three have given up, so the fourth is the one; its end is the last of the waits.
                (winner,) = set(servers) - set(losers)
                here = running(winner)
                winner.terminate()
    assert len(losers) == 3
    for loser in losers:
        out, err = loser.communicate()
        assert out == ""
        assert re.match(
            r"kvstream: server: a kvstream server of this user (runs on port \d+|is starting)", one_line(err)
        )
    assert here["pid"] == winner.pid


def test_a_second_start_names_the_first(start: Start, run: Run) -> None:
    here = running(start("server", "--json"))
    second = run("server")
    assert second.returncode == 2
    assert second.stdout == ""
    assert f"runs on port {here['port']} (pid {here['pid']})" in one_line(second.stderr)


def test_killed_server_leaves_nothing_running_and_the_next_one_starts(start: Start) -> None:
    server = start("server", "--json")
    here = running(server)
    pidfd = os.pidfd_open(nats_server_of(server))
    try:
        server.kill()
        assert ended(pidfd), "nats-server outlived its owner"
    finally:
        os.close(pidfd)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", here["port"]), timeout=5)
    following = start("server", "--json")
    there = running(following)
    assert there["pid"] == following.pid
    assert len(list(Path(there["file"]).parent.glob("nats-*"))) == 1, "the dead one's directory is left"
    assert end(following)[0] == 0


def test_server_ends_with_its_nats_server(start: Start) -> None:
    server = start("server", "--json")
    here = running(server)
    os.kill(nats_server_of(server), signal.SIGKILL)
    out, err = server.communicate(timeout=SECONDS)
    assert (server.returncode, out) == (1, "")
    assert one_line(err).startswith("kvstream: nats-server ended by itself")
    assert not Path(here["file"]).exists()


def test_server_on_a_given_port(start: Start, run: Run) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        refused = run("server", "--port", str(port))
        assert (refused.returncode, refused.stdout) == (2, "")
        assert one_line(refused.stderr).startswith(
            f"kvstream: --port: can't listen on 127.0.0.1:{port}: Address already"
        )
    server = start("server", "--port", str(port), "--json")
    assert running(server)["port"] == port
    assert end(server)[0] == 0


@pytest.mark.parametrize("port", ["-1", "65536"])
def test_server_on_no_port(run: Run, port: str) -> None:
    result = run("server", f"--port={port}")
    assert result.returncode == 2
    assert one_line(result.stderr).startswith("kvstream: --port: ")


# -- workers


WORKER = WorkerRecord(
    name="decode-0",
    rank=1,
    incarnation="ab" * 16,
    key="c0ffee" * 4,
    roles=("cache", "decode"),
    address=DataAddress(transport="ucx", host="127.0.0.1", port=4321, host_id="here"),
    pid=77,
    host="node-7",
    load=Load(streams=3, free_blocks=20, blocks=64),
    started=0.0,
)


async def test_workers_are_listed(start: Start, run: Run, environ: Environ) -> None:
    server = start("server", "--json")
    await asyncio.to_thread(running, server)
    broker = await NatsBroker.connect(await resolve_target(environ=environ), rng=random.Random(1))
    try:
        async with Registry(broker, rng=random.Random(1)) as registry:
            await registry.register(WORKER)
            as_json = await asyncio.to_thread(patient, run, "workers", "--json")
            as_table = await asyncio.to_thread(patient, run, "workers")
    finally:
        await broker.aclose()
    assert json.loads(one_line(as_json.stdout)) == {
        "workers": [
            {
                "name": "decode-0",
                "rank": 1,
                "incarnation": "ab" * 16,
                "roles": ["cache", "decode"],
                "state": "ready",
                "host": "node-7",
                "pid": 77,
                "address": "127.0.0.1:4321",
                "streams": 3,
                "free_blocks": 20,
                "blocks": 64,
            }
        ]
    }
    row = "decode-0/1 cache,decode ready node-7 77 127.0.0.1:4321 3 20/64"
    assert as_table.stdout.splitlines()[1].split() == row.split()
    for result in (as_json, as_table):
        assert (result.returncode, result.stderr) == (0, "")
        assert WORKER.key not in result.stdout


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ((), 2, "kvstream: nats: no NATS server is known.*kvstream server"),
        (("--nats", "http://127.0.0.1"), 2, "kvstream: nats: .*nats://HOST:PORT"),
        (
            ("--nats", "nats://someone:secret@127.0.0.1:1"),
            1,
            "kvstream: .*127.0.0.1:1.*can't be reached.*; check the add",
        ),
    ],
)
@pytest.mark.parametrize("command", ["workers", "streams"])
@timed
def test_workers_without_a_server(run: Run, command: str, args: tuple[str, ...], code: int, words: str) -> None:
    result, took = clocked(run, command, *args)
    assert (result.returncode, result.stdout) == (code, "")
    assert re.match(words, one_line(result.stderr))
    assert "secret" not in result.stderr
    in_time(took, 1.7)


def test_workers_of_a_frozen_server(start: Start, run: Run) -> None:
    server = start("server", "--json")
    running(server)
    frozen = nats_server_of(server)
    os.kill(frozen, signal.SIGSTOP)

    @timed
    def gives_up() -> None:
        result, took = clocked(run, "workers")
        in_time(took, 1.7)
        assert (result.returncode, result.stdout) == (1, "")
        if "no answer from NATS within" in result.stderr:
            raise Late(result.stderr)  # the whole command took that long, not the connection alone
        assert re.match("kvstream: .*no answer within .*; .*`kvstream server`", one_line(result.stderr))

    try:
        gives_up()
    finally:
        os.kill(frozen, signal.SIGCONT)


# -- doctor

NAMES = [
    "python", "kvstream", "uvloop", "ucx", "transports", "rdma", "gpu to gpu", "lane shared", "lane get", "lane put",
    "round trip", "cuda", "nats-server", "server", "nats", "shared memory", "ptrace", "memlock", "descriptors", "cpus",
    "demo model",
]  # fmt: skip


def diagnosis(result: Result) -> dict[str, dict[str, str]]:
    """The checks by name, after a look at the form of the whole."""
    assert result.stderr == ""
    report = json.loads(one_line(result.stdout))
    assert set(report) == {"ok", "checks"}
    assert [check["name"] for check in report["checks"]] == NAMES
    for check in report["checks"]:
        assert set(check) == {"name", "status", "found", "remedy"}
        assert check["status"] in ("ok", "warn", "fail")
        assert check["found"]
        assert check["status"] == "ok" or check["remedy"], check
    assert report["ok"] == all(check["status"] != "fail" for check in report["checks"])
    assert result.returncode == (0 if report["ok"] else 1)
    assert "Traceback" not in result.stdout
    return {check["name"]: check for check in report["checks"]}


def test_doctor_with_a_running_server(start: Start, run: Run) -> None:
    here = running(start("server", "--json"))
    checks = diagnosis(patient(run, "doctor", "--json"))
    assert checks["ucx"]["found"].startswith("UCX ")
    assert "tcp" in checks["transports"]["found"]
    assert checks["lane put"] == {"name": "lane put", "status": "ok", "found": "works: put, tcp/lo", "remedy": ""}
    assert re.match(r"\d+ us", checks["round trip"]["found"])
    assert f"127.0.0.1:{here['port']} (pid {here['pid']})" in checks["server"]["found"]
    assert checks["nats"]["status"] == "ok"
    assert f"nats://127.0.0.1:{here['port']}" in checks["nats"]["found"]


def test_doctor_without_ucxx(run: Run, environ: Environ, tmp_path: Path) -> None:
    (tmp_path / "stub" / "ucxx").mkdir(parents=True)
    (tmp_path / "stub" / "ucxx" / "__init__.py").write_text("raise ImportError('libucxx.so: cannot open')\n")
    environ["PYTHONPATH"] = f"{tmp_path / 'stub'}:{ROOT}"
    environ["NATS_URL"] = "nats://127.0.0.1:1"
    environ["NATS_TOKEN"] = "secret"
    result = patient(run, "doctor", "--json")
    assert "secret" not in result.stdout
    checks = diagnosis(result)
    assert checks["ucx"]["status"] == "fail"
    assert "libucxx.so: cannot open" in checks["ucx"]["found"]
    assert "pip install 'kvstream-runtime[cpu]'" in checks["ucx"]["remedy"]
    assert checks["lane shared"]["status"] == "fail"
    # The others are made all the same.
    assert checks["python"]["status"] == checks["nats-server"]["status"] == "ok"
    assert checks["nats"]["status"] == "fail"
    assert "NATS_TOKEN, NATS_URL" in checks["nats"]["found"]


def test_doctor_for_people(run: Run, environ: Environ) -> None:
    environ["UCX_TLS"] = "tcp"  # so that nothing can read another process's memory
    result = patient(run, "doctor")
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert "\x1b" not in result.stdout
    assert max(len(line) for line in lines if "/" not in line) <= 80
    (get,) = (line for line in lines if "lane get" in line)
    assert get.startswith("warn  lane get ")
    assert any("`kvstream server`" in line for line in lines)
    assert re.match(r"21 checks in \d+\.\d s: \d+ ok, \d+ to look at, 0 failed", lines[-1])


@pytest.fixture
def stub_ucxx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Replace ucxx in child processes by this text."""

    def stub(text: str) -> None:
        (tmp_path / "ucxx").mkdir()
        (tmp_path / "ucxx" / "__init__.py").write_text(text)
        monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")

    return stub


async def test_ucx_that_aborts_is_a_finding(stub_ucxx: Callable[[str], None]) -> None:
    stub_ucxx("import os, sys\nprint('Fatal: endpoint', file=sys.stderr, flush=True)\nos.abort()\n")
    with pytest.raises(ProbeFailed, match="SIGABRT: Fatal: endpoint"):
        await probe_library(SECONDS)


async def test_ucx_that_hangs_ends_in_time(stub_ucxx: Callable[[str], None], tmp_path: Path) -> None:
    stub_ucxx(f"import os, time\nopen({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(600)\n")
    before = children()
    with pytest.raises(ProbeFailed, match="not finished within 2 s"):
        await probe_transfers(2.0)
    assert children() == before


async def test_a_cancelled_probe_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    started = asyncio.Event()
    launch = asyncio.create_subprocess_exec
    before = children()

    async def launched(*args: Any, **kwargs: Any) -> asyncio.subprocess.Process:
        process = await launch(*args, **kwargs)
        started.set()
        return process

    monkeypatch.setattr(lane_probe.asyncio, "create_subprocess_exec", launched)
    task = asyncio.create_task(probe_transfers(SECONDS))
    await started.wait()
    assert children() > before
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert children() == before


def children() -> set[str]:
    """The processes of this one that are neither dead nor someone else's."""
    found: set[str] = set()
    for task in Path("/proc/self/task").iterdir():
        found.update((task / "children").read_text().split())
    return found


# -- the rest


def test_unknown_command(run: Run) -> None:
    result = run("nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert "invalid choice: 'nonsense'" in result.stderr
    assert "Traceback" not in result.stderr


def test_version_and_help(run: Run) -> None:
    assert run("--version").stdout == f"kvstream {kvstream.__version__}\n"
    for command in ("server", "worker", "workers", "doctor"):
        result = run(command, "--help")
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout.startswith(f"usage: kvstream {command} ")


def test_output_that_nobody_reads(start: Start) -> None:
    server = start("server")
    assert server.stdout is not None
    assert server.stderr is not None
    server.stdout.close()
    assert server.wait(SECONDS) == 141
    assert server.stderr.read() == ""


INTERRUPTED_IMPORT = """
import os, signal, sys
from kvstream.cli.main import main

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == "{module}":
            sys.meta_path.remove(self)
            {action}

sys.meta_path.insert(0, Interrupts())
sys.exit(main({argv}))
"""
INTERRUPT = "os.kill(os.getpid(), signal.SIGINT)"
# As an extension module's import does that is interrupted in C.
INTERRUPT_IN_C = """
            try: raise KeyboardInterrupt
            except KeyboardInterrupt as error: raise ImportError("half imported") from error"""


@pytest.mark.parametrize("action", [INTERRUPT, INTERRUPT_IN_C], ids=["python", "c"])
@pytest.mark.parametrize(
    ("module", "argv"),
    [
        ("kvstream.cli.demo", ["demo"]),
        ("kvstream.cli.demo.coordinator", ["demo"]),
        ("kvstream.cli.server", ["server"]),
        ("nats", ["workers"]),
        ("kvstream.cli.trials", ["doctor"]),
        ("kvstream.cli.logs", ["server"]),
    ],
)
def test_an_interrupt_while_a_command_is_imported_is_quiet(
    environ: Environ, tmp_path: Path, module: str, argv: list[str], action: str
) -> None:
    code = INTERRUPTED_IMPORT.format(module=module, action=action, argv=argv)
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        check=False,
        text=True,
        timeout=SECONDS,
    )
    assert result.stderr == ""
    assert result.returncode == 130


def test_demo_is_loaded_only_when_asked_for(environ: Environ) -> None:
    code = (
        "import sys\nfrom kvstream.cli.main import main\n"
        "try: main(['server', '--help'])\nexcept SystemExit: pass\n"
        "assert 'kvstream.cli.demo' not in sys.modules and 'ucxx' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], env=environ, check=True, stdout=subprocess.DEVNULL, timeout=SECONDS)
