"""Sends whole answers, the large ones in parts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from starlette.types import Send

from gateway.api.diagnostics import answer_headers
from gateway.api.streaming import UNREAD_BYTES
from gateway.telemetry.trail import Trail

JSON = b"application/json"

PART_BYTES = 256 << 10
"""Bytes, about, that are joined and sent at once: copying megabytes holds up every stream of the process."""

_PLACE = b"\0"
"""Marks where an array goes: JSON never has this byte."""

_encode = msgspec.json.Encoder().encode


class EncodedArray:
    """Stands for an array whose entries are encoded already: encoding them all at an answer's end takes too long."""

    __slots__ = ("entries",)

    def __init__(self, entries: Sequence[bytes]) -> None:
        self.entries = entries

    def raw(self) -> msgspec.Raw:
        """Return the array as JSON, where it is short."""
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
    """Yield a document as JSON, in parts where there are arrays in it that are encoded already."""
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
    """Yield the same bytes, short parts joined: an answer of a few short parts is one message."""
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


async def send_json(send: Send, document: Any, trail: Trail) -> None:
    await send_bytes(send, _encode(document), JSON, trail)


async def send_parts(send: Send, parts: Iterator[bytes], content_type: bytes, trail: Trail) -> None:
    """Send an answer that may be large as its parts are made: other tasks get a turn between two, and no more of it is
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
    await send_last(send, part)


async def send_bytes(send: Send, body: bytes, content_type: bytes, trail: Trail, status: int = 200) -> None:
    """Send an answer at once. `status`: of something that went well."""
    trail.status, trail.outcome = status, "ok"
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % len(body)), *answer_headers(trail)]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send_last(send, body)


async def send_last(send: Send, body: bytes) -> None:
    """Send the rest of an answer. Where it is long, wait until the peer has read it: the call's memory and its place
    among the requests of its key are given back when this returns.
    """
    if len(body) > UNREAD_BYTES:
        for start in range(0, len(body), PART_BYTES):
            await send({"type": "http.response.body", "body": body[start : start + PART_BYTES], "more_body": True})
            await asyncio.sleep(0)
        body = b""
    await send({"type": "http.response.body", "body": body})
