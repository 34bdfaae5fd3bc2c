"""Which NATS server is used, as whom, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvstream.discovery.credentials import (
    NatsTarget,
    check_target,
    redact,
    refresh_target,
    resolve_target,
    target_from_environment,
)
from kvstream.discovery.server_file import claim_server
from kvstream.errors import BrokerUnavailable, ConfigError


def context(home: Path, name: str, **values: str) -> dict[str, str]:
    folder = home / "nats" / "context"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(values))
    return {"XDG_CONFIG_HOME": str(home)}


def test_precedence(tmp_path: Path) -> None:
    environ = context(tmp_path, "prod", url="nats://context:1")
    (tmp_path / "nats" / "context.txt").write_text("prod\n")
    target = target_from_environment(None, environ)
    assert target is not None and target.urls == ("nats://context:1",)
    environ["NATS_URL"] = "nats://plain:1"
    target = target_from_environment(None, environ)
    assert target is not None and target.urls == ("nats://plain:1",) and target.source == "NATS_URL"
    environ["KVSTREAM_NATS_URL"] = "ours:1,nats://ours2:2"
    target = target_from_environment(None, environ)
    assert target is not None and target.urls == ("nats://ours:1", "nats://ours2:2")
    target = target_from_environment("nats://given:1", environ)
    assert target is not None and target.urls == ("nats://given:1",) and target.source == "the given URL"
    assert target_from_environment(None, {"HOME": str(tmp_path / "nobody")}) is None


def test_credentials_by_field() -> None:
    environ = {
        "NATS_URL": "nats://localhost:1",
        "NATS_USER": "u",
        "NATS_PASSWORD": "p",
        "KVSTREAM_NATS_USER": "ours",
        "NATS_CREDS": "~/c",
        "NATS_CA": "/ca",
        "HOME": "/home/x",
    }
    target = target_from_environment(None, environ)
    assert target is not None
    assert (target.user, target.password, target.creds, target.ca) == ("ours", "p", "/home/x/c", "/ca")
    assert target.tls


def test_copies_of_the_lease_table() -> None:
    assert target_from_environment(None, {"NATS_URL": "nats://h", "HOME": "/nowhere"}).replicas == 0  # type: ignore[union-attr]
    for url, environ in (("nats://h", {}), (None, {"NATS_URL": "nats://h"})):
        target = target_from_environment(url, {**environ, "KVSTREAM_NATS_REPLICAS": "1"})
        assert target is not None and target.replicas == 1
        for wrong in ("0", "2", "-1", "x", "1.0", " 3", "33"):
            with pytest.raises(ConfigError, match=r"KVSTREAM_NATS_REPLICAS: .*use 1, 3 or 5"):
                target_from_environment(url, {**environ, "KVSTREAM_NATS_REPLICAS": wrong})


def test_context_is_taken_whole_and_named(tmp_path: Path) -> None:
    environ = context(tmp_path, "prod", url="tls://h:1", user="u", password="p", inbox_prefix="_INBOX_me", extra="x")
    environ |= {"NATS_CONTEXT": "prod", "NATS_USER": "not this one"}
    target = target_from_environment(None, environ)
    assert target is not None
    assert (target.user, target.password, target.inbox_prefix) == ("u", "p", "_INBOX_me")
    assert "prod" in target.source
    for wrong in ("missing", "../prod", ".prod"):
        with pytest.raises(ConfigError, match=r"nats\.context"):
            target_from_environment(None, environ | {"NATS_CONTEXT": wrong})
    (tmp_path / "nats" / "context" / "prod.json").write_text("{")
    with pytest.raises(ConfigError, match=r"prod\.json"):
        target_from_environment(None, environ)


@pytest.mark.parametrize("host", ["example.com", "10.0.0.1", "0.0.0.0", "[2001:db8::1]", "localhost.example.com"])
def test_plaintext_to_another_host_is_refused(host: str) -> None:
    target = NatsTarget(urls=(f"nats://u:secret@{host}:4222",), source="the test")
    with pytest.raises(ConfigError, match="KVSTREAM_NATS_ALLOW_PLAINTEXT") as caught:
        check_target(target, allow_plaintext=False)
    assert "secret" not in str(caught.value)
    check_target(target, allow_plaintext=True)
    check_target(NatsTarget(urls=(f"tls://{host}:4222",), source="the test"), allow_plaintext=False)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.9.9.9", "[::1]"])
def test_plaintext_to_this_host_is_fine(host: str) -> None:
    check_target(NatsTarget(urls=(f"nats://{host}:4222",), source="the test"), allow_plaintext=False)


@pytest.mark.parametrize(
    "url",
    ["http://localhost", "ws://localhost:1", "nats://", "nats://localhost:99999", "nats://u:secret@[::1", "nats://[x]"],
)
def test_urls_are_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="nats: ") as caught:
        check_target(NatsTarget(urls=(url,), source="the test"), allow_plaintext=True)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", [5, b"nats://localhost", ["nats://localhost"], True, object()])
async def test_a_url_of_the_wrong_type_is_a_clear_error(url: Any) -> None:
    with pytest.raises(ConfigError, match=rf"nats: .*nats://HOST:PORT.* not {type(url).__name__}"):
        await resolve_target(url, environ={})


def test_files_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nats\.creds: .*missing"):
        check_target(NatsTarget(urls=("nats://localhost",), source="s", creds=str(tmp_path / "missing")), False)
    with pytest.raises(ConfigError, match=r"nats\.nkey"):
        check_target(NatsTarget(urls=("nats://localhost",), source="s", nkey="a\0b"), False)
    (tmp_path / "cert").touch()
    with pytest.raises(ConfigError, match=r"nats\.cert"):
        check_target(NatsTarget(urls=("nats://localhost",), source="s", cert=str(tmp_path / "cert")), False)


def test_secrets_are_not_shown() -> None:
    target = NatsTarget(
        urls=("nats://me:secret@localhost:1",), source="s", user="me", password="secret", token="secret"
    )
    assert "secret" not in repr(target) and "secret" not in target.display
    assert redact("nats://me:se@cret@localhost:1/x") == "nats://localhost:1/x"


async def test_nothing_known_names_all_that_was_tried(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(ConfigError) as caught:
        await resolve_target(None, environ=environ, wait=0)
    for word in ("KVSTREAM_NATS_URL", "NATS_URL", "nats context", "kvstream server", "server.json"):
        assert word in str(caught.value)


async def test_the_running_server_is_found(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    async with claim_server(environ=environ) as claim:
        await claim.announce("127.0.0.1", 4321, "kvstream", "secret")
        target = await resolve_target(None, environ=environ, wait=0)
    assert (target.urls, target.user, target.password) == (("nats://127.0.0.1:4321",), "kvstream", "secret")
    with pytest.raises(ConfigError):
        await resolve_target(None, environ=environ, wait=0)
    with pytest.raises(ConfigError, match="PLAINTEXT"):
        await resolve_target("nats://10.1.1.1", environ=environ)
    assert await resolve_target("nats://10.1.1.1", environ=environ | {"KVSTREAM_NATS_ALLOW_PLAINTEXT": "1"})


# -- the target at a reconnect


async def test_a_server_that_came_back_elsewhere_is_found_again(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)}
    async with claim_server(environ=environ) as claim:
        await claim.announce("127.0.0.1", 4321, "kvstream", "first")
        target = await resolve_target(None, environ=environ, wait=0)
        assert await refresh_target(target, environ=environ) == target
    with pytest.raises(BrokerUnavailable, match="kvstream server"):
        await refresh_target(target, environ=environ)
    # Another context that is selected meanwhile is another cluster: a worker does not move there by itself.
    elsewhere = environ | context(tmp_path, "prod", url="nats://localhost:1") | {"NATS_CONTEXT": "prod"}
    async with claim_server(environ=environ) as claim:
        await claim.announce("127.0.0.1", 1234, "kvstream", "second")
        found = await refresh_target(target, environ=elsewhere)
    assert (found.urls, found.password) == (("nats://127.0.0.1:1234",), "second")


async def test_a_context_is_read_again(tmp_path: Path) -> None:
    environ = context(tmp_path, "mine", url="nats://localhost:1", user="u", password="old") | {"NATS_CONTEXT": "mine"}
    target = await resolve_target(None, environ=environ)
    context(tmp_path, "mine", url="nats://localhost:2", user="u", password="new")
    # By its name: which one is selected by now does not matter.
    found = await refresh_target(target, environ=environ | {"NATS_CONTEXT": "other"})
    assert (found.urls, found.password) == (("nats://localhost:2",), "new")
    context(tmp_path, "mine", url="nats://10.1.1.1:2")
    with pytest.raises(ConfigError, match="PLAINTEXT"):
        await refresh_target(target, environ=environ)
    (tmp_path / "nats" / "context" / "mine.json").unlink()
    with pytest.raises(ConfigError, match=r"mine\.json"):
        await refresh_target(target, environ=environ)


async def test_what_was_given_stands(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path), "NATS_URL": "nats://localhost:1", "NATS_USER": "u"}
    for given in (None, "nats://localhost:2"):
        target = await resolve_target(given, environ=environ)
        assert await refresh_target(target, environ={"NATS_URL": "nats://localhost:3"}) == target
