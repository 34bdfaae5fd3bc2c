"""The settings of `kvstream worker`: a TOML file, over it the environment, over that the flags.

It reads and checks them; every mistake is a ConfigError that names where it stands, what is wrong, and where a name is
unknown the nearest one that is known. It starts nothing.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec

from kvstream.config import RuntimeConfig
from kvstream.errors import ConfigError
from kvstream.layout import KVLayout, Shard

__all__ = ["DEFAULT_ENGINE", "WorkerSettings", "load_settings", "read_layout"]

DEFAULT_ENGINE = "kvstream.holder:Holder"
_PREFIX = "KVSTREAM_"
_RUNTIME_PREFIX = "KVSTREAM_RUNTIME_"
_FROM_ENVIRONMENT = (
    "name",
    "roles",
    "device",
    "blocks",
    "layout",
    "engine",
    "data_interface",
    "lanes",
    "health",
    "health_host",
    "drain",
)
"""Settings that KVSTREAM_ variables give; where NATS is, discovery reads from them itself."""
_LISTS = ("roles", "lanes")
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at `\$(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a worker is. `layout` is a file (TOML, or JSON by its suffix) or the layout itself; `engine` names a factory
    as `package.module:Factory`, which gets `options` as keyword arguments; `health` is a port for HTTP (0: any free
    one), `drain` how many seconds a worker that was told to stop may take to finish; `runtime` as RuntimeConfig."""

    name: str
    blocks: int
    layout: str | KVLayout
    roles: tuple[str, ...] = ("cache",)
    nats: str | None = None
    device: str = "cpu"
    engine: str = DEFAULT_ENGINE
    options: dict[str, Any] = {}
    data_interface: str | None = None
    lanes: tuple[str, ...] = ("auto",)
    shard: Shard = Shard()
    health: int | None = None
    health_host: str = "127.0.0.1"
    drain: float = 30.0
    runtime: RuntimeConfig = RuntimeConfig()

    def __post_init__(self) -> None:
        if self.health is not None and not 0 <= self.health <= 65535:
            raise ConfigError("health", f"{self.health} is no port; use 0 (any free one) to 65535")
        if not 0 <= self.drain <= 86400:
            raise ConfigError("drain", f"must be from 0 to 86400 seconds, is {self.drain}")


def load_settings(config: str | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> WorkerSettings:
    """The settings out of the file `config` (or the one that KVSTREAM_CONFIG names), the environment, and `flags`, of
    which those that are None were not given. Reads the file. Raises ConfigError."""
    path = config or environ.get(_PREFIX + "CONFIG") or None
    found = _read_toml(Path(path), "config") if path else {}
    if path:
        where = f"{path}: "
        _check_names(where, found, WorkerSettings)
        for name, kind in (("runtime", RuntimeConfig), ("layout", KVLayout), ("shard", Shard)):
            part = found.get(name)
            if isinstance(part, dict):
                _check_names(where, cast("dict[str, object]", part), kind, f"{name}.")
        if isinstance(layout := found.get("layout"), str):
            found["layout"] = str(Path(path).parent / layout)
        # Each source by itself, so that an error names the one at fault; what it lacks others may give.
        _convert({"name": "x", "blocks": 1, "layout": "x", **found}, where, strict=True)
    given = _from_environment(environ, found)
    merged = {**found, **given, **{name: value for name, value in flags.items() if value is not None}}
    if merged.get("nats") == found.get("nats") and any(environ.get(name) for name in ("KVSTREAM_NATS_URL", "NATS_URL")):
        merged.pop("nats", None)
    for name, remedy in (
        ("name", "what this worker is called, unique in the cluster"),
        ("layout", "the file that describes the KV layout"),
        ("blocks", "how many KV blocks its pool has"),
    ):
        if name not in merged:
            raise ConfigError(
                name, f"is needed: {remedy} (--{name}, {_PREFIX}{name.upper()}, or `{name}` in the --config file)"
            )
    return _convert(merged, "", strict=False)


def read_layout(settings: WorkerSettings) -> KVLayout:
    """The layout that the settings name or hold. Raises ConfigError naming the file, and the line or field at fault."""
    if isinstance(settings.layout, KVLayout):
        return settings.layout
    path = Path(settings.layout)
    found = _read_json(path, "layout") if path.suffix == ".json" else _read_toml(path, "layout")
    _check_names(f"{path}: ", found, KVLayout, field="layout")
    try:
        return msgspec.convert(found, KVLayout)
    except msgspec.ValidationError as error:
        what, field = _place(error)
        raise ConfigError("layout", f"{path}: {field + ': ' if field else ''}{what}") from None
    except ConfigError as error:
        raise ConfigError("layout", f"{path}: {error}") from None


def _from_environment(environ: Mapping[str, str], found: Mapping[str, object]) -> dict[str, object]:
    given: dict[str, object] = {}
    for name in _FROM_ENVIRONMENT:
        text = environ.get(_PREFIX + name.upper())
        if text:
            given[name] = _words(text) if name in _LISTS else text
    runtime: dict[str, object] = {}
    known = RuntimeConfig.__struct_fields__
    for variable in sorted(environ):
        if variable.startswith(_RUNTIME_PREFIX):
            name = variable.removeprefix(_RUNTIME_PREFIX).lower()
            if name not in known:
                raise ConfigError("environment", f"unknown setting {variable}{_nearest(name, known, _env_name)}")
            runtime[name] = environ[variable]
    if runtime:
        below = found.get("runtime", {})
        given["runtime"] = {**(cast("dict[str, object]", below) if isinstance(below, dict) else {}), **runtime}
    return given


def _env_name(name: str) -> str:
    return _RUNTIME_PREFIX + name.upper()


def _words(text: str) -> list[str]:
    return [word for word in re.split(r"[,\s]+", text) if word]


def _convert(values: Mapping[str, object], where: str, *, strict: bool) -> WorkerSettings:
    try:
        return msgspec.convert(values, WorkerSettings, strict=strict)
    except msgspec.ValidationError as error:
        what, field = _place(error)
        raise ConfigError(field or "config", f"{where}{what}") from None
    except ConfigError as error:
        if not where:
            raise
        raise ConfigError("config", f"{where}{error}") from None


def _place(error: msgspec.ValidationError) -> tuple[str, str]:
    """What is wrong, and with which field."""
    match = _PLACE.match(str(error))
    assert match is not None
    what = match["what"]
    return what[:1].lower() + what[1:], (match["path"] or "").strip(".")


def _check_names(
    where: str,
    found: Mapping[str, object],
    kind: type[msgspec.Struct],
    prefix: str = "",
    field: str = "config",
) -> None:
    known = kind.__struct_fields__
    for name in found:
        if name not in known:
            raise ConfigError(field, f"{where}unknown key {prefix + name!r}{_nearest(name, known, repr, prefix)}")


def _nearest(name: str, known: Sequence[str], show: Any, prefix: str = "") -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {show(prefix + near[0])}?" if near else f"; known are {', '.join(known)}"


def _read_toml(path: Path, field: str) -> dict[str, object]:
    try:
        return tomllib.loads(_read(path, field))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(field, f"{path} is not TOML: {error}") from None


def _read_json(path: Path, field: str) -> dict[str, object]:
    try:
        found: object = json.loads(_read(path, field))
    except json.JSONDecodeError as error:
        raise ConfigError(field, f"{path} is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(field, f"{path} holds no JSON object")
    return cast("dict[str, object]", found)


def _read(path: Path, field: str) -> str:
    try:
        return path.read_text()
    except OSError as error:
        raise ConfigError(field, f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(field, f"{path} is not UTF-8 text: {error}") from None
