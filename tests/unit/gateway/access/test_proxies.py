"""A caller's address and scheme: what trusted proxies tell, and nobody else."""

from __future__ import annotations

import pytest
from starlette.types import Scope

from gateway.access.proxies import ProxiesInvalid, trusted_proxies

SETTING = "10.0.0.0/8, 2001:db8:1::/48"


def scope_of(peer: str | None, *forwarded: str, proto: str = "") -> Scope:
    headers = [(b"x-forwarded-for", value.encode()) for value in forwarded]
    headers += [(b"x-forwarded-proto", proto.encode())] if proto else []
    return {"client": None if peer is None else (peer, 4711), "headers": headers, "scheme": "http"}


@pytest.mark.parametrize(
    ("peer", "forwarded", "address"),
    [
        ("192.0.2.7", [], "192.0.2.7"),
        ("192.0.2.7", ["203.0.113.1"], "192.0.2.7"),
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.1"], "203.0.113.1"),
        ("10.0.0.1", ["198.51.100.66, 203.0.113.1"], "203.0.113.1"),
        ("10.0.0.1", ["198.51.100.66", "203.0.113.1, 10.9.9.9"], "203.0.113.1"),
        ("10.0.0.1", ["10.1.1.1, 10.2.2.2"], "10.1.1.1"),
        ("10.0.0.1", ["203.0.113.1, unknown"], "10.0.0.1"),
        ("10.0.0.1", ["203.0.113.1, unknown, 10.2.2.2"], "10.2.2.2"),
        ("10.0.0.1", ["203.0.113.1:8080"], "203.0.113.1"),
        ("10.0.0.1", ["[2001:db8::7]:8080"], "2001:db8::7"),
        ("10.0.0.1", ["2001:db8::7"], "2001:db8::7"),
        ("2001:db8:1::1", ["2001:db8::7"], "2001:db8::7"),
        ("2001:db8:2::1", ["2001:db8::7"], "2001:db8:2::1"),
        ("::ffff:10.0.0.1", ["203.0.113.1"], "203.0.113.1"),
        ("10.0.0.1", [""], "10.0.0.1"),
        ("10.0.0.1", ["198.51.100.66," + "10.0.0.2," * 5000 + "10.0.0.3"], "10.0.0.2"),
        (None, ["203.0.113.1"], ""),
    ],
)
def test_the_last_address_that_is_no_trusted_proxys_counts(
    peer: str | None, forwarded: list[str], address: str
) -> None:
    assert trusted_proxies(SETTING).address_of(scope_of(peer, *forwarded)) == address


def test_nobody_is_trusted_unless_told_so() -> None:
    proxies = trusted_proxies("")
    assert proxies.address_of(scope_of("127.0.0.1", "203.0.113.1")) == "127.0.0.1"
    assert proxies.address_of(scope_of(None, "203.0.113.1")) == ""
    assert proxies.scheme_of(scope_of("127.0.0.1", proto="https")) == "http"


def test_a_proxy_may_come_by_the_unix_socket() -> None:
    proxies = trusted_proxies("unix")
    assert proxies.address_of(scope_of(None, "203.0.113.1")) == "203.0.113.1"
    assert proxies.address_of(scope_of("127.0.0.1", "203.0.113.1")) == "127.0.0.1"


def test_the_scheme_is_that_of_the_caller() -> None:
    proxies = trusted_proxies(SETTING)
    assert proxies.scheme_of(scope_of("10.0.0.1", proto="https")) == "https"
    assert proxies.scheme_of(scope_of("10.0.0.1", proto="gopher")) == "http"
    assert proxies.scheme_of(scope_of("192.0.2.7", proto="https")) == "http"
    assert proxies.scheme_of({**scope_of("192.0.2.7"), "scheme": "wss"}) == "https"


def test_what_is_no_network_is_told() -> None:
    with pytest.raises(ProxiesInvalid, match=r"trusted_proxies.*10\.0\.0\.0/99"):
        trusted_proxies("10.0.0.0/99")
