"""Counts and bounds the connections of one server, in all and per address, and closes idle ones to make room.

Within the bounds a connection may stay idle for as long as the server lets it. Where a bound is reached, the one that
has been idle for longest is closed for the new one. If none is idle, the new one is beyond the bound and gets one
answer only: a probe is answered as usual, any other request is told that there is no room. Some descriptors are
reserved for connections beyond the bound.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from ipaddress import IPv6Address, IPv6Network
from itertools import islice
from time import monotonic
from typing import Protocol

MAX_CONNECTIONS = 8192
"""Most connections unless a setting or the descriptors allow others; an idle one takes about 10 KiB."""
OWN_DESCRIPTORS = 256
"""Descriptors kept for Redis, workers, logs and files, or a quarter of all where that is less."""
MAX_BEYOND = 64
"""Most connections beyond a bound at a time, or a sixteenth of all descriptors where that is less."""
IDLE_S = 1.0
"""Seconds before a connection counts as idle: a new one has its first request on the way."""
BEYOND_S = 0.1
"""The same for a connection beyond a bound, while others beyond it wait for its place."""
LOOKED_AT = 256
"""Connections, longest idle first, among which one of a certain address is looked for."""
STARVED_S = 0.2
"""Seconds for which new connections count as beyond the bound once descriptors ran out, so that those accepted with a
reserved one do."""
FREED_AT_ONCE = 8
"""Most idle connections closed at once where no descriptor is left."""
MAX_HEADS_BYTES = 32 << 20
"""Bytes of all request heads together that have begun and not ended."""
MAX_LONG_HEADS_BYTES = 32 << 20
"""Bytes of all long heads together whose requests are being answered."""
LONG_HEAD_BYTES = 16 << 10
"""Bytes in memory beyond which a head is a long one: few clients send a quarter of that."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The bounds of one server. `reserved`: paths that are answered beyond the bounds, too. `unread_s`: seconds that a
    peer may read nothing of what was written for it, once its buffers are full.
    """

    most: int
    most_per_address: int
    num_descriptors: int
    reserved: frozenset[bytes] = frozenset()
    max_heads_bytes: int = MAX_HEADS_BYTES
    unread_s: float = math.inf
    max_long_heads_bytes: int = MAX_LONG_HEADS_BYTES

    @classmethod
    def of(
        cls,
        num_descriptors: int,
        most: int = 0,
        address_share: float = 1.0,
        reserved: frozenset[bytes] = frozenset(),
        unread_s: float = math.inf,
    ) -> ConnectionBounds:
        """Return the bounds of a process with so many descriptors; `most` 0: as many as it can, within reason."""
        room = num_descriptors - min(OWN_DESCRIPTORS, num_descriptors // 4) - 2 * _beyond_of(num_descriptors)
        most = max(1, min(most or MAX_CONNECTIONS, room))
        return cls(most, max(1, int(most * address_share)), num_descriptors, reserved, unread_s=unread_s)


def _beyond_of(num_descriptors: int) -> int:
    return max(1, min(MAX_BEYOND, num_descriptors // 16))


def _ignore(reason: str) -> None:
    """Do nothing: nobody counts."""


def network_of(address: str) -> str:
    """Return what counts as one address: with IPv6 its /64, all of which belongs to one peer."""
    if ":" not in address:
        return address
    given = IPv6Address(address.partition("%")[0])
    return str(given.ipv4_mapped or IPv6Network((given, 64), strict=False))


class Verdict(Enum):
    """The decision about a new connection."""

    WITHIN = auto()
    BEYOND = auto()
    REFUSED = auto()
    """It is closed at once: its address has too many already, and many others are beyond the bound."""


class Closable(Protocol):
    """A connection that can be closed to make room."""

    def make_room(self) -> None:
        """Close the connection at once."""


class LongHeads:
    """Counts the bytes of the long heads of requests under way. Short heads are not counted: no request with one waits
    for others' long heads.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: dict[Closable, int] = {}
        self._total = 0

    def hold(self, connection: Closable, num_bytes: int) -> bool:
        """Count the connection's head, in place of the one before; return False where there is no room for it."""
        self.release(connection)
        if num_bytes <= LONG_HEAD_BYTES:
            return True
        if self._total + num_bytes > self._max_bytes:
            return False
        self._bytes[connection] = num_bytes
        self._total += num_bytes
        return True

    def replaced(self, connection: Closable, by: Closable) -> None:
        """Count the head as that of the other connection."""
        num_bytes = self._bytes.pop(connection, 0)
        if num_bytes:
            self._bytes[by] = num_bytes

    def release(self, connection: Closable) -> None:
        """Count the connection's head no more: its request is answered, or the connection is gone."""
        self._total -= self._bytes.pop(connection, 0)


class Unfinished:
    """Counts the bytes of unfinished heads or messages on all connections; the one that began first makes room."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: OrderedDict[Closable, int] = OrderedDict()
        self._total = 0

    def grew(self, connection: Closable, num_bytes: int) -> None:
        """Count so many more bytes; close the connections that began first while there are too many."""
        self._bytes[connection] = self._bytes.get(connection, 0) + num_bytes
        self._total += num_bytes
        while self._total > self._max_bytes:
            first = next(iter(self._bytes))
            self.ended(first)
            first.make_room()

    def ended(self, connection: Closable) -> None:
        """Count the connection's bytes no more: what they belong to is whole, or will never be."""
        self._total -= self._bytes.pop(connection, 0)


