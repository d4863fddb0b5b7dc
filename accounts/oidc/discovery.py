"""Finds a provider's endpoints in its discovery document. Source: OpenID Connect Discovery 1.0, RFC 8414, RFC 9207."""

from __future__ import annotations

import time

import msgspec

from accounts.oidc.provider_http import ProviderAway, ProviderHttp
from accounts.protocol.sign_on import Provider

PATH = "/.well-known/openid-configuration"
KEPT_S = 3600.0
"""Seconds after which the document is fetched anew."""


class Endpoints(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a discovery document that is used."""

    issuer: str
    jwks_uri: str
    authorization_endpoint: str = ""
    token_endpoint: str = ""
    device_authorization_endpoint: str = ""
    """Empty: the provider has no device flow."""
    token_endpoint_auth_methods_supported: tuple[str, ...] = ("client_secret_basic",)
    authorization_response_iss_parameter_supported: bool = False
    """Whether the provider names itself when it sends people back."""

    @property
    def urls(self) -> tuple[str, ...]:
        found = (
            *(self.jwks_uri, self.authorization_endpoint),
            *(self.token_endpoint, self.device_authorization_endpoint),
        )
        return tuple(url for url in found if url)


_decode = msgspec.json.Decoder(Endpoints).decode


class Discovery:
    """Knows one provider's endpoints, and fetches them when they are needed and old."""

    def __init__(self, provider: Provider, http: ProviderHttp) -> None:
        self._provider = provider
        self._http = http
        self._known: Endpoints | None = None
        self._known_until = 0.0

    async def endpoints(self) -> Endpoints:
        """Return the endpoints. Old ones are returned if new ones can't be had. Raises ProviderAway."""
        if self._known is not None and time.monotonic() < self._known_until:
            return self._known
        try:
            found = _read(await self._http.get(self._provider.issuer.rstrip("/") + PATH), self._provider)
        except ProviderAway:
            if self._known is None:
                raise
            return self._known
        self._known, self._known_until = found, time.monotonic() + KEPT_S
        return found

    def doubt(self) -> None:
        """Have the document fetched anew the next time, since an endpoint of it fails."""
        self._known_until = 0.0


def _read(document: bytes, provider: Provider) -> Endpoints:
    where = f"the discovery document of {provider.issuer}"
    try:
        found = _decode(document)
    except msgspec.DecodeError as error:
        raise ProviderAway(f"{where} can't be read: {error}") from None
    if found.issuer != provider.issuer:
        raise ProviderAway(f"{where} names the issuer {found.issuer[:200]!r}; write it like that in `oidc`")
    for url in found.urls:
        if not provider.allows(url):
            raise ProviderAway(f"{where} names the address {url[:200]!r}, which is not https")
    return found
