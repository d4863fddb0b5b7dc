"""Recognises callers by a key that was valid lately, in a request's bytes before they are parsed."""

from __future__ import annotations

import hashlib
import os
import re
from collections import OrderedDict
from time import monotonic

MAX_CALLERS = 1024
LATELY_S = 600.0
"""Seconds after which a key that has not been verified again is unknown."""
LOOKED_AT_BYTES = 4 << 10
"""Bytes of a request that are searched for a key; a caller whose key stands behind them counts as unknown."""

KEY = re.compile(rb"\r\n(?:authorization:[ \t]*bearer[ \t]|x-api-key:)[ \t]*([^\r\n]+)", re.IGNORECASE)


class KnownCallers:
    """Digests of keys that this process has verified lately. They are made with a secret of the process and looked up
    in a dict, so no keys are kept, nor anything that could be compared with them.
    """

    def __init__(self, most: int = MAX_CALLERS) -> None:
        self._most = most
        self._secret = os.urandom(32)
        self._verified_at: OrderedDict[bytes, float] = OrderedDict()

    def verified(self, key: bytes) -> None:
        """Note that the key is valid now."""
        digest = self._digest(key)
        self._verified_at[digest] = monotonic()
        self._verified_at.move_to_end(digest)
        if len(self._verified_at) > self._most:
            self._verified_at.popitem(last=False)

    def caller_of(self, request: bytes) -> str:
        """Return a name for the caller of a request that begins with these bytes; empty for an unknown one."""
        found = KEY.search(request, 0, LOOKED_AT_BYTES)
        if found is None:
            return ""
        digest = self._digest(found[1].rstrip())
        verified_at = self._verified_at.get(digest)
        return "" if verified_at is None or monotonic() - verified_at > LATELY_S else digest.hex()

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._secret).digest()
