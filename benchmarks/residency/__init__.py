"""Residency in simulated time: loads, waits and fairness, and what a decision costs."""
