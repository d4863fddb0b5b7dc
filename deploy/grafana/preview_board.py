"""Draws boards from a running Prometheus, without a Grafana: a page each, and a picture where there is a Chromium.

python deploy/grafana/preview_board.py http://127.0.0.1:9090 overview queue --minutes 15
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from preview.page import height, page, width
from preview.source import Source

FOLDER = Path(__file__).resolve().parents[2] / "helm" / "files" / "dashboards"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
HEAD_PX = 50
SCALE = 0.85
"""Of the picture: a board is 1360 pixels wide, a page of documentation less."""


def draw(name: str, source: Source, folder: Path) -> Path:
    """The page of one board."""
    file = folder / f"{name}.html"
    file.write_text(page(load(name), source))
    return file


def load(name: str) -> dict[str, Any]:
    board: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return board


def photograph(name: str, file: Path, browser: str, rows: int = 0) -> Path:
    """The page as a PNG beside it. `rows`: of the board's grid; 0: all."""
    picture = file.with_suffix(".png")
    board = load(name)
    tall = HEAD_PX + (height(board) if not rows else rows * height(board) // _rows(board))
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--disable-gpu",
            "--no-sandbox",
            "--hide-scrollbars",
            f"--force-device-scale-factor={SCALE}",
            f"--user-data-dir={profile}",
        ]
        command += [f"--window-size={width()},{tall}", f"--screenshot={picture}", file.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    return picture


def _rows(board: dict[str, Any]) -> int:
    return int(max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="preview_board.py", description=__doc__)
    parser.add_argument("url", help="address of the Prometheus")
    parser.add_argument("boards", nargs="+", choices=sorted(file.stem for file in FOLDER.glob("*.json")))
    parser.add_argument("--minutes", type=float, default=60.0, help="how far back")
    parser.add_argument("--rate-s", type=int, default=60, help="window of rates: four scrapes and more")
    parser.add_argument("--rows", type=int, default=0, help="of the grid, in the picture; 0: all")
    parser.add_argument("--out", type=Path, default=Path("build/boards"), help="folder for the pages")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    now = time.time()
    source = Source(asked.url.rstrip("/"), now - asked.minutes * 60, now, asked.rate_s)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    for name in asked.boards:
        file = draw(name, source, asked.out)
        print(file)
        if browser is not None:
            print(photograph(name, file, browser, asked.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
