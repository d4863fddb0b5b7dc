"""The form of an API key: `pk-`, 32 bytes as 43 characters, and a checksum of 6, by which scanners know leaked keys."""

from __future__ import annotations

import base64
import hmac
import secrets
import string
import zlib

PREFIX = "pk-"
NUM_BYTES = 32
CHECKSUM_CHARS = 6
PATTERN = r"pk-[A-Za-z0-9_-]{43}[0-9A-Za-z]{6}"
"""Regular expression of every key, for scanners of leaks; `is_whole` tells false finds."""
_DIGITS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def new_key() -> str:
    """Return a new random key."""
    return _key(secrets.token_bytes(NUM_BYTES))


def derived_key(secret: str, *parts: str) -> str:
    """Return the key that a request has, however often it is sent: it is derived from the gateway secret."""
    told = b"paddock api key" + b"".join(b"\0" + part.encode() for part in parts)
    return _key(hmac.digest(secret.encode(), told, "sha256"))


def is_whole(key: str) -> bool:
    """Return whether the key has the checksum of its other characters."""
    body = key[:-CHECKSUM_CHARS]
    return key.startswith(PREFIX) and hmac.compare_digest(key[-CHECKSUM_CHARS:].encode(), _checksum(body).encode())


def _key(raw: bytes) -> str:
    body = PREFIX + base64.urlsafe_b64encode(raw).decode().rstrip("=")
    return body + _checksum(body)


def _checksum(body: str) -> str:
    """Return the CRC-32 in base 62."""
    number, digits = zlib.crc32(body.encode()), ""
    for _ in range(CHECKSUM_CHARS):
        number, digit = divmod(number, len(_DIGITS))
        digits = _DIGITS[digit] + digits
    return digits
