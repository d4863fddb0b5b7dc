"""Where files may be fetched from: hosts that are listed, and no address within the gateway's own network."""

from __future__ import annotations

import pytest

from workers.process.addresses import is_listed, why_refused

PUBLIC = [
    "93.184.216.34",
    "8.8.8.8",
    "2606:2800:220:1:248:1893:25c8:1946",
    "::ffff:8.8.8.8",
    "64:ff9b::808:808",
    "2002:808:808::1",
    "64:ff9b:1::808:808",
    "64:ff9b:1:808:8:800::",
]
OWN = [
    "127.0.0.1",
    "127.9.9.9",
    "::1",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.1.1",
    "100.64.0.1",
    "fc00::1",
    "fd12:3456::1",
    "::ffff:127.0.0.1",
    "::ffff:10.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::a00:1",
    "64:ff9b:1::a00:1",
    "64:ff9b:1:a00:0:100:808:808",
    "fec0::1",
    "2002:7f00:1::",
    "2002:a00:1::5",
]
NEVER = [
    "::10.0.0.1",
    "::7f00:1",
    "169.254.169.254",
    "169.254.1.1",
    "fe80::1",
    "fe80::1%eth0",
    "::ffff:169.254.169.254",
    "64:ff9b::a9fe:a9fe",
    "64:ff9b:1:a9fe:a9:fe00:808:808",
    "64:ff9b:1:a9:fe:a9fe:808:808",
    "2002:a9fe:a9fe::",
    "fd00:ec2::254",
    "100.100.100.200",
    "192.0.0.192",
    "168.63.129.16",
    "224.0.0.1",
    "ff02::1",
    "0.0.0.0",
    "::",
    "255.255.255.255",
    "240.0.0.1",
    "192.0.2.1",
    "198.18.0.1",
    "2001:db8::1",
    "no address",
    "",
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed(address: str) -> None:
    assert why_refused(address, allow_private=False) == ""


@pytest.mark.parametrize("address", OWN)
def test_own_networks_are_for_the_operator_to_allow(address: str) -> None:
    assert why_refused(address, allow_private=False)
    assert why_refused(address, allow_private=True) == ""


@pytest.mark.parametrize("address", NEVER)
@pytest.mark.parametrize("allow_private", [False, True])
def test_some_addresses_are_never_allowed(address: str, allow_private: bool) -> None:
    assert why_refused(address, allow_private=allow_private)


@pytest.mark.parametrize(
    ("host", "allowed", "is_in"),
    [
        ("example.com", ["example.com"], True),
        ("EXAMPLE.com.", ["example.COM"], True),
        ("a.example.com", ["example.com"], False),
        ("a.example.com", ["*.example.com"], True),
        ("a.b.example.com", ["*.example.com"], True),
        ("example.com", ["*.example.com"], False),
        ("badexample.com", ["*.example.com"], False),
        ("example.com.evil.org", ["example.com", "*.example.com"], False),
        ("10.0.0.1", ["10.0.0.1"], True),
        ("::1", ["[::1]"], True),
        ("anything", ["*"], False),
        ("anything", [], False),
    ],
)
def test_hosts_are_listed_by_name(host: str, allowed: list[str], is_in: bool) -> None:
    assert is_listed(host, allowed) is is_in


@pytest.mark.parametrize(
    ("host", "port", "listed", "is_in"),
    [
        ("example.com", 80, "example.com", True),
        ("example.com", 443, "example.com", True),
        ("example.com", 8080, "example.com", False),
        ("example.com", 8080, "example.com:8080", True),
        ("example.com", 443, "example.com:8080", False),
        ("a.example.com", 8080, " *.example.com:8080 ", True),
        ("example.com", 9, "example.com:*", True),
        ("::1", 443, "::1", True),
        ("::1", 8080, "::1", False),
        ("::1", 8080, "[::1]:8080", True),
        ("::1", 8080, "[::1]", False),
        ("example.com", 443, "example.com:x", False),
    ],
)
def test_other_ports_are_listed_by_themselves(host: str, port: int, listed: str, is_in: bool) -> None:
    assert is_listed(host, [listed], port) is is_in
