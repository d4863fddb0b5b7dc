"""How saved blocks are called on disk: names that only holders of the secret can make or guess.

A block is named by what its KV was computed from: a chain of digests over the scope (team, salt, adapters) and all
tokens up to its end. The name on disk is an HMAC of that, so a folder's listing tells nothing about prompts or teams.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from workers.engine.scope import Scope

BLOCK_TOKENS = 64
DIGEST_BYTES = 32
FOLDER_HEX = 16
NAME_HEX = 40


class TokenArray(Protocol):
    """A one-dimensional `numpy.int32` array (this module does without numpy: `paddock cache` uses it)."""

    def __len__(self) -> int: ...
    def tobytes(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class BlockName:
    """One block of one conversation."""

    tenant: str | None
    digest: bytes
    start: int
    end: int


def chain(
    seed: bytes, tokens: TokenArray, block: int = BLOCK_TOKENS, *, public_seed: bytes = b"", num_public: int = 0
) -> list[bytes]:
    """A digest for the end of each full block: of the seed and all tokens before that.

    Blocks wholly within the first `num_public` tokens belong to `public_seed`. 64 tokens take about 1 us.
    """
    return list(_links(seed, tokens.tobytes(), block * 4, public_seed, num_public // block))


def block_names(tokens: TokenArray, scope: Scope, num_public: int = 0) -> list[BlockName]:
    """The names of a conversation's full blocks, in order. `tokens`: `numpy.int32`."""
    digests = chain(scope.seed, tokens, public_seed=scope.public.seed, num_public=num_public)
    num_open = num_public // BLOCK_TOKENS
    return [
        BlockName(None if k < num_open else scope.tenant, digest, k * BLOCK_TOKENS, (k + 1) * BLOCK_TOKENS)
        for k, digest in enumerate(digests)
    ]


class CacheKeys:
    """What is derived from the secret. Every use has a key of its own."""

    __slots__ = ("_folders", "_names", "seal")

    def __init__(self, secret: str) -> None:
        """Raises ValueError for an empty secret."""
        if not secret:
            raise ValueError("the cache's secret is empty")
        master = secret.encode()
        self._names = _derived(master, b"names of blocks")
        self._folders = _derived(master, b"folders of teams")
        self.seal = _derived(master, b"seals of files")

    def tenant_folder(self, tenant: str | None) -> str:
        """The folder of a team's files; of None: the folder of what all teams share."""
        text = b"public" if tenant is None else b"team " + tenant.encode("utf-8", "surrogatepass")
        return hmac.digest(self._folders, text, "sha256").hex()[:FOLDER_HEX]

    def file_name(self, fingerprint: bytes, digest: bytes) -> str:
        return hmac.digest(self._names, fingerprint + digest, "sha256").hex()[:NAME_HEX]


def version_folder(fingerprint: bytes) -> str:
    """The folder of all files of one model under one llama.cpp and one set of settings."""
    return fingerprint.hex()[:FOLDER_HEX]


def _links(seed: bytes, data: bytes, step: int, public_seed: bytes, num_open: int) -> Iterator[bytes]:
    view = memoryview(data)
    digest = public_seed if num_open else seed
    for number, at in enumerate(range(0, len(data) - step + 1, step)):
        if num_open and number == num_open:
            digest = hashlib.blake2b(digest, key=seed, digest_size=DIGEST_BYTES).digest()
        digest = hashlib.blake2b(view[at : at + step], key=digest, digest_size=DIGEST_BYTES).digest()
        yield digest


def _derived(master: bytes, label: bytes) -> bytes:
    return hmac.digest(master, b"paddock cache: " + label, "sha256")
