"""Follows the load of a model by one worker: how far it is, how it fails, and what memory it takes in the end."""
