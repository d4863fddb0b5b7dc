"""Reads the session key that a browser holds in a cookie since its user signed in.

A browser sends cookies with requests that other pages make it send. So they count only where such a request does no
harm: for reading what the console shows, and for what a page of this very origin asks. Source: RFC 6265bis; W3C Fetch
Metadata Request Headers; WHATWG Fetch, "Origin header".
"""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie

from starlette.types import Scope

from accounts.protocol.sign_on import PLAIN_COOKIE, SECURE_COOKIE
from gateway.access.keys import key_in
from gateway.errors import KeyMissing

CONSOLE = "/admin/"
"""Beginning of the paths that any page may link to: GET changes nothing there."""


def credential_of(scope: Scope) -> bytes | None:
    """Return the API key or token of a request, or the session key in its cookie; None: it has none.

    Raises KeyMissing."""
    key = key_in(scope["headers"])
    return key if key is not None else session_key(scope)


def session_key(scope: Scope) -> bytes | None:
    """Return the session key in a request's cookie; None: it has none. Raises KeyMissing if the request may come from
    a page of another origin."""
    headers = dict[bytes, bytes](scope["headers"])
    key = _cookie(headers.get(b"cookie", b""))
    if not key:
        return None
    if scope["method"] == "GET" and scope["path"].startswith(CONSOLE):
        return key
    if not _is_of_this_origin(scope, headers):
        raise KeyMissing(
            "The cookie of your sign-in counts only for requests from this address's own pages. Send an API key, as "
            "`Authorization: Bearer <key>`."
        )
    return key


def _is_of_this_origin(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Return whether the browser says that a page of this origin sent the request."""
    fetched_by = headers.get(b"sec-fetch-site")
    if fetched_by is not None:
        return fetched_by == b"same-origin"
    host = headers.get(b"host", b"")
    # TLS may end before this gateway, which then takes its own scheme for http.
    origins = [b"https://" + host, *([] if scope["scheme"] in ("https", "wss") else [b"http://" + host])]
    return bool(host) and headers.get(b"origin") in origins


def _cookie(header: bytes) -> bytes:
    if PLAIN_COOKIE.encode() not in header:
        return b""
    try:
        cookies = SimpleCookie(header.decode("latin-1"))
    except CookieError:
        return b""
    found = cookies.get(SECURE_COOKIE) or cookies.get(PLAIN_COOKIE)
    return found.value.encode("latin-1", "replace") if found is not None else b""
