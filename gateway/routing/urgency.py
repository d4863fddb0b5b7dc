"""Priority classes of the line: who goes first whatever teams' shares are. Pure."""

from __future__ import annotations

MOST_URGENT = 8
"""Classes go from its negative to it."""


def urgency(priority: int) -> int:
    """The class of a request of this priority; both count up with urgency, and requests may go further than classes."""
    return max(-MOST_URGENT, min(MOST_URGENT, priority))
