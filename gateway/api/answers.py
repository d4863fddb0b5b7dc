"""Small whole answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Send

from gateway.api.diagnostics import answer_headers
from gateway.telemetry.trail import Trail

JSON = b"application/json"

_encode = msgspec.json.Encoder().encode


async def send_json(send: Send, document: Any, trail: Trail) -> None:
    await send_bytes(send, _encode(document), JSON, trail)


async def send_bytes(send: Send, body: bytes, content_type: bytes, trail: Trail, status: int = 200) -> None:
    """`status`: of something that went well."""
    trail.status, trail.outcome = status, "ok"
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *answer_headers(trail)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
