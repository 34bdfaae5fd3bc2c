"""The settings of `kvstream worker`: which source wins, and how each mistake is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvstream import ConfigError, KVLayout
from kvstream.cli.worker.engines import make_engine
from kvstream.cli.worker.settings import WorkerSettings, load_settings, read_layout
from kvstream.holder import Holder

ROOT = Path(__file__).parents[2]
NEEDED = {"name": "a", "blocks": 4, "layout": "l.toml"}
LAYOUT = {"layers": 4, "kv_heads": 2, "head_dim": 8, "block_tokens": 4, "dtype": "float16"}
FILE = """
name = "file"
blocks = 1
layout = "file.toml"
roles = ["x", "y"]
nats = "nats://file:1"
drain = 5

[options]
budget = 100

[runtime]
stall_timeout = 7
slots = 3
"""


@pytest.fixture
def config(tmp_path: Path) -> Any:
    def write(text: str, name: str = "worker.toml") -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write


def test_flags_over_environment_over_file(config: Any) -> None:
    path = config(FILE)
    settings = load_settings(None, {"KVSTREAM_CONFIG": path}, {"name": None})
    assert (settings.name, settings.blocks, settings.roles, settings.drain) == ("file", 1, ("x", "y"), 5.0)
    assert (settings.runtime.stall_timeout, settings.runtime.slots) == (7, 3)
    assert (settings.options, settings.nats) == ({"budget": 100}, "nats://file:1")
    environ = {
        "KVSTREAM_NAME": "env",
        "KVSTREAM_BLOCKS": "2",
        "KVSTREAM_ROLES": "p, q",
        "KVSTREAM_DRAIN": "2.5",
        "KVSTREAM_HEALTH": "0",
        "KVSTREAM_RUNTIME_SLOTS": "5",
        "KVSTREAM_RUNTIME_CHECKSUMS": "true",
        "KVSTREAM_NATS_URL": "nats://env:1",
        "KVSTREAM_OTHER": "ignored",
    }
    settings = load_settings(path, environ, {})
    assert (settings.name, settings.blocks, settings.roles, settings.health) == ("env", 2, ("p", "q"), 0)
    assert (settings.runtime.stall_timeout, settings.runtime.slots, settings.runtime.checksums) == (7, 5, True)
    assert settings.nats is None, "where the environment names a server, discovery reads it with its credentials"
    settings = load_settings(path, environ, {"name": "flag", "blocks": 3, "roles": [], "nats": "nats://flag:1"})
    assert (settings.name, settings.blocks, settings.roles, settings.nats) == ("flag", 3, (), "nats://flag:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blokcs = 1", "unknown key 'blokcs'; did you mean 'blocks'?"),
        ("qqq = 1", "unknown key 'qqq'; known are name, blocks"),
        ("[runtime]\nstal_timeout = 1", "unknown key 'runtime.stal_timeout'; did you mean 'runtime.stall_timeout'?"),
        ("[layout]\nlayer = 1", "unknown key 'layout.layer'; did you mean 'layout.layers'?"),
        ('blocks = "x"', "expected `int`, got `str`"),
        ("[runtime]\nslots = 1.5", "expected `int`, got `float`"),
        ("[runtime]\nslots = 0", "slots: must be finite and greater than zero"),
        ("health = 70000", "health: 70000 is no port"),
        ("drain = -1", "drain: must be from 0 to 86400 seconds"),
        ("blocks = = 1", r"is not TOML: .*line 1"),
    ],
)
def test_mistakes_in_the_file_are_named(config: Any, text: str, message: str) -> None:
    path = config(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_settings(path, {}, {})
    assert path in str(caught.value)


def test_other_mistakes(config: Any, tmp_path: Path) -> None:
    for environ, flags, message in (
        ({}, {"name": "a", "blocks": 1}, "layout: is needed"),
        ({}, {"blocks": 1, "layout": "l"}, "name: is needed: .*--name, KVSTREAM_NAME"),
        ({"KVSTREAM_BLOCKS": "many"}, {"name": "a", "layout": "l"}, "blocks: expected `int`, got `str`"),
        ({"KVSTREAM_RUNTIME_SLOT": "1"}, NEEDED, r"unknown setting KVSTREAM_RUNTIME_SLOT; did you .*RUNTIME_SLOTS\?"),
        ({"KVSTREAM_RUNTIME_SLOTS": "0"}, NEEDED, "slots: must be finite"),
        ({"KVSTREAM_CONFIG": str(tmp_path / "none")}, NEEDED, "can't read .*none: No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_settings(None, environ, flags)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_settings(str(binary), {}, NEEDED)


def test_layouts_from_files_and_inline(config: Any) -> None:
    expected = KVLayout(**LAYOUT)
    lines = "\n".join(f"{key} = {value!r}" for key, value in LAYOUT.items())
    assert read_layout(load_settings(None, {}, {**NEEDED, "layout": config(lines, "l.toml")})) == expected
    json = str(LAYOUT).replace("'", '"')
    assert read_layout(load_settings(None, {}, {**NEEDED, "layout": config(json, "l.json")})) == expected
    beside = load_settings(config(FILE.replace("file.toml", "l.toml")), {}, {})
    assert read_layout(beside) == expected, "a file names others by where it is itself"
    inline = load_settings(config(f"[layout]\n{lines}"), {}, {"name": "a", "blocks": 1})
    assert read_layout(inline) == expected


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("l.toml", "layers = =", "is not TOML: .*line 1"),
        ("l.json", '{"layers": 4,\n "kv_heads": }', "is not JSON: .*line 2 column 14"),
        ("l.json", "[1]", "holds no JSON object"),
        ("l.toml", "layers = 4\nkv_head = 2", "unknown key 'kv_head'; did you mean 'kv_heads'"),
        ("l.toml", 'layers = "4"', "layers: expected `int`, got `str`"),
        ("l.toml", "layers = 4", "missing required field `kv_heads`"),
        (
            "l.toml",
            'layers = 0\nkv_heads = 2\nhead_dim = 8\nblock_tokens = 4\ndtype = "int8"',
            "layers: must be an int from 1",
        ),
    ],
)
def test_mistakes_in_a_layout_file_are_named(config: Any, name: str, text: str, message: str) -> None:
    path = config(text, name)
    with pytest.raises(ConfigError, match=message) as caught:
        read_layout(load_settings(None, {}, {**NEEDED, "layout": path}))
    assert caught.value.field == "layout"
    assert path in str(caught.value)


def test_the_documented_settings_are_those_that_there_are(config: Any) -> None:
    text = (ROOT / "docs" / "worker.md").read_text()
    layout, settings = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    read_layout(load_settings(None, {}, {**NEEDED, "layout": config(layout, "l.toml")}))
    loaded = load_settings(config(settings), {}, {})
    assert isinstance(make_engine(loaded.engine, loaded.options), Holder)
    documented = set(re.findall(r"^(\w+) =|^\[(\w+)\]", settings, re.MULTILINE))
    names = {name for pair in documented for name in pair}
    assert names >= set(WorkerSettings.__struct_fields__)


class NoEngine:
    def start(self) -> None: ...


def takes_anything(**options: object) -> Holder:
    return Holder()


def test_engines_by_name() -> None:
    assert isinstance(make_engine("kvstream.holder:Holder", {"budget": 3}), Holder)
    assert isinstance(make_engine(f"{__name__}:takes_anything", {"x": 3}), Holder)


@pytest.mark.parametrize(
    ("name", "options", "field", "message"),
    [
        ("kvstream.holder", {}, "engine", "must be package.module:Factory"),
        ("kvstream.nothing:X", {}, "engine", "can't import kvstream.nothing"),
        ("kvstream.holder:Hodler", {}, "engine", "has no function or class 'Hodler'"),
        ("kvstream.holder:Holder", {"bugdet": 1}, "options", "no option 'bugdet'; did you mean 'budget'?"),
        ("kvstream.holder:Holder", {"zz": 1}, "options", "it has budget, ttl, max_ttl, retry_after"),
        ("kvstream.holder:Holder", {"ttl": -1}, "ttl", "above zero"),
        ("kvstream.memory.pool:KVPool.x", {}, "engine", "has no"),
        (f"{__name__}:NoEngine", {}, "engine", "which has no `async def start`"),
    ],
)
def test_mistakes_in_an_engine_are_named(name: str, options: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_engine(name, options)
    assert caught.value.field == field
    assert message in str(caught.value)
