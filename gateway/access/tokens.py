"""Authenticates requests that have a token (JWT) of an identity provider in place of an API key.

A token is verified once, and remembered until it expires, the provider's keys change, or others push it out. Its holder
is a user of the team and role that the rules of the setting `oidc` give.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace

from accounts.oidc.people import Person, granted, person_of
from accounts.oidc.providers import KnownProvider, Providers
from accounts.oidc.verification import TokenRefused, is_token, valid_until, verify
from accounts.protocol.records import MAX_NAME_CHARS, PERSON_PREFIX, AccessRecord
from accounts.protocol.sign_on import SignOn
from gateway.access.directory import Directory
from gateway.back_pressure import provider_unavailable
from gateway.call import Principal
from gateway.errors import AuthenticationFailed, PermissionDenied, TokenNotAccepted

MAX_REMEMBERED = 10_000
"""Maximum number of verified tokens that are remembered; the one that was used longest ago is forgotten first."""


@dataclass(slots=True)
class _Verified:
    """A verified token."""

    provider: KnownProvider
    person: Person
    sha256: str
    valid_until: float
    """Unix time."""
    keys_version: int
    """Version of the provider's keys with which it was verified."""
    principal: Principal | None = None
    directory_version: int = -1
    """The directory's version with which the principal was made."""


class Tokens:
    """Finds the principal of a token."""

    def __init__(
        self, providers: Providers, directory: Directory, verified: Callable[[bytes], None] | None = None
    ) -> None:
        """`verified` is called with each token that is accepted."""
        self._accepted = verified
        self.providers = providers
        self._directory = directory
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()
        """SHA-256 of a token -> what is known of it, the one used last at the end."""

    async def run(self) -> None:
        """Keep the providers' keys fresh, until cancelled."""
        await self.providers.run()

    def takes(self, key: bytes) -> bool:
        """Return whether what a request has in place of an API key is to be read as a token."""
        return bool(self.providers.all) and is_token(key)

    async def prepare(self, token: bytes) -> None:
        """Wait until the signing key of a token that is not verified yet is fetched, if it is not known."""
        if self.takes(token) and hashlib.sha256(token).digest() not in self._verified:
            with contextlib.suppress(TokenRefused):  # `authenticate` says why
                await self.providers.look_for_key(token)

    def authenticate(self, token: bytes) -> Principal:
        """Return the user whose token it is.

        Raises AuthenticationFailed (TokenNotAccepted), PermissionDenied, ProviderUnavailable."""
        asked = hashlib.sha256(token)
        known = self._verified.get(asked.digest())
        if known is None or not self._still_holds(known):
            self._verified.pop(asked.digest(), None)
            known = self._verify(token, asked.hexdigest())
            self._verified[asked.digest()] = known
            if len(self._verified) > MAX_REMEMBERED:
                self._verified.popitem(last=False)
        else:
            self._verified.move_to_end(asked.digest())
        if known.principal is None or known.directory_version != self._directory.version:
            known.principal, known.directory_version = self._principal(known), self._directory.version
        if self._accepted is not None:
            self._accepted(token)
        return known.principal

    def _still_holds(self, known: _Verified) -> bool:
        return time.time() < known.valid_until and known.keys_version == known.provider.keys.version

    def _verify(self, token: bytes, sha256: str) -> _Verified:
        try:
            provider, told = self.providers.of_token(token)
            key = provider.key_of(told)
            if key is None:
                if not provider.keys.are_known:
                    raise provider_unavailable(provider.settings.shown_name)
                raise TokenRefused(
                    "This token is signed with a key that its provider does not list. Ask for a new token."
                )
            claims = verify(token, provider.settings, key, provider.settings.accepted_audiences)
            person = person_of(claims, provider.settings, self.providers.sign_on)
        except TokenRefused as error:
            raise (TokenNotAccepted if error.is_signed else AuthenticationFailed)(str(error)) from None
        return _Verified(provider, person, sha256, valid_until(claims, provider.settings), provider.keys.version)

    def _principal(self, known: _Verified) -> Principal:
        person = known.person
        user = self._directory.user(person.user)
        if user is None and not known.provider.settings.create_users:
            raise PermissionDenied(f"The user {person.user} is not known here. Ask an admin to add them.")
        grant = granted(person, user)
        if grant is None:
            raise PermissionDenied(
                f"No team is given to {person.user}. Ask the operator for a rule in `oidc` that holds for you."
            )
        record = AccessRecord(
            name=_key_id(person.user), sha256=known.sha256, team=grant.team, role=grant.role, user=person.user
        )
        return replace(self._directory.principal(record), by_token=True)


def tokens_of(sign_on: SignOn, directory: Directory, verified: Callable[[bytes], None]) -> Tokens:
    """Return what authenticates the tokens of the providers of a setting `oidc`."""
    return Tokens(Providers(sign_on), directory, verified)


def _key_id(user: str) -> str:
    """Return the key id of a user's calls; a long name is cut, and told apart by a hash."""
    name = PERSON_PREFIX + user
    if len(name) <= MAX_NAME_CHARS:
        return name
    return f"{name[: MAX_NAME_CHARS - 13]}~{hashlib.sha256(user.encode()).hexdigest()[:12]}"
