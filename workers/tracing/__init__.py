"""Traces: the context that travels with a call, the spans that are made once the call is over, and their export.

Shared by gateways and workers. Nothing here is loaded or done per token; OpenTelemetry's libraries are loaded by
`workers.tracing.tracer` only where an endpoint is configured.
"""
