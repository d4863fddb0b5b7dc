"""`POST /health/drain`, of gateways and of workers: takes a process out of service and answers when nothing runs there.

`timeout_s` of the query bounds the waiting. A gateway knows `settle_s` too: for so long nobody new must have come.
"""

from __future__ import annotations

import math

DRAIN_PATH = "/health/drain"
LONGEST_S = 86_400.0
"""Nobody waits longer, nor asks for it."""


def seconds_of(text: str) -> float:
    """A time that is asked for. Raises ValueError: what it must be."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 <= found <= LONGEST_S:
        raise ValueError(f"must be a number of seconds from 0 to {LONGEST_S:g}")
    return found
