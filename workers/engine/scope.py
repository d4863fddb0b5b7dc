"""The scope of cached tokens: the trust boundary of all KV that is shared, kept or written to disk."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

SEED_BYTES = 32


@dataclass(frozen=True, slots=True)
class Scope:
    """The scope within which saved KV may be used again."""

    tenant: str | None
    """Team; None: tokens of a prompt that the catalog marks shareable."""
    salt: str = ""
    """The caller's `cache_salt`."""
    adapters: bytes = b""
    """Contents and scales of the adapters that the KV was computed with."""
    own: str = ""
    """Name of the one call whose cells these are, since its last shift; such KV never goes to disk."""

    @property
    def seed(self) -> bytes:
        return _digest(
            b"public" if self.tenant is None else b"tenant",
            (self.tenant or "").encode("utf-8", "surrogatepass"),
            self.salt.encode("utf-8", "surrogatepass"),
            self.adapters,
        )

    @property
    def public(self) -> Scope:
        """Return the scope of the shareable tokens of the same conversation."""
        return Scope(None, "", self.adapters)


def _digest(*parts: bytes) -> bytes:
    """Return a digest of the parts, each with its length, so that they can't run into each other."""
    whole = hashlib.blake2b(digest_size=SEED_BYTES, person=b"paddock cache")
    for part in parts:
        whole.update(len(part).to_bytes(8, "little"))
        whole.update(part)
    return whole.digest()
