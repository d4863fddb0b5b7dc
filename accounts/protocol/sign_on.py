"""The setting `oidc`: identity providers (OpenID Connect), and the rules that turn their claims into teams and roles.

    oidc:
      public_url: https://llm.example.com
      providers:
        - issuer: https://id.example.com/realms/staff
          client_id: paddock
          client_secret: "..."
          rules:
            - {claim: groups, value: llm-admins, team: default, role: admin}
            - {claim: groups, value: llm-red, team: red}

Gateways read it to verify tokens, and the accounts service to sign people in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from accounts.protocol.records import Name
from workers.yaml_document import YamlInvalid, load_yaml

SECURE_COOKIE, PLAIN_COOKIE = "__Host-paddock", "paddock"
"""The cookies with a browser's session key: by TLS, which no other host or page can set, and without."""
MAX_FILE_BYTES = 1 << 20
DEFAULT_SESSION_S = 12 * 3600.0

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
"""The signatures that a provider may be allowed. All have a public key: with HS256 whoever verifies could also sign."""
GrantedRole = Literal["admin", "manager", "user"]
Text = Annotated[str, Meta(min_length=1, max_length=512)]


class SignOnInvalid(ValueError):
    """The setting `oidc` can't be used; the message names the field and the remedy."""


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Gives people with a claim a team and a role."""

    claim: Annotated[str, Meta(max_length=512)] = ""
    """Name of the claim; dots lead into objects, as in `realm_access.roles`. Empty: the rule holds for everybody."""
    value: Annotated[str, Meta(max_length=512)] = ""
    """The claim's value or, if that is a list, one of its values."""
    team: Name
    role: GrantedRole = "user"


class Provider(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One identity provider."""

    issuer: Text
    """Its issuer, exactly as its tokens name it. `/.well-known/openid-configuration` below it says the rest."""
    client_id: Text
    client_secret: Annotated[str, Meta(max_length=1024)] = ""
    """Empty: Paddock is a public client there, which PKCE alone protects."""
    name: Annotated[str, Meta(max_length=64)] = ""
    """The name on the sign-in page; empty: the issuer's host."""
    audiences: Annotated[tuple[Text, ...], Meta(max_length=16)] = ()
    """Audiences of the tokens that callers may send to the API; empty: `client_id`."""
    scopes: Annotated[tuple[Text, ...], Meta(max_length=32)] = ("openid", "profile", "email")
    """Scopes that a sign-in asks for."""
    algorithms: Annotated[tuple[Algorithm, ...], Meta(min_length=1)] = ("RS256", "ES256")
    leeway_s: Annotated[float, Meta(ge=0, le=300)] = 30.0
    """Seconds by which the provider's clock may differ from this one."""
    user_claim: Text = "email"
    """The claim that names the user. An email address counts only if the provider has verified it."""
    user_prefix: Annotated[str, Meta(max_length=64, pattern=r"^([A-Za-z0-9_@+][A-Za-z0-9_.@+:-]*)?$")] = ""
    """Text before the users' names, so that no provider can name a user of another one."""
    rules: Annotated[tuple[Rule, ...], Meta(max_length=1000)] = ()
    """The first rule that holds gives team and role. If none does, the user's own record may give them."""
    create_users: bool = True
    """Whether people may come who are not known yet; the first sign-in makes the user."""
    insecure_http: bool = False
    """Whether the provider may be reached without TLS, which anybody on the way can then take the place of."""

    @property
    def shown_name(self) -> str:
        return self.name or urlsplit(self.issuer).hostname or self.issuer

    @property
    def accepted_audiences(self) -> tuple[str, ...]:
        return self.audiences or (self.client_id,)

    def allows(self, url: str) -> bool:
        """Return whether an address may be the provider's: by TLS, on this machine, or as `insecure_http` says."""
        parts = urlsplit(url)
        if parts.scheme == "https":
            return bool(parts.hostname)
        return parts.scheme == "http" and bool(parts.hostname) and (self.insecure_http or is_loopback(parts.hostname))


class SignOn(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole setting. Without providers there is no single sign-on."""

    providers: Annotated[tuple[Provider, ...], Meta(max_length=16)] = ()
    public_url: Annotated[str, Meta(max_length=512)] = ""
    """Where people reach the gateways, such as `https://llm.example.com`; empty: as each request says."""
    session_s: Annotated[float, Meta(ge=60, le=90 * 86400)] = DEFAULT_SESSION_S
    """Seconds after which people have to sign in again."""

    def provider_of(self, issuer: str) -> Provider | None:
        """Return the provider whose tokens name this issuer."""
        return next((each for each in self.providers if each.issuer == issuer), None)

    def prefixes_beside(self, provider: Provider) -> tuple[str, ...]:
        """Return the prefixes of other providers' users that begin with this provider's own."""
        others = (other.user_prefix for other in self.providers if other is not provider)
        return tuple(prefix for prefix in others if prefix.startswith(provider.user_prefix))


NO_SIGN_ON = SignOn()

_decode = msgspec.json.Decoder(SignOn).decode


def read_sign_on(setting: str) -> SignOn:
    """Return the setting `oidc`: a JSON object, or the path of a YAML or JSON file. Raises SignOnInvalid."""
    text = setting.strip()
    if not text:
        return NO_SIGN_ON
    try:
        found = _decode(text) if text.startswith("{") else msgspec.convert(_document(Path(text)), SignOn)
    except msgspec.DecodeError as error:
        raise SignOnInvalid(f"oidc: {error}; docs/teams.md shows all fields") from None
    _check(found)
    return found


def _document(path: Path) -> object:
    try:
        with path.expanduser().open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise SignOnInvalid(f"oidc: {path}: {error.strerror}; give a readable file, or a JSON object") from None
    if len(raw) > MAX_FILE_BYTES:
        raise SignOnInvalid(f"oidc: {path} has more than {MAX_FILE_BYTES} bytes")
    try:
        found: object = load_yaml(raw)
        return found
    except YamlInvalid as error:
        raise SignOnInvalid(f"oidc: {path}: not valid YAML: {error}") from None


def _check(sign_on: SignOn) -> None:
    if sign_on.public_url:
        parts = urlsplit(sign_on.public_url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path.strip("/") or parts.query:
            raise SignOnInvalid("oidc: public_url: give scheme and host alone, such as https://llm.example.com")
    for number, provider in enumerate(sign_on.providers):
        field = f"oidc: providers[{number}]"
        if not provider.allows(provider.issuer):
            raise SignOnInvalid(
                f"{field}.issuer: {provider.issuer!r} is no https address; give one, or set insecure_http: true"
            )
        if "openid" not in provider.scopes:
            raise SignOnInvalid(f"{field}.scopes: add `openid`: without it a provider sends no ID token")
    _check_distinct("issuer", [each.issuer for each in sign_on.providers], "name each issuer once")
    _check_distinct("name", [each.shown_name for each in sign_on.providers], "give each provider a name of its own")
    remedy = "give each provider another one, so that none can name users of another"
    _check_distinct("user_prefix", [each.user_prefix for each in sign_on.providers], remedy)


def _check_distinct(field: str, values: Iterable[str], remedy: str) -> None:
    seen = set[str]()
    for number, value in enumerate(values):
        if value in seen:
            raise SignOnInvalid(f"oidc: providers[{number}].{field}: {value!r} is there twice; {remedy}")
        seen.add(value)


def is_loopback(host: str | None) -> bool:
    """Return whether a host, as in a URL, is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False
