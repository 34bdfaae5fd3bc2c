"""`python -m kvstream` is the `kvstream` command."""

from __future__ import annotations

import sys

from kvstream.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
