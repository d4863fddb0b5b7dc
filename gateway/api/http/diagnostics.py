"""Keeps the log of a request in its ASGI scope, and writes the headers and SSE comments that show it to the caller.

CORS: as in llama-server, any web page may send requests with an API key that the page itself has.

The page sends its key in a header. So no answer allows credentials that the browser keeps (cookies, client
certificates, HTTP passwords). llama-server's answers do: if it is behind a proxy with a login, any page that a
logged-in person visits could send requests in that person's name.

Source: `pre_routing_handler` in tools/server/server-http.cpp of llama.cpp; WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import UTC, datetime
from time import time

from starlette.types import Scope, Send

from gateway.api.http.streaming import PING
from gateway.telemetry.answer_log import UNRECORDED, begin_trace
from gateway.telemetry.finish import PROBED
from gateway.telemetry.request_log import Ignored, RequestLog
from workers.tracing.span import MAX_STATE_CHARS, TRACEPARENT, TRACESTATE, TraceContext, read_context
from workers.tracing.tracer import Tracer

Headers = list[tuple[bytes, bytes]]

PRIVATE = frozenset({"/metrics", "/metrics/targets", "/ready", "/version"})
"""Paths that need no key. No web page may read their answers: otherwise, any page that somebody visits could."""
SIGN_ON = "/auth/"
"""What paths of the single sign-on begin with, which are private as well: a page must not sign somebody in unseen."""

ANTHROPIC_PATHS = "/v1/messages"
MAX_ORIGIN_BYTES = 512
METHODS = b"GET, POST, DELETE, OPTIONS"


def origin_of(scope: Scope) -> bytes:
    """Return the origin of the web page that sent the request; empty: no page did, or no page may read the answer."""
    if scope["path"] in PRIVATE or scope["path"].startswith(SIGN_ON):
        return b""
    found = _header(scope, b"origin")
    return found if len(found) <= MAX_ORIGIN_BYTES else b""


def origin_headers(origin: bytes) -> Headers:
    """Return the CORS headers of an answer to a web page of this origin; none if it is empty."""
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")] if origin else []


async def answer_preflight(scope: Scope, send: Send, origin: bytes) -> None:
    """Answer a preflight request, which a browser sends without a key before a page's request."""
    # Browsers do not count `Authorization` among the headers that `*` stands for.
    wanted = _header(scope, b"access-control-request-headers") or b"*"
    headers = [
        *origin_headers(origin),
        (b"access-control-allow-methods", METHODS),
        (b"access-control-allow-headers", wanted),
        (b"content-type", b"text/html"),
        (b"content-length", b"0"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b""})


def _header(scope: Scope, name: bytes) -> bytes:
    return next((value for given, value in scope["headers"] if given == name), b"")


MAX_REQUEST_ID_CHARS = 128

DEBUG_HEADER = b"x-paddock-debug"

_REQUEST_LOG = "paddock.request_log"


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the caller's `x-request-id` if it is 1 to 128 visible ASCII characters, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID_CHARS and all(33 <= b <= 126 for b in value):
            return value.decode("ascii")
    return "req-" + os.urandom(12).hex()


def caller_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the caller's trace context from `traceparent` and `tracestate`; None: it is missing or invalid."""
    parents = [value for name, value in headers if name == TRACEPARENT]
    if len(parents) != 1:
        return None
    states = b",".join(value for name, value in headers if name == TRACESTATE)
    return read_context(parents[0].decode("latin-1"), states[: MAX_STATE_CHARS + 1].decode("latin-1"))


def begin_request_log(
    scope: Scope, tracer: Tracer, *, closes: bool = False, refuses_unknown: bool = False
) -> RequestLog:
    """Begin the log of a request, and keep it in the scope. `closes`: whether its connection is closed after the
    answer. `refuses_unknown`: whether parameters without effect are errors."""
    headers, path = scope["headers"], scope["path"]
    request_log = scope[_REQUEST_LOG] = RequestLog(
        request_id(headers),
        scope["method"],
        path,
        trace=UNRECORDED if path in PROBED else begin_trace(tracer, caller_context(headers)),
        scheme=scope.get("scheme", "http"),
        origin=origin_of(scope),
        closes=closes,
        explains=(DEBUG_HEADER, b"1") in headers,
        ignored=Ignored(refuses=refuses_unknown),
    )
    return request_log


def request_log_of(scope: Scope) -> RequestLog:
    request_log = scope[_REQUEST_LOG]
    if not isinstance(request_log, RequestLog):
        raise TypeError("the request did not come through the door")
    return request_log


