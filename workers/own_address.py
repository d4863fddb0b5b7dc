"""Turns the address that a local process listens on into one that this machine can call it at."""

from __future__ import annotations

HOSTS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to look, not where to listen


def host_of(host: str) -> str:
    """Return the host to call; a process that listens on all addresses is called at the loopback address."""
    return HOSTS.get(host, host)


def url_of(host: str, port: int) -> str:
    found = host_of(host)
    return f"http://{f'[{found}]' if ':' in found else found}:{port}"
