"""Back pressure: what a refused caller is told of when to come again, and that one module says so."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from gateway import back_pressure, errors
from gateway.back_pressure import QueueState, no_slot_in_time, queue_full, retry_after

GATEWAY = Path(back_pressure.__file__).parent
OTHER_503 = {"Unavailable", "RequestTimeout", "StorageFull", "OutOfMemory"}
"""Errors that are not about this gateway's load: what is not ready yet, a limit of one request, a worker's own word."""


@pytest.mark.parametrize(
    ("num_slots", "num_waiting", "hold_s", "expected_s"),
    [(4, 7, 2.0, 4), (4, 0, 0.1, 1), (1, 99, 9.0, 60), (0, 4, 2.0, 10)],
)
def test_retry_after_is_the_predicted_wait_of_a_new_call(
    num_slots: int, num_waiting: int, hold_s: float, expected_s: int
) -> None:
    queue = QueueState("m", num_slots, num_waiting, hold_s)
    assert retry_after(queue_full(queue, limit=5)) == expected_s
    assert retry_after(no_slot_in_time(queue, 30.0, is_degraded=False)) == expected_s


def test_the_least_is_said_where_nothing_is_predicted() -> None:
    assert retry_after(back_pressure.stopping()) == 1
    assert retry_after(errors.OutOfMemory("x")) == 1
    assert retry_after(errors.InvalidRequest("x")) is None


def test_no_other_module_makes_these_errors() -> None:
    about_load = {
        name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.PaddockError) and kind.status in (429, 503)
    } - OTHER_503
    found = []
    for path in sorted(GATEWAY.rglob("*.py")):
        if path.name == "back_pressure.py" or path.is_relative_to(GATEWAY / "client"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                made = isinstance(node.func, ast.Name) and node.func.id in about_load
                if made or any(keyword.arg == "retry_after_s" for keyword in node.keywords):
                    found.append(f"{path.relative_to(GATEWAY)}:{node.lineno}")
    assert found == []
