"""Asks an identity provider as its client: codes for tokens, and the device flow.

Source: RFC 6749, RFC 7636 (PKCE), RFC 8628 (device flow), OpenID Connect Core 1.0.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import quote_plus, urlencode, urlsplit

import msgspec

from accounts.oidc.discovery import Endpoints
from accounts.oidc.people import Person, person_of
from accounts.oidc.provider_http import ProviderAway
from accounts.oidc.providers import KnownProvider, Providers
from accounts.oidc.verification import TokenRefused, verify_id_token

DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
KindT = TypeVar("KindT")

BASIC, POST = "client_secret_basic", "client_secret_post"


class ProviderRefused(Exception):
    """The provider refuses what it is asked. `code`: its error code, such as `access_denied`."""

    def __init__(self, code: str, description: str) -> None:
        super().__init__(f"{code}: {description}" if description else code)
        self.code = code


class DeviceBegun(msgspec.Struct, frozen=True, kw_only=True):
    """The provider's answer to the begin of a device flow."""

    device_code: str
    user_code: str
    verification_uri: str = ""
    verification_url: str = ""
    """Google's name of the same."""
    verification_uri_complete: str = ""
    expires_in: float = 600.0
    interval: float = 5.0


class _Tokens(msgspec.Struct, frozen=True):
    id_token: str = ""


class _Error(msgspec.Struct, frozen=True):
    error: str = "invalid_response"
    error_description: str = ""


def challenge_of(verifier: str) -> str:
    """Return the S256 code challenge of a code verifier."""
    return base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()


async def sign_in_url(provider: KnownProvider, *, state: str, nonce: str, code_verifier: str, redirect_uri: str) -> str:
    """Return the address at the provider where a browser signs in. Raises ProviderAway."""
    endpoints = await provider.discovery.endpoints()
    if not endpoints.authorization_endpoint:
        raise ProviderAway(f"{provider.settings.issuer} names no authorization_endpoint")
    query = {
        "response_type": "code",
        "client_id": provider.settings.client_id,
        "redirect_uri": redirect_uri,
        "scope": " ".join(provider.settings.scopes),
        "state": state,
        "nonce": nonce,
        "code_challenge": challenge_of(code_verifier),
        "code_challenge_method": "S256",
    }
    joint = "&" if urlsplit(endpoints.authorization_endpoint).query else "?"
    return f"{endpoints.authorization_endpoint}{joint}{urlencode(query)}"


async def redeem_code(
    providers: Providers, provider: KnownProvider, *, code: str, nonce: str, code_verifier: str, redirect_uri: str
) -> Person:
    """Return the person whose authorization code it is. Raises ProviderAway, ProviderRefused, TokenRefused."""
    form = {"grant_type": "authorization_code", "code": code, "redirect_uri": redirect_uri}
    return await _person(providers, provider, {**form, "code_verifier": code_verifier}, nonce)


async def begin_device(providers: Providers, provider: KnownProvider) -> DeviceBegun:
    """Begin a device flow. Raises ProviderAway, ProviderRefused."""
    endpoints = await provider.discovery.endpoints()
    if not endpoints.device_authorization_endpoint:
        raise ProviderRefused("unsupported", f"{provider.settings.shown_name} has no device flow")
    form = {"scope": " ".join(provider.settings.scopes)}
    answer = await _ask(providers, provider, endpoints.device_authorization_endpoint, form, endpoints)
    return _decoded(answer, DeviceBegun, provider)


async def poll_device(providers: Providers, provider: KnownProvider, device_code: str) -> Person:
    """Return the person who has signed in for a device flow.

    Raises ProviderAway, TokenRefused, and ProviderRefused: `authorization_pending` until somebody has."""
    return await _person(providers, provider, {"grant_type": DEVICE_GRANT, "device_code": device_code}, "")


async def _person(providers: Providers, provider: KnownProvider, form: Mapping[str, str], nonce: str) -> Person:
    endpoints = await provider.discovery.endpoints()
    if not endpoints.token_endpoint:
        raise ProviderAway(f"{provider.settings.issuer} names no token_endpoint")
    answer = await _ask(providers, provider, endpoints.token_endpoint, form, endpoints)
    token = _decoded(answer, _Tokens, provider).id_token.encode()
    if not token:
        raise ProviderAway(f"{provider.settings.issuer} answered without an ID token")
    found, told = providers.of_token(token)
    if found is not provider:
        raise TokenRefused("The provider's token is from another issuer. Begin again.")
    await providers.look_for_key(token)
    key = provider.key_of(told)
    if key is None:
        raise TokenRefused("The provider's token is signed with a key that the provider does not list. Begin again.")
    claims = verify_id_token(token, provider.settings, key, nonce)
    return person_of(claims, provider.settings, providers.sign_on)


async def _ask(
    providers: Providers, provider: KnownProvider, url: str, form: Mapping[str, str], endpoints: Endpoints
) -> bytes:
    """Send a form as the provider's client, and return the answer. Raises ProviderAway, ProviderRefused."""
    client, secret = provider.settings.client_id, provider.settings.client_secret
    methods = endpoints.token_endpoint_auth_methods_supported
    fields, headers = {**form}, {}
    if secret and (BASIC in methods or POST not in methods):
        pair = f"{quote_plus(client)}:{quote_plus(secret)}"
        headers["authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
    else:
        fields["client_id"] = client
        if secret:
            fields["client_secret"] = secret
    status, body = await providers.http.post(url, fields, headers)
    if status == 200:
        return body
    try:
        error = msgspec.json.decode(body, type=_Error)
    except msgspec.DecodeError:
        raise ProviderAway(f"POST {url} was answered with status {status}") from None
    raise ProviderRefused(error.error[:64], error.error_description[:256])


def _decoded(body: bytes, kind: type[KindT], provider: KnownProvider) -> KindT:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise ProviderAway(f"an answer of {provider.settings.issuer} can't be read: {error}") from None
