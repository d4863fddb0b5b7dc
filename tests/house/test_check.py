"""deploy/check.py: which tests that failed side by side are run once more."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTION = "--failed-to="


@pytest.fixture
def check() -> Any:
    spec = importlib.util.spec_from_file_location("paddock_check", ROOT / "deploy" / "check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("code", "num_failed", "again", "ends"),
    [(0, 0, None, 0), (1, 3, 0, 0), (1, 3, 1, 1), (1, 21, None, 1), (3, 0, None, 3), (1, 0, None, 1)],
    ids=["none", "pass_alone", "fail_alone", "too_many", "pytest_broke", "no_names"],
)
def test_some_that_fail_side_by_side_are_run_alone(
    check: Any, monkeypatch: pytest.MonkeyPatch, code: int, num_failed: int, again: int | None, ends: int
) -> None:
    failed = [f"tests/test_a.py::test_{number}" for number in range(num_failed)]
    alone: list[list[str]] = []

    def run_openly(command: list[str]) -> int:
        if not command[-1].startswith(OPTION):
            alone.append(command)
            return again or 0
        if failed:
            Path(command[-1].removeprefix(OPTION)).write_text("".join(f"{name}\n" for name in failed))
        return code

    monkeypatch.setattr(check, "run_openly", run_openly)
    assert check.run_tests(["pytest"]) == ends
    assert alone == ([] if again is None else [[*check.PYTEST, *failed]])
