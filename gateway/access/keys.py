"""Authenticates a request: finds the holder of the API key in its headers, or in the cookie of whoever signed in.

A browser sends cookies with requests that other pages make it send. So they count only where such a request does no
harm: for reading what the console shows, and for what a page of this very origin asks. Source: RFC 6265bis; W3C Fetch
Metadata Request Headers; WHATWG Fetch, "Origin header".
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import time

from starlette.types import Scope

from accounts.protocol.records import AccessRecord
from accounts.protocol.sign_on import PLAIN_COOKIE, SECURE_COOKIE
from gateway.access.directory import Directory
from gateway.access.key_index import KeyIndex
from gateway.access.proxies import Network, is_in, networks_of
from gateway.call import Principal
from gateway.errors import AuthenticationFailed, KeyExpired, KeyMissing, NetworkNotAllowed

MAX_HOLDERS = 32_768
"""Maximum number of holders that are kept; of further keys the record is decoded again at each use, in about 10 us."""

AUTHORIZATION = b"authorization"
HEADERS = (AUTHORIZATION, b"x-api-key", b"api-key", b"x-goog-api-key")
"""Headers that may have the key, in order of precedence. The first has it behind `Bearer`."""
_HEADERS = frozenset(HEADERS)
SCHEME = b"bearer"
_SECURE, _PLAIN = SECURE_COOKIE.encode(), PLAIN_COOKIE.encode()
CONSOLE = "/admin/"
"""Beginning of the paths that any page may link to: GET changes nothing there."""
OF_CONSOLE = b"x-paddock-console"
"""The header of what the console reads: without TLS, browsers do not say which page sent a GET. A page of another
origin can't send it along with cookies: its browser would ask first, and is not told that it may."""


@dataclass(frozen=True, slots=True)
class Holder:
    """A key's principal, and the conditions on which it may call."""

    principal: Principal
    is_conditional: bool = False
    """Whether there is a condition at all."""
    valid_until: float = math.inf
    """Unix time."""
    is_replaced: bool = False
    """Whether the key is the one before a rotation, valid only for a while."""
    networks: tuple[Network, ...] = ()
    """Networks from which the key may be used; empty: all."""

    def check(self, address_of: Callable[[], str], now: float) -> None:
        """Raise KeyExpired or NetworkNotAllowed if a condition is not met. `now`: unix time."""
        if now > self.valid_until:
            raise KeyExpired(self._expired())
        if self.networks and not is_in(address := address_of(), self.networks):
            raise NetworkNotAllowed(
                f"This API key may not be used from {address or 'a Unix socket'}. Call from a network that it is for, "
                "or have yours added to the key's `networks`."
            )

    def _expired(self) -> str:
        if self.is_replaced:
            return f"This API key was replaced, and was valid until {_shown(self.valid_until)}. Use the new one."
        return f"This API key expired on {_shown(self.valid_until)}. Ask for a new one."


def make_holder(record: AccessRecord, sha256: str, principal: Principal) -> Holder:
    """Return the holder of a key. `sha256`: the key's hash, that of the record or the one before a rotation."""
    valid_until = math.inf if record.expires_at is None else record.expires_at
    is_replaced = sha256 != record.sha256 and record.previous_until < valid_until
    if is_replaced:
        valid_until = record.previous_until
    is_conditional = bool(record.networks) or valid_until < math.inf
    return Holder(principal, is_conditional, valid_until, is_replaced, networks_of(record.networks))


def _shown(at: float) -> str:
    try:
        return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (OverflowError, ValueError, OSError):
        return f"{at:g} (unix time)"


