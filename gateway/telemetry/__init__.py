"""Telemetry for operators: metrics, log lines, traces, and the log of each request, from which the other three are
made.
"""
