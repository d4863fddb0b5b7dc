"""How long calls have when SIGTERM comes."""

from __future__ import annotations

import math

import pytest

from workers.protocol.control import LEAST_S, left_s


@pytest.mark.parametrize(
    ("bound_s", "drained_s", "left"),
    [
        (120.0, -math.inf, 120.0),
        (120.0, 0.0, 120.0),
        (120.0, 30.0, 90.0),
        (120.0, 119.0, LEAST_S),
        (120.0, 9000.0, LEAST_S),
        (5.0, 9000.0, 5.0),
        (0.0, -math.inf, 0.0),
    ],
)
def test_a_bound_counts_from_when_the_draining_began(bound_s: float, drained_s: float, left: float) -> None:
    assert left_s(bound_s, drained_s) == left
