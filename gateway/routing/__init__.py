"""Ranks workers for a call: pure functions from a snapshot of the fleet to a ranking that explains itself."""