@dataclass(slots=True)
class _Known:
    address: str
    beyond: bool


class Connections:
    """The open connections. Methods ignore connections that are not known, or not any more."""

    def __init__(self, bounds: ConnectionBounds) -> None:
        self.bounds = bounds
        self._max_beyond = _beyond_of(bounds.num_descriptors)
        self._last_descriptor = bounds.num_descriptors - min(OWN_DESCRIPTORS, bounds.num_descriptors // 4)
        self._known: dict[Closable, _Known] = {}
        self._per_address: Counter[str] = Counter()
        # Connection -> time of its last change, the longest ago first.
        self._unused: OrderedDict[Closable, float] = OrderedDict()
        self._idle: OrderedDict[Closable, float] = OrderedDict()
        self._beyond: OrderedDict[Closable, float] = OrderedDict()
        self._num_beyond = 0
        self._heads = Unfinished(bounds.max_heads_bytes)
        self.long_heads = LongHeads(bounds.max_long_heads_bytes)
        self._starved_until = -math.inf
        self.on_beyond: Callable[[str], None] = _ignore
        """Called for each connection that comes beyond a bound, with the reason: `address`, `all` or `descriptors`."""

    @property
    def num_open(self) -> int:
        return len(self._known)

    @property
    def full(self) -> bool:
        """Whether no connection can be accepted, not even to refuse it."""
        return self._num_beyond >= self._max_beyond

    @property
    def pressed(self) -> bool:
        """Whether so many are beyond the bound that those that have their answer are closed at once."""
        return self._num_beyond > self._max_beyond // 2

    def came(self, connection: Closable, address: str, descriptor: int) -> Verdict:
        """Count a new connection, close another one for it if need be, and return the verdict.

        `descriptor`: the system gives the lowest that is free, so a high one shows that few are left.
        """
        bounds, beyond, address = self.bounds, False, network_of(address)
        too_many = bounds.most_per_address < bounds.most and self._per_address[address] >= bounds.most_per_address
        if too_many and not self._close_idle(address):
            if self._num_beyond >= self._max_beyond // 2:
                self.on_beyond("address")
                return Verdict.REFUSED
            beyond = True
        crowded = len(self._known) - self._num_beyond >= bounds.most
        few_left = descriptor >= self._last_descriptor
        no_room = ((crowded or few_left) and not self._close_idle()) or monotonic() < self._starved_until
        if beyond or no_room:
            self.on_beyond("address" if beyond else "all" if crowded else "descriptors")
        beyond = beyond or no_room
        self._known[connection] = _Known(address, beyond)
        self._num_beyond += beyond
        self._per_address[address] += 1
        (self._beyond if beyond else self._unused)[connection] = monotonic()
        return Verdict.BEYOND if beyond else Verdict.WITHIN

    def address_of(self, connection: Closable) -> str:
        """Return what counts as the connection's address; empty where it is not known any more."""
        known = self._known.get(connection)
        return "" if known is None else known.address

    def busy(self, connection: Closable) -> None:
        """Note that a whole head has come."""
        for waiting in (self._unused, self._idle, self._beyond):
            waiting.pop(connection, None)
        self._heads.ended(connection)

    def idle(self, connection: Closable) -> None:
        """Note that every request is answered. One beyond the bound has had its answer, and makes room for the next."""
        known = self._known.get(connection)
        if known is not None:
            (self._beyond if known.beyond else self._idle)[connection] = monotonic()

    def head_grew(self, connection: Closable, num_bytes: int) -> None:
        """Count more bytes of an unfinished head; where all have too many, the one that began first makes room."""
        if connection in self._known:
            self._heads.grew(connection, num_bytes)

    def replaced(self, connection: Closable, by: Closable) -> None:
        """Note that the connection's transport has another protocol now."""
        known = self._known.pop(connection, None)
        if known is not None:
            self._known[by] = known
            self.long_heads.replaced(connection, by)
        self.busy(connection)

    def gone(self, connection: Closable) -> None:
        known = self._known.pop(connection, None)
        if known is None:
            return
        self.busy(connection)
        self.long_heads.release(connection)
        self._num_beyond -= known.beyond
        self._per_address[known.address] -= 1
        if not self._per_address[known.address]:
            del self._per_address[known.address]

    def starve(self) -> None:
        """Count new connections as beyond the bound for a moment, since no descriptor is left."""
        self._starved_until = monotonic() + STARVED_S

    def make_room(self) -> None:
        """Close connections beyond the bound that sent no head or are answered; also idle ones if descriptors lack.

        Call it when what they may have sent has been read.
        """
        while self._close_first(self._beyond, BEYOND_S):
            pass
        if monotonic() < self._starved_until:
            any(not self._close_idle() for _ in range(FREED_AT_ONCE))

    def _close_idle(self, address: str | None = None) -> bool:
        return any(self._close_first(waiting, IDLE_S, address) for waiting in (self._unused, self._idle))

    def _close_first(self, waiting: OrderedDict[Closable, float], least_s: float, address: str | None = None) -> bool:
        before = monotonic() - least_s
        for connection, since in islice(waiting.items(), LOOKED_AT):
            if since > before:
                return False
            if address is None or self._known[connection].address == address:
                self._close(connection)
                return True
        return False

    def _close(self, connection: Closable) -> None:
        self.gone(connection)
        connection.make_room()
