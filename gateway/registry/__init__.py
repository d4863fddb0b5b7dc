"""Keeps the fleet as this gateway sees it: an immutable snapshot, replaced as workers report changes."""
