"""Keeps streams of answers that outlive their connections and can be read again from any event."""
