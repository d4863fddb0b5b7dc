"""The keys of the disk tier, derived from its secret: names that only holders of the secret can make or guess.

A file's name is an HMAC of what its KV was computed from (`workers.engine.cache.names`), so a folder's listing tells
nothing about prompts or teams. The name of a whole state also carries, masked, the name of its whole blocks (the stem),
so that one look per block of a prompt tells where a closer look is worth it.
"""

from __future__ import annotations

import hmac

FOLDER_HEX = 16
NAME_HEX = 40
STEM_HEX = 16
"""Further hex digits in the names of whole states."""


class CacheKeys:
    """The keys that are derived from the secret, one for each use."""

    __slots__ = ("_folders", "_masks", "_names", "_stems", "seal")

    def __init__(self, secret: str) -> None:
        """Derive the keys. Raises ValueError for an empty secret."""
        if not secret:
            raise ValueError("the cache's secret is empty")
        master = secret.encode()
        self._names = _derived(master, b"names of blocks")
        self._stems = _derived(master, b"stems of states")
        self._masks = _derived(master, b"masks of stems")
        self._folders = _derived(master, b"folders of teams")
        self.seal = _derived(master, b"seals of files")

    def tenant_folder(self, tenant: str | None) -> str:
        """Return the name of the folder of a team's files; for None, of the files that all teams share."""
        text = b"public" if tenant is None else b"team " + tenant.encode("utf-8", "surrogatepass")
        return hmac.digest(self._folders, text, "sha256").hex()[:FOLDER_HEX]

    def file_name(self, fingerprint: bytes, digest: bytes, stem: bytes = b"") -> str:
        """Return the name of a block's file, or of a whole state's, which has a `stem`."""
        name = hmac.digest(self._names, fingerprint + digest, "sha256").hex()[:NAME_HEX]
        return name + self._masked(name, self.stem_mark(fingerprint, stem)) if stem else name

    def stem_mark(self, fingerprint: bytes, stem: bytes) -> str:
        """Return the mark of a stem, which `mark_of` finds in the names of all states with this stem."""
        return hmac.digest(self._stems, fingerprint + stem, "sha256").hex()[:STEM_HEX]

    def mark_of(self, name: str) -> str:
        """Return the mark in a whole state's file name. Without the key, names of one mark have nothing in common."""
        return self._masked(name[:NAME_HEX], name[NAME_HEX:])

    def _masked(self, name: str, mark: str) -> str:
        mask = hmac.digest(self._masks, name.encode(), "sha256").hex()[:STEM_HEX]
        return f"{int(mark, 16) ^ int(mask, 16):0{STEM_HEX}x}"


def version_folder(fingerprint: bytes) -> str:
    """Return the name of the folder for all files of one model, one llama.cpp and one set of settings."""
    return fingerprint.hex()[:FOLDER_HEX]


def _derived(master: bytes, label: bytes) -> bytes:
    return hmac.digest(master, b"paddock cache: " + label, "sha256")
