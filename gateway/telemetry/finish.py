"""Accounts for a request that is over: counts it, logs a line without prompts and keys, makes the spans of its trace.

Accounts for a request that is over: counts it, logs a line without prompts and keys, hands it to the tracer.

Logs one line per request when it is over, without prompt text and keys.

`gateway.telemetry.prompts` logs the prompt text where an operator wants it.

Makes the spans of a request that is over: its own, its waits for a slot, its attempts at workers.

Sources: OpenTelemetry's semantic conventions for HTTP spans and for generative AI. docs/tracing.md explains each
attribute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from gateway.telemetry.metrics import Metrics, operation_of
from gateway.telemetry.record import KeptAttempt, KeptRecord, KeptWait
from gateway.telemetry.trail import Trail
from workers.process import log_lines
from workers.protocol.events import Finished
from workers.tracing.span import PROVIDER, Attributes, Kind, Span, Value

METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "WEBSOCKET"})
OTHER_METHOD = "_OTHER"
"""The convention's name for unknown methods."""
LEFT = frozenset({"client_gone", "cancelled", "superseded"})
"""Outcomes that are no error: nobody wanted the answer any more."""

DEFAULT_PORTS = {"http": 80, "https": 443}


def tell(trail: Trail) -> None:
    """Hand a request that is over to its tracer, if it is recorded. The trail may not change afterwards."""
    record = trail.record
    if isinstance(record, KeptRecord):
        record.tracer.tell(RequestJourney(trail, record, time.monotonic()))


def _server(url: str) -> tuple[str, int]:
    """Return host and port of a worker's address. The standard library's parser takes as long as the rest of a span."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("/")[0]
    host, _, port = place.rpartition(":")
    if host and port.isdecimal():
        return host.strip("[]"), int(port)
    return place.strip("[]"), DEFAULT_PORTS.get(scheme, 0)


class RequestJourney:
    """A request that is over, as `workers.tracing.tracer.Journey`: makes its spans when the tracer wants them."""

    __slots__ = ("_ended_at", "_record", "_trail")

    def __init__(self, trail: Trail, record: KeptRecord, ended_at: float) -> None:
        self._trail = trail
        self._record = record
        self._ended_at = ended_at

    def spans(self) -> Sequence[Span]:
        return [
            self._request(),
            *(self._wait(wait) for wait in self._record.waits_kept),
            *(self._attempt(attempt) for attempt in self._record.attempts),
        ]

    def _request(self) -> Span:
        trail, record = self._trail, self._record
        method = trail.method if trail.method in METHODS else OTHER_METHOD
        failed = "" if trail.outcome == "ok" else trail.outcome
        return Span(
            f"{method} {trail.route}" if trail.route else method,
            record.own,
            record.parent_id,
            trail.received_at,
            self._ended_at,
            Kind.SERVER,
            {
                "http.request.method": method,
                "http.route": trail.route,
                "url.path": trail.path,
                "url.scheme": "http",
                "http.response.status_code": trail.status,
                "error.type": failed,
                "paddock.request_id": trail.request_id,
                "paddock.team": trail.team,
                **(self._answer() if trail.model else {}),
            },
            failed if failed not in LEFT and (trail.status >= 500 or trail.status < 400) else "",
            tuple(record.events),
            tuple(record.links),
        )

    def _answer(self) -> Attributes:
        trail = self._trail
        told: dict[str, Value] = {
            "gen_ai.operation.name": operation_of(trail.path),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": trail.alias,
            "gen_ai.response.model": trail.model,
        }
        if (usage := trail.usage) is not None:
            told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            told["gen_ai.usage.output_tokens"] = usage.completion_tokens
            told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        ends = [attempt.end for attempt in self._record.attempts]
        if reasons := tuple(end.reason.value for end in ends if isinstance(end, Finished)):
            told["gen_ai.response.finish_reasons"] = reasons
        if trail.ttft_s is not None:
            told["paddock.ttft_ms"] = round(trail.ttft_s * 1e3)
        if trail.handed_over:
            told["paddock.detached"] = True
        return told

    def _wait(self, wait: KeptWait) -> Span:
        told: dict[str, Value] = {"gen_ai.request.model": wait.model}
        if wait.position:
            told["paddock.queue.position"] = wait.position
        if wait.predicted_s is not None:
            told["paddock.queue.predicted_ms"] = round(wait.predicted_s * 1e3)
        if wait.overtaken:
            told["paddock.queue.overtaken"] = wait.overtaken
        error = wait.error if wait.ended_at else self._trail.outcome
        told["error.type"] = error
        shown = "" if error in LEFT else error
        ended_at = wait.ended_at or self._ended_at
        return Span(
            "queue", wait.context, self._record.own.span_id, wait.began_at, ended_at, attributes=told, error=shown
        )

    def _attempt(self, attempt: KeptAttempt) -> Span:
        host, port = _server(attempt.address)
        error = attempt.error if attempt.ended_at else self._trail.outcome
        told: dict[str, Value] = {
            "gen_ai.operation.name": operation_of(self._trail.path),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": attempt.model,
            "server.address": host,
            "server.port": port,
            "paddock.worker": attempt.worker,
            "error.type": error,
        }
        if attempt.number > 1:
            told["paddock.attempt"] = attempt.number
        if attempt.begun_at:
            told["paddock.begun_ms"] = round((attempt.begun_at - attempt.began_at) * 1e3)
        if isinstance(attempt.end, Finished):
            told["gen_ai.response.finish_reasons"] = (attempt.end.reason.value,)
        return Span(
            "attempt",
            attempt.own,
            self._record.own.span_id,
            attempt.began_at,
            attempt.ended_at or self._ended_at,
            Kind.CLIENT,
            told,
            "" if error in LEFT or error == "ok" else error,
        )


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
    tell(trail)
