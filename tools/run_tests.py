"""The whole test suite in two pytest processes side by side: half of the tests wait more than they compute.

It only starts them, and shows what they say one after the other; with arguments it is one plain pytest with these. Its
exit code is not 0 where one of theirs is not.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile

PYTEST = [sys.executable, "-m", "pytest"]
COMPUTING = ("tests/unit", "tests/sim", "tests/contract")
WAITING = ("tests/chaos", "tests/integration")


def main(arguments: list[str]) -> int:
    if arguments:
        return subprocess.call([*PYTEST, *arguments])
    with tempfile.TemporaryFile() as output:
        # A cache of its own would be written by both at once; it is of no use here.
        quiet = ["-p", "no:cacheprovider"]
        computing = subprocess.Popen([*PYTEST, *quiet, *COMPUTING], stdout=output, stderr=subprocess.STDOUT)
        try:
            waiting = subprocess.call([*PYTEST, *quiet, *WAITING])
            computed = computing.wait()
        finally:
            computing.kill()
            computing.wait()
        output.seek(0)
        sys.stdout.flush()
        sys.stdout.buffer.write(output.read())
    return waiting or computed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
