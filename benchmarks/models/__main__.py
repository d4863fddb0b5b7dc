"""Runs a part of the comparison: `python -m benchmarks.models [points|swaps|storm ...] [--systems ...]`."""

from __future__ import annotations

import argparse
import asyncio

from benchmarks.models import ROUNDS, SWAPPED, compared, outcome_rows, stormed, swapped, table
from benchmarks.models.files import files
from benchmarks.models.scenarios import POINTS
from benchmarks.models.storm import GAP_S
from benchmarks.models.systems import SYSTEMS
from benchmarks.table import print_rows

PARTS = ("points", "swaps", "storm")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.models", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="all by default")
    parser.add_argument("--systems", nargs="+", choices=[*SYSTEMS], default=[*SYSTEMS])
    parser.add_argument("--points", nargs="+", choices=[*POINTS], default=[*POINTS])
    parser.add_argument("--swapped", nargs="+", choices=SWAPPED, default=SWAPPED, help="whose swap times")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of swaps")
    parser.add_argument("--calls", type=int, default=1000, help="of the storm")
    parser.add_argument("--gap", type=float, default=GAP_S, help="seconds between two calls of the storm")
    parser.add_argument("--seed", type=int, default=0, help="models in random order; 0: in turn")
    parser.add_argument("--stay", type=float, help="Paddock's min_resident_s in the storm")
    given = parser.parse_args()
    parts = given.parts or PARTS
    if "points" in parts:
        outcomes = asyncio.run(compared(given.systems, given.points, files()))
        print_rows("models that calls load, by point", outcome_rows(outcomes))
        print(f"\n{table(outcomes)}", flush=True)
    if "swaps" in parts:
        print_rows("swap times", asyncio.run(swapped(given.systems, given.swapped, given.rounds)))
    if "storm" in parts:
        print_rows("a storm", asyncio.run(stormed(given.systems, given.calls, given.gap, given.seed, given.stay)))


if __name__ == "__main__":
    main()
