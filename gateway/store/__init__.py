"""Reads and writes Paddock's data in Redis: the client, the admission scripts (`lua/`) and their invariants
(`integrity`).
"""
