"""The local caller of `paddock up --open`: calls from this machine need no API key, and have an admin's rights.

The browsers of this machine run pages of strangers, which can send requests to loopback: by a name of their own that
leads there (DNS rebinding), or outright. So a request counts only if it names a loopback host and no page of another
host sent it, and one that a proxy passed on is not of this machine. A request with a key is held to that key alone.
Source: WHATWG Fetch, "Origin header"; W3C Fetch Metadata Request Headers; RFC 9110, section 7.6.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from ipaddress import ip_address
from socket import AF_INET, AF_INET6, socket
from urllib.parse import urlsplit

from starlette.types import Scope

from accounts.protocol.records import AccessRecord
from gateway.access.directory import Directory
from gateway.call import Principal
from gateway.errors import NotLocal
from gateway.settings import GatewaySettings

LOCAL_RECORD = AccessRecord(name="local", sha256="0" * 64, admin=True)
"""What the local caller counts as in logs, limits and usage. No key has this hash."""
LOOPBACK_NAMES = frozenset({"localhost", "localhost."})
PROXIED = frozenset({b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip"})
"""Headers that only proxies add."""
WARNING = "every program and every user of this machine may call this gateway without a key, as an admin"


class OpenRefused(ValueError):
    """`open` can't be had with the other settings; the message says why, and what to do."""


class LocalCaller:
    """Knows requests of this machine, and whose they are."""

    def __init__(self, directory: Directory) -> None:
        """`directory`: has the limits of the local caller's team."""
        self._directory = directory
        self._version = -1
        self._made = Principal("", "", frozenset(), admin=False)

    def principal(self, scope: Scope) -> Principal:
        """Return the caller of a request without a key. Raises NotLocal."""
        if why := _why_not_local(scope):
            raise NotLocal(
                f"This gateway is open to its own machine only (--open): {why}. Call it as localhost or 127.0.0.1 from "
                "this machine, or send an API key."
            )
        if self._version != self._directory.version:
            self._version = self._directory.version
            self._made = replace(self._directory.principal(LOCAL_RECORD), of_settings=True)
        return self._made


def check_open(settings: GatewaySettings, environment: Mapping[str, str], listeners: Iterable[socket] = ()) -> None:
    """Check that `open` lets in nobody but this machine's own. `listeners`: the sockets that are listened on, as far as
    they are there. Raises OpenRefused."""
    if not settings.open:
        return
    remedy = "leave --open out, and give callers keys"
    if not is_loopback(settings.host):
        raise OpenRefused(
            f"--open lets everybody in without a key, so it is for loopback only, and --host {settings.host} can be "
            f"reached from other machines; {remedy}, or leave --host out"
        )
    if settings.uds is not None:
        raise OpenRefused(f"--open is for a port on loopback, and --uds {settings.uds} is none; leave one of them out")
    if settings.trusted_proxies:
        raise OpenRefused(f"--open is for this machine alone, and trusted_proxies pass on calls of others; {remedy}")
    if "KUBERNETES_SERVICE_HOST" in environment:
        raise OpenRefused(f"--open is for one's own machine, and this is a pod of Kubernetes; {remedy}")
    for listener in listeners:
        name = listener.getsockname()
        if listener.family not in (AF_INET, AF_INET6) or not is_loopback(name[0]):
            raise OpenRefused(f"--open is for loopback only, and the gateway listens on {name}; {remedy}")


def is_loopback(host: str) -> bool:
    """Return whether an address, or a host's name, is this machine's own whoever looks it up."""
    if host.lower() in LOOPBACK_NAMES:
        return True
    try:
        found = ip_address(host)
    except ValueError:
        return False
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


def _why_not_local(scope: Scope) -> str:
    """Return why a request is not this machine's own; empty: it is."""
    headers = dict[bytes, bytes](scope["headers"])
    client = scope["client"][0] if scope.get("client") else ""
    if not is_loopback(client):
        return f"it was called from {client or 'a socket without an address'}"
    if passed_on := sorted(PROXIED.intersection(headers)):
        return f"the header `{passed_on[0].decode()}` says that a proxy passed the request on"
    for name in (b"host", b"origin"):
        if len(given := [value for key, value in scope["headers"] if key == name]) > 1:
            return f"the request has {len(given)} headers `{name.decode()}`"
    host = headers.get(b"host", b"").decode("latin-1")
    if not _names_loopback(f"//{host}"):
        return f"`Host: {host}` is the name of another" if host else "the request has no header `Host`"
    origin = headers.get(b"origin")
    if origin is None:
        is_of_other = headers.get(b"sec-fetch-site") == b"cross-site"
        return "a page of another address sent the request" if is_of_other else ""
    shown = origin.decode("latin-1")
    return "" if _names_loopback(shown) else f"a page of `{shown}` sent the request"


def _names_loopback(url: str) -> bool:
    try:
        named = urlsplit(url)
        return named.username is None and is_loopback(named.hostname or "")
    except ValueError:
        return False
