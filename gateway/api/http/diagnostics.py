"""The trail (log record) of a request on its way through ASGI, and the headers and comments that show it.

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
from gateway.telemetry.finish import PROBED
from gateway.telemetry.record import UNRECORDED, begun
from gateway.telemetry.trail import Ignored, Trail
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

_TRAIL = "paddock.trail"


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


def begin_trail(scope: Scope, tracer: Tracer, *, refuses_unknown: bool = False) -> Trail:
    """Begin a request's trail. `refuses_unknown`: parameters that nothing is done with are errors."""
    headers, path = scope["headers"], scope["path"]
    record = UNRECORDED if path in PROBED else begun(tracer, caller_context(headers))
    trail = Trail(request_id(headers), scope["method"], path, origin=origin_of(scope), record=record)
    trail.debug = (DEBUG_HEADER, b"1") in scope["headers"]
    trail.ignored = Ignored(refuses=refuses_unknown)
    scope[_TRAIL] = trail
    return trail


def trail_of(scope: Scope) -> Trail:
    trail = scope[_TRAIL]
    if not isinstance(trail, Trail):
        raise TypeError("the request did not come through the door")
    return trail


def ignored_of(scope: Scope) -> Ignored:
    """Return the list of the request's parameters that nothing is done with; it is lost where there is no trail."""
    trail = scope.get(_TRAIL)
    return trail.ignored if isinstance(trail, Trail) else Ignored()


def answer_headers(trail: Trail) -> list[tuple[bytes, bytes]]:
    """Return the headers with what is known when they go out; a caller that still waits for a slot has no worker."""
    headers = [*name_headers(trail), *origin_headers(trail.origin)]
    headers += connection_headers(trail)
    if trail.worker:
        headers += [
            (b"x-paddock-model", trail.model.encode("ascii", "replace")),
            (b"x-paddock-worker", trail.worker.encode("ascii", "replace")),
            (b"x-paddock-queue-ms", b"%.2f" % trail.queue_ms),
            (b"x-paddock-overhead-ms", b"%.2f" % trail.overhead_ms),
            (b"x-paddock-attempts", b"%d" % trail.attempts),
        ]
    if trail.stands_in:
        headers.append((b"x-paddock-default-model", trail.stands_in.encode("ascii", "replace")))
    if trail.worker or trail.standing.filed:
        headers.append((b"x-queue-position", b"%d" % trail.standing.filed))
    if trail.priority is not None:
        headers.append((b"x-paddock-priority", b"%d" % trail.priority))
    if trail.slot is not None:
        headers.append((b"x-paddock-slot", b"%d" % trail.slot))
    if ignored := trail.ignored.header:
        headers.append((b"x-paddock-ignored", ignored.encode("ascii")))
    if trail.placement:
        headers.append((b"x-paddock-placement", trail.placement.encode("ascii", "replace")))
    return headers


def name_headers(trail: Trail) -> list[tuple[bytes, bytes]]:
    """Return the headers by which logs and traces find the request; for every answer, errors as well."""
    headers = [(b"x-request-id", trail.request_id.encode())]
    return [*headers, (b"x-paddock-trace-id", trail.trace_id.encode())] if trail.trace_id else headers


def connection_headers(trail: Trail) -> list[tuple[bytes, bytes]]:
    """Return the header that ends the connection, where it ends; for every answer, errors as well."""
    return [(b"connection", b"close")] if trail.closes else []


def ping(trail: Trail) -> bytes:
    """Return the comment that keeps a stream alive; it tells the queue position of a caller that waits for a slot."""
    standing = trail.standing
    if not standing.position:
        return PING
    if standing.for_worker:
        return b": waiting position=%d for=worker\n\n" % standing.position
    return b": waiting position=%d wait_s=%.1f\n\n" % (standing.position, standing.wait_s)
