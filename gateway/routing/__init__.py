"""Where a call should go: pure functions from a snapshot to a ranking that explains itself."""
