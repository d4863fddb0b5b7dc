"""Calls over bare connections, which keep every byte that came, however the connection ended.

An HTTP client may drop what it has not handed on when its connection breaks; a count of tokens needs all of it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WORD = re.compile(rb'"content":"t\d+ ')


class _Bytes(asyncio.Protocol):
    """Collects what comes, until the connection ends."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


@dataclass(frozen=True, slots=True)
class Got:
    """What a caller got of one call."""

    status: int
    """0: no whole head of a response came."""
    num_tokens: int
    """Tokens of the answer's text, in whole events, or in a whole answer."""
    is_whole: bool
    """Whether the answer came to its end."""
    body: bytes


async def call_raw(
    url: str, path: str, body: Mapping[str, Any], headers: Mapping[str, str], leave_after_s: float | None = None
) -> Got:
    """Send a request and return what came until the connection ended, or until the caller leaves. Raises OSError where
    there is no connection."""
    place, raw = urlsplit(url), json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", f"Host: {place.netloc}", "Connection: close", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(raw)}", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.create_connection(_Bytes, place.hostname or "", place.port or 80)
    transport.write("\r\n".join(lines).encode() + raw)
    try:
        await asyncio.wait([protocol.ended], timeout=leave_after_s)
    finally:
        transport.abort()
    return _got(bytes(protocol.received), streams=bool(body.get("stream")))


def _got(received: bytes, *, streams: bool) -> Got:
    head, separator, rest = received.partition(b"\r\n\r\n")
    if not separator:
        return Got(0, 0, is_whole=False, body=b"")
    status = int(head.split(b" ", 2)[1])
    if streams and status == 200:
        events = rest.split(b"\n\n")[:-1]  # what stands behind the last is not whole
        num_tokens = sum(len(WORD.findall(event)) for event in events)
        return Got(status, num_tokens, is_whole=rest.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), body=rest)
    length = re.search(rb"(?i)content-length: (\d+)", head)
    is_whole = length is not None and len(rest) == int(length[1])
    num_tokens = 0
    if is_whole and status == 200:
        num_tokens = sum(len(choice["message"]["content"].split()) for choice in json.loads(rest)["choices"])
    return Got(status, num_tokens, is_whole=is_whole, body=rest)
