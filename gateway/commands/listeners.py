"""Opens the sockets that `paddock up` hands to its gateways, and decides how many gateways there are."""

from __future__ import annotations

import errno
import math
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from workers.http_server.acceptor import SharedCounts
from workers.process import sockets
from workers.process.sockets import PortTaken, UnixPath

WORKERS_PER_GATEWAY = 4


@dataclass(frozen=True, slots=True)
class Listeners:
    """The sockets that the gateways inherit. They stay open here, so that no connection is refused or cut off while a
    gateway is started again or replaced."""

    shared: socket.socket
    """On the port, or the Unix socket, that callers know."""
    own: tuple[socket.socket, ...]
    """On a port of each gateway's own, for probes and metrics; empty: there is one gateway, which needs none."""

    counts: IO[bytes] | None
    """The file in which several gateways count their connections."""
    path: UnixPath | None = None
    """The path of the shared one, if it is a Unix socket."""
    admin: socket.socket | None = None
    """On the port for admins, which the gateways share as well; None: there is no such port."""

    @property
    def port(self) -> int | None:
        """The port that callers know; None: they know a Unix socket."""
        return None if self.path is not None else port_of(self.shared)

    def descriptors(self, number: int) -> tuple[int, ...]:
        """Return the descriptors that gateway `number` inherits."""
        return (self.shared.fileno(), *(one.fileno() for one in self.own[number : number + 1]))

    def targets(self, host: str) -> list[str]:
        """Return the addresses, host:port, of each gateway's own port."""
        return [urlsplit(sockets.url_of(host, port_of(one))).netloc for one in self.own]

    def close(self) -> None:
        if self.path is not None:
            self.path.remove()
        for one in (self.shared, *self.own, *([] if self.admin is None else [self.admin])):
            one.close()
        if self.counts is not None:
            self.counts.close()


def port_of(listener: socket.socket) -> int:
    port: int = listener.getsockname()[1]
    return port


def listen(
    host: str, port: int, num_gateways: int, uds: Path | None = None, uds_mode: int = 0o660, admin_port: int = 0
) -> Listeners:
    """Return sockets that listen on the port (0: any free one), or on the Unix socket `uds`, and, for several gateways,
    on a port of each one's own: the next ones or, where these are in use, any free ones. `admin_port`: the port for
    admins; 0: none. Raises PortTaken; OSError if `host` is no address of this machine, or `uds` no path for a
    socket."""
    if uds is not None:
        shared, path = _listen_unix(uds, uds_mode), UnixPath(uds)
    else:
        shared, path = _listen(host, port), None
        port = port_of(shared)
    admin = _listen(host, admin_port, "--admin-port") if admin_port else None
    own = [_listen_near(host, port + 1 + number) for number in range(num_gateways if num_gateways > 1 else 0)]
    return Listeners(shared, tuple(own), SharedCounts.new_file(len(own)) if own else None, path, admin)


def _listen_unix(uds: Path, mode: int) -> socket.socket:
    try:
        return sockets.listen_unix(uds, mode)
    except PortTaken as error:
        raise PortTaken(f"{error}; give another with --uds") from None


def _listen(host: str, port: int, flag: str = "--port") -> socket.socket:
    try:
        return sockets.listen(host, port, watched=False)
    except PortTaken as error:
        raise PortTaken(f"{error}; give another with {flag}") from None
    except OSError as error:
        if error.errno == errno.EACCES:
            raise PortTaken(f"port {port} on {host} needs privileges; give another with {flag}") from None
        meant = urlsplit(host if "//" in host else f"//{host}")
        is_more = meant.hostname and (meant.scheme or (host.count(":") == 1 and meant.netloc))
        remedy = (
            f"give --host {meant.hostname}, and the port with --port"
            if is_more
            else "give an address of this machine with --host"
        )
        raise OSError(f"can't listen on {host}: {error.strerror}; {remedy}") from None


def _listen_near(host: str, port: int) -> socket.socket:
    try:
        return sockets.listen(host, port, watched=False)
    except (OSError, OverflowError):
        return sockets.listen(host, 0, watched=False)


def number_of_gateways(asked: int, num_workers: int, cores: int) -> int:
    """Return how many gateways run; where 0 is asked for, a few: streaming for four workers can take half of a core."""
    return asked or max(1, min(math.ceil(num_workers / WORKERS_PER_GATEWAY), cores // 2))
