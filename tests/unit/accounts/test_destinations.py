"""Where a browser may be sent after it has signed in."""

from __future__ import annotations

import pytest

from accounts.errors import Invalid
from accounts.sso.destinations import checked_base, checked_return, is_program, with_query
from accounts.sso.oauth import challenge_of

BASE = "https://llm.example.com"
CHALLENGE = challenge_of("verifier")


@pytest.mark.parametrize(
    ("return_to", "goes_to"),
    [
        ("", ""),
        ("/", "/"),
        ("/admin/usage?team=red#top", "/admin/usage?team=red#top"),
        ("https://llm.example.com/admin", "/admin"),
        ("https://llm.example.com", "/"),
    ],
)
def test_this_address_itself(return_to: str, goes_to: str) -> None:
    assert checked_return(return_to, BASE, "") == goes_to


@pytest.mark.parametrize("host", ["127.0.0.1:9999", "localhost:1", "[::1]:65535", "127.9.9.9:80"])
def test_a_program_on_the_browsers_machine(host: str) -> None:
    address = f"http://{host}/done?x=1"
    assert checked_return(address, BASE, CHALLENGE) == address
    assert is_program(address)
    assert with_query(address, code="a b") == f"{address}&code=a+b"
    for challenge in ("", "short", CHALLENGE + "="):
        with pytest.raises(Invalid, match="code_challenge"):
            checked_return(address, BASE, challenge)


@pytest.mark.parametrize(
    "return_to",
    [
        "https://evil.example",
        "//evil.example",
        "///evil.example",
        "////evil.example",
        "https://llm.example.com//evil.example",
        "https://llm.example.com?x",
        "/\\evil.example",
        "\\\\evil.example",
        "/\t/evil.example",
        "/\n/evil.example",
        " https://evil.example",
        "https:evil.example",
        "https:/evil.example",
        "evil.example",
        "javascript:alert(1)",
        "data:text/html,x",
        "http://llm.example.com/",
        "https://llm.example.com:444/",
        "https://llm.example.com@evil.example/",
        "https://llm.example.com.evil.example/",
        "https://evil.example/https://llm.example.com",
        "http://127.0.0.1.evil.example/",
        "http://127.0.0.1@evil.example/",
        "http://localhost.evil.example/",
        "https://127.0.0.1:1/",
        "http://[::1]evil.example/",
        "/ä",
        "/" + "x" * 3000,
    ],
)
def test_nowhere_else(return_to: str) -> None:
    with pytest.raises(Invalid):
        checked_return(return_to, BASE, CHALLENGE)


def test_an_address_under_which_people_come() -> None:
    assert checked_base("https://llm.example.com:8443/") == "https://llm.example.com:8443"


@pytest.mark.parametrize("base", ["https://", "ftp://a", "https://a@b", 'https://a"b', "https://a b", "https://a/b"])
def test_a_host_that_is_none(base: str) -> None:
    with pytest.raises(Invalid):
        checked_base(base)
