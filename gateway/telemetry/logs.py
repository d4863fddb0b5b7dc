"""What the gateway logs of a request: one line when it is over, without prompt text and keys.

Who wants the former has `gateway.telemetry.prompts`.
"""

from __future__ import annotations

import logging

from gateway.telemetry.trail import Trail
from workers import log_lines

REQUEST_LOGGER = "paddock.request"
PROBED = frozenset({"/health", "/v1/health", "/healthz", "/ready", "/metrics", "/metrics/targets"})
"""Asked every few seconds by machines, which are no callers: worth a line at debug level only."""

NOISE = ("without completing response", "without completing handshake", "Invalid UTF-8 sequence")
"""A stream that is cut off on purpose lacks its last chunk, and a handshake that is refused its end; uvicorn calls both
errors of the application. The last is a client's fault, and uvicorn's line has a traceback.
"""


def configure(level: str, log_format: str) -> None:
    """As `workers.log_lines.configure`."""
    log_lines.configure(level, log_format, NOISE)


def log_request(trail: Trail) -> None:
    """The one line of a request that ended."""
    level = logging.DEBUG if trail.path in PROBED else logging.WARNING if trail.status >= 500 else logging.INFO
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra={"fields": trail.line()})
