"""Connects the gateway to the workers: calls go out by POST, events come in on one stream per worker process."""
