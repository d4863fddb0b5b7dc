"""Traces calls: the context that is sent with a call, the spans that are made after the call's end, and their export.

Shared by gateways and workers. Nothing here runs per token. OpenTelemetry's libraries are loaded by
`workers.tracing.tracer` only if an endpoint is configured.
"""
