"""Verifies tokens (JWT): signature, algorithm, issuer, audience, times. Source: RFC 7519, RFC 8725, RFC 9068, OpenID
Connect Core 1.0, section 3.1.3.7.

What a token says of itself is believed only as far as it helps to find the key: the algorithm must be one that the
provider is allowed, and the one that the key is for.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import jwt
import msgspec
from jwt import PyJWK
from jwt.exceptions import (
    ExpiredSignatureError,
    ImmatureSignatureError,
    InvalidAlgorithmError,
    InvalidAudienceError,
    InvalidSignatureError,
    MissingRequiredClaimError,
    PyJWTError,
)

from accounts.protocol.sign_on import Provider

MAX_TOKEN_BYTES = 16 << 10
MAX_HEADER_CHARS = 2 << 10
"""Maximum characters of a token's header, in base64."""
TYPES = frozenset({"", "jwt", "at+jwt", "application/at+jwt"})
"""Types (`typ`) of ID tokens and access tokens. Others, such as `logout+jwt`, are for something else."""
REQUIRED = ("exp", "iss", "aud")

Claims = dict[str, Any]


class TokenRefused(ValueError):
    """The token is not accepted; the message says why and what to do, for whoever sent it."""

    def __init__(self, message: str, *, is_signed: bool = False) -> None:
        """`is_signed`: whether the provider did sign it."""
        super().__init__(message)
        self.is_signed = is_signed


@dataclass(frozen=True, slots=True)
class Told:
    """The parts of a token that are read before it is verified: by them its provider and key are found."""

    key_id: str
    algorithm: str
    issuer: str


class _Header(msgspec.Struct, frozen=True):
    alg: str
    kid: str = ""
    typ: str = ""


class _Payload(msgspec.Struct, frozen=True):
    iss: str = ""


_decode_header = msgspec.json.Decoder(_Header).decode
_decode_payload = msgspec.json.Decoder(_Payload).decode


def is_token(key: bytes) -> bool:
    """Return whether what a request has in place of an API key is a token: three parts with dots between them."""
    return key.count(b".") == 2 and key.startswith(b"e")  # the first letter of any JSON object in base64


def read_told(token: bytes) -> Told:
    """Return what a token says of itself, unverified. Raises TokenRefused."""
    if len(token) > MAX_TOKEN_BYTES:
        raise TokenRefused(f"This token has more than {MAX_TOKEN_BYTES} bytes. Ask for one with fewer claims.")
    header, _, rest = token.partition(b".")
    payload, _, _ = rest.partition(b".")
    if len(header) > MAX_HEADER_CHARS:
        raise TokenRefused(f"The header of this token has more than {MAX_HEADER_CHARS} characters.")
    try:
        read = _decode_header(_decoded(header))
        issuer = _decode_payload(_decoded(payload)).iss
    except (msgspec.DecodeError, ValueError):
        raise TokenRefused("This token is no JSON Web Token. Send it whole, as the provider issued it.") from None
    if read.typ.lower() not in TYPES:
        raise TokenRefused("This token is no ID token or access token. Ask the provider for one of these.")
    return Told(read.kid, read.alg, issuer)


def verify(token: bytes, provider: Provider, key: PyJWK, audiences: Collection[str]) -> Claims:
    """Return the claims of a token that the key's holder signed for one of the audiences. Raises TokenRefused."""
    try:
        return jwt.decode(
            token,
            key,
            algorithms=provider.algorithms,
            audience=audiences,
            issuer=provider.issuer,
            leeway=provider.leeway_s,
            options={"require": list(REQUIRED)},
        )
    except PyJWTError as error:
        told, is_signed = _reason(error, audiences)
        raise TokenRefused(told, is_signed=is_signed) from None


def valid_until(claims: Claims, provider: Provider) -> float:
    """Return the unix time until which verified claims hold."""
    return float(int(claims["exp"])) + provider.leeway_s


def verify_id_token(token: bytes, provider: Provider, key: PyJWK, nonce: str) -> Claims:
    """Return the claims of an ID token that answers this sign-in. `nonce`: empty in flows that have none.

    Raises TokenRefused."""
    claims = verify(token, provider, key, (provider.client_id,))
    if nonce and claims.get("nonce") != nonce:
        raise TokenRefused("The provider's answer belongs to another sign-in. Begin again.")
    audience = claims["aud"]
    if isinstance(audience, list) and len(audience) > 1 and claims.get("azp") != provider.client_id:
        raise TokenRefused("The provider's token was issued to another client. Begin again.")
    return claims


def _decoded(part: bytes) -> bytes:
    try:
        return base64.b64decode(part + b"=" * (-len(part) % 4), altchars=b"-_", validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None


def _reason(error: PyJWTError, audiences: Collection[str]) -> tuple[str, bool]:
    """Return why a token is refused, and whether the provider signed it: claims are looked at after the signature."""
    match error:
        case ExpiredSignatureError():
            return "This token has expired. Ask the provider for a new one.", True
        case ImmatureSignatureError():
            return "This token is not valid yet. Compare the provider's clock with this machine's.", True
        case InvalidAudienceError():
            return f"This token is for somebody else. Ask for one whose audience is {' or '.join(audiences)}.", True
        case MissingRequiredClaimError():
            return f"This token has no claim `{error.claim}`. Ask for an ID token or an access token.", True
        case InvalidSignatureError():
            return "The signature of this token is not its provider's.", False
        case InvalidAlgorithmError():
            return "This token is signed with an algorithm that is not accepted.", False
        case _:
            return "This token is no valid JSON Web Token.", False
