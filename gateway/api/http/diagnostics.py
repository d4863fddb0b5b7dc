"""The log of a request on its way through ASGI, and the headers and comments that show it.

CORS: any web page may ask with a key that it has itself, as in llama-server.

The key travels in a header that the page sets, never in what the browser keeps (cookies, client certificates, HTTP
passwords). So no answer allows credentials. llama-server's do: there, a page that somebody happens to visit could
ask with that person's login at a proxy before the server.

Source: `pre_routing_handler` in tools/server/server-http.cpp of llama.cpp; WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from starlette.types import Scope, Send

from gateway.api.http.streaming import PING
from gateway.telemetry.answer_log import UNRECORDED, begin_trace
from gateway.telemetry.finish import PROBED
from gateway.telemetry.request_log import Ignored, RequestLog
from workers.tracing.span import MAX_STATE_CHARS, TRACEPARENT, TRACESTATE, TraceContext, read_context
from workers.tracing.tracer import Tracer

Headers = list[tuple[bytes, bytes]]

PRIVATE = frozenset({"/metrics", "/metrics/targets", "/ready", "/version"})
"""Paths that need no key: a page that somebody happens to visit may not read these."""

MAX_ORIGIN_BYTES = 512
METHODS = b"GET, POST, DELETE, OPTIONS"


def origin_of(scope: Scope) -> bytes:
    """Return the origin of the page that asks and may read the answer; empty: none."""
    if scope["path"] in PRIVATE:
        return b""
    found = _header(scope, b"origin")
    return found if len(found) <= MAX_ORIGIN_BYTES else b""


def origin_headers(origin: bytes) -> Headers:
    """Return the headers that every answer to a page has."""
    return [(b"access-control-allow-origin", origin), (b"vary", b"origin")] if origin else []


async def answer_preflight(scope: Scope, send: Send, origin: bytes) -> None:
    """Answer what a browser asks before a page's request, without a key."""
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
    """Return the span that the caller makes its request in; None: it names none, or not as the standard has it."""
    parents = [value for name, value in headers if name == TRACEPARENT]
    if len(parents) != 1:
        return None
    states = b",".join(value for name, value in headers if name == TRACESTATE)
    return read_context(parents[0].decode("latin-1"), states[: MAX_STATE_CHARS + 1].decode("latin-1"))


def begin_request_log(
    scope: Scope, tracer: Tracer, *, closes: bool = False, refuses_unknown: bool = False
) -> RequestLog:
    """Begin the log of a request. `closes`: its connection ends with the answer. `refuses_unknown`: parameters that
    nothing is done with are errors.
    """
    headers, path = scope["headers"], scope["path"]
    request_log = scope[_REQUEST_LOG] = RequestLog(
        request_id(headers),
        scope["method"],
        path,
        trace=UNRECORDED if path in PROBED else begin_trace(tracer, caller_context(headers)),
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
    """Return the list of the request's parameters that nothing is done with; it is lost where there is no log."""
    request_log = scope.get(_REQUEST_LOG)
    return request_log.ignored if isinstance(request_log, RequestLog) else Ignored()


def answer_headers(request_log: RequestLog) -> list[tuple[bytes, bytes]]:
    """Return the headers with what is known when they go out; a caller that still waits for a slot has no worker."""
    headers = [*name_headers(request_log), *origin_headers(request_log.origin)]
    headers += connection_headers(request_log)
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
    """Return the headers by which logs and traces find the request; for every answer, errors as well."""
    headers = [(b"x-request-id", request_log.request_id.encode())]
    trace_id = request_log.trace.trace_id
    return [*headers, (b"x-paddock-trace-id", trace_id.encode())] if trace_id else headers


def connection_headers(request_log: RequestLog) -> list[tuple[bytes, bytes]]:
    """Return the header that ends the connection, where it ends; for every answer, errors as well."""
    return [(b"connection", b"close")] if request_log.closes else []


def ping(request_log: RequestLog) -> bytes:
    """Return the comment that keeps a stream alive; it tells the queue position of a caller that waits for a slot."""
    queue_position = request_log.queue_position
    if not queue_position.position:
        return PING
    if queue_position.for_worker:
        return b": waiting position=%d for=worker\n\n" % queue_position.position
    return b": waiting position=%d wait_s=%.1f\n\n" % (queue_position.position, queue_position.wait_s)