class Keys:
    """Holds the valid API keys: those of the settings, and below them those in Redis, which `KeyStore` reads."""

    def __init__(
        self,
        records: Iterable[AccessRecord] = (),
        verified: Callable[[bytes], None] | None = None,
        directory: Directory | None = None,
    ) -> None:
        """`records`: see `replace`. `verified` is called with the key of each request whose key may be used.
        `directory`: what is known of the keys' teams and users; None: nothing."""
        self._verified = verified
        self.directory = directory or Directory()
        self._fixed: dict[bytes, AccessRecord] = {}
        self._index = KeyIndex()
        self._holders: dict[bytes, Holder] = {}
        """SHA-256 of a key -> its holder, once a request had the key."""
        self._version = self.directory.version
        """The directory's version with which the holders were made."""
        self.replace(records)

    @property
    def index(self) -> KeyIndex:
        """The keys in Redis, to be read only: `put` and `remove` change them."""
        return self._index

    def __len__(self) -> int:
        return len(self._fixed) + self._index.num_keys

    def replace(self, records: Iterable[AccessRecord]) -> None:
        """Replace the keys that are valid whatever Redis has. Of several with the same key, the last one counts."""
        self._fixed = {bytes.fromhex(record.sha256): record for record in records}
        self._holders.clear()

    def put(self, name: bytes, value: bytes, record: AccessRecord | None) -> None:
        """Take what Redis has under a name. `record`: the record in `value`; None: it is not valid."""
        self._forget(self._index.put(name, value, record))

    def remove(self, name: bytes) -> None:
        """Forget a name, which Redis does not have any more."""
        self._forget(self._index.remove(name))

    def authenticate(
        self, headers: Iterable[tuple[bytes, bytes]], address_of: Callable[[], str] = lambda: ""
    ) -> Principal:
        """Return the principal of the key in the headers. Raises as `key_in` and `holder_of` do."""
        return self.holder_of(key_in(headers), address_of)

    def holder_of(self, key: bytes | None, address_of: Callable[[], str] = lambda: "") -> Principal:
        """Return the principal of a key; None: the request has none. `address_of` returns the caller's address.

        Raises AuthenticationFailed (KeyMissing, KeyExpired), NetworkNotAllowed."""
        if key is None:
            raise KeyMissing("This request has no API key. Send `Authorization: Bearer <key>` or `x-api-key: <key>`.")
        holder = self._find(key)
        if holder is None:
            raise AuthenticationFailed(
                "This API key is not known here. Check it for missing characters; the first key lies in the file "
                "`first-key` in the gateway's state folder."
            )
        if holder.is_conditional:
            holder.check(address_of, time())
        if self._verified is not None:
            self._verified(key)
        return holder.principal

    def known(self, key: bytes) -> Principal | None:
        """Return the principal of a key, valid now or not; None: the key is not known."""
        holder = self._find(key)
        return None if holder is None else holder.principal

    def _find(self, key: bytes) -> Holder | None:
        if self._version != self.directory.version:
            self._holders.clear()
            self._version = self.directory.version
        # Keys are looked up by their hash: what the look-up's timing reveals about a hash does not help to find a key.
        asked = hashlib.sha256(key).digest()
        return self._holders.get(asked) or self._made(asked)

    def _made(self, sha256: bytes) -> Holder | None:
        fixed = self._fixed.get(sha256)
        record = fixed or self._index.find(sha256)
        if record is None:
            return None
        principal = self.directory.principal(record)
        if fixed is not None:
            principal = replace(principal, of_settings=True)
        if len(self._holders) >= MAX_HOLDERS:
            self._holders.clear()
        holder = self._holders[sha256] = make_holder(record, sha256.hex(), principal)
        return holder

    def _forget(self, hashes: Iterable[bytes]) -> None:
        for sha256 in hashes:
            self._holders.pop(sha256, None)


def key_in(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the API key in the headers (HEADERS); None: there is none.

    Raises KeyMissing if two headers of one name differ: what stands between caller and gateway may have looked at the
    other one."""
    found: dict[bytes, bytes] | None = None
    for name, value in headers:
        if name in _HEADERS:
            if found is None:
                found = {name: value}
            elif found.setdefault(name, value) != value:
                raise KeyMissing(f"This request has several headers `{name.decode()}`. Send one.")
    if found is None:
        return None
    scheme, _, key = found.get(AUTHORIZATION, b"").strip().partition(b" ")
    if scheme.lower() == SCHEME and (key := key.strip()):
        return key
    return next((key for name in HEADERS[1:] if (key := found.get(name, b"").strip())), None)


def credential_of(scope: Scope) -> bytes | None:
    """Return the API key or token of a request, or the session key in its cookie; None: it has none.

    Raises KeyMissing."""
    key = key_in(scope["headers"])
    return key if key is not None else session_key(scope)


def session_key(scope: Scope) -> bytes | None:
    """Return the session key in a request's cookie; None: it has none. Raises KeyMissing if the request may come from
    a page of another origin."""
    headers = dict[bytes, bytes](scope["headers"])
    key = _cookie(headers.get(b"cookie", b""))
    if not key:
        return None
    if scope["method"] == "GET" and (scope["path"].startswith(CONSOLE) or OF_CONSOLE in headers):
        return key
    if not _is_of_this_origin(scope, headers):
        raise KeyMissing(
            "The cookie of your sign-in counts only for requests from this address's own pages. Send an API key, as "
            "`Authorization: Bearer <key>`."
        )
    return key


def is_of_other_origin(scope: Scope) -> bool:
    """Return whether a browser says that a page of another origin sent the request. Programs say nothing of that."""
    headers = dict[bytes, bytes](scope["headers"])
    return not headers.keys().isdisjoint((b"sec-fetch-site", b"origin")) and not _is_of_this_origin(scope, headers)


def _is_of_this_origin(scope: Scope, headers: dict[bytes, bytes]) -> bool:
    """Return whether the browser says that a page of this origin sent the request."""
    fetched_by = headers.get(b"sec-fetch-site")
    if fetched_by is not None:
        return fetched_by == b"same-origin"
    host = headers.get(b"host", b"")
    # TLS may end before this gateway, which then takes its own scheme for http.
    origins = [b"https://" + host, *([] if scope["scheme"] in ("https", "wss") else [b"http://" + host])]
    return bool(host) and headers.get(b"origin") in origins


def _cookie(header: bytes) -> bytes:
    """Return the session cookie in a header `cookie`; empty: there is none."""
    if _PLAIN not in header:
        return b""
    cookies = {name: value for name, _, value in (part.strip().partition(b"=") for part in header.split(b";"))}
    return cookies.get(_SECURE) or cookies.get(_PLAIN, b"")
