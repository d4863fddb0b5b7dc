"""Rules: which user, team and role the claims of a token give."""

from __future__ import annotations

from typing import Any

import pytest

from accounts.oidc.people import Grant, fitting, granted, person_of
from accounts.oidc.verification import TokenRefused
from accounts.protocol.records import UserRecord
from accounts.protocol.sign_on import Provider, Rule, SignOn

CLAIMS: dict[str, Any] = {"sub": "7", "email": "Ann@Example.com", "email_verified": True}


def provider(*rules: Rule, user_claim: str = "email", user_prefix: str = "") -> Provider:
    return Provider(
        issuer="https://id.example.com",
        client_id="paddock",
        rules=rules,
        user_claim=user_claim,
        user_prefix=user_prefix,
    )


def grants(rule: Rule, **claims: object) -> tuple[Grant, ...]:
    given = provider(rule)
    return person_of(CLAIMS | claims, given, SignOn(providers=(given,))).grants


@pytest.mark.parametrize(
    ("claim", "value", "claims", "holds"),
    [
        ("groups", "red", {"groups": ["blue", "red"]}, True),
        ("groups", "red", {"groups": ["blue"]}, False),
        ("groups", "red", {"groups": "red"}, True),
        ("groups", "red", {"groups": "redder"}, False),
        ("groups", "red", {}, False),
        ("groups", "", {}, False),
        ("groups", "None", {"groups": None}, False),
        ("groups", "red", {"groups": [["red"], {"red": 1}]}, False),
        ("realm_access.roles", "red", {"realm_access": {"roles": ["red"]}}, True),
        ("realm_access.roles", "red", {"realm_access": ["roles"]}, False),
        ("https://example.com/groups", "red", {"https://example.com/groups": ["red"]}, True),
        ("staff", "true", {"staff": True}, True),
        ("level", "3", {"level": 3}, True),
        ("", "", {}, True),
    ],
)
def test_a_rule_holds(claim: str, value: str, claims: dict[str, object], holds: bool) -> None:
    assert bool(grants(Rule(claim=claim, value=value, team="red"), **claims)) == holds


def test_the_first_rule_that_holds_gives_team_and_role() -> None:
    rules = (
        Rule(claim="groups", value="leads", team="red", role="manager"),
        Rule(claim="groups", value="staff", team="blue"),
        Rule(team="guests"),
    )
    given = provider(*rules)
    person = person_of(CLAIMS | {"groups": ["staff", "leads"]}, given, SignOn(providers=(given,)))
    assert person.grants == (Grant("red", "manager"), Grant("blue", "user"), Grant("guests", "user"))
    assert granted(person, None) == Grant("red", "manager")


def test_without_a_rule_the_users_record_gives_them() -> None:
    given = provider()
    person = person_of(CLAIMS, given, SignOn(providers=(given,)))
    assert granted(person, None) is None
    assert granted(person, UserRecord(name="ann@example.com")) is None
    assert granted(person, UserRecord(name="ann@example.com", teams={"red": "manager"})) == Grant("red", "manager")


def test_an_address_is_one_however_it_is_written() -> None:
    given = provider()
    assert person_of(CLAIMS, given, SignOn(providers=(given,))).user == "ann@example.com"


def test_a_name_keeps_its_characters_apart() -> None:
    assert fitting("o'neill@example.com") == "o=27neill@example.com"
    assert fitting("o=27neill@example.com") == "o=3D27neill@example.com"
    assert fitting("ä b/c\n") == "=C3=A4=20b=2Fc=0A"
    assert fitting("\ud800") == "=3F"


@pytest.mark.parametrize("name", ["", None, ["ann"], {"a": 1}, "x" * 300, "'ann", ".ann", 5.5])
def test_what_names_nobody_is_refused(name: object) -> None:
    given = provider(user_claim="name")
    with pytest.raises(TokenRefused, match="`name`"):
        person_of(CLAIMS | {"name": name}, given, SignOn(providers=(given,)))


def test_no_provider_names_users_of_another_one() -> None:
    own, guests = provider(user_claim="name"), provider(user_claim="name", user_prefix="guest:")
    both = SignOn(providers=(own, guests))
    assert person_of(CLAIMS | {"name": "ann"}, guests, both).user == "guest:ann"
    assert person_of(CLAIMS | {"name": "guest"}, own, both).user == "guest"
    with pytest.raises(TokenRefused, match="another identity provider"):
        person_of(CLAIMS | {"name": "guest:ann"}, own, both)
