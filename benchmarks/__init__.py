"""Measurements, side by side and as ratios where there is something to compare with. Never part of the tests.

`python -m benchmarks NAME [--json] [--svg PATH]`; the last line of `--json` is one JSON object.
"""
