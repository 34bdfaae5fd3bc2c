"""Writes docs/schemas: the JSON schemas of the control protocol, made from its types. `--check` only compares.

One file per operation, with its request and its reply, and one for the events.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

from kvstream.discovery.control import KINDS, OPERATIONS

FOLDER = Path(__file__).parent.parent / "docs" / "schemas"
_REFERENCE = "#/$defs/{name}"


def schemas() -> dict[str, str]:
    """The text of each file by its name."""
    found: dict[str, str] = {}
    for operation in OPERATIONS:
        (request, reply), definitions = msgspec.json.schema_components(
            [operation.request, operation.reply], ref_template=_REFERENCE
        )
        found[f"{operation.name}.json"] = _text(
            {"description": operation.about, "request": request, "reply": reply, "$defs": definitions}
        )
    published = [kind for name, kind in KINDS.items() if name not in ("suspect", "lost")]
    events, definitions = msgspec.json.schema_components(published, ref_template=_REFERENCE)
    found["events.json"] = _text({"description": "what is published", "anyOf": list(events), "$defs": definitions})
    return found


def _text(schema: dict[str, object]) -> str:
    return json.dumps({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=2) + "\n"


def main() -> int:
    wanted = schemas()
    if "--check" in sys.argv[1:]:
        there = {path.name: path.read_text() for path in FOLDER.glob("*.json")}
        return 0 if there == wanted else 1
    FOLDER.mkdir(parents=True, exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in wanted.items():
        (FOLDER / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
