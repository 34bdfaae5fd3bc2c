"""Runs one benchmark by name."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from pathlib import Path

from benchmarks.options import Options, Scale
from benchmarks.plot import render

NAMES = ("checksums", "connect", "lanes", "load", "notify", "overlap", "registry", "scale", "small", "transfer")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--svg", type=Path, metavar="PATH", help="write a plot")
    parser.add_argument("--transport", choices=("auto", "tcp"), default="auto", help="transfer: all over TCP")
    parser.add_argument("--quick", action="store_true", help="less of all, to see that it works")
    parser.add_argument("--tiny", action="store_true", help="as little as possible, for the tests")
    arguments = parser.parse_args()
    if arguments.transport != "auto" and arguments.name != "transfer":
        parser.error("--transport belongs to transfer")
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    scale: Scale = "tiny" if arguments.tiny else "quick" if arguments.quick else "full"
    result = module.run(Options(scale, arguments.transport))
    print(module.table(result))
    if arguments.svg is not None:
        arguments.svg.write_text(render(module.figure(result)))
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
