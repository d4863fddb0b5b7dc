"""Calls from other addresses of this machine: all of 127.0.0.0/8 is loopback on Linux."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import ip_network
from typing import Any

import requests
from requests.adapters import HTTPAdapter


class _From(HTTPAdapter):
    """Connects from one address."""

    def __init__(self, address: str) -> None:
        self._address = address
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, source_address=(self._address, 0), **kwargs)


def calling_from(address: str) -> requests.Session:
    """Return a session whose requests come from this address."""
    session = requests.Session()
    session.mount("http://", _From(address))
    return session


def loopback_addresses() -> Iterator[str]:
    """Yield addresses of this machine, each once."""
    return (str(address) for address in ip_network("127.66.0.0/16").hosts())
