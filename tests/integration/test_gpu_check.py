"""benchmarks/gpu_check on a machine without a GPU: it says so, checks on host memory what it can, and always ends."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Facts, Run, Skip, Wrong, check_kernels, check_strided, second_process
from benchmarks.gpu_check import answer as answer_of
from benchmarks.gpu_peers import Transfer, serve_streams
from kvstream import RuntimeConfig
from tests.fake_cupy import FakeCupy


def test_without_a_gpu() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--seconds", "100"]
    ended = subprocess.run(
        command,
        check=False,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads(ended.stdout.splitlines()[-1])
    assert result["gpu"] is None
    assert result["failed"] == []
    assert {"gpu", "cuda ipc", "copy bandwidth", "bandwidth by block size"} <= {s["step"] for s in result["skipped"]}
    assert all(skipped["why"] for skipped in result["skipped"])
    steps = result["steps"]
    assert {"cma", "ucx", "kernels", "strided views", "pool", "peers", "stream, shared", "stream, put"} <= set(steps)
    assert steps["pool"]["device"] == "cpu"
    assert steps["peers"]["lane"] == "shared"
    assert not steps["peers"]["on_device"]
    assert {name for name in steps if name.startswith("get")} == {"get, as kvstream sets it", "get, UCX's defaults"}


def _fine() -> Facts:
    return {"answer": 42}


def _crash() -> Facts:
    os.abort()


def _hang() -> Facts:
    time.sleep(60)
    return {}


def _wrong() -> Facts:
    raise Wrong("2 of 4 bytes differ")


def _missing() -> Facts:
    raise Skip("nothing there")


def _dead_peer() -> Facts:
    with second_process(_die) as conn:
        answer_of(conn)
    return {}


def _die(_: object) -> None:
    os.abort()


def test_steps_that_end_in_every_way() -> None:
    run = Run(60)
    assert run.step("fine", _fine) == {"answer": 42}
    for name, work in (("crash", _crash), ("wrong", _wrong), ("missing", _missing), ("dead peer", _dead_peer)):
        assert run.step(name, work) is None
    begin = time.monotonic()
    assert run.step("hang", _hang, at_most=2) is None
    assert time.monotonic() - begin < 15
    assert run.steps == {"fine": {"answer": 42}}
    assert run.skipped == [{"step": "missing", "why": "nothing there"}]
    assert {failure["step"]: failure["why"] for failure in run.failed} == {
        "crash": "the process ended with status -6",
        "wrong": "Wrong: 2 of 4 bytes differ",
        "dead peer": "EOFError: ",
        "hang": "no result within 2 s",
    }


def test_no_step_begins_when_the_time_is_up() -> None:
    run = Run(0.5)
    assert run.step("fine", _fine) is None
    assert run.skipped == [{"step": "fine", "why": "the time is up (--seconds)"}]


def _serve_on_a_stand_in(conn: Any, transfer: Transfer) -> None:
    sys.modules["cupy"] = FakeCupy()
    serve_streams(conn, transfer)


@pytest.mark.parametrize(("changes", "on_device"), [({}, True), ({"device_staging": 0}, False)])
def test_streams_between_processes_on_a_stand_in_for_a_gpu(
    cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int], on_device: bool
) -> None:
    monkeypatch.setattr(gpu_check, "serve_streams", _serve_on_a_stand_in)
    config = msgspec.structs.replace(RuntimeConfig(device_staging=1 << 20, device_slot_bytes=1 << 16), **changes)
    transfer = Transfer("cuda:0", layers=4, blocks=64, block_bytes=4096, config=config)
    facts = gpu_check.check_peers(transfer, on_device=on_device, copy_gbps=1.0)
    assert (facts["lane"], facts["on_device"]) == (("get", True) if on_device else ("shared", False))
    assert facts["gbps"] > 0
    if not on_device:
        with pytest.raises(Wrong, match="did not stay"):
            gpu_check.check_peers(transfer, on_device=True)


@pytest.mark.parametrize("check", [check_kernels, check_strided])
def test_the_checks_on_host_memory(check: object) -> None:
    assert callable(check)
    assert functools.partial(check, False)()
