"""The server file: private, ours, of a living process, one at a time, and found when it comes."""

from __future__ import annotations

import asyncio
import os
import stat
import tempfile
from pathlib import Path

import msgspec
import pytest

from kvstream.discovery.server_file import (
    ServerInfo,
    claim_server,
    find_server,
    process_start,
    read_server_file,
    runtime_directory,
    server_file_path,
    write_private,
)
from kvstream.errors import ConfigError


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(tmp_path)}


def info(**fields: int) -> bytes:
    mine = ServerInfo(pid=os.getpid(), start=process_start(os.getpid()) or 0, host="h", port=1, user="u", password="p")
    return msgspec.json.encode(msgspec.structs.replace(mine, **fields))


async def test_modes_and_end(environ: dict[str, str]) -> None:
    old = os.umask(0)
    try:
        async with claim_server(environ=environ) as claim:
            assert read_server_file(environ) is None
            await claim.announce("127.0.0.1", 4222, "kvstream", "secret")
            assert stat.S_IMODE(claim.path.stat().st_mode) == 0o600
            assert stat.S_IMODE(claim.path.parent.stat().st_mode) == 0o700
            found = read_server_file(environ)
            assert found is not None and found.port == 4222 and found.password == "secret"
            assert "secret" not in repr(found)
        assert not claim.path.exists()
    finally:
        os.umask(old)


async def test_the_second_is_told_about_the_first(environ: dict[str, str]) -> None:
    async with claim_server(environ=environ) as claim:
        with pytest.raises(ConfigError, match="is starting"):
            async with claim_server(environ=environ):
                raise AssertionError
        await claim.announce("127.0.0.1", 4222, "u", "p")
        with pytest.raises(ConfigError, match=f"port 4222 .pid {os.getpid()}"):
            async with claim_server(environ=environ):
                raise AssertionError
        assert read_server_file(environ) is not None
    async with claim_server(environ=environ):
        pass


def test_a_file_left_behind_is_not_believed(environ: dict[str, str]) -> None:
    path = runtime_directory(environ) / "server.json"
    write_private(path, info())
    assert read_server_file(environ) is not None
    write_private(path, info(start=1))
    assert read_server_file(environ) is None
    write_private(path, info(pid=2**22 + 1))
    assert read_server_file(environ) is None
    for garbage in (b"", b"{}", b"\xff", info()[:-5], b" " * 5000):
        write_private(path, garbage)
        assert read_server_file(environ) is None


def test_a_file_that_others_could_have_written_or_read_is_not_believed(environ: dict[str, str], tmp_path: Path) -> None:
    path = runtime_directory(environ) / "server.json"
    write_private(path, info())
    path.chmod(0o640)
    assert read_server_file(environ) is None
    path.unlink()
    write_private(tmp_path / "elsewhere", info())
    path.symlink_to(tmp_path / "elsewhere")
    assert read_server_file(environ) is None


def test_the_fallback_directory_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for environ in ({}, {"XDG_RUNTIME_DIR": str(tmp_path / "missing")}):
        path = runtime_directory(environ)
        assert path == tmp_path / f"kvstream-{os.getuid()}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    path.chmod(0o750)
    with pytest.raises(ConfigError, match="0700"):
        runtime_directory({})
    path.rmdir()
    (tmp_path / "mine").mkdir(mode=0o700)
    path.symlink_to(tmp_path / "mine")
    with pytest.raises(ConfigError, match="0700"):
        runtime_directory({})
    assert server_file_path({}).name == "server.json"


async def test_find_waits_for_a_server_to_come(environ: dict[str, str]) -> None:
    assert await find_server(0, environ=environ) is None
    assert await find_server(0.05, environ=environ) is None
    waiting = asyncio.ensure_future(find_server(5, environ=environ))
    async with claim_server(environ=environ) as claim:
        await claim.announce("127.0.0.1", 4222, "u", "p")
        found = await waiting
    assert found is not None and found.port == 4222
