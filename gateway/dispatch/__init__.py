"""Takes a call from the name of its model to an answer that has begun: its slot, its retries, its fan-out."""
