"""Reads from a request's head where its body ends and whether it can be read at all, and writes a head anew."""

from __future__ import annotations

from collections.abc import Sequence

from workers.http_server.state import Refusal

Header = tuple[bytes, bytes]
"""A header's name, in lower case, and its value."""

NO_TUNNEL = Refusal(501, "This server is no proxy and opens no tunnel (CONNECT). Ask for what this address serves.")
SOCKET_WITH_BODY = Refusal(
    400, "The handshake of a WebSocket has a body, where none is allowed. Send it without content-length."
)
MALFORMED_BODY = Refusal(
    400, "A chunk of the body is malformed. Send its size in hexadecimal digits, and CRLF behind both."
)
UNKNOWN_VERSION = Refusal(505, "The request is of another version than HTTP/1.1. Send HTTP/1.1 or 1.0.")
UNENDED_BODY = Refusal(
    400, "The last transfer-encoding is not chunked, so the end of the body is unknown. Send it chunked."
)
UNKNOWN_CODING = Refusal(501, "Bodies are read with no transfer-encoding but chunked. Send the body as it is.")


def refusal_of(method: bytes, version: str, headers: Sequence[Header], *, upgrades: bool) -> Refusal | None:
    """Return why a request cannot be read, by RFC 9110, 15.6.6, and RFC 9112, 6.1 and 6.3; None if it can. `upgrades`:
    whether it begins a WebSocket.

    A body is not passed on in a coding that nobody here undoes: the application would take it for the text itself."""
    if method == b"CONNECT":
        return NO_TUNNEL
    if upgrades and length_of(headers) != 0:
        return SOCKET_WITH_BODY
    if version.partition(".")[0] not in ("0", "1"):
        return UNKNOWN_VERSION
    values = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    codings = [coding for value in values for part in value.split(b",") if (coding := part.strip())]
    if codings and codings[-1] != b"chunked":
        return UNENDED_BODY
    return UNKNOWN_CODING if len(codings) > 1 else None


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