def ignored_of(scope: Scope) -> Ignored:
    """Return the record of the request's ignored parameters; if there is no log, one that nobody reads."""
    request_log = scope.get(_REQUEST_LOG)
    return request_log.ignored if isinstance(request_log, RequestLog) else Ignored()


def answer_headers(request_log: RequestLog) -> list[tuple[bytes, bytes]]:
    """Return the diagnostic headers, with the facts known by now: while a call waits for a slot, it has no worker."""
    headers = [*name_headers(request_log), *origin_headers(request_log.origin)]
    headers += [*connection_headers(request_log), *limit_headers(request_log)]
    answer, attempt = request_log.answer, request_log.answer.last_attempt
    if attempt is not None:
        headers += [
            (b"x-paddock-model", answer.model.encode("ascii", "replace")),
            (b"x-paddock-worker", attempt.at.worker.encode("ascii", "replace")),
            (b"x-paddock-queue-ms", b"%.2f" % (answer.queue_s * 1e3)),
            (b"x-paddock-overhead-ms", b"%.2f" % (request_log.overhead_s * 1e3)),
            (b"x-paddock-attempts", b"%d" % len(answer.attempts)),
        ]
    if request_log.stands_in:
        headers.append((b"x-paddock-default-model", request_log.stands_in.encode("ascii", "replace")))
    if attempt is not None or request_log.queue_position.filed:
        headers.append((b"x-queue-position", b"%d" % request_log.queue_position.filed))
    if answer.priority is not None:
        headers.append((b"x-paddock-priority", b"%d" % answer.priority))
    if attempt is not None and attempt.slot is not None:
        headers.append((b"x-paddock-slot", b"%d" % attempt.slot))
    if ignored := request_log.ignored.header:
        headers.append((b"x-paddock-ignored", ignored.encode("ascii")))
    if attempt is not None and attempt.placement:
        headers.append((b"x-paddock-placement", attempt.placement.encode("ascii", "replace")))
    return headers


def name_headers(request_log: RequestLog) -> list[tuple[bytes, bytes]]:
    """Return the ids by which logs and traces find the request, as headers of every answer, errors included."""
    headers = [(b"x-request-id", request_log.request_id.encode())]
    trace_id = request_log.trace.trace_id
    return [*headers, (b"x-paddock-trace-id", trace_id.encode())] if trace_id else headers


def limit_headers(request_log: RequestLog) -> Headers:
    """Return what is left of the caller's limits per minute, as OpenAI's headers, or Anthropic's if it speaks that."""
    headers: Headers = []
    for what, left in ((b"requests", request_log.requests_left), (b"tokens", request_log.tokens_left)):
        if left is None:
            continue
        numbers = ((b"limit", b"%d" % left.limit), (b"remaining", b"%d" % left.remaining))
        if request_log.path.startswith(ANTHROPIC_PATHS):
            headers += [(b"anthropic-ratelimit-%b-%b" % (what, name), value) for name, value in numbers]
            at = datetime.fromtimestamp(time() + left.reset_s, UTC)
            headers.append((b"anthropic-ratelimit-%b-reset" % what, f"{at:%Y-%m-%dT%H:%M:%SZ}".encode()))
        else:
            headers += [(b"x-ratelimit-%b-%b" % (name, what), value) for name, value in numbers]
            headers.append((b"x-ratelimit-reset-%b" % what, shown_duration(left.reset_s).encode()))
    return headers


def shown_duration(seconds: float) -> str:
    """Return a duration as OpenAI's headers have it: `1m0s`, `12.5s`, `0s`."""
    minutes, rest = divmod(round(seconds, 3), 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"


def connection_headers(request_log: RequestLog) -> list[tuple[bytes, bytes]]:
    """Return `connection: close` if the connection ends after this answer. `send_error` adds it to errors."""
    return [(b"connection", b"close")] if request_log.closes else []


def ping(request_log: RequestLog) -> bytes:
    """Return the SSE comment that keeps a stream alive; while its call waits, it shows the position in the queue."""
    queue_position = request_log.queue_position
    if not queue_position.position:
        return PING
    if queue_position.for_worker:
        loading = f" {queue_position.loading}".rstrip().encode()
        return b": waiting position=%d for=worker%b\n\n" % (queue_position.position, loading)
    return b": waiting position=%d wait_s=%.1f\n\n" % (queue_position.position, queue_position.wait_s)
