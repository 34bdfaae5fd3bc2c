"""Fails when a module of kvstream reaches for time, randomness or ids past the seams.

A simulation substitutes clock, randomness and ids; one direct call of `time.monotonic` and a run no longer repeats. The
few files allowed here are the seams themselves and what never runs in a simulation.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

FORBIDDEN = {"time", "random", "secrets", "uuid"}
ALLOWED = (
    "kvstream/runtime/seams.py",  # the seams
    "kvstream/sim/rng.py",  # seeded generators, which the simulation puts in the place of the real ones
    "kvstream/discovery/nats.py",  # real broker: reconnect jitter, inbox names
    "kvstream/discovery/client.py",  # an orchestrator's, never a worker's
    "kvstream/discovery/server.py",  # starts a real process, draws its credentials
    "kvstream/discovery/server_file.py",
    "kvstream/transport/",  # names of real shared memory; a simulation brings its own transport
    "kvstream/cli/",
)


def violations(path: Path) -> list[str]:
    """The forbidden imports of one file, as `file:line: text`."""
    found: list[str] = []
    tree = ast.parse(path.read_text(), str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []  # names for annotations only
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        found += [f"{path}:{node.lineno}: imports {name}" for name in names if name.split(".")[0] in FORBIDDEN]
    return found


def main() -> int:
    root = Path(__file__).parent.parent
    found: list[str] = []
    for path in sorted((root / "kvstream").rglob("*.py")):
        if not str(path.relative_to(root)).startswith(ALLOWED):
            found += violations(path)
    for line in found:
        print(f"{line}: take it from kvstream.runtime.seams instead")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
