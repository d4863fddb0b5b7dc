"""CORS: any web page may ask with a key that it has itself, as in llama-server.

The key travels in a header that the page sets, never in what the browser keeps (cookies, client certificates, HTTP
passwords). So no answer allows credentials. llama-server's do: there, a page that somebody happens to visit could ask
with that person's login at a proxy before the server.

Source: `pre_routing_handler` in tools/server/server-http.cpp of llama.cpp; WHATWG Fetch, "CORS protocol".
"""

from __future__ import annotations

from starlette.types import Scope, Send

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
