"""`POST /health/drain`, of gateways and of workers: takes a process out of service and answers when nothing runs there.

`timeout_s` of the query bounds the waiting. A gateway knows `settle_s` too: seconds in which no new request came.
"""

from __future__ import annotations

import math

DRAIN_PATH = "/health/drain"
LONGEST_S = 86_400.0
"""Longest time that may be asked for, seconds."""

LEAST_S = 20.0
"""Least seconds for calls after SIGTERM, however long the draining has gone on: the chart kills 30 s after its hook."""


def left_s(bound_s: float, drained_s: float) -> float:
    """Return the seconds left of a bound for draining, when SIGTERM comes `drained_s` after it began; negative: it
    begins now. A hook that waited in vain has used the bound up: calls that go on for longer would be killed.
    """
    return min(bound_s, max(LEAST_S, bound_s - max(0.0, drained_s)))


def seconds_of(text: str) -> float:
    """Return the seconds that a text asks for. Raises ValueError: what it must be."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= LONGEST_S:
        raise ValueError(f"must be a number of seconds from 0 to {LONGEST_S:g}")
    return found
