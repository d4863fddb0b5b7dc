"""Authenticates a request: finds the principal of the API key in its headers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable

from gateway.access.records import AccessRecord
from gateway.call import Principal
from gateway.errors import AuthenticationFailed


class Keys:
    """Every key that is valid now; replaced as a whole when Redis tells of others."""

    def __init__(self, records: Iterable[AccessRecord] = (), verified: Callable[[bytes], None] | None = None) -> None:
        """`verified` is told each key that a request has shown and that is valid."""
        self._verified = verified
        self._known: tuple[tuple[bytes, Principal], ...] = ()
        self.replace(records)

    def __len__(self) -> int:
        return len(self._known)

    def replace(self, records: Iterable[AccessRecord]) -> None:
        self._known = tuple((record.sha256.encode(), record.principal()) for record in records)

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """Return the principal of the key in `Authorization: Bearer`, else `x-api-key`. Raises AuthenticationFailed."""
        key = _key_in(headers)
        if key is None:
            raise AuthenticationFailed(
                "This request has no API key. Send `Authorization: Bearer <key>` or `x-api-key: <key>`."
            )
        found: Principal | None = None
        asked = hashlib.sha256(key).hexdigest().encode()
        # All keys are compared, whichever matches: the time taken tells nothing.
        for known, principal in self._known:
            if hmac.compare_digest(known, asked):
                found = principal
        if found is None:
            raise AuthenticationFailed(
                "This API key is not known here. Check it for missing characters; the first key lies in the file "
                "`first-key` in the gateway's state folder."
            )
        if self._verified is not None:
            self._verified(key)
        return found


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    other: bytes | None = None
    for name, value in headers:
        if name == b"authorization":
            scheme, _, key = value.strip().partition(b" ")
            if scheme.lower() == b"bearer" and key.strip():
                return key.strip()
        elif name == b"x-api-key" and value.strip():
            other = value.strip()
    return other
