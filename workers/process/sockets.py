"""Listening sockets and their URLs, and socket options by which a process learns that its peer's machine is gone.

A machine without power sends no FIN. The kernel asks a silent peer whether it is there, and ends a connection whose
bytes nobody acknowledges. Both ends see an ordinary lost connection then; gateways come back with `Last-Event-ID`, so a
network that was away loses nothing.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

IDLE_S = 2
"""Seconds without a byte after which the kernel probes the peer; KEEP_ALIVE_INTERVAL_S is no longer."""
AGAIN_S = 1
ASKED = 3
UNACKNOWLEDGED_S = 4
"""Seconds that bytes may go unacknowledged: below a worker's grace for gateways, far above a bad network's worst."""


def tcp_options() -> Mapping[int, int]:
    """Return the options of level IPPROTO_TCP, as far as this system has them."""
    wanted = {
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": AGAIN_S,
        "TCP_KEEPCNT": ASKED,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_S * 1000,
    }
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def notice_dead_peer(sock: Any) -> None:
    """Set the options on a socket, or on a transport's view of one. A listening socket hands them on to those that it
    accepts. Sockets of other families stay as they are."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # one that has just closed takes none
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in tcp_options().items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a new socket for one of `getaddrinfo`'s addresses (aiohttp's `socket_factory`)."""
    family, kind, protocol = address[:3]
    sock = socket.socket(family, kind, protocol)
    notice_dead_peer(sock)
    return sock


class PortTaken(OSError):
    """The address to listen on is in use."""


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0: any free one. Raises PortTaken, or OSError for an unusable address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_dead_peer(sock)
        sock.bind((host, port))
        sock.listen(1024)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} of {host} is in use; choose another with --worker-port") from error
        raise
    sock.setblocking(False)
    return sock


def address_of(sock: socket.socket) -> str:
    """Return the URL at which other machines reach a socket; if it listens on all addresses, with the host's own."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        with suppress(OSError):  # a host that cannot resolve its own name says so by being unreachable
            host = socket.gethostbyname(socket.gethostname())
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


HOSTS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to look, not where to listen


def host_of(host: str) -> str:
    """Return the host to call; a process that listens on all addresses is called at the loopback address."""
    return HOSTS.get(host, host)


def url_of(host: str, port: int) -> str:
    found = host_of(host)
    return f"http://{f'[{found}]' if ':' in found else found}:{port}"
