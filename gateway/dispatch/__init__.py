"""Takes a call from its model's name to an answer that has begun: finds slots, retries, and fans out."""
