"""The caller of a request that a gateway forwards to the accounts service, sealed with the gateway secret."""

from __future__ import annotations

import base64
import binascii
import hmac

import msgspec

from accounts.protocol.records import Role

HEADER = "x-paddock-caller"
LIFE_S = 60.0
"""Seconds for which a sealed caller is valid: long enough for clocks that differ, short enough to be useless later."""


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """Whoever sent a request to a gateway."""

    key: str = ""
    """Name of the API key; empty: the request has none (a route that needs no key, or a token of single sign-on)."""
    of_settings: bool = False
    """Whether the key is one of the gateway's settings: a key of its name in the database is another one."""
    user: str = ""
    team: str = ""
    organisation: str = ""
    role: Role | None = None
    """None: the caller is not known."""
    address: str = ""
    """The caller's address, as the gateway saw it."""
    request_id: str = ""
    url: str = ""
    """Scheme and host under which the caller reached the gateway, such as `https://llm.example.com`."""
    at: float = 0.0
    """Unix time at the gateway."""


class CallerUnknown(ValueError):
    """The sealed caller is missing, forged or too old."""


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Caller).decode


def seal_caller(caller: Caller, secret: str) -> str:
    """Return the value of the header HEADER."""
    encoded = _encode(caller)
    return f"{_seal(encoded, secret)}.{base64.urlsafe_b64encode(encoded).decode()}"


def open_caller(value: str, secret: str, now: float) -> Caller:
    """Return the caller in a header's value. `now`: unix time. Raises CallerUnknown."""
    seal, _, text = value.partition(".")
    try:
        encoded = base64.urlsafe_b64decode(text)
    except (binascii.Error, ValueError):
        raise CallerUnknown("the header is no sealed caller") from None
    if not hmac.compare_digest(seal.encode(), _seal(encoded, secret).encode()):
        raise CallerUnknown("the seal is not made with this gateway secret; give gateways and accounts the same one")
    caller = _decode(encoded)
    if abs(now - caller.at) > LIFE_S:
        raise CallerUnknown(f"the caller was sealed {now - caller.at:.0f} s ago; at most {LIFE_S:g} s are allowed")
    return caller


def _seal(encoded: bytes, secret: str) -> str:
    return hmac.digest(secret.encode(), b"paddock caller\0" + encoded, "sha256").hex()
