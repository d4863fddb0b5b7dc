from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

import pytest

from workers.process.sockets import PortTaken, address_of, listen


def test_port_zero_takes_a_free_one_and_the_address_names_it() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        assert port > 0
        assert address_of(sock) == f"http://127.0.0.1:{port}"


def test_a_worker_on_all_addresses_gives_one_that_others_can_use() -> None:
    with listen("0.0.0.0", 0) as sock:
        host = urlsplit(address_of(sock)).hostname
    assert host is not None
    assert not ipaddress.ip_address(host).is_unspecified


def test_a_taken_port_is_told_apart_from_a_bad_address() -> None:
    with listen("127.0.0.1", 0) as sock, pytest.raises(PortTaken, match="in use"):
        listen("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(OSError, match="assign") as caught:
        listen("192.0.2.1", 0)
    assert not isinstance(caught.value, PortTaken)
