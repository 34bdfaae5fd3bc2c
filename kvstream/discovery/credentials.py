"""Which NATS server to use, and as whom: flags, environment, a NATS context, or this user's running server.

Secrets are read as late as possible and never shown: every text made here has the user information taken out of
URLs. Plaintext to another host is refused unless it is allowed in so many words. What came from a file is read again
before each reconnect, from that file alone: a worker follows its server, and never moves to another one by itself.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit, urlunsplit

import msgspec

from kvstream.discovery.server_file import ServerInfo, find_server, read_server_file, server_file_path
from kvstream.errors import BrokerUnavailable, ConfigError

__all__ = ["NatsTarget", "check_target", "redact", "refresh_target", "resolve_target", "target_from_environment"]

_FIELDS = ("user", "password", "token", "creds", "nkey", "cert", "key", "ca")
_FILES = ("creds", "nkey", "cert", "key", "ca")


class NatsTarget(msgspec.Struct, frozen=True, kw_only=True):
    """Where NATS is and how to prove who we are. `source` says where this was found, for messages.

    `creds` (JWT and seed), `nkey` (seed), `cert` and `key` (client certificate) and `ca` are paths of PEM or NATS
    files, or empty; they are read at each connect. `origin` says what `refresh_target` reads again: nothing, the NATS
    context named `context`, or this user's server file. `replicas` are the copies of the lease table in a cluster; 0:
    as many as is usual.
    """

    urls: tuple[str, ...]
    source: str
    origin: Literal["given", "context", "server"] = "given"
    context: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    inbox_prefix: str = "_INBOX"
    replicas: int = 0

    @property
    def display(self) -> str:
        """The URLs without secrets."""
        return ",".join(redact(url) for url in self.urls)

    @property
    def tls(self) -> bool:
        """Whether the connection must be encrypted."""
        return bool(self.ca or self.cert) or any(url.lower().startswith("tls:") for url in self.urls)

    @property
    def remedy(self) -> str:
        """What to do when nothing answers there."""
        if self.origin == "server":
            return "start `kvstream server` again, or set KVSTREAM_NATS_URL to another NATS server"
        return (
            f"check the address in {self.source} and that a NATS server runs there; or start `kvstream server`, which "
            "is used where no address is set"
        )

    def __repr__(self) -> str:
        return f"NatsTarget({self.display}, from {self.source})"


class _Context(msgspec.Struct):
    """A context file of the `nats` tool, as far as it is understood here."""

    url: str = ""
    user: str = ""
    password: str = ""
    token: str = ""
    creds: str = ""
    nkey: str = ""
    cert: str = ""
    key: str = ""
    ca: str = ""
    inbox_prefix: str = ""


def redact(url: str) -> str:
    """The URL without user information."""
    try:
        parts = urlsplit(url)
    except ValueError:
        # Where its user information ends can't be told either.
        return "(not a URL)"
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


async def resolve_target(
    url: str | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    wait: float = 5.0,
) -> NatsTarget:
    """The NATS server to use: `url` > KVSTREAM_NATS_* > NATS_* > the selected NATS context > this user's server.

    The last one is waited for up to `wait` seconds. `environ` stands in for os.environ. Raises ConfigError that
    names what was tried, or what is wrong with the one found.
    """
    if not isinstance(url, str | None):  # pyright: ignore[reportUnnecessaryIsInstance] - callers need not be typed
        raise ConfigError("nats", f"must be None or a URL as nats://HOST:PORT, not {type(url).__name__}")
    environ = os.environ if environ is None else environ
    # Files are read off the loop.
    target = await asyncio.to_thread(target_from_environment, url, environ)
    if target is None:
        info = await find_server(wait, environ=environ)
        if info is None:
            raise ConfigError(
                "nats",
                "no NATS server is known: give a URL, set KVSTREAM_NATS_URL or NATS_URL, select a context with "
                f"`nats context select`, or run `kvstream server` (waited {wait:g} s for {server_file_path(environ)})",
            )
        target = _from_server(info)
    await asyncio.to_thread(check_target, target, _allows_plaintext(environ))
    return target


async def refresh_target(target: NatsTarget, *, environ: Mapping[str, str] | None = None) -> NatsTarget:
    """The target as its origin has it now: at another address, or with other credentials, after a restart.

    What was given by URL and variables stands. Raises ConfigError, or BrokerUnavailable with no `kvstream server`.
    """
    return await asyncio.to_thread(_refresh, target, os.environ if environ is None else environ)


def _refresh(target: NatsTarget, environ: Mapping[str, str]) -> NatsTarget:
    if target.origin == "given":
        return target
    if target.origin == "context":
        fresh = _read_context(target.context, environ)
    else:
        info = read_server_file(environ)
        if info is None:
            raise BrokerUnavailable(f"no `kvstream server` of this user runs any more; {target.remedy}")
        fresh = _from_server(info)
    check_target(fresh, _allows_plaintext(environ))
    return fresh


def _from_server(info: ServerInfo) -> NatsTarget:
    return NatsTarget(
        urls=(f"nats://{info.host}:{info.port}",),
        source=f"the running kvstream server (pid {info.pid})",
        origin="server",
        user=info.user,
        password=info.password,
    )


def _allows_plaintext(environ: Mapping[str, str]) -> bool:
    return environ.get("KVSTREAM_NATS_ALLOW_PLAINTEXT", "") == "1"


def target_from_environment(url: str | None, environ: Mapping[str, str]) -> NatsTarget | None:
    """The target by URL, environment or context file; None where none of them names one. Reads files."""
    source = "the given URL"
    if not url:
        for name in ("KVSTREAM_NATS_URL", "NATS_URL"):
            if environ.get(name):
                url, source = environ[name], name
                break
    if not url:
        return _from_context(environ)
    values = {
        field: environ.get(f"KVSTREAM_NATS_{field.upper()}") or environ.get(f"NATS_{field.upper()}") or ""
        for field in _FIELDS
    }
    return _build(url, source, values, environ)


def check_target(target: NatsTarget, allow_plaintext: bool) -> None:
    """Raise ConfigError for a URL that can't be used, a missing file, or plaintext to another host. Reads files."""
    if not target.urls:
        raise ConfigError("nats", f"{target.source} holds no URL")
    for url in target.urls:
        try:
            parts = urlsplit(url)
            scheme, host, _ = parts.scheme, parts.hostname, parts.port
        except ValueError:
            scheme = host = None
        if scheme not in ("nats", "tls") or not host:
            raise ConfigError("nats", f"{redact(url)!r} ({target.source}) is not nats://HOST:PORT or tls://HOST:PORT")
        if not (target.tls or allow_plaintext or _is_loopback(host)):
            raise ConfigError(
                "nats",
                f"{redact(url)} ({target.source}) is another host and the connection would not be encrypted; use "
                "tls://, give a CA (NATS_CA), or allow it with KVSTREAM_NATS_ALLOW_PLAINTEXT=1",
            )
    for field in _FILES:
        path = getattr(target, field)
        if path and ("\0" in path or not os.access(path, os.R_OK)):
            raise ConfigError(f"nats.{field}", f"{path!r} ({target.source}) can't be read")
    if bool(target.cert) != bool(target.key):
        raise ConfigError("nats.cert", f"{target.source} gives only one of certificate and key")


