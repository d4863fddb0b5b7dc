"""Reads the parameters that several dialects have: their types and limits, and how they become canonical."""
