"""From priorities of requests to classes of the line."""

from __future__ import annotations

import pytest

from gateway.routing.placement import MOST_URGENT, priority_class


@pytest.mark.parametrize(("priority", "klass"), [(0, 0), (3, 3), (-8, -8), (8, 8), (9, 8), (-100, -8), (2**40, 8)])
def test_classes_end_where_they_end(priority: int, klass: int) -> None:
    assert priority_class(priority) == klass
    assert -MOST_URGENT <= priority_class(priority) <= MOST_URGENT
