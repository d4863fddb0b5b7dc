"""Paddock's data in Redis: the client, the admission scripts (`lua/`) and what must always hold (`integrity`)."""
