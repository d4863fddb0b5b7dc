"""By which address a machine calls a process of its own, of which it knows on what that listens."""

from __future__ import annotations

HOSTS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to look, not where to listen


def host_of(host: str) -> str:
    """Who listens on all of a machine's addresses is asked by its own."""
    return HOSTS.get(host, host)


def url_of(host: str, port: int) -> str:
    found = host_of(host)
    return f"http://{f'[{found}]' if ':' in found else found}:{port}"
