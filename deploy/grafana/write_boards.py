"""Writes every board to helm/files/dashboards; with --check says which files are not what it would write.

python deploy/grafana/write_boards.py [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from boards import models, overview, queue, redis, runbook, teams, workers
from boards.board import Board

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "helm" / "files" / "dashboards"
REMEDY = "run: python deploy/grafana/write_boards.py"


def boards() -> tuple[Board, ...]:
    runbook_page = (ROOT / "docs" / "runbook.md").read_text()
    return (
        *(overview.BOARD, models.BOARD, workers.BOARD, queue.BOARD, teams.BOARD, redis.BOARD),
        runbook.board(runbook_page),
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="write_boards.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a file is out of date")
    check = parser.parse_args().check
    stale = []
    for board in boards():
        file = FOLDER / f"{board.name}.json"
        if check and (not file.is_file() or file.read_text() != board.text()):
            stale.append(file.name)
        elif not check:
            file.write_text(board.text())
    if stale:
        print(f"out of date: {', '.join(stale)}; {REMEDY}", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
