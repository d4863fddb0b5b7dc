"""Runs the field alone, whole or in part: `python -m benchmarks.field [--rounds N] [--again] [GATEWAY ...]`."""

from __future__ import annotations

import argparse

from benchmarks.field import measure
from benchmarks.field.gateways import STARTS
from benchmarks.field.install import forget_failures
from benchmarks.table import print_rows

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m benchmarks.field", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("gateways", nargs="*", choices=[*STARTS, []], help="which to measure; all of them by default")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--again", action="store_true", help="try again to install what could not be installed before")
    given = parser.parse_args()
    if given.again:
        forget_failures()
    print_rows("gateways of the field", measure(given.rounds, given.gateways))
