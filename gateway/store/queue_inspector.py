"""Shows operators a model's queue in Redis: which calls wait, for how long, and what they bid for workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio

from gateway.store.outage import answered, reading
from gateway.store.packed import unpacked_team
from gateway.store.scripts import load_script
from workers.protocol import keys
from workers.protocol.heartbeat import PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class QueuedBid:
    """The bid of a waiting ticket for one worker."""

    cost_ms: float
    """Time from getting the slot to the first token."""
    other_ms: float
    """Cost of the best other worker: wait, time to the first token, and what other calls lose more there than here."""
    kv_tokens: int
    rate: float
    """What the call loses if another call gets the slot, divided by the time for which it would hold the slot.
    Negative: the call is better off if it waits for another worker."""


@dataclass(frozen=True, slots=True)
class QueuedTicket:
    """One call near the front of the queue."""

    team: str
    priority: int
    """Priority class; higher goes first."""
    waited_s: float
    """Seconds since the call was queued."""
    overtaken: int
    """How often a slot that the call wanted went to a ticket further back in the queue."""
    begin_in_s: float | None
    """Seconds until the call's deadline for its first token; below 0: missed; None: it has none."""
    gateway: str
    bids: Mapping[str, QueuedBid]
    """Worker -> the call's bid for it."""
    elsewhere: QueuedBid | None
    """The call's bid for all suitable workers that are not in `bids`; None: there are no other suitable workers."""


@dataclass(frozen=True, slots=True)
class QueueView:
    settling: bool
    """Whether no slots are granted for now: Redis lost its data, and gateways must first report their running calls."""
    waiting: int
    by_priority: Mapping[int, int]
    by_team: Mapping[str, int]
    """Team -> number of its tickets, including tickets that were granted a slot and have not claimed it yet."""
    head: tuple[QueuedTicket, ...]
    """The tickets to which a free slot is offered first, in the order of the queue."""
    leased: Mapping[str, tuple[int, int]]
    """Worker -> number of its leases, and the KV tokens that the calls with these leases are predicted to take."""


class QueueInspector:
    """Reads queues and gateways' heartbeats from Redis; changes nothing."""

    def __init__(self, redis: redis.asyncio.Redis) -> None:
        self._redis = redis
        self._script = load_script("look")

    async def inspect(self, model: str, workers: Sequence[str], classes: int) -> QueueView:
        """Return the state of a model's queue, and the leases of `workers`. `classes`: the highest priority class;
        classes go from `-classes` to `classes`.

        Raises StoreUnavailable."""
        head = (keys.model_prefix(model), PROTOCOL_VERSION, 0, "")
        asked = (*map(str, (*head, -classes, classes)), *workers)
        answer: Any = await answered(self._redis.eval(self._script.source, 1, *asked))
        with reading():
            settling, waiting, by_priority, by_team, tickets, leased, now_ms = answer
            counts = iter(leased)
            return QueueView(
                bool(settling),
                waiting,
                dict(_pairs(by_priority)),
                {unpacked_team(team.decode()): count for team, count in _pairs(by_team)},
                tuple(_ticket(row, now_ms) for row in tickets),
                {worker: (next(counts), next(counts)) for worker in workers},
            )

    async def gateways(self) -> dict[str, float]:
        """Return gateway id -> unix time of its last heartbeat. Raises StoreUnavailable."""
        beats: list[Any] = await answered(self._redis.zrange(keys.GATEWAYS, 0, -1, withscores=True))
        with reading():
            return {id.decode(): float(at) for id, at in beats}


def _pairs(row: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    items = iter(row)
    return zip(items, items, strict=True)


def _ticket(row: Sequence[Any], now_ms: int) -> QueuedTicket:
    """Return a ticket from its priority class, how often it was overtaken, and its record (lua/shared.lua)."""
    priority, overtaken, record = row
    deadline, elsewhere, _, named, gateway, filed, team = record.decode().split("\n")
    bids = dict(bid.rsplit("=", 1) for bid in named.split("|") if bid)
    deadline_ms, filed_ms = float(deadline), float(filed.split(" ")[-1])
    return QueuedTicket(
        team=unpacked_team(team),
        priority=priority,
        waited_s=(now_ms - filed_ms) / 1000,
        overtaken=overtaken,
        begin_in_s=(deadline_ms - now_ms) / 1000 if deadline_ms else None,
        gateway=gateway,
        bids={worker: _bid(bid) for worker, bid in bids.items()},
        elsewhere=_bid(elsewhere) if elsewhere else None,
    )


def _bid(text: str) -> QueuedBid:
    rate, kv, cost, other = text.split(" ")
    return QueuedBid(float(cost), float(other), int(kv), float(rate))
