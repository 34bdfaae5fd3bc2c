"""`kvstream worker`: a worker process in the foreground, by default one that holds KV for others.

It turns flags, environment and file into settings, and what ends the worker into its exit code.
"""

from __future__ import annotations

import argparse
import os
import sys
import tomllib
from typing import Any

import msgspec

from kvstream.cli.loop import run_loop
from kvstream.cli.worker.daemon import Exit, Running, serve
from kvstream.cli.worker.settings import DEFAULT_ENGINE, load_settings
from kvstream.errors import BrokerUnavailable, ConfigError, Fenced

__all__ = ["add_arguments", "run"]

_EPILOG = """\
Settings come from the --config file (TOML), over it the environment (KVSTREAM_NAME, KVSTREAM_BLOCKS, ...;
KVSTREAM_RUNTIME_STALL_TIMEOUT and so on for what is in [runtime]), over that these flags.

exit codes: 0 told to stop, and all finished; 1 failure; 2 bad configuration; 3 the name is another worker's;
4 NATS can't be reached at the start; 5 told to stop, and left with work unfinished"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--config", metavar="FILE", help="settings in TOML, with the names of these flags")
    parser.add_argument("--name", help="what it is called, unique in the cluster")
    parser.add_argument("--roles", metavar="A,B", help="what it is there for (default: cache)")
    parser.add_argument("--nats", metavar="URL", help="default: KVSTREAM_NATS_*, NATS_*, NATS context, kvstream server")
    parser.add_argument("--layout", metavar="FILE", help="the KV layout, in TOML or JSON: layers, kv_heads, ...")
    parser.add_argument("--blocks", type=int, metavar="N", help="KV blocks of its pool")
    parser.add_argument("--device", help="where the pool is: cpu (default), cuda:N")
    parser.add_argument("--engine", metavar="MODULE:FACTORY", help=f"what it runs (default: {DEFAULT_ENGINE})")
    parser.add_argument(
        "--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the engine; may be repeated"
    )
    parser.add_argument("--data-interface", metavar="IF", help="where the data plane listens (default: loopback)")
    parser.add_argument("--lanes", metavar="A,B", help="how bytes may move (default: auto)")
    parser.add_argument("--health", type=int, metavar="PORT", help="answer /livez and /readyz there (0: any free port)")
    parser.add_argument("--drain", type=float, metavar="SECONDS", help="for what it has to finish (default: 30)")
    parser.add_argument("--json", action="store_true", help="say that it is ready as one JSON object")


def run(args: argparse.Namespace) -> int:
    flags: dict[str, object] = {
        name: getattr(args, name)
        for name in ("name", "nats", "layout", "blocks", "device", "engine", "data_interface", "health", "drain")
    }
    for name in ("roles", "lanes"):
        words: str | None = getattr(args, name)
        flags[name] = None if words is None else [word for word in words.split(",") if word]
    settings = load_settings(args.config, os.environ, flags)
    if args.option:
        options = {**settings.options, **dict(_option(text) for text in args.option)}
        settings = msgspec.structs.replace(settings, options=options)

    def say(running: Running) -> None:
        print(msgspec.json.encode(running).decode() if args.json else _text(running), flush=True)

    try:
        return run_loop(serve(settings, say))
    except Fenced as error:
        return _failed(error, Exit.FENCED)
    except BrokerUnavailable as error:
        return _failed(error, Exit.NO_BROKER)


def _option(text: str) -> tuple[str, Any]:
    """KEY=VALUE; a value that is TOML (a number, true, a list, a quoted text) is that, else it is text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ConfigError("--option", f"must be KEY=VALUE, is {text!r}")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def _text(running: Running) -> str:
    health = "" if running.health is None else f"; health on port {running.health}"
    roles = ", ".join(running.roles) or "no role"
    return f"{running.name}/{running.rank} ({roles}; pid {running.pid}) at {running.host}:{running.port}{health}"


def _failed(error: Exception, code: Exit) -> int:
    print("kvstream:", " ".join(str(error).split()), file=sys.stderr)
    return code
