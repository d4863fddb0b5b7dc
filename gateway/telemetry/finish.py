"""Accounts for a request that is over: counts it, logs a line without prompts and keys, hands it to the tracer.

Logs one line per request when it is over, without prompt text and keys.

`gateway.telemetry.prompts` logs the prompt text where an operator wants it.
"""

from __future__ import annotations

import logging
import time

from gateway.telemetry import request_spans
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from workers.process import log_lines

REQUEST_LOGGER = "paddock.request"
PROBED = frozenset({"/health", "/v1/health", "/healthz", "/ready", "/metrics", "/metrics/targets"})
"""Paths that machines request every few seconds; they are no callers, so these are logged at debug level only."""

NOISE = ("without completing response", "without completing handshake", "Invalid UTF-8 sequence")
"""Log lines of uvicorn to drop. A stream that is cut off on purpose lacks its last chunk, a refused handshake its end;
uvicorn calls both errors of the application. The last is a client's fault, and uvicorn's line has a traceback.
"""


def configure(level: str, log_format: str) -> None:
    """Configure logging as `workers.process.log_lines.configure` does, without uvicorn's noise."""
    log_lines.configure(level, log_format, NOISE)


def log_request(trail: Trail) -> None:
    """Log the one line of a request that ended."""
    level = logging.DEBUG if trail.path in PROBED else logging.WARNING if trail.status >= 500 else logging.INFO
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra={"fields": trail.line()})


def close_trail(trail: Trail, metrics: Metrics) -> None:
    """Set the request's outcome, count it, log it and trace it. Called once per request."""
    trail.outcome = trail.outcome or ("ok" if 0 < trail.status < 400 else "cancelled")
    if trail.model:
        metrics.ended(trail, time.monotonic() - trail.received_at)
    elif trail.outcome != "ok" and trail.path not in PROBED:
        metrics.turned_away(trail)
    log_request(trail)
    request_spans.tell(trail)
