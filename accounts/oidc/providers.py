"""All identity providers of the setting `oidc`, with their endpoints and keys, as one part of a process."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from jwt import PyJWK

from accounts.oidc.discovery import Discovery
from accounts.oidc.provider_http import ProviderHttp
from accounts.oidc.signing_keys import REFETCH_S, SigningKeys
from accounts.oidc.verification import TokenRefused, Told, read_told
from accounts.protocol.sign_on import Provider, SignOn

UNKNOWN_ISSUER = "This token is from an issuer that is not known here. Compare it with `issuer` in the setting `oidc`."


@dataclass(frozen=True, slots=True)
class KnownProvider:
    """One provider, and what is fetched from it."""

    settings: Provider
    discovery: Discovery
    keys: SigningKeys

    def key_of(self, told: Told) -> PyJWK | None:
        """Return the key that a token names; None: it is not known. Raises TokenRefused."""
        if told.algorithm not in self.settings.algorithms:
            raise TokenRefused("This token is signed with an algorithm that is not accepted.")
        return self.keys.find(told.key_id, told.algorithm)


class Providers:
    """The providers. Their keys are fetched while `run` runs."""

    def __init__(self, sign_on: SignOn, refetch_s: float = REFETCH_S) -> None:
        """`refetch_s`: minimum seconds between two fetches of a provider's keys."""
        self.sign_on = sign_on
        self.http = ProviderHttp()
        self.all = tuple(self._known(provider, refetch_s) for provider in sign_on.providers)
        self._by_issuer = {each.settings.issuer: each for each in self.all}

    def of_token(self, token: bytes) -> tuple[KnownProvider, Told]:
        """Return the provider that a token says it is from, and what else it says. Raises TokenRefused."""
        told = read_told(token)
        found = self._by_issuer.get(told.issuer)
        if found is None:
            raise TokenRefused(UNKNOWN_ISSUER)
        return found, told

    async def look_for_key(self, token: bytes) -> None:
        """Have keys fetched if the token's is not known, and wait for it. Raises TokenRefused."""
        provider, told = self.of_token(token)
        if provider.key_of(told) is None:
            await provider.keys.look_for(told.key_id, told.algorithm)

    async def run(self) -> None:
        """Fetch the keys of all providers, and keep them fresh, until cancelled."""
        async with self.http.running(), asyncio.TaskGroup() as tasks:
            for each in self.all:
                tasks.create_task(each.keys.run())

    def _known(self, provider: Provider, refetch_s: float) -> KnownProvider:
        discovery = Discovery(provider, self.http)
        return KnownProvider(provider, discovery, SigningKeys(provider, discovery, self.http, refetch_s))
