"""Says who a verified token is of, and which team and role the rules give them. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from accounts.oidc.verification import Claims, TokenRefused
from accounts.protocol.records import Role, UserRecord
from accounts.protocol.sign_on import Provider, SignOn

MAX_USER_CHARS = 256
BEGINS = re.compile(r"[A-Za-z0-9_@+]")
_OTHER = re.compile(r"[^A-Za-z0-9_.@+:-]")
"""Characters that are no part of a user's name, which goes into paths, Redis and log lines."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A team, and the role in it."""

    team: str
    role: Role


@dataclass(frozen=True, slots=True)
class Person:
    """The holder of a verified token."""

    user: str
    """Name of the user."""
    email: str
    """Empty: the token has none, or one that the provider has not verified."""
    subject: str
    """The provider's own id of the person, which never changes."""
    issuer: str
    grants: tuple[Grant, ...]
    """The grants of the rules that hold, the first rule's first."""


def person_of(claims: Claims, provider: Provider, sign_on: SignOn) -> Person:
    """Return the person that verified claims are of. Raises TokenRefused if they name none."""
    email = _email(claims)
    named = email if provider.user_claim == "email" else _text(_claim(claims, provider.user_claim))
    if not named:
        raise TokenRefused(_nameless(provider), is_signed=True)
    user = provider.user_prefix + fitting(named)
    if len(user) > MAX_USER_CHARS or not BEGINS.match(user):
        raise TokenRefused(
            f"The claim `{provider.user_claim}` of this token can't be the name of a user. Have the operator choose "
            "another one (`user_claim`).",
            is_signed=True,
        )
    if any(user.startswith(prefix) for prefix in sign_on.prefixes_beside(provider)):
        raise TokenRefused("This token names a user of another identity provider.", is_signed=True)
    values = {name: _values(claims, name) for name in {rule.claim for rule in provider.rules} if name}
    grants = dict.fromkeys(
        Grant(rule.team, rule.role) for rule in provider.rules if not rule.claim or rule.value in values[rule.claim]
    )
    return Person(user, email, _text(claims.get("sub")), provider.issuer, tuple(grants))


def fitting(name: str) -> str:
    """Return a name of the characters that names of users have; each other byte becomes `=` and two digits, as in
    `o=27neill@example.com`."""
    return _OTHER.sub(lambda found: "".join(f"={byte:02X}" for byte in found[0].encode("utf-8", "replace")), name)


def granted(person: Person, record: UserRecord | None) -> Grant | None:
    """Return the team and role of a person: those of the first rule that holds, else those of the user's record."""
    if person.grants:
        return person.grants[0]
    if record is None or not record.teams:
        return None
    team, role = next(iter(record.teams.items()))
    return Grant(team, "admin" if record.admin else role)


def _email(claims: Claims) -> str:
    """Return the email address, in small letters: providers differ in how they write it, not in whom they mean."""
    told = claims.get("email_verified")
    is_verified = told is True or told == "true"
    return _text(claims.get("email")).lower() if is_verified else ""


def _claim(claims: Claims, name: str) -> object:
    """Return the value of a claim; dots lead into objects, unless a claim has the whole name."""
    if name in claims:
        return claims[name]
    found: object = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _values(claims: Claims, name: str) -> frozenset[str]:
    """Return the value of a claim or, if that is a list, its values, as texts."""
    found = _claim(claims, name)
    values = found if isinstance(found, list) else [found]
    return frozenset(_text(value) for value in values if isinstance(value, str | int))


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, str | int) else ""


def _nameless(provider: Provider) -> str:
    if provider.user_claim == "email":
        return (
            "This token has no email address that the provider has verified (`email_verified`). Verify it there, ask "
            "for the scope `email`, or have the operator name users by another claim (`user_claim`)."
        )
    return f"This token has no claim `{provider.user_claim}`, which names the user."
