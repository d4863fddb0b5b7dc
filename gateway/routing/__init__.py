"""Ranks workers for a call, by pure functions: from a snapshot of the fleet to a ranking, with its reasons."""
