"""Placement in simulated time: ours and the usual ways, on public traces and on some made up here."""
