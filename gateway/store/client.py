"""The Redis client, and the admission scripts as typed methods. Times go in as seconds; the clock is Redis's own."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError

from gateway.store.pipe import Pipe
from gateway.store.scripts import Script, load_script
from workers.protocol import keys
from workers.protocol.heartbeat import PROTOCOL_VERSION

CONNECT_TIMEOUT_S = 2.0
ANSWER_TIMEOUT_S = 2.0


def connect(url: str) -> redis.asyncio.Redis:
    """A client for `redis://`, `rediss://` or `unix://`; connects on first use. No answer within the bounds raises.

    A dropped connection is tried again once, so every script bears being run twice.
    """
    client: redis.asyncio.Redis = redis.asyncio.Redis.from_url(
        url,
        decode_responses=False,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        socket_timeout=ANSWER_TIMEOUT_S,
        retry=Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
    )
    return client


@dataclass(frozen=True, slots=True)
class Lease:
    """One slot of one worker process, held by one call of one gateway."""

    id: str
    fence: int
    model: str
    worker: str
    boot: str
    address: str
    """Base URL of the worker."""
    queue_ms: float = 0.0
    """How long the call waited for it, admission itself included."""


@dataclass(frozen=True, slots=True)
class Taken:
    lease: Lease
    in_use: int
    """Leases of that worker now, this one included."""


@dataclass(frozen=True, slots=True)
class Filed:
    """A ticket is in the line."""

    arrival: int


@dataclass(frozen=True, slots=True)
class LineFull:
    waiting: int


@dataclass(frozen=True, slots=True)
class Ticket:
    """A call that waits."""

    id: str
    arrival: int
    avoid: frozenset[str]
    ttl_s: float
    """How long it lives if nobody re-reads it."""


@dataclass(frozen=True, slots=True)
class Renewed:
    void: frozenset[str]
    """Leases of an earlier worker process, or superseded: they will not come back."""
    crowded: frozenset[str]
    """Leases that Redis had lost and whose slot is not free: tried again at the next renewal."""


@dataclass(frozen=True, slots=True)
class Swept:
    leases_freed: int
    tickets_dropped: int
    granted: int
    waiting: int
    in_use: Mapping[str, int]
    """Worker id -> its leases."""


class Store:
    """The admission scripts (`lua/`), one method each. Methods raise StoreUnavailable when Redis is away."""

    def __init__(
        self,
        redis: redis.asyncio.Redis,
        *,
        protocol: int = PROTOCOL_VERSION,
        lease_ttl_s: float = keys.LEASE_TTL_S,
        grant_ttl_s: float = keys.GRANT_TTL_S,
        settle_s: float = keys.LEASE_RENEW_S,
        timeout_s: float = ANSWER_TIMEOUT_S,
    ) -> None:
        self.redis = redis
        self._protocol = protocol
        self._lease_ttl_ms = _ms(lease_ttl_s)
        self._grant_ttl_ms = _ms(grant_ttl_s)
        self._settle_ms = _ms(settle_s)
        self._acquire = load_script("acquire")
        self._claim = load_script("claim")
        self._release = load_script("release")
        self._withdraw = load_script("withdraw")
        self._renew = load_script("renew")
        self._reread = load_script("reread")
        self._sweep = load_script("sweep")
        self._pipe = Pipe(
            redis,
            (self._acquire, self._claim, self._release, self._withdraw, self._renew, self._reread, self._sweep),
            timeout_s,
        )

    async def acquire(
        self,
        gateway: str,
        model: str,
        id: str,
        ranked: Sequence[str],
        avoid: frozenset[str],
        ticket_ttl_s: float,
        max_queue: int,
    ) -> Taken | Filed | LineFull:
        """The first free slot of the ranked workers, else a place in the line."""
        channel = keys.grants_channel(gateway)
        rest = (channel, self._lease_ttl_ms, _ms(ticket_ttl_s), max_queue, _avoided(avoid))
        answer = await self._send(self._acquire, gateway, model, id, *rest, *ranked)
        match answer[0]:
            case b"lease":
                return _taken(model, id, answer)
            case b"queued":
                return Filed(answer[1])
            case _:
                return LineFull(answer[1])

    async def claim(self, gateway: str, model: str, id: str) -> Taken | None:
        """The lease that a ticket was granted; None while there is none."""
        answer = await self._send(self._claim, gateway, model, id, self._lease_ttl_ms)
        return _taken(model, id, answer) if answer[0] == b"lease" else None

    async def release(self, gateway: str, lease: Lease) -> int | None:
        """Hands the slot on. The worker's remaining leases, or None when the lease was not this caller's any more."""
        known, in_use = await self._send(self._release, gateway, lease.model, lease.id, lease.fence)
        return int(in_use) if known else None

    async def withdraw(self, gateway: str, model: str, ids: Iterable[str]) -> int:
        """Forgets tickets, grants and leases; how many were known."""
        return int(await self._send(self._withdraw, gateway, model, *ids))

    def post_release(self, gateway: str, lease: Lease) -> None:
        """`release` without waiting; sent in the order of calls, logged if it fails."""
        self._pipe.post(*self._call(self._release, gateway, lease.model, lease.id, lease.fence))

    def post_withdraw(self, gateway: str, model: str, ids: Iterable[str]) -> None:
        """`withdraw` without waiting; sent in the order of calls, logged if it fails."""
        self._pipe.post(*self._call(self._withdraw, gateway, model, *ids))

    async def renew(self, gateway: str, model: str, leases: Iterable[Lease]) -> Renewed:
        """Keeps leases alive; a gateway calls it every `keys.LEASE_RENEW_S` with all that it holds."""
        rows = [text for lease in leases for text in (lease.id, lease.fence, lease.worker, lease.boot)]
        void, crowded = await self._send(self._renew, gateway, model, self._lease_ttl_ms, self._settle_ms, *rows)
        return Renewed(_texts(void), _texts(crowded))

    async def reread(self, gateway: str, model: str, tickets: Iterable[Ticket]) -> frozenset[str]:
        """Keeps tickets alive and in line; ids of those that hold a grant."""
        rows = [item for t in tickets for item in (t.id, _ms(t.ttl_s), t.arrival, _avoided(t.avoid))]
        channel = keys.grants_channel(gateway)
        return _texts(await self._send(self._reread, gateway, model, channel, self._settle_ms, *rows))

    async def sweep(self, gateway: str, model: str) -> Swept:
        """Frees what the dead have left, and grants it."""
        freed, dropped, granted, waiting, counts = await self._send(self._sweep, gateway, model)
        in_use = {worker.decode(): count for worker, count in zip(counts[::2], counts[1::2], strict=True)}
        return Swept(freed, dropped, granted, waiting, in_use)

    async def close(self) -> None:
        """Waits for what is on its way; the client itself belongs to whoever made it."""
        await self._pipe.close()

    def _send(self, script: Script, gateway: str, model: str, *rest: str | int) -> asyncio.Future[Any]:
        return self._pipe.send(*self._call(script, gateway, model, *rest))

    def _call(self, script: Script, gateway: str, model: str, *rest: str | int) -> tuple[Any, ...]:
        return (script, keys.model_prefix(model), self._protocol, self._grant_ttl_ms, gateway, *rest)


def _ms(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _avoided(workers: frozenset[str]) -> str:
    return json.dumps(sorted(workers)) if workers else ""


def _texts(values: Iterable[bytes]) -> frozenset[str]:
    return frozenset(value.decode() for value in values)


def _taken(model: str, id: str, answer: list[Any]) -> Taken:
    _, fence, worker, boot, address, in_use = answer
    return Taken(Lease(id, fence, model, worker.decode(), boot.decode(), address.decode()), in_use)
