"""Measures anew, keeps it, and writes the tables of docs/capacity.md: `python -m benchmarks.capacity.save [--tables]`.

With `--tables` nothing is measured: the tables are written from what is kept.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import msgspec

from benchmarks.capacity import rows_of
from benchmarks.capacity.tables import MEASURED, load, tables
from benchmarks.capacity.trial import measured
from benchmarks.table import print_rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "capacity.md"
PLACE = re.compile(r"<!-- table: (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def written(page: str, made: dict[str, str]) -> str:
    return PLACE.sub(lambda place: f"<!-- table: {place[1]} -->\n{made[place[1]]}\n<!-- end -->", page)


def main() -> None:
    if "--tables" not in sys.argv:
        trial = measured()
        MEASURED.write_bytes(msgspec.json.format(msgspec.json.encode(trial), indent=1) + b"\n")
        print_rows("unit costs", rows_of(trial))
    PAGE.write_text(written(PAGE.read_text(), tables(load())))


if __name__ == "__main__":
    main()
