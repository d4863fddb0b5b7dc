"""The setting `oidc`: what can be used, and what an error names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from accounts.protocol.sign_on import NO_SIGN_ON, SignOnInvalid, read_sign_on

PROVIDER: dict[str, Any] = {"issuer": "https://id.example.com", "client_id": "paddock"}


def setting(*providers: dict[str, Any], **more: object) -> str:
    return json.dumps({"providers": providers, **more})


def test_nothing_is_no_sign_on() -> None:
    assert read_sign_on(" ") == NO_SIGN_ON


def test_a_provider_needs_little() -> None:
    (provider,) = read_sign_on(setting(PROVIDER)).providers
    assert provider.algorithms == ("RS256", "ES256")
    assert provider.accepted_audiences == ("paddock",)
    assert provider.shown_name == "id.example.com"
    assert provider.create_users


def test_a_file_holds_yaml(tmp_path: Path) -> None:
    file = tmp_path / "oidc.yaml"
    file.write_text(
        "providers:\n  - {issuer: 'https://id.example.com', client_id: paddock, rules: [{team: red}]}\n"
        "public_url: https://llm.example.com\n"
    )
    found = read_sign_on(str(file))
    assert (found.providers[0].rules[0].team, found.public_url) == ("red", "https://llm.example.com")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "oidc"),
        (setting({"issuer": "https://id.example.com"}), "client_id"),
        (setting(PROVIDER | {"isuser": 1}), "isuser"),
        (setting(PROVIDER | {"rules": [{"claim": "groups", "value": "a"}]}), "providers[0].rules[0]"),
        (setting(PROVIDER | {"rules": [{"team": "a", "role": "metrics"}]}), "providers[0].rules[0].role"),
        (setting(PROVIDER | {"algorithms": ["HS256"]}), "providers[0].algorithms[0]"),
        (setting(PROVIDER | {"algorithms": ["none"]}), "providers[0].algorithms[0]"),
        (setting(PROVIDER | {"algorithms": []}), "providers[0].algorithms"),
        (setting(PROVIDER | {"leeway_s": 3600}), "providers[0].leeway_s"),
        (setting(PROVIDER | {"scopes": ["email"]}), "providers[0].scopes"),
        (setting(PROVIDER | {"issuer": "http://id.example.com"}), "insecure_http"),
        (setting(PROVIDER | {"user_prefix": "a/b"}), "providers[0].user_prefix"),
        (setting(PROVIDER, PROVIDER), "providers[1].issuer"),
        (setting(PROVIDER, PROVIDER | {"issuer": "https://id.example.com/2"}), "providers[1].name"),
        (setting(PROVIDER, PROVIDER | {"issuer": "https://other.example.com"}), "providers[1].user_prefix"),
        (setting(PROVIDER, public_url="llm.example.com"), "public_url"),
        (setting(PROVIDER, public_url="https://llm.example.com/path"), "public_url"),
        ("/no/such/file.yaml", "/no/such/file.yaml"),
    ],
)
def test_an_error_names_the_field(text: str, named: str) -> None:
    with pytest.raises(SignOnInvalid) as caught:
        read_sign_on(text)
    assert str(caught.value).startswith("oidc")
    assert named in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1:8080", "localhost", "[::1]:9"])
def test_a_provider_on_this_machine_needs_no_tls(host: str) -> None:
    assert read_sign_on(setting(PROVIDER | {"issuer": f"http://{host}/realm"})).providers


def test_without_tls_only_where_that_is_said() -> None:
    text = setting(PROVIDER | {"issuer": "http://keycloak:8080/realms/a", "insecure_http": True})
    assert read_sign_on(text).providers[0].allows("http://keycloak:8080/keys")
    secure = read_sign_on(setting(PROVIDER)).providers[0]
    assert not any(map(secure.allows, ("http://id.example.com/keys", "file:///etc/passwd", "ftp://id.example.com")))
