"""Looks up the addresses of host names, and connects to hosts by name. A lookup that hangs holds up nothing else.

An event loop looks names up in a few threads: uvloop lets two slow lookups run at once, each goes on when its caller
has given up, and the process waits for them when it ends. While a name server hangs, nothing could be reached by any
name. Here a name has one lookup at a time, in a thread that nobody waits for when the process ends. A lookup that takes
very long may never return (its thread waits for a name server that has forgotten it), so others are begun beside it.
"""

from __future__ import annotations

import _thread
import asyncio
import ipaddress
import math
import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TypeVar

LATE_S = 0.25
"""Seconds from the begin of a lookup after which the addresses that the last one found are used. Half of the shortest
time that a caller has for a connection: one Sentinel's half second."""
MAX_THREADS = 64
"""Maximum number of lookups that run at once; others wait. Workers reached by names need a lookup each."""
AGAIN_S = 30.0
"""Seconds after which another lookup of a name is begun beside one that has not returned. The system's own bound for
one name server is 10 s by default."""
MAX_THREADS_OF_NAME = 3
"""Maximum number of lookups of one name that run at once."""
MAX_NAMES = 4096
"""Maximum number of names whose addresses are remembered: more than a fleet has workers."""

NO_SUCH_NAME = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""Error numbers by which a name server says that a name has no address, so that its old ones hold no longer."""

Addresses = tuple[str, ...]
"""Numeric addresses, of IPv4 or IPv6, in the order in which to try them."""
ConnectedT = TypeVar("ConnectedT")
ProtocolT = TypeVar("ProtocolT", bound=asyncio.BaseProtocol)


class _Lookup:
    """One lookup of a name."""

    def __init__(self, host: str) -> None:
        self.host = host
        self.begun_at = time.monotonic()
        self.in_thread_since = math.inf
        """time.monotonic() when a thread began it; infinite: it waits for a thread."""
        self.found: Future[Addresses] = Future()
        self.found.set_running_or_notify_cancel()  # so that a caller who gives up does not cancel it for the others


class Resolver:
    """Looks up host names for all event loops of a process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, Addresses] = {}
        """Name -> the addresses found last; the name that was looked up longest ago comes first."""
        self._under_way: dict[str, _Lookup] = {}
        """Name -> its latest lookup, unless that has ended."""
        self._num_of: Counter[str] = Counter()
        """Name -> number of its lookups that have not ended."""
        self._waiting: deque[_Lookup] = deque()
        """Lookups that no thread has begun."""
        self._num_threads = 0

    async def addresses(self, host: str) -> Addresses:
        """Return a host's addresses; a numeric address is its own. If the lookup takes longer than LATE_S, or fails,
        the addresses found last are returned. If there are none, this waits for as long as the lookup takes: bound it.

        Raises OSError if the host has no address, or none is known and the lookup fails."""
        if _is_numeric(host):
            return (host,)
        lookup, known = self._lookup(host)
        try:
            async with asyncio.timeout(lookup.begun_at + LATE_S - time.monotonic() if known else None):
                return await asyncio.wrap_future(lookup.found)
        except TimeoutError:
            if not known:
                raise
            return known

    def _lookup(self, host: str) -> tuple[_Lookup, Addresses]:
        """Return the host's latest lookup, begun now if none is under way, and the addresses found last."""
        with self._lock:
            known = self._known.get(host, ())
            lookup = self._under_way.get(host)
            if lookup is not None and not self._may_hang(lookup):
                return lookup, known
            lookup = self._under_way[host] = _Lookup(host)
            self._num_of[host] += 1
            self._waiting.append(lookup)
            if self._num_threads == MAX_THREADS:
                return lookup, known
            try:
                # `threading.Thread.start` would wait for the thread: for ever, if memory is short just then.
                _thread.start_new_thread(self._work, ())
                self._num_threads += 1
                return lookup, known
            except RuntimeError as error:
                self._waiting.remove(lookup)
                failed = OSError(f"no thread can be started to look up {host!r}: {error}")
        self._end(lookup, failed)
        return lookup, known

    def _may_hang(self, lookup: _Lookup) -> bool:
        """Return whether another lookup of the name should be begun beside this one."""
        hangs = time.monotonic() - lookup.in_thread_since > AGAIN_S
        return hangs and self._num_of[lookup.host] < MAX_THREADS_OF_NAME

    def _work(self) -> None:
        """Do the lookups that wait, one after the other."""
        while True:
            with self._lock:
                if not self._waiting:
                    self._num_threads -= 1
                    return
                lookup = self._waiting.popleft()
                lookup.in_thread_since = time.monotonic()
            try:
                found = _look_up(lookup.host)
            except Exception as error:  # noqa: BLE001 - callers get it: the thread must not end with them waiting
                self._end(lookup, error)
            else:
                self._end(lookup, found)

    def _end(self, lookup: _Lookup, outcome: Addresses | Exception) -> None:
        with self._lock:
            self._num_of[lookup.host] -= 1
            if not self._num_of[lookup.host]:
                del self._num_of[lookup.host]
            if self._under_way.get(lookup.host) is lookup:
                del self._under_way[lookup.host]
            known = self._known.pop(lookup.host, ())
            if isinstance(outcome, tuple):
                known = outcome
            elif isinstance(outcome, socket.gaierror) and outcome.errno in NO_SUCH_NAME:
                known = ()
            if known:
                self._known[lookup.host] = known
            if len(self._known) > MAX_NAMES:
                del self._known[next(iter(self._known))]
        if known:
            lookup.found.set_result(known)
        else:
            lookup.found.set_exception(outcome if isinstance(outcome, Exception) else OSError("no addresses"))


RESOLVER = Resolver()
"""The resolver of this process: whoever makes a connection shares its lookups, threads and addresses."""


async def connect_tcp(
    protocol: Callable[[], ProtocolT], host: str, port: int, *, tls: ssl.SSLContext | bool | None = None
) -> tuple[asyncio.Transport, ProtocolT]:
    """Connect to a host, as the event loop's `create_connection` does, but with the addresses from RESOLVER. A
    certificate must be for `host`, not for its address. Raises OSError if no address can be connected to."""
    loop = asyncio.get_running_loop()
    name = host if tls else None
    return await first_connected(
        await RESOLVER.addresses(host),
        lambda address: loop.create_connection(protocol, address, port, ssl=tls or None, server_hostname=name),
    )


async def first_connected(addresses: Addresses, connect: Callable[[str], Awaitable[ConnectedT]]) -> ConnectedT:
    """Try to connect to each address in order, and return the first connection. Raises OSError if there is none."""
    errors: list[OSError] = []
    for address in addresses:
        try:
            return await connect(address)
        except ssl.SSLError:  # the host is reached, and is not what it should be
            raise
        except OSError as error:
            errors.append(error)
    if len({error.errno for error in errors}) == 1:
        raise errors[0]
    raise OSError("; ".join(f"{address}: {error}" for address, error in zip(addresses, errors, strict=True)))


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _look_up(host: str) -> Addresses:
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except ValueError as error:  # a label that is empty or too long
        raise OSError(f"{host!r} is no name of a host: {error}") from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in entries))
