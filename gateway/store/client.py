"""The Redis client, and the admission scripts as typed methods. Callers pass times in seconds; the scripts use Redis's
own clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from gateway.store.outage import reading
from gateway.store.packed import packed_team
from gateway.store.scripts import Script, ScriptSender, load_script
from workers.protocol import keys
from workers.protocol.heartbeat import PROTOCOL_VERSION, WorkerAddress
from workers.redis import link

NO_LOSS_MS = 0.01
"""Difference in cost, in ms, below which two workers count as equally good."""

UNFENCED = 0
"""Fencing token of a lease that Redis does not have yet."""

ANSWER_TIMEOUT_S = 2.0
"""Seconds within which Redis must reply, and within which a connection to it must be made."""


def connect(url: str) -> redis.asyncio.Redis:
    """Return a client for any URL of docs/redis.md. It connects on first use, and raises if no answer comes in time.

    After a dropped connection a command is sent once more, so running a script twice must do no harm. Raises
    BadRedisUrl."""
    return link.connect(url, timeout_s=ANSWER_TIMEOUT_S, retries=1)


@dataclass(frozen=True, slots=True)
class Lease:
    """One slot of one worker process, held by one call of one gateway."""

    id: str
    fence: int
    at: WorkerAddress
    kv_tokens: int = 0
    """KV cells that the call is predicted to take."""
    queue_ms: float = 0.0
    """Milliseconds that the call waited for the slot, including the time that admission itself took."""
    team: str = ""
    weight: float = 1.0
    """Weight of the team in fair shares."""
    overtaken: int = 0
    """How often a slot went to a ticket further back in the queue than the call's."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The predicted cost of placing a call on one worker."""

    worker: str
    cost_ms: float
    """Milliseconds from getting the slot to the first token."""
    other_ms: float
    """Milliseconds to the first token on the best other worker, including the wait for its slot."""
    kv_tokens: int
    burden_ms: float = 0.0
    """Milliseconds that other calls on this worker lose by the call's prefill (its burden). Not part of `cost_ms`."""
    other_burden_ms: float = 0.0
    """The burden on the best other worker. Not part of `other_ms`."""

    def packed(self, hold_ms: float) -> str:
        """Return a ticket's bid for the worker, as text for lua/shared.lua. `hold_ms`: predicted time of the decode."""
        lost_ms = self.other_ms + self.other_burden_ms - self.cost_ms - self.burden_ms
        if -NO_LOSS_MS < lost_ms < 0:
            lost_ms = 0.0  # rounding of equal sums
        rate = lost_ms / (self.cost_ms + hold_ms + 1)
        return f"{rate:.9g} {self.kv_tokens} {self.cost_ms:.0f} {self.other_ms:.0f}"


NO_OFFER = Offer("", 0.0, 0.0, 0)
"""Stands where a call has no worker to take at once."""


@dataclass(frozen=True, slots=True)
class Offers:
    """The costs of a call at the workers that can serve it. The call's ticket carries them while the call waits."""

    take: tuple[Offer, ...] = ()
    """Workers to take at once if they have a free slot, best first."""
    more: tuple[Offer, ...] = ()
    """Workers not to take at once. A waiting call gets a slot on one only if its bid for it is not negative."""
    elsewhere: Offer | None = None
    """The cost at any worker that the other fields do not name; None: no other worker can serve the call."""
    left_out: frozenset[str] = frozenset()
    """Workers that can't serve the call, so that the cost in `elsewhere` does not apply to them."""
    begin_within_ms: float = 0.0
    """Milliseconds from now within which the first token is wanted; 0: there is no deadline."""
    hold_ms: float = 0.0
    """Predicted milliseconds of the decode, which begins with the first token."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request for a slot: the call's id, team and priority class, and its charge in fair queueing."""

    id: str
    team: str
    share: float
    """Predicted tokens divided by the weight of the team: virtual tokens."""
    priority: int = 0
    """Priority class; higher goes first."""
    weight: float = 1.0
    """Weight of the team in fair shares."""


@dataclass(frozen=True, slots=True)
class Filed:
    """The place of a ticket in the queue."""

    rank: str
    """The ticket's score in the queue, from its priority class and virtual finish, exactly as Redis wrote it."""
    start: str
    """Virtual start of the call in fair queueing, in virtual tokens."""
    position: int
    """Position in the queue; 1 is served next."""


@dataclass(frozen=True, slots=True)
class QueueLimitReached:
    waiting: int
    of_team: bool = False
    """Whether the team's limit was reached, and `waiting` counts the team's calls; False: it is the model's limit."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A waiting call, with all that `reread` needs to renew its place in the queue."""

    order: Order
    filed: Filed
    ttl_s: float
    """Seconds until the ticket expires, unless its gateway renews it (`reread`) again."""
    offers: Offers | None
    """The call's offers if they have changed since the last renewal; None: they are the same."""


