"""Finishes a request that is over: counts it, logs a line without prompts and keys, and makes the spans of its trace.

`gateway.telemetry.prompts` logs prompts, if an operator has asked for that.

Sources: OpenTelemetry's semantic conventions for HTTP spans and for generative AI. docs/tracing.md explains each
attribute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from accounts.protocol.usage import LEFT
from gateway.telemetry.answer_log import AttemptLog, WaitLog
from gateway.telemetry.metrics import Metrics, operation_of
from gateway.telemetry.request_log import RequestLog
from workers.process import log_lines
from workers.protocol.events import Finished
from workers.tracing.span import PROVIDER, Attributes, Kind, Span, TraceContext, Value

METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE", "WEBSOCKET"})
OTHER_METHOD = "_OTHER"
"""The name that OpenTelemetry's convention has for unknown methods."""

DEFAULT_PORTS = {"http": 80, "https": 443}


def tell(request_log: RequestLog) -> None:
    """Hand a request that is over to its tracer, if its trace is recorded. Its log must not change afterwards."""
    if request_log.trace.tracer is not None:
        request_log.trace.tracer.tell(RequestJourney(request_log, time.monotonic()))


def _server(url: str) -> tuple[str, int]:
    """Return host and port of a worker's address. Parsed by hand: the standard library's parser takes as long as all
    the rest of a span."""
    scheme, _, rest = url.partition("://")
    place = rest.partition("/")[0]
    host, _, port = place.rpartition(":")
    if host and port.isdecimal():
        return host.strip("[]"), int(port)
    return place.strip("[]"), DEFAULT_PORTS.get(scheme, 0)


