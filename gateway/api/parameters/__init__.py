"""Reads the parameters that several dialects have: checks types and limits, and makes parts of canonical requests."""
