"""Small whole answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.types import Send

from gateway.api.diagnostics import answer_headers
from gateway.telemetry.trail import Trail

JSON = b"application/json"

_encode = msgspec.json.Encoder().encode


async def send_json(send: Send, document: Any, trail: Trail) -> None:
    await send_bytes(send, _encode(document), JSON, trail)


async def send_parts(send: Send, parts: Iterator[bytes], content_type: bytes, trail: Trail) -> None:
    """Send an answer that may be large as its parts are made: others get their turn between two, and no more of it is
    held than the connection takes.
    """
    part, more = next(parts), next(parts, None)
    if more is None:
        await send_bytes(send, part, content_type, trail)
        return
    trail.status, trail.outcome = 200, "ok"
    headers = [(b"content-type", content_type), *answer_headers(trail)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while more is not None:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
        part, more = more, next(parts, None)
    await send({"type": "http.response.body", "body": part})


async def send_bytes(send: Send, body: bytes, content_type: bytes, trail: Trail, status: int = 200) -> None:
    """`status`: of something that went well."""
    trail.status, trail.outcome = status, "ok"
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *answer_headers(trail)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
