"""Counts and bounds the connections of one server, in all and per address, and closes idle ones to make room.

Within the bounds a connection may stay idle for as long as the server lets it. When a bound is reached, a new
connection takes the place of the one that has been idle for longest. If none is idle, the new connection is "beyond the
bound" and gets one answer only: a probe is answered as usual, any other request is refused. Some descriptors are
reserved for connections beyond the bound. A "head" is a request's first line and its headers.
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
"""Default maximum of connections, if there are enough descriptors; an idle connection takes about 10 KiB."""
OWN_DESCRIPTORS = 256
"""Descriptors kept free for Redis, workers, logs and files; a quarter of all descriptors where that is less."""
MAX_BEYOND = 64
"""Maximum number of connections beyond a bound at a time, or a sixteenth of all descriptors where that is less; at
this number no more are accepted."""
IDLE_S = 1.0
"""Seconds without a request until a connection counts as idle: a new one's first request may take so long to come."""
BEYOND_S = 0.1
"""`IDLE_S` for a connection beyond a bound. It is shorter, because other connections wait for its place."""
LOOKED_AT = 256
"""Maximum number of connections, the longest idle first, among which one of a given address is searched for."""
STARVED_S = 0.2
"""Seconds after descriptors ran out for which new connections count as beyond the bound, since they were accepted with
a reserved descriptor."""
FREED_AT_ONCE = 8
"""Maximum number of idle connections closed at once when no descriptor is left."""
MAX_HEADS_BYTES = 32 << 20
"""Maximum bytes of all unfinished heads together; above it connections with large ones are closed (`Unfinished`)."""
MAX_LONG_HEADS_BYTES = 32 << 20
"""Maximum bytes of the long heads of all requests that wait or are being answered; more are refused with 431."""
LONG_HEAD_BYTES = 16 << 10
"""A head that takes more bytes of memory than this is a long head. Few clients send a quarter of that."""


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """The bounds of one server. `most`: number of connections. `reserved`: paths that are answered even on connections
    beyond a bound. `unread_s`: seconds for which a peer may leave its answers unread once its buffers are full."""

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
        """Return the bounds of a process with `num_descriptors`. `most` 0: up to `MAX_CONNECTIONS`, as far as the
        descriptors suffice. `address_share`: share of all connections that one address may have."""
        room = num_descriptors - min(OWN_DESCRIPTORS, num_descriptors // 4) - 2 * _beyond_of(num_descriptors)
        most = max(1, min(most or MAX_CONNECTIONS, room))
        return cls(most, max(1, int(most * address_share)), num_descriptors, reserved, unread_s=unread_s)


def _beyond_of(num_descriptors: int) -> int:
    return max(1, min(MAX_BEYOND, num_descriptors // 16))


def _ignore(reason: str) -> None:
    """Do nothing. The default of `Connections.on_beyond`."""


def network_of(address: str) -> str:
    """Return the address that connections are counted by; for IPv6 its /64, all of which belongs to one peer."""
    if ":" not in address:
        return address
    given = IPv6Address(address.partition("%")[0])
    return str(given.ipv4_mapped or IPv6Network((given, 64), strict=False))


class Verdict(Enum):
    """The decision about a new connection."""

    WITHIN = auto()
    BEYOND = auto()
    REFUSED = auto()
    """The connection is closed at once: its address has too many already, and many others are beyond the bound."""


class Closable(Protocol):
    """A connection that can be closed to make room."""

    def make_room(self) -> None:
        """Close the connection at once."""

    def cut_unfinished(self) -> None:
        """Close the connection: unfinished heads or messages take too many bytes, and its own is among the largest."""


class LongHeads:
    """Counts the bytes of the long heads of requests under way. Short heads are not counted, so that others' long
    heads never keep out a request with a short one."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes: dict[Closable, int] = {}
        self._total = 0

    def hold(self, connection: Closable, num_bytes: int) -> bool:
        """Count the connection's new head instead of its last one. If there is no room, count neither; return False."""
        self.release(connection)
        if num_bytes <= LONG_HEAD_BYTES:
            return True
        if self._total + num_bytes > self._max_bytes:
            return False
        self._bytes[connection] = num_bytes
        self._total += num_bytes
        return True

    def replaced(self, connection: Closable, by: Closable) -> None:
        """Count the connection's head as that of `by` from now on: the WebSocket that the connection has become."""
        num_bytes = self._bytes.pop(connection, 0)
        if num_bytes:
            self._bytes[by] = num_bytes

    def release(self, connection: Closable) -> None:
        """Stop counting the connection's head: its request is answered, or the connection is gone."""
        self._total -= self._bytes.pop(connection, 0)


class Unfinished:
    """Counts and bounds the bytes of unfinished heads or messages on all connections, by holder (address or caller)."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held: dict[str, OrderedDict[Closable, int]] = {}
        """Address or caller -> connection -> bytes of its unfinished head or message. Those begun first come first."""
        self._holder_of: dict[Closable, str] = {}
        self._totals: Counter[str] = Counter()
        self._total = 0

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all unfinished heads or messages."""
        return self._total

    def grew(self, connection: Closable, num_bytes: int, holder: str) -> None:
        """Count `num_bytes` more. While the sum is too high, close a connection of the holder with the most bytes: the
        oldest with at least the average of this holder's connections. A slow honest peer among many has less."""
        holder = self._holder_of.setdefault(connection, holder)
        held = self._held.setdefault(holder, OrderedDict())
        held[connection] = held.get(connection, 0) + num_bytes
        self._totals[holder] += num_bytes
        self._total += num_bytes
        while self._total > self._max_bytes:
            most = max(self._totals, key=self._totals.__getitem__)
            average = self._totals[most] / len(self._held[most])
            first = next(one for one, size in self._held[most].items() if size >= average)
            self.ended(first)
            first.cut_unfinished()

    def ended(self, connection: Closable) -> None:
        """Stop counting the connection's bytes: its head or message is complete, or never will be."""
        holder = self._holder_of.pop(connection, None)
        if holder is None:
            return
        num_bytes = self._held[holder].pop(connection)
        self._total -= num_bytes
        self._totals[holder] -= num_bytes
        if not self._held[holder]:
            del self._held[holder], self._totals[holder]


@dataclass(slots=True)
class _Known:
    address: str
    beyond: bool


class Connections:
    """Keeps the open connections of one server. Methods ignore connections that are not, or no longer, among them."""

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
        self.num_coming = 0
        """Number of accepted connections that have not come yet: the acceptor adds them, `came` takes them off."""
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
        """Whether so many connections are beyond the bound that each is closed as soon as it has its answer."""
        return self._num_beyond > self._max_beyond // 2

    def came(self, connection: Closable, address: str, descriptor: int) -> Verdict:
        """Return the verdict on a new connection; may close an idle one to make room. Count it unless it is refused.

        `descriptor`: its socket's. The system assigns the lowest free number, so a high one shows that few are left."""
        self.num_coming = max(0, self.num_coming - 1)
        bounds, beyond, address = self.bounds, False, network_of(address)
        # Peers on a Unix socket have no address.
        too_many = (
            address != ""
            and bounds.most_per_address < bounds.most
            and self._per_address[address] >= bounds.most_per_address
        )
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

    def shook_hands(self, handshake: Closable, connection: Closable) -> Verdict:
        """Count the connection in place of its TLS handshake, which is complete; return the verdict on it."""
        known = self._known.pop(handshake, None)
        if known is None:
            return Verdict.REFUSED  # it was closed meanwhile, to make room
        for waiting in (self._unused, self._beyond):
            waiting.pop(handshake, None)
        self._known[connection] = known
        (self._beyond if known.beyond else self._unused)[connection] = monotonic()
        return Verdict.BEYOND if known.beyond else Verdict.WITHIN

    def address_of(self, connection: Closable) -> str:
        """Return the address that the connection is counted by; empty if the connection is not known any more."""
        known = self._known.get(connection)
        return "" if known is None else known.address

    def busy(self, connection: Closable) -> None:
        """Record that the connection has received a complete head."""
        for waiting in (self._unused, self._idle, self._beyond):
            waiting.pop(connection, None)
        self._heads.ended(connection)

    def idle(self, connection: Closable) -> None:
        """Record that all the connection's requests are answered. From now on it may be closed to make room."""
        known = self._known.get(connection)
        if known is not None:
            (self._beyond if known.beyond else self._idle)[connection] = monotonic()

    def head_grew(self, connection: Closable, num_bytes: int) -> None:
        """Count more bytes of an unfinished head; may close connections with the largest ones (`Unfinished`)."""
        if (known := self._known.get(connection)) is not None:
            self._heads.grew(connection, num_bytes, known.address)

    def replaced(self, connection: Closable, by: Closable) -> None:
        """Record that the connection has become a WebSocket, which the asyncio protocol `by` serves from now on."""
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
        """Count new connections as beyond the bound for `STARVED_S`, since no descriptor is left."""
        self._starved_until = monotonic() + STARVED_S

    def make_room(self) -> None:
        """Close connections beyond the bound that sent no head or are answered. If descriptors ran out lately, close
        some idle connections too. Call it after the loop has read: a peer that has sent a request is not idle."""
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