class RequestJourney:
    """A request that is over: it makes its spans if the tracer wants them. Implements
    `workers.tracing.tracer.Journey`."""

    __slots__ = ("_ended_at", "_request_log")

    def __init__(self, request_log: RequestLog, ended_at: float) -> None:
        self._request_log = request_log
        self._ended_at = ended_at

    def spans(self) -> Sequence[Span]:
        spans: list[Span] = []
        parent = self._request_log.trace.context
        if parent is not None:
            spans.append(self._request(parent))
            for answer in self._request_log.answers:
                spans += [self._wait(wait, wait.context, parent) for wait in answer.waits if wait.context]
            for answer in self._request_log.answers:
                spans += [
                    self._attempt(attempt, number, attempt.context, parent)
                    for number, attempt in enumerate(answer.attempts, 1)
                    if attempt.context
                ]
        return spans

    def _request(self, own: TraceContext) -> Span:
        request_log, trace = self._request_log, self._request_log.trace
        method = request_log.method if request_log.method in METHODS else OTHER_METHOD
        failed = "" if request_log.outcome == "ok" else request_log.outcome
        return Span(
            f"{method} {request_log.route}" if request_log.route else method,
            own,
            trace.parent_id,
            request_log.received_at,
            self._ended_at,
            Kind.SERVER,
            {
                "http.request.method": method,
                "http.route": request_log.route,
                "url.path": request_log.path,
                "url.scheme": request_log.scheme,
                "http.response.status_code": request_log.status,
                "error.type": failed,
                "paddock.request_id": request_log.request_id,
                "paddock.team": request_log.team,
                **(self._answer() if request_log.model else {}),
            },
            failed if failed not in LEFT and (request_log.status >= 500 or request_log.status < 400) else "",
            tuple(trace.events),
            tuple(trace.links),
        )

    def _answer(self) -> Attributes:
        request_log = self._request_log
        told: dict[str, Value] = {
            "gen_ai.operation.name": operation_of(request_log.path),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": request_log.alias,
            "gen_ai.response.model": request_log.model,
        }
        if (usage := request_log.usage) is not None:
            told["gen_ai.usage.input_tokens"] = usage.prompt_tokens
            told["gen_ai.usage.output_tokens"] = usage.completion_tokens
            told["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
        ends = [attempt.last_event for answer in request_log.answers for attempt in answer.attempts]
        if reasons := tuple(end.reason.value for end in ends if isinstance(end, Finished)):
            told["gen_ai.response.finish_reasons"] = reasons
        if request_log.ttft_s is not None:
            told["paddock.ttft_ms"] = round(request_log.ttft_s * 1e3)
        if request_log.handed_over:
            told["paddock.detached"] = True
        return told

    def _wait(self, wait: WaitLog, own: TraceContext, parent: TraceContext) -> Span:
        told: dict[str, Value] = {"gen_ai.request.model": wait.model}
        if wait.position:
            told["paddock.queue.position"] = wait.position
        if wait.predicted_s is not None:
            told["paddock.queue.predicted_ms"] = round(wait.predicted_s * 1e3)
        if wait.overtaken:
            told["paddock.queue.overtaken"] = wait.overtaken
        error = wait.error if wait.ended_at else self._request_log.outcome
        told["error.type"] = error
        shown = "" if error in LEFT else error
        ended_at = wait.ended_at or self._ended_at
        return Span("queue", own, parent.span_id, wait.began_at, ended_at, attributes=told, error=shown)

    def _attempt(self, attempt: AttemptLog, number: int, own: TraceContext, parent: TraceContext) -> Span:
        host, port = _server(attempt.at.url)
        error = attempt.error if attempt.ended_at else self._request_log.outcome
        told: dict[str, Value] = {
            "gen_ai.operation.name": operation_of(self._request_log.path),
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": attempt.at.model,
            "server.address": host,
            "server.port": port,
            "paddock.worker": attempt.at.worker,
            "error.type": error,
        }
        if number > 1:
            told["paddock.attempt"] = number
        if attempt.begun_at:
            told["paddock.begun_ms"] = round((attempt.begun_at - attempt.submitted_at) * 1e3)
        if isinstance(attempt.last_event, Finished):
            told["gen_ai.response.finish_reasons"] = (attempt.last_event.reason.value,)
        return Span(
            "attempt",
            own,
            parent.span_id,
            attempt.submitted_at,
            attempt.ended_at or self._ended_at,
            Kind.CLIENT,
            told,
            "" if error in LEFT or error == "ok" else error,
        )


REQUEST_LOGGER = "paddock.request"
PROBED = frozenset({"/health", "/v1/health", "/healthz", "/ready", "/metrics", "/metrics/targets"})
"""Paths that machines request every few seconds. Such requests are no callers' work, so they are logged at debug level
only."""

NOISE = ("without completing response", "without completing handshake", "Invalid UTF-8 sequence")
"""Log lines of uvicorn with one of these texts are dropped. The first two report as errors what the gateway does on
purpose: it cuts off streams without their last chunk, and refuses handshakes. The third reports a client's fault, with
a traceback."""


def configure(level: str, log_format: str) -> None:
    """Configure logging as `workers.process.log_lines.configure` does, and drop uvicorn's noise."""
    log_lines.configure(level, log_format, NOISE)


def log_request(request_log: RequestLog) -> None:
    """Log the one line about a request that has ended."""
    level = (
        logging.DEBUG if request_log.path in PROBED else logging.WARNING if request_log.status >= 500 else logging.INFO
    )
    logging.getLogger(REQUEST_LOGGER).log(level, "request", extra={"fields": request_log.line()})


def finish_request(request_log: RequestLog, metrics: Metrics) -> None:
    """Set the request's outcome, record its usage, count it, log it and hand it to its tracer. Call it once per
    request."""
    request_log.outcome = request_log.outcome or ("ok" if 0 < request_log.status < 400 else "cancelled")
    request_log.meter.finish(request_log)
    if request_log.model:
        metrics.ended(request_log, time.monotonic() - request_log.received_at)
    elif request_log.outcome != "ok" and request_log.path not in PROBED:
        metrics.turned_away(request_log)
    log_request(request_log)
    tell(request_log)
