"""Authenticates a request: finds the principal of the API key in its headers."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from accounts.protocol.records import AccessRecord
from gateway.access.directory import Directory
from gateway.call import Principal
from gateway.errors import AuthenticationFailed


@dataclass(slots=True)
class _Known:
    """A valid key: its record, and its principal once a request had the key."""

    record: AccessRecord
    principal: Principal | None = None
    version: int = -1
    """The directory's version with which the principal was made."""


class Keys:
    """Holds the valid API keys. `replace` exchanges all of them at once when the keys in Redis change."""

    def __init__(
        self,
        records: Iterable[AccessRecord] = (),
        verified: Callable[[bytes], None] | None = None,
        directory: Directory | None = None,
    ) -> None:
        """`verified` is called with the key of each request whose key is valid. `directory`: what is known of the keys'
        teams and users; None: nothing."""
        self._verified = verified
        self.directory = directory or Directory()
        self._known: dict[bytes, _Known] = {}
        """SHA-256 of a key -> what is known of it."""
        self.replace(records)

    def __len__(self) -> int:
        return len(self._known)

    def replace(self, records: Iterable[AccessRecord]) -> None:
        before, known = self._known, dict[bytes, _Known]()
        for record in records:
            digest = bytes.fromhex(record.sha256)
            there = before.get(digest)
            known[digest] = there if there is not None and there.record is record else _Known(record)
        self._known = known

    def authenticate(self, headers: Iterable[tuple[bytes, bytes]]) -> Principal:
        """Return the principal of the key in `Authorization: Bearer` or `x-api-key`. Raises AuthenticationFailed."""
        key = _key_in(headers)
        if key is None:
            raise AuthenticationFailed(
                "This request has no API key. Send `Authorization: Bearer <key>` or `x-api-key: <key>`."
            )
        # Keys are looked up by their hash: what the look-up's timing reveals about a hash does not help to find a key.
        asked = hashlib.sha256(key)
        found = self._known.get(asked.digest())
        if found is None or not hmac.compare_digest(found.record.sha256, asked.hexdigest()):
            raise AuthenticationFailed(
                "This API key is not known here. Check it for missing characters; the first key lies in the file "
                "`first-key` in the gateway's state folder."
            )
        if self._verified is not None:
            self._verified(key)
        return self._principal(found)

    def _principal(self, known: _Known) -> Principal:
        if known.principal is None or known.version != self.directory.version:
            known.principal, known.version = self.directory.principal(known.record), self.directory.version
        return known.principal


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
