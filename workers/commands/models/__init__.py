"""The commands over the models folder: list, pull, show, verify, rm."""
