"""Says where a browser may be sent after it has signed in: to this address itself, or to a program on its own machine.

Anything else would let a link of a stranger send people, who trust this address, wherever it wants. Source: RFC 8252,
section 7.3 (loopback redirects); RFC 6749, section 10.15 (open redirectors).
"""

from __future__ import annotations

import re
from urllib.parse import urlencode, urlsplit, urlunsplit

from accounts.errors import Invalid
from accounts.protocol.sign_on import is_loopback

MAX_CHARS = 2048
_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:\d{1,5})?")
_PRINTABLE = re.compile(r"[!-~]*")
"""Printable ASCII: browsers drop tabs and line breaks within addresses, and read what is left."""
CHALLENGE = re.compile(r"[A-Za-z0-9_-]{43}")
"""An S256 code challenge: a SHA-256 in base64. Source: RFC 7636, section 4.2."""


def checked_base(base: str) -> str:
    """Return scheme and host under which people reach the gateways. Raises Invalid if they are none."""
    scheme, _, authority = base.rstrip("/").partition("://")
    if scheme not in ("http", "https") or not _AUTHORITY.fullmatch(authority):
        raise Invalid("The header `host` of this request names no host. Open the address in a browser.")
    return f"{scheme}://{authority}"


def checked_return(return_to: str, base: str, code_challenge: str) -> str:
    """Return where the browser goes in the end: a path, or an address on its own machine. Raises Invalid.

    `base`: the gateway's scheme and host."""
    if len(return_to) > MAX_CHARS or not _PRINTABLE.fullmatch(return_to) or "\\" in return_to:
        raise Invalid("`return_to` is no address.", param="return_to")
    parts = urlsplit(return_to)
    if not parts.scheme and not parts.netloc:
        return _checked_path(return_to) if return_to else ""
    if not _AUTHORITY.fullmatch(parts.netloc):
        raise Invalid("`return_to` is no address.", param="return_to")
    if f"{parts.scheme}://{parts.netloc}" == base:
        return _checked_path(return_to[len(base) :] or "/")
    if parts.scheme == "http" and is_loopback(parts.hostname):
        if not CHALLENGE.fullmatch(code_challenge):
            raise Invalid(
                "A program that waits at `return_to` must send `code_challenge`: the SHA-256 of its code verifier, in "
                "base64url (RFC 7636).",
                param="code_challenge",
            )
        return return_to
    raise Invalid(
        "`return_to` leads elsewhere. Give a path of this address, or an address of your own machine.",
        param="return_to",
    )


def _checked_path(path: str) -> str:
    """Return the path. Raises Invalid if a browser would take it for something else: `//x` is another host."""
    if not path.startswith("/") or path.startswith("//"):
        raise Invalid("`return_to` is a path that begins with one `/`, or an address.", param="return_to")
    return path


def is_program(return_to: str) -> bool:
    """Return whether a checked `return_to` is where a program on the browser's machine waits."""
    return bool(urlsplit(return_to).netloc)


def with_query(address: str, **more: str) -> str:
    """Return the address with more in its query; what is empty is left out."""
    parts = urlsplit(address)
    query = "&".join(filter(None, (parts.query, urlencode({name: value for name, value in more.items() if value}))))
    return urlunsplit(parts._replace(query=query))
