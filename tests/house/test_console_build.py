"""The console's files in the package are what its sources make, byte for byte, and its types hold."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CONSOLE = ROOT / "gateway" / "console"
MOST_BYTES = 250_000
"""Maximum size of all files together, compressed."""
BUILT = ("app.js", "style.css")

pytestmark = pytest.mark.skipif(shutil.which("npm") is None, reason="no npm on this machine")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with their dependencies, as the lock file has them."""
    folder = tmp_path_factory.mktemp("console") / "web"
    shutil.copytree(CONSOLE / "web", folder, ignore=shutil.ignore_patterns("node_modules"))
    run(folder, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
    return folder


def run(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_files_are_what_the_sources_make(web: Path, tmp_path: Path) -> None:
    run(web, "node", "build.mjs", str(tmp_path))
    for name in BUILT:
        assert (tmp_path / name).read_bytes() == (CONSOLE / "static" / name).read_bytes(), (
            f"{name} is out of date: run `npm ci && npm run build` in gateway/console/web"
        )


def test_types_hold(web: Path) -> None:
    run(web, "npm", "run", "--silent", "check")


def test_lock_file_names_no_registry() -> None:
    assert "resolved" not in (CONSOLE / "web" / "package-lock.json").read_text()


def test_the_console_is_small(tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "static"), "gztar", CONSOLE / "static")
    assert Path(archive).stat().st_size <= MOST_BYTES
