"""Sends errors where nothing else was sent before. The dialect decides how they look (`ErrorShape`)."""

from __future__ import annotations

import asyncio
import math

from starlette.types import Message, Receive, Scope, Send

from gateway.api.answers import send_last
from gateway.api.cors import origin_headers
from gateway.api.diagnostics import name_headers
from gateway.api.dialect import SHAPE, ErrorShape
from gateway.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    BodyTooSlow,
    MethodNotAllowed,
    NotSupported,
    PaddockError,
    Stopping,
    Superseded,
)
from gateway.telemetry.trail import Trail

LINGER_S = 5.0
LINGER_BYTES = 64 << 20
"""Seconds and bytes for which a refused body is read and thrown away, so that its sender gets to see the refusal."""


def shape_of(scope: Scope) -> ErrorShape:
    """Return the error shape of the route, or the one that `Door` sets where none was found."""
    shape: ErrorShape = scope[SHAPE]
    return shape


def error_headers(error: PaddockError) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if error.retry_after_s is not None or error.status in (429, 503):
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(error.retry_after_s or 1.0))))
    if isinstance(error, NotSupported | Superseded):
        headers.append((b"x-should-retry", b"false"))  # SDKs take every 5xx, and 409, for a passing trouble
    if isinstance(error, AuthenticationFailed):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if ends_connection(error):
        headers.append((b"connection", b"close"))
    return headers


def ends_connection(error: PaddockError) -> bool:
    """Return whether nothing more can be asked on the connection after this error."""
    return isinstance(error, Stopping | BodyTooLarge | BodyTooSlow)


def note_error(trail: Trail, error: PaddockError) -> None:
    trail.outcome = error.code or error.type


async def send_error(receive: Receive, send: Send, error: PaddockError, trail: Trail, shape: ErrorShape) -> None:
    """Answer the request with an error; nothing may have been sent before."""
    trail.status = shape.status(error)
    note_error(trail, error)
    body = shape.body(error, trail)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [*name_headers(trail), *origin_headers(trail.origin), *error_headers(error)]
    if trail.closes and not ends_connection(error):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": trail.status, "headers": headers})
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _discard_rest(receive)
        body = b""
    await send_last(send, body)


async def _discard_rest(receive: Receive) -> None:
    """Read on: closing while the client still writes would reset the connection before it has read the answer."""
    num_bytes = 0
    try:
        async with asyncio.timeout(LINGER_S):
            while num_bytes < LINGER_BYTES:
                message: Message = await receive()
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
                num_bytes += len(message.get("body", b""))
    except TimeoutError:
        return
