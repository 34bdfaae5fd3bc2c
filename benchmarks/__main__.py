"""Runs one benchmark by name."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

NAMES = ("notify", "transfer")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    arguments = parser.parse_args()
    module = importlib.import_module(f"benchmarks.{arguments.name}")
    result = module.run()
    print(module.table(result))
    if arguments.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
