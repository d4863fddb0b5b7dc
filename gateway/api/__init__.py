"""The HTTP API: reads each dialect into the canonical request, writes it from the canonical events."""
