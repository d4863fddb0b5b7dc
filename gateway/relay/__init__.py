"""Connects the gateway to workers: calls go out as POST requests, events come in on one stream per worker process."""
