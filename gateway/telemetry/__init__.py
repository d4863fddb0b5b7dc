"""Telemetry for operators: metrics, a log line per request, traces, and the log record (trail) that all come from."""
