"""The HTTP API: reads requests of each dialect into canonical ones, and writes its answers from canonical events."""
