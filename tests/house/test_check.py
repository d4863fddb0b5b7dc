"""deploy/check.py: what it says of tests holds."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_what_may_fail_side_by_side_exists_and_says_why() -> None:
    spec = importlib.util.spec_from_file_location("paddock_check", ROOT / "deploy" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    check = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check)
    assert all(check.RUN_AGAIN.values())
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not serial", *check.RUN_AGAIN]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    assert "deselected" not in found.stdout, "a test that is marked `serial` runs alone already"
