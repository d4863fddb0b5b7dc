"""Whose request a connection brings, known from its bytes before they are parsed: one whose key was good lately."""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from time import monotonic

MAX_CALLERS = 1024
LATELY_S = 600.0
"""A key that has not been verified for so long is anybody's again."""
LOOKED_AT_BYTES = 4 << 10
"""Of what has come; a caller whose key stands behind more of it waits with those who show none."""

KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]|x-api-key:)[ \t]*([^\r\n]+)", re.IGNORECASE)


class KnownCallers:
    """Digests of keys that this process has verified lately. They are made with a secret of the process, and looked up
    in a dict: neither keys nor what could be compared with them are kept.
    """

    def __init__(self, most: int = MAX_CALLERS) -> None:
        self._most = most
        self._secret = os.urandom(32)
        self._verified_at: OrderedDict[bytes, float] = OrderedDict()

    def verified(self, key: bytes) -> None:
        """The key is valid now."""
        digest = self._digest(key)
        self._verified_at[digest] = monotonic()
        self._verified_at.move_to_end(digest)
        if len(self._verified_at) > self._most:
            self._verified_at.popitem(last=False)

    def caller_of(self, request: bytes) -> str:
        """Return a name for the caller of a request that begins so; empty: none that is known."""
        found = KEY.search(request, 0, LOOKED_AT_BYTES)
        if found is None:
            return ""
        digest = self._digest(found[1].rstrip())
        verified_at = self._verified_at.get(digest)
        return "" if verified_at is None or monotonic() - verified_at > LATELY_S else digest.hex()

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()
