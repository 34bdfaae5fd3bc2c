"""Entry point of the command line: which subcommand, how it logs, and how its errors end the process.

A KVStreamError is one line on stderr and an exit code, never a traceback: 2 where the caller's input is wrong
(ConfigError, and argparse's own), 1 for anything else. A subcommand's module is imported only when it is asked for,
and within `main`: an interrupt is quiet from there on, so this module itself must import little.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Protocol

from kvstream import __version__
from kvstream.errors import ConfigError, KVStreamError

__all__ = ["main"]

_COMMANDS = {
    "demo": "prefill in one process, decode in others, KV cache streamed between",
    "server": "run a NATS server for this user's workers",
    "worker": "run a worker: one that holds KV for others, or an engine of yours",
    "workers": "list the workers that are registered",
    "streams": "list the live streams, as both sides have them",
    "events": "follow what happens in the cluster",
    "drain": "have a worker take nothing new and finish what is live",
    "cancel": "end a stream as cancelled",
    "reroute": "send a stream to another destination",
    "bench": "measure what moves between two workers, on one host or two",
    "sim": "run simulated clusters under seeded faults",
    "doctor": "check this machine: what works, what does not, what to do about it",
}
_INTERRUPTED = 130
_BROKEN_PIPE = 141


class _Command(Protocol):
    """The module of a subcommand."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, args: argparse.Namespace) -> int: ...


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line (default: sys.argv) and return the exit code. argparse exits by itself with 0 or 2."""
    try:
        code = _dispatch(sys.argv[1:] if argv is None else list(argv))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except ImportError as error:
        # An extension module that is interrupted while it is imported (numpy's) says so in this way.
        if _is_interrupt(error):
            return _INTERRUPTED
        raise
    except BrokenPipeError:
        # Whoever read our output has gone. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    except KVStreamError as error:
        return _report(error)
    except ExceptionGroup as group:
        expected, rest = group.split(KVStreamError)
        if expected is None or rest is not None:
            raise
        return max(_report(error) for error in _leaves(expected))


def _dispatch(argv: list[str]) -> int:
    listed = "\n".join(f"  {name:<9} {text}" for name, text in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="kvstream",
        description="Stream KV cache between LLM inference workers, layer by layer.",
        epilog=f"commands:\n{listed}\n\n`kvstream COMMAND --help` tells more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"kvstream {__version__}")
    _add_logging(parser, None)
    parser.add_argument("command", choices=_COMMANDS, metavar="COMMAND", help="one of those below")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)

    command = _load(args.command)
    # The command's own parser, so that only that command's module is imported. What is not given to it must not
    # replace what was given before it, hence no defaults for the options that both take.
    own = argparse.ArgumentParser(prog=f"kvstream {args.command}", description=_COMMANDS[args.command] + ".")
    _add_logging(own, argparse.SUPPRESS)
    command.add_arguments(own)
    args = own.parse_args(args.arguments, args)

    from kvstream.cli.logs import configure_logging

    levels = ("warning", "info", "debug")
    configure_logging(args.log_level or levels[min(args.verbose or 0, 2)], args.log_format or "console")
    return command.run(args)


def _load(name: str) -> _Command:
    if name == "demo":
        from kvstream.cli import demo

        return demo
    if name == "server":
        from kvstream.cli import server

        return server
    if name == "sim":
        from kvstream.cli import sim

        return sim
    if name == "worker":
        from kvstream.cli import worker

        return worker
    if name == "workers":
        from kvstream.cli import workers

        return workers
    if name == "streams":
        from kvstream.cli import streams

        return streams
    if name == "events":
        from kvstream.cli import events

        return events
    if name == "drain":
        from kvstream.cli import drain

        return drain
    if name == "cancel":
        from kvstream.cli import cancel

        return cancel
    if name == "reroute":
        from kvstream.cli import reroute

        return reroute
    if name == "bench":
        from kvstream.cli import bench

        return bench
    from kvstream.cli import doctor

    return doctor


def _add_logging(parser: argparse.ArgumentParser, default: str | None) -> None:
    group = parser.add_argument_group("logging, on stderr")
    group.add_argument("-v", "--verbose", action="count", default=default, help="log info; -vv: debug")
    group.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default=default)
    group.add_argument("--log-format", choices=("console", "json"), default=default, help="default: console")


def _report(error: KVStreamError) -> int:
    # One line, whatever the message holds (a server's log, for example). A ConfigError's text begins with its field.
    print("kvstream:", " ".join(str(error).split()), file=sys.stderr)
    return 2 if isinstance(error, ConfigError) else 1


def _is_interrupt(error: BaseException) -> bool:
    """Whether an interrupt is what it comes from."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def _leaves(group: ExceptionGroup[KVStreamError]) -> list[KVStreamError]:
    found: list[KVStreamError] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, ExceptionGroup) else [error]
    return found
