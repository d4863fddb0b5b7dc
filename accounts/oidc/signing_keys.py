"""Keeps the public keys with which a provider signs tokens. They are fetched in the background, never twice at once.

A call whose token names an unknown key has them fetched anew, at most once per REFETCH_S, and waits for that. While the
provider does not answer, the last keys stay valid. Source: RFC 7517, RFC 7518.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping

import msgspec
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from jwt import PyJWK
from jwt.exceptions import PyJWTError

from accounts.oidc.discovery import Discovery
from accounts.oidc.provider_http import ProviderAway, ProviderHttp
from accounts.protocol.sign_on import Provider

log = logging.getLogger(__name__)

REFRESH_S = 300.0
"""Seconds after which the keys are fetched anew in any case, so that keys that were withdrawn are gone by then."""
REFETCH_S = 10.0
"""Minimum seconds between two fetches."""
WAIT_S = 3.0
"""Maximum seconds that a call waits for keys."""
MAX_WAITING = 64
"""Maximum number of calls that wait for keys; others are told at once that their key is not known."""
MAX_KEYS = 64
LEAST_RSA_BITS = 2048

KeyName = tuple[str, str]
"""Id of a key (`kid`), and an algorithm that it is used with."""

FAMILIES: Mapping[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "EC P-256": ("ES256",),
    "EC P-384": ("ES384",),
    "EC P-521": ("ES512",),
    "OKP Ed25519": ("EdDSA",),
}
"""Kind of a key -> algorithms that use such keys. Keys of other kinds, secret ones (`oct`) above all, are left out."""


class _Key(msgspec.Struct, frozen=True):
    """The part of a JSON Web Key that says what it is for."""

    kty: str = ""
    crv: str = ""
    kid: str = ""
    alg: str = ""
    use: str = ""


class _KeySet(msgspec.Struct, frozen=True):
    keys: tuple[msgspec.Raw, ...]


_decode_set = msgspec.json.Decoder(_KeySet).decode
_decode_key = msgspec.json.Decoder(_Key).decode


def read_key_set(document: bytes, allowed: Collection[str]) -> dict[KeyName, PyJWK]:
    """Return the keys of a JSON Web Key Set by their name, for the allowed algorithms. Others are left out.

    Raises ValueError if none is left, or the document is no key set."""
    found: dict[KeyName, PyJWK] = {}
    for raw in _decode_set(document).keys[:MAX_KEYS]:
        with contextlib.suppress(msgspec.DecodeError, PyJWTError, ValueError):
            key = _decode_key(raw)
            algorithms = FAMILIES.get(f"{key.kty} {key.crv}".strip(), ())
            if key.use not in ("", "sig") or (key.alg and key.alg not in algorithms):
                continue
            for algorithm in algorithms:
                if algorithm in allowed and key.alg in ("", algorithm):
                    usable = PyJWK(msgspec.json.decode(raw), algorithm)
                    if not _is_weak(usable):
                        found.setdefault((key.kid, algorithm), usable)
    if not found:
        raise ValueError(f"it has no key for {', '.join(allowed)}")
    return found


def _is_weak(key: PyJWK) -> bool:
    return isinstance(key.key, RSAPublicKey) and key.key.key_size < LEAST_RSA_BITS


class SigningKeys:
    """The keys of one provider. `run` fetches them; `find` only looks."""

    def __init__(
        self, provider: Provider, discovery: Discovery, http: ProviderHttp, refetch_s: float = REFETCH_S
    ) -> None:
        self.version = 0
        """Grows when the keys change: what was verified before must be verified anew."""
        self._provider = provider
        self._discovery = discovery
        self._http = http
        self._refetch_s = refetch_s
        self._keys: dict[KeyName, PyJWK] = {}
        self._document = b""
        self._is_fetching = False
        self._may_fetch_at = 0.0
        """time.monotonic() from which the keys may be fetched again."""
        self._wanted = asyncio.Event()
        self._fetched = asyncio.Event()
        """Set, and replaced, at the end of each fetch."""
        self._num_waiting = 0
        self._trouble = ""
        """How the last fetch failed; empty: it did not."""

    @property
    def are_known(self) -> bool:
        """Whether the keys could be fetched at least once."""
        return bool(self._keys)

    def find(self, key_id: str, algorithm: str) -> PyJWK | None:
        """Return the key. A token that names none gets the provider's only key for the algorithm."""
        found = self._keys.get((key_id, algorithm))
        if found is not None or key_id:
            return found
        fitting = [key for (_, used_with), key in self._keys.items() if used_with == algorithm]
        return fitting[0] if len(fitting) == 1 else None

    async def look_for(self, key_id: str, algorithm: str) -> None:
        """Have the keys fetched if this one is not known and they were not fetched just now. Wait until they are."""
        if self.find(key_id, algorithm) is not None or self._num_waiting >= MAX_WAITING:
            return
        if not self._is_fetching and time.monotonic() < self._may_fetch_at:
            return
        self._wanted.set()
        self._num_waiting += 1
        try:
            async with asyncio.timeout(WAIT_S):
                await self._fetched.wait()
        except TimeoutError:
            pass  # the caller finds no key, and says so
        finally:
            self._num_waiting -= 1

    async def run(self) -> None:
        """Fetch the keys at once, and then whenever they are old or wanted, until cancelled."""
        while True:
            self._wanted.clear()
            self._is_fetching = True
            try:
                await self._fetch()
            finally:
                self._is_fetching = False
                self._may_fetch_at = time.monotonic() + self._refetch_s
                self._fetched.set()
                self._fetched = asyncio.Event()
            await asyncio.sleep(self._refetch_s)
            if self._trouble:
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self._wanted.wait()

    async def _fetch(self) -> None:
        try:
            endpoints = await self._discovery.endpoints()
            document = await self._http.get(endpoints.jwks_uri)
            if document != self._document:
                self._keys = read_key_set(document, self._provider.algorithms)
                self._document, self.version = document, self.version + 1
        except (ProviderAway, ValueError) as error:  # msgspec.DecodeError is a ValueError
            self._discovery.doubt()
            self._tell(str(error))
        else:
            self._tell("")

    def _tell(self, trouble: str) -> None:
        """Log that the keys can't be fetched, or can again; each once."""
        if trouble and not self._trouble:
            kept = "the last ones stay valid" if self._keys else "its tokens are refused until then"
            log.warning("the keys of %s can't be fetched: %s; %s", self._provider.issuer, trouble, kept)
        elif self._trouble and not trouble:
            log.info("the keys of %s are known again", self._provider.issuer)
        self._trouble = trouble
