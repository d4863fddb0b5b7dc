"""Limits of what teams store, for parts of a gateway that are tested without its directory."""

from __future__ import annotations

from accounts.protocol.records import NO_TEAM_LIMITS, TeamLimits


def unlimited(team: str) -> TeamLimits:
    """Return the limits of a team that has none."""
    return NO_TEAM_LIMITS
