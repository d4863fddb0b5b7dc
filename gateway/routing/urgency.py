"""Priority classes of the queue: calls of a higher class go first, whatever the shares of teams are. Pure."""

from __future__ import annotations

MOST_URGENT = 8
"""Highest class; classes go from its negative to it."""


def urgency(priority: int) -> int:
    """Return the class of a request's priority. Both count up with urgency; priorities may go further than classes."""
    return max(-MOST_URGENT, min(MOST_URGENT, priority))
