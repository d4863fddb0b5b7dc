"""Makes listening sockets and their URLs, and sets socket options by which a process notices a peer that is gone.

A machine that lost its power sends no FIN. With these options the kernel probes a silent peer, and closes a connection
whose bytes are not acknowledged. The process then sees an ordinary lost connection; gateways reconnect with
`Last-Event-ID`, so a network failure loses no events.
"""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

IDLE_S = 2
"""Seconds of silence after which the kernel probes the peer; at least `KEEP_ALIVE_INTERVAL_S` of the worker wire."""
AGAIN_S = 1
ASKED = 3
"""Number of probes, `AGAIN_S` seconds apart, after which a peer that answers none is taken to be gone."""
UNACKNOWLEDGED_S = 4
"""Seconds that sent bytes may be unacknowledged: under the default `gateway_grace_s`, more than bad networks take."""


def tcp_options() -> Mapping[int, int]:
    """Return the options for noticing a dead peer that this system has (level IPPROTO_TCP), as option -> value."""
    wanted = {
        "TCP_KEEPIDLE": IDLE_S,
        "TCP_KEEPINTVL": AGAIN_S,
        "TCP_KEEPCNT": ASKED,
        "TCP_USER_TIMEOUT": UNACKNOWLEDGED_S * 1000,
    }
    return {getattr(socket, name): value for name, value in wanted.items() if hasattr(socket, name)}


def notice_dead_peer(sock: Any) -> None:
    """Set keep-alive and `tcp_options` on a socket, or on asyncio's wrapper of one. If it is a listening socket, the
    sockets that it accepts inherit these options. Sockets of families other than IPv4 and IPv6 are left unchanged."""
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with suppress(OSError):  # the socket may have been closed meanwhile
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in tcp_options().items():
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


def watched_socket(address: tuple[Any, ...]) -> socket.socket:
    """Return a new socket that notices a dead peer, for aiohttp. `address`: an entry of the result of `getaddrinfo`."""
    family, kind, protocol = address[:3]
    sock = socket.socket(family, kind, protocol)
    notice_dead_peer(sock)
    return sock


class PortTaken(OSError):
    """The address to listen on is in use."""


ASKED_S = 2.0
"""Seconds within which a Unix socket's server takes a connection; one that does not is taken to live as well."""
MAX_PATH_BYTES = 103
"""Maximum bytes of a Unix socket's path that every system can connect to (macOS; Linux has 107)."""
BACKLOG = 2048
"""Maximum number of connections that wait to be accepted."""


def listen(host: str, port: int, *, watched: bool = True) -> socket.socket:
    """Return a listening socket; port 0: any free port; a host's name means its IPv4 address. `watched`: whether the
    connections notice a dead peer. Raises PortTaken, or OSError for an unusable address."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if watched:
            notice_dead_peer(sock)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise PortTaken(f"port {port} on {host} is in use") from error
        raise
    sock.setblocking(False)
    return sock


def listen_unix(path: Path, mode: int) -> socket.socket:
    """Return a socket that listens at this path, with these permissions; what a server left there that is gone is
    replaced. Raises PortTaken if a server listens there, or OSError with a message that tells what to do.

    The socket gets its path when it has its permissions and listens, so nobody is refused or let in meanwhile."""
    _check_free(path)
    sock, own = socket.socket(socket.AF_UNIX), path.with_name(f".{os.getpid():x}~")
    try:
        own.unlink(missing_ok=True)
        sock.bind(str(own))
        own.chmod(mode)
        sock.listen(BACKLOG)
        own.replace(path)
    except OSError as error:
        sock.close()
        with suppress(OSError):
            own.unlink(missing_ok=True)
        told = error.strerror or str(error)
        raise OSError(
            f"can't listen on the Unix socket {path}: {told}; give a short path in a folder of yours"
        ) from None
    sock.setblocking(False)
    return sock


def _check_free(path: Path) -> None:
    """Raise PortTaken if a server listens at this path, OSError if no socket can lie there."""
    if len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise OSError(f"{path} has more than {MAX_PATH_BYTES} bytes, too many for a socket; give a short path")
    try:
        kind = path.lstat().st_mode
    except OSError:
        return  # there is nothing, or nothing that can be looked at, which `bind` will say
    if not stat.S_ISSOCK(kind):
        raise OSError(f"{path} is there and is no socket; give another path for the socket")
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(ASKED_S)
        try:
            asking.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise PortTaken(f"the Unix socket {path} may be in use ({error.strerror or error})") from None
    raise PortTaken(f"the Unix socket {path} is in use")


class UnixPath:
    """The path of a Unix socket that this process listens on, from the time that it got it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode = path.lstat().st_ino

    def remove(self) -> None:
        """Remove the path, unless another server has taken it since."""
        with suppress(OSError):
            if self.path.lstat().st_ino == self._inode:
                self.path.unlink()


def address_of(sock: socket.socket) -> str:
    """Return the URL at which other machines reach a socket: with one of the host's addresses if it listens on all."""
    host, port = sock.getsockname()[:2]
    if ipaddress.ip_address(host).is_unspecified:
        with suppress(OSError):  # if the host can't resolve its own name, the URL keeps an unreachable address
            host = socket.gethostbyname(socket.gethostname())
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


HOSTS = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - where to look, not where to listen


def host_of(host: str) -> str:
    """Return the host at which to call a process that listens on `host`: loopback if it listens on all addresses."""
    return HOSTS.get(host, host)


def url_of(host: str, port: int, scheme: str = "http") -> str:
    found = host_of(host)
    return f"{scheme}://{f'[{found}]' if ':' in found else found}:{port}"
