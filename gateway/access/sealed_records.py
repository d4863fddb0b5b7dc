"""Access records as they stand in Redis: each with the seal of the gateway secret, so that only its holders make keys.

    <64 hexadecimal digits> <the record, JSON>

The seal is of the JSON as it is written, so that a record outlives versions that add fields.
"""

from __future__ import annotations

import hmac

from gateway.access.records import AccessRecord, decode_record, encode_record


class NotSealed(ValueError):
    """A record that no holder of the gateway secret wrote."""

    def __init__(self) -> None:
        super().__init__("no seal of PADDOCK_GATEWAY_SECRET, the same on all gateways; write it with `paddock key add`")


def seal_record(record: AccessRecord, secret: str) -> bytes:
    """Return the value of a field of `keys.ACCESS_KEYS`."""
    encoded = encode_record(record)
    return _seal(encoded, secret) + b" " + encoded


def open_record(value: bytes | str, secret: str) -> AccessRecord:
    """Return the record in such a value. Raises ValueError: NotSealed, or where the value is no record."""
    raw = value if isinstance(value, bytes) else value.encode()  # as the client's types have it
    seal, _, encoded = raw.partition(b" ")
    if not hmac.compare_digest(seal, _seal(encoded, secret)):
        raise NotSealed
    return decode_record(encoded)


def is_bare(value: bytes | str) -> bool:
    """Return whether the value is a record without any seal, as versions before the seal wrote them."""
    return value.lstrip()[:1] in (b"{", "{")


def _seal(encoded: bytes, secret: str) -> bytes:
    return hmac.digest(secret.encode(), b"paddock access record\0" + encoded, "sha256").hex().encode()
