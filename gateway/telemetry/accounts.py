"""Accounts for a request that is over: counts it in the metrics, logs it, and hands it to the tracer."""

from __future__ import annotations

import time

from gateway.telemetry import request_spans
from gateway.telemetry.logs import PROBED, log_request
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail


def close_trail(trail: Trail, metrics: Metrics) -> None:
    """Set the request's outcome, count it, log it and trace it. Called once per request."""
    trail.outcome = trail.outcome or ("ok" if 0 < trail.status < 400 else "cancelled")
    if trail.model:
        metrics.ended(trail, time.monotonic() - trail.received_at)
    elif trail.outcome != "ok" and trail.path not in PROBED:
        metrics.turned_away(trail)
    log_request(trail)
    request_spans.tell(trail)
