"""Writes helm/values.schema.json and the table of helm/README.md; with --check says what is out of date.

python deploy/chart/write_values.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from chart_values.pages import readme, schema_text

CHART = Path(__file__).resolve().parents[2] / "helm"


def main() -> int:
    parser = argparse.ArgumentParser(prog="write_values.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    values = (CHART / "values.yaml").read_text()
    page = CHART / "README.md"
    wanted = {CHART / "values.schema.json": schema_text(values), page: readme(page.read_text(), values)}
    stale = [file for file, text in wanted.items() if not file.is_file() or file.read_text() != text]
    for file in stale:
        print(f"{file.name} {'is out of date' if check else 'written'}")
        if not check:
            file.write_text(wanted[file])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
