"""Sends whole answers, large ones in parts, and errors in place of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from gateway.api.dialect import SHAPE, ErrorShape
from gateway.api.http.diagnostics import answer_headers, limit_headers, name_headers, origin_headers
from gateway.api.http.streaming import UNREAD_BYTES
from gateway.back_pressure import retry_after
from gateway.errors import (
    AuthenticationFailed,
    BodyTooLarge,
    BodyTooSlow,
    Cancelled,
    CatalogChanged,
    MethodNotAllowed,
    NotSupported,
    PaddockError,
    RateLimited,
    Stopping,
    Superseded,
)
from gateway.telemetry.request_log import RequestLog

JSON = b"application/json"

PART_BYTES = 256 << 10
"""Approximate bytes joined and sent at once: copying megabytes at once would hold up every stream of the process."""

_PLACE = b"\0"
"""Stands in encoded JSON for an array to insert: JSON never contains this byte."""

_encode = msgspec.json.Encoder().encode


class EncodedArray:
    """A JSON array whose entries were encoded earlier, one by one: encoding all at an answer's end takes too long."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.entries = entries

    def raw(self) -> msgspec.Raw:
        """Return the whole array as JSON. For short arrays; `parts` is for long ones."""
        return msgspec.Raw(b"[%b]" % b",".join(self.entries))

    def parts(self) -> Iterator[bytes]:
        """Yield the array as JSON, about `PART_BYTES` at a time."""
        entries = self.entries
        at_once = max(1, PART_BYTES * len(entries) // (sum(map(len, entries)) + 1))
        yield b"["
        for start in range(0, len(entries), at_once):
            yield (b"," if start else b"") + b",".join(entries[start : start + at_once])
        yield b"]"


def in_parts(document: Any) -> Iterator[bytes]:
    """Yield a document as JSON; each `EncodedArray` in it comes in parts of its own."""
    arrays: list[EncodedArray] = []

    def place(array: EncodedArray) -> msgspec.Raw:
        arrays.append(array)
        return msgspec.Raw(_PLACE)

    first, *others = msgspec.json.Encoder(enc_hook=place).encode(document).split(_PLACE)
    yield first
    for array, part in zip(arrays, others, strict=True):
        yield from array.parts()
        yield part


def gathered(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Yield the same bytes with short parts joined, so that an answer of a few short parts is one message."""
    held: list[bytes] = []
    num_bytes = 0
    for part in parts:
        held.append(part)
        num_bytes += len(part)
        if num_bytes > UNREAD_BYTES:
            yield b"".join(held)
            held, num_bytes = [], 0
    if held:
        yield b"".join(held)


async def send_json(send: Send, document: Any, request_log: RequestLog) -> None:
    await send_bytes(send, _encode(document), JSON, request_log)


async def send_parts(send: Send, parts: Iterator[bytes], content_type: bytes, request_log: RequestLog) -> None:
    """Send an answer that can be large, one part after another. Other tasks run between two parts. Each part is
    made just before the previous one is sent, so that the whole answer is never in memory."""
    part, more = next(parts), next(parts, None)
    if more is None:
        await send_bytes(send, part, content_type, request_log)
        return
    request_log.status, request_log.outcome = 200, "ok"
    headers = [(b"content-type", content_type), *answer_headers(request_log)]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    while more is not None:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0)
        part, more = more, next(parts, None)
    await send_last(send, part)


async def send_bytes(send: Send, body: bytes, content_type: bytes, request_log: RequestLog, status: int = 200) -> None:
    """Send a successful answer in one piece. `status`: its status, 200 or another of success."""
    request_log.status, request_log.outcome = status, "ok"
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *answer_headers(request_log)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_last(send, body)


async def send_last(send: Send, body: bytes) -> None:
    """Send the last bytes of an answer. If they are many, wait until the peer has read most of them: once this returns,
    the memory of the call is given back, and the call no longer counts among the requests of its key."""
    if len(body) > UNREAD_BYTES:
        for start in range(0, len(body), PART_BYTES):
            await send({"type": "http.response.body", "body": body[start : start + PART_BYTES], "more_body": True})
            await asyncio.sleep(0)
        body = b""
    await send({"type": "http.response.body", "body": body})


LINGER_S = 5.0
LINGER_BYTES = 64 << 20
"""A refused body is read and discarded for LINGER_S or LINGER_BYTES at most, so that its sender sees the error."""


def shape_of(scope: Scope) -> ErrorShape:
    """Return the error shape of the route; until a route is found, it is OpenAI's, set by `root_app.Door`."""
    shape: ErrorShape = scope[SHAPE]
    return shape


def error_headers(error: PaddockError) -> list[tuple[bytes, bytes]]:
    headers: list[tuple[bytes, bytes]] = []
    if (seconds := retry_after(error)) is not None:
        headers.append((b"retry-after", b"%d" % seconds))
    if isinstance(error, NotSupported | Superseded | Cancelled | CatalogChanged) or (
        isinstance(error, RateLimited) and error.is_final
    ):
        headers.append((b"x-should-retry", b"false"))  # SDKs retry every 5xx, 429 and 409
    if isinstance(error, AuthenticationFailed):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, MethodNotAllowed):
        headers.append((b"allow", error.allow.encode()))
    if ends_connection(error):
        headers.append((b"connection", b"close"))
    return headers


def ends_connection(error: PaddockError) -> bool:
    """Return whether the connection must be closed after this error."""
    return isinstance(error, Stopping | BodyTooLarge | BodyTooSlow)


def note_error(request_log: RequestLog, error: PaddockError) -> None:
    request_log.outcome = error.code or error.type


async def send_error(
    receive: Receive, send: Send, error: PaddockError, request_log: RequestLog, shape: ErrorShape
) -> None:
    """Answer the request with an error. Nothing of an answer may have been sent before."""
    request_log.status = shape.status(error)
    note_error(request_log, error)
    body = shape.body(error, request_log)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    headers += [*name_headers(request_log), *origin_headers(request_log.origin), *error_headers(error)]
    headers += limit_headers(request_log)
    if request_log.closes and not ends_connection(error):
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": request_log.status, "headers": headers})
    if isinstance(error, BodyTooLarge | BodyTooSlow):
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await _discard_rest(receive)
        body = b""
    await send_last(send, body)


async def _discard_rest(receive: Receive) -> None:
    """Discard the rest of the body: closing while the client writes would reset the connection, and lose the answer."""
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
