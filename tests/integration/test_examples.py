"""What the documentation shows is run as it stands: the README's Python and the smallest example."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    # In asyncio's debug mode slow callbacks are told on stderr.
    kept = {k: v for k, v in os.environ.items() if "NATS" not in k and k != "PYTHONASYNCIODEBUG"}
    environment = kept | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60, env=environment, check=False
    )


def test_the_library_in_20_lines(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    program = tmp_path / "readme.py"
    program.write_text(code)
    result = run("-W", "error", str(program))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert re.fullmatch(
        r"1105920 bytes over the shared lane, payload \{'first_token': 504\}\n", result.stdout
    )  # 30 layers x 3 blocks x 12 KiB


def test_embedded_example() -> None:
    result = run("-W", "error", str(ROOT / "examples" / "embedded.py"))
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "decode: layer 7 is in place" in result.stdout
    assert "bytes identical" in result.stdout
    assert "DIFFER" not in result.stdout
