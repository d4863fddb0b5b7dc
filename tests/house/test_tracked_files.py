"""What must not stand in any file of the repository."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

MACHINE_PATHS = re.compile(r"(?<![\w.])/(?:home/\w|root/|work/|Users/\w|opt/wheels)")
CONFLICTS = re.compile(r"^(?:<{7} |>{7} |={7}$)")
REGISTRIES = re.compile(r"pypi\.org|pythonhosted|--(?:extra-)?index-url|--find-links|registry\.npmjs", re.IGNORECASE)


def tracked() -> list[Path]:
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and path != Path(__file__).resolve()]


def lines_with(pattern: re.Pattern[str]) -> list[str]:
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    return found


def test_no_paths_of_somebodys_machine() -> None:
    assert lines_with(MACHINE_PATHS) == []


def test_no_registry_addresses() -> None:
    assert lines_with(REGISTRIES) == []


def test_no_conflicts_of_a_merge() -> None:
    assert lines_with(CONFLICTS) == []


def test_locks_hold_versions_and_hashes_only() -> None:
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        for line in lock.read_text().splitlines():
            assert re.fullmatch(r"[a-z0-9][a-z0-9._-]*==\S+( ; .+?)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?", line), (
                line
            )


def test_the_patterns_can_fail() -> None:
    assert MACHINE_PATHS.search("see /home/me/x")
    assert CONFLICTS.search("<<<<<<< HEAD")
    assert REGISTRIES.search("https://pypi.org/simple")
