"""Traces: the context that travels with a call, the spans that are made of it once it is over, and how they leave.

Shared by gateways and workers. Nothing here is loaded or done per token; OpenTelemetry's libraries are loaded by
`workers.tracing.opened` only where an endpoint is configured.
"""
