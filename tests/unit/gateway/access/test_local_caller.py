"""Where a gateway may be open, and where not."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from gateway.access.local_caller import OpenRefused, check_open, is_loopback
from gateway.settings import GatewaySettings


def settings(**values: Any) -> GatewaySettings:
    return GatewaySettings(open=True, **values)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.1", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback_is_fine(host: str) -> None:
    assert is_loopback(host)
    check_open(settings(host=host), {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.evil.example", "my-machine", ""])
def test_any_other_host_is_refused(host: str) -> None:
    with pytest.raises(OpenRefused, match=f"--host {host} can be reached from other machines; leave --open out"):
        check_open(settings(host=host), {})


def test_what_brings_calls_of_others_is_refused() -> None:
    with pytest.raises(OpenRefused, match="trusted_proxies pass on calls of others"):
        check_open(settings(trusted_proxies="127.0.0.1"), {})
    with pytest.raises(OpenRefused, match="--uds /run/paddock is none"):
        check_open(settings(uds=Path("/run/paddock")), {})
    with pytest.raises(OpenRefused, match="a pod of Kubernetes"):
        check_open(settings(), {"KUBERNETES_SERVICE_HOST": "10.0.0.1"})


def test_what_is_listened_on_counts_whatever_the_host_is_called() -> None:
    with socket.socket() as everywhere, socket.socket() as here:
        everywhere.bind(("", 0))
        here.bind(("127.0.0.1", 0))
        check_open(settings(), {}, [here])
        with pytest.raises(OpenRefused, match="listens on"):
            check_open(settings(), {}, [here, everywhere])


def test_a_gateway_that_is_not_open_may_listen_anywhere() -> None:
    check_open(GatewaySettings(host="0.0.0.0", trusted_proxies="10.0.0.1"), {"KUBERNETES_SERVICE_HOST": "x"})