def _build(url: str, source: str, values: Mapping[str, str], environ: Mapping[str, str]) -> NatsTarget:
    urls = tuple(part if "://" in part else f"nats://{part}" for part in re.split(r"[,\s]+", url.strip()) if part)
    expanded = {
        field: _expand(value, environ) if field in _FILES and value else value for field, value in values.items()
    }
    # Every field of `values` is a text field of the struct.
    return msgspec.convert({"urls": urls, "source": source, "replicas": _replicas(environ), **expanded}, NatsTarget)


def _replicas(environ: Mapping[str, str]) -> int:
    text = environ.get("KVSTREAM_NATS_REPLICAS", "")
    if not text:
        return 0
    if text not in ("1", "3", "5"):
        raise ConfigError("KVSTREAM_NATS_REPLICAS", f"{text!r} is not a number of copies; use 1, 3 or 5")
    return int(text)


def _expand(path: str, environ: Mapping[str, str]) -> str:
    return environ.get("HOME", "~") + path[1:] if path.startswith("~/") else path


def _from_context(environ: Mapping[str, str]) -> NatsTarget | None:
    folder = _context_folder(environ)
    name = environ.get("NATS_CONTEXT", "")
    if not name:
        if folder is None:
            return None
        try:
            name = (folder / "context.txt").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        if not name:
            return None
    return _read_context(name, environ)


def _context_folder(environ: Mapping[str, str]) -> Path | None:
    home = environ.get("XDG_CONFIG_HOME") or os.path.join(environ.get("HOME", ""), ".config")
    return Path(home) / "nats" if os.path.isabs(home) else None


def _read_context(name: str, environ: Mapping[str, str]) -> NatsTarget:
    folder = _context_folder(environ)
    if "/" in name or "\0" in name or name.startswith("."):
        raise ConfigError("nats.context", f"{name!r} is not the name of a NATS context")
    if folder is None:
        raise ConfigError("nats.context", f"context {name!r} is selected, and neither HOME nor XDG_CONFIG_HOME is set")
    path = folder / "context" / f"{name}.json"
    try:
        context = msgspec.json.decode(path.read_bytes(), type=_Context)
    except FileNotFoundError:
        raise ConfigError("nats.context", f"context {name!r} is selected and {path} does not exist") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError("nats.context", f"{path} can't be read: {error}") from None
    values = {field: getattr(context, field) for field in _FIELDS}
    if context.inbox_prefix:
        values["inbox_prefix"] = context.inbox_prefix
    target = _build(context.url, f"NATS context {name!r}", values, environ)
    return msgspec.structs.replace(target, origin="context", context=name)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
