"""The trail of a request on its way through ASGI, and the headers and comments that show it."""

from __future__ import annotations

import os
from collections.abc import Iterable

from starlette.types import Scope

from gateway.api.cors import origin_headers, origin_of
from gateway.api.streaming import PING
from gateway.telemetry.trail import Trail

MAX_REQUEST_ID_CHARS = 128

DEBUG_HEADER = b"x-paddock-debug"

_TRAIL = "paddock.trail"


def request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """The caller's `x-request-id` if it is 1 to 128 visible ASCII characters, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and 0 < len(value) <= MAX_REQUEST_ID_CHARS and all(33 <= b <= 126 for b in value):
            return value.decode("ascii")
    return "req-" + os.urandom(12).hex()


def begin_trail(scope: Scope) -> Trail:
    trail = Trail(request_id(scope["headers"]), scope["method"], scope["path"], origin=origin_of(scope))
    trail.debug = (DEBUG_HEADER, b"1") in scope["headers"]
    scope[_TRAIL] = trail
    return trail


def trail_of(scope: Scope) -> Trail:
    trail = scope[_TRAIL]
    if not isinstance(trail, Trail):
        raise TypeError("the request did not come through the door")
    return trail


def answer_headers(trail: Trail) -> list[tuple[bytes, bytes]]:
    """What is known when the headers go out; a caller that still waits for a slot has no worker yet."""
    headers = [(b"x-request-id", trail.request_id.encode()), *origin_headers(trail.origin)]
    headers += connection_headers(trail)
    if trail.worker:
        headers += [
            (b"x-paddock-model", trail.model.encode("ascii", "replace")),
            (b"x-paddock-worker", trail.worker.encode("ascii", "replace")),
            (b"x-paddock-queue-ms", b"%.2f" % trail.queue_ms),
            (b"x-paddock-overhead-ms", b"%.2f" % trail.overhead_ms),
            (b"x-paddock-attempts", b"%d" % trail.attempts),
        ]
    if trail.worker or trail.standing.filed:
        headers.append((b"x-queue-position", b"%d" % trail.standing.filed))
    if trail.slot is not None:
        headers.append((b"x-paddock-slot", b"%d" % trail.slot))
    if trail.placement:
        headers.append((b"x-paddock-placement", trail.placement.encode("ascii", "replace")))
    return headers


def connection_headers(trail: Trail) -> list[tuple[bytes, bytes]]:
    """For every answer, errors as well."""
    return [(b"connection", b"close")] if trail.closes else []


def ping(trail: Trail) -> bytes:
    """The comment that keeps a stream alive: where its caller stands, if it waits for a slot."""
    standing = trail.standing
    if not standing.position:
        return PING
    return b": waiting position=%d wait_s=%.1f\n\n" % (standing.position, standing.wait_s)