@dataclass(frozen=True, slots=True)
class Renewed:
    void: frozenset[str]
    """Leases that are lost for good: their worker process is gone, or another lease has taken their place."""
    crowded: frozenset[str]
    """Leases that Redis lost or never had, and whose worker has no free slot now; the next renewal tries again."""
    fences: Mapping[str, int]
    """Id of each lease that was UNFENCED -> the fencing token that Redis has now given it."""


@dataclass(frozen=True, slots=True)
class Swept:
    leases_freed: int
    tickets_dropped: int
    granted: int
    waiting: int


class Store:
    """Runs the admission scripts (`lua/`), one method for each. Methods raise StoreUnavailable if Redis is away."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        *,
        protocol: int = PROTOCOL_VERSION,
        lease_ttl_s: float = keys.LEASE_TTL_S,
        grant_ttl_s: float = keys.GRANT_TTL_S,
        settle_s: float = keys.LEASE_RENEW_S,
        timeout_s: float = ANSWER_TIMEOUT_S,
        took: Callable[[float, str], None] | None = None,
    ) -> None:
        """`took` is called after each script call, with the seconds to its reply or failure, and the script's name."""
        self.redis = redis
        self._protocol = protocol
        self._lease_ttl_ms = _ms(lease_ttl_s)
        self._grant_ttl_ms = _ms(grant_ttl_s)
        self._settle_ms = _ms(settle_s)
        self._acquire = load_script("acquire", "tickets", "filing", "line", "overdraft", at_once=True)
        self._claim = load_script("claim", "line")
        self._release = load_script("release", "line", "overdraft", at_once=True)
        self._withdraw = load_script("withdraw", "tickets", "line")
        self._renew = load_script("renew")
        self._reread = load_script("reread", "filing", "line")
        self._sweep = load_script("sweep", "tickets", "line", "overdraft")
        self._pipe = ScriptSender(
            redis,
            (self._acquire, self._claim, self._release, self._withdraw, self._renew, self._reread, self._sweep),
            timeout_s,
            took,
        )

    async def acquire(
        self,
        gateway: str,
        model: str,
        order: Order,
        offers: Offers,
        *,
        ticket_ttl_s: float,
        max_queue: int,
        max_team_queue: int,
    ) -> Lease | Filed | QueueLimitReached:
        """Take a slot of the first worker in `offers.take` that has a free one. If none has, take a place in the queue,
        unless the queue is full."""
        best, *others = offers.take or (NO_OFFER,)
        answer = await self._send(
            self._acquire,
            gateway,
            model,
            order.id,
            self._lease_ttl_ms,
            packed_team(order.team),
            repr(order.share),
            repr(order.weight),
            best.worker,
            best.kv_tokens,
            "".join([f"{offer.worker} {offer.kv_tokens} " for offer in others]),
            f"{_ms(ticket_ttl_s)} {max_queue} {max_team_queue} {order.priority} {offers.begin_within_ms:.0f}",
            _bids(offers),
        )
        with reading():
            match answer[0]:
                case b"lease":
                    return _lease(model, order.id, answer, offers)
                case b"queued":
                    return Filed(answer[1].decode(), answer[2].decode(), answer[3])
                case b"team full":
                    return QueueLimitReached(answer[1], of_team=True)
                case _:
                    return QueueLimitReached(answer[1])

    async def claim(self, gateway: str, model: str, id: str, offers: Offers) -> Lease | None:
        """Return the lease on the slot that a ticket was granted; None if it was granted none yet."""
        answer = await self._send(self._claim, gateway, model, id, self._lease_ttl_ms)
        with reading():
            return _lease(model, id, answer, offers) if answer[0] == b"lease" else None

    async def release(self, gateway: str, lease: Lease, share: float | None = None) -> bool:
        """Free a lease's slot. `share`: virtual tokens to charge the call for; None: those predicted. Return False if
        there was no such lease."""
        return bool(await self._send(self._release, gateway, lease.at.model, *_release_arguments(lease, share)))

    async def withdraw(self, gateway: str, model: str, ids: Iterable[str]) -> int:
        """Remove tickets, grants and leases. Return how many of the ids existed."""
        return int(await self._send(self._withdraw, gateway, model, *ids))

    def post_release(self, gateway: str, lease: Lease, share: float | None, lost: Callable[[], None]) -> None:
        """Queue a `release` behind earlier calls, and return. `lost` is called if Redis turns out to be away."""
        self._pipe.post(lost, *self._call(self._release, gateway, lease.at.model, *_release_arguments(lease, share)))

    def post_withdraw(self, gateway: str, model: str, id: str, lost: Callable[[], None]) -> None:
        """Queue a `withdraw` behind earlier calls, and return. `lost` is called if Redis turns out to be away."""
        self._pipe.post(lost, *self._call(self._withdraw, gateway, model, id))

    async def renew(
        self, gateway: str, model: str, leases: Iterable[Lease], *, was_away: bool = False, settle: bool = False
    ) -> Renewed:
        """Renew leases; a gateway calls this every `keys.LEASE_RENEW_S` with all its leases. `was_away`: whether this
        gateway may have placed calls while Redis was away; `settle`: whether other gateways may have done so, too."""
        rows = [item for one in leases for item in _lease_row(one)]
        head = (self._lease_ttl_ms, self._settle_ms, "settle" if settle else "away" if was_away else "")
        void, crowded, given = await self._send(self._renew, gateway, model, *head, *rows)
        with reading():
            fences = {id.decode(): int(fence) for id, fence in zip(given[::2], given[1::2], strict=True)}
            return Renewed(_texts(void), _texts(crowded), fences)

    async def reread(self, gateway: str, model: str, tickets: Sequence[Ticket]) -> dict[str, int]:
        """Renew tickets in the queue. Return id -> position; 0 for tickets that were granted a slot."""
        rows: list[str | int] = []
        for ticket in tickets:
            rows += _ticket_row(ticket)
        positions = await self._send(self._reread, gateway, model, self._settle_ms, *rows)
        return {ticket.order.id: place for ticket, place in zip(tickets, positions, strict=True)}

    async def sweep(self, gateway: str, model: str, *, pause_s: float = 0.0) -> Swept:
        """Free expired leases and tickets, and grant the slots that come free. Do nothing if any gateway has swept
        within the last `pause_s` seconds."""
        return Swept(*await self._send(self._sweep, gateway, model, round(pause_s * 1000)))

    async def close(self) -> None:
        """Wait until every script call sent has its answer. The Redis client stays open, as it belongs to others."""
        await self._pipe.close()

    def _send(self, script: Script, gateway: str, model: str, *rest: str | int) -> asyncio.Future[Any]:
        return self._pipe.send(*self._call(script, gateway, model, *rest))

    def _call(self, script: Script, gateway: str, model: str, *rest: str | int) -> tuple[Any, ...]:
        return (script, keys.model_prefix(model), self._protocol, self._grant_ttl_ms, gateway, *rest)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _bids(offers: Offers) -> str:
    """Return the bids of a ticket as the lines of text that lua/shared.lua reads."""
    hold_ms = offers.hold_ms
    elsewhere = "" if offers.elsewhere is None else offers.elsewhere.packed(hold_ms)
    left_out = f" {' '.join(sorted(offers.left_out))} " if offers.left_out else ""
    named = "".join([f"{offer.worker}={offer.packed(hold_ms)}|" for offer in offers.take + offers.more])
    return f"{elsewhere}\n{left_out}\n|{named}"


