"""The fleet as this gateway sees it: an immutable snapshot, replaced as heartbeats come in."""
