"""Telemetry for operators: metrics, a log line per request, traces, and the request log that all come from."""