def _ticket_row(ticket: Ticket) -> list[str | int]:
    """Return the arguments of the script `reread` for one ticket."""
    order, filed, offers = ticket.order, ticket.filed, ticket.offers
    whose = (order.id, _ms(ticket.ttl_s), packed_team(order.team), repr(order.weight))
    row: list[str | int] = [*whose, repr(order.share), filed.start, filed.rank]
    if offers is None:
        return [*row, 0, "", 0]
    take = [offer.worker for offer in offers.take]
    return [*row, f"{offers.begin_within_ms:.0f}", _bids(offers), len(take), *take]


def _lease_row(lease: Lease) -> tuple[str | int, ...]:
    """Return the arguments of the script `renew` for one lease."""
    team = packed_team(lease.team)
    return lease.id, lease.fence, lease.at.worker, lease.at.boot, lease.kv_tokens, team, repr(lease.weight)


def _release_arguments(lease: Lease, share: float | None) -> tuple[str, int, str]:
    return lease.id, lease.fence, "" if share is None else repr(share)


def _texts(values: Iterable[bytes]) -> frozenset[str]:
    return frozenset(value.decode() for value in values)


def _lease(model: str, id: str, answer: list[Any], offers: Offers) -> Lease:
    _, fence, worker, boot, address, *rest = answer
    name = worker.decode()
    named = {offer.worker: offer.kv_tokens for offer in offers.take + offers.more}
    other = 0 if offers.elsewhere is None else offers.elsewhere.kv_tokens
    kv_tokens, overtaken = named.get(name, other), rest[0] if rest else 0
    at = WorkerAddress(model, name, boot.decode(), address.decode().rstrip("/"))
    return Lease(id, fence, at, kv_tokens, overtaken=overtaken)
