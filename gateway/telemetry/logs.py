"""Logs one line per request when it is over, without prompt text and keys.

`gateway.telemetry.prompts` logs the prompt text where an operator wants it.
"""

from __future__ import annotations

import logging

from gateway.telemetry.trail import Trail
from workers import log_lines

REQUEST_LOGGER = "paddock.request"
PROBED = frozenset({"/health", "/v1/health", "/healthz", "/ready", "/metrics", "/metrics/targets"})
"""Paths that machines request every few seconds; they are no callers, so these are logged at debug level only."""

NOISE = ("without completing response", "without completing handshake", "Invalid UTF-8 sequence")
"""Log lines of uvicorn to drop. A stream that is cut off on purpose lacks its last chunk, a refused handshake its end;
uvicorn calls both errors of the application. The last is a client's fault, and uvicorn's line has a traceback.
"""


def configure(level: str, log_format: str) -> None:
    """Configure logging as `workers.log_lines.configure` does, without uvicorn's noise."""
    log_lines.configure(level, log_format, NOISE)


def log_request(trail: Trail) -> None:
    """Log the one line of a request that ended."""
    level = logging.DEBUG if trail.path in PROBED else logging.WARNING if trail.status >= 500 else logging.INFO
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra={"fields": trail.line()})
