"""Reads from a request's head where its body ends, and writes a head anew."""

from __future__ import annotations

from collections.abc import Sequence

from workers.http_server.state import Refusal

Header = tuple[bytes, bytes]
"""A header's name, in lower case, and its value."""

NO_TUNNEL = Refusal(501, "This server is no proxy and opens no tunnel (CONNECT). Ask for what this address serves.")
SOCKET_WITH_BODY = Refusal(
    400, "The handshake of a WebSocket has a body, where none is allowed. Send it without content-length."
)


def length_of(headers: Sequence[Header]) -> int | None:
    """Return the body's length in bytes; None: unknown. The parser refuses lengths that are no number or come twice."""
    length: int | None = 0
    for name, value in headers:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length":
            length = int(value) if value.isdigit() else None
    return length


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: Sequence[Header]) -> bytes:
    """Return a request's head, as bytes to parse, without its `upgrade` header.

    The parts must come from a parser, which lets no line break into them."""
    lines = [b"%b: %b\r\n" % header for header in headers if header[0] != b"upgrade"]
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), b"".join(lines))
