"""Ours: the gateway's ranking over the workers' news, and the line in a real Redis, in simulated time.

Everything that decides is the project's: `PoolUpdater`, `rank`, `LocalQueue`, `offers_of`, and `Store` with scripts.
What a gateway does with them in its loops is done here at the same intervals, but of simulated time: news are told at
most every 0.2 s and read every 0.2 s, tickets are re-read with fresh bids every second. Redis has its own clock, so
nothing may expire; deadlines are told anew with each re-reading.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from math import inf

import redis.asyncio

from benchmarks.routing_sim.floor import Floor
from benchmarks.routing_sim.machine import Job, Machine
from benchmarks.routing_sim.reports import MODEL, Reporter, machine_number, prefix_of
from gateway.admission.local_queue import LocalQueue, Waiter, WaitLimits
from gateway.admission.maintenance import REFRESHED, REREAD_AT_ONCE
from gateway.admission.ranker import offers_of
from gateway.routing.placement import PlacementRequest, Ranking
from gateway.routing.pool import PoolUpdater
from gateway.routing.rank import rank
from gateway.store.client import Filed, Lease, Offers, Order, Store, Ticket
from tests.support.pool import SECRET
from workers.protocol import keys
from workers.protocol.heartbeat import News, record_of

FOREVER_S = 1e7


class Desk:
    """One gateway: its picture of the fleet, its calls, and what it sent where."""

    def __init__(self, number: int) -> None:
        self.id = f"g{number}"
        self.book = PoolUpdater()
        self.line = LocalQueue()
        self.jobs: dict[str, Job] = {}
        """By ticket or lease."""
        self.leases: dict[int, tuple[Lease, Order]] = {}
        self._turns = itertools.count()

    def rank(self, request: PlacementRequest, now: float, ahead: int | None = None) -> Ranking:
        return rank(
            request,
            self.book.pool,
            self.line.placements(MODEL),
            now=now,
            queued=self.line.num_queued(MODEL) if ahead is None else ahead,
            turn=next(self._turns),
        )

    def refreshed(self, waiter: Waiter, now: float) -> Offers:
        """What the waiting call bids now."""
        self.line.placements(MODEL).remove_waiting(waiter.id)
        ahead = waiter.filed.position - 1 if waiter.filed is not None else None
        waiter.ranking = self.rank(waiter.request, now, ahead)
        waiter.offers = _offers(waiter, now)
        self.line.note_preferred(waiter)
        return waiter.offers


def _offers(waiter: Waiter, now: float) -> Offers:
    within_ms = (waiter.begin_by - now) * 1000 if waiter.begin_by else 0.0
    return offers_of(waiter.ranking, max(0.0, within_ms))


class Paddock:
    """A policy. Calls come to the gateways in turns."""

    def __init__(
        self,
        floor: Floor,
        store: Store,
        grants: redis.asyncio.client.PubSub,
        desks: list[Desk],
        weights: Mapping[str, float],
    ) -> None:
        """`weights`: of teams; 1 for those that are not named."""
        self.floor = floor
        self._store = store
        self._grants = grants
        self._desks = desks
        self._weights = weights
        self._reporters = [Reporter(machine) for machine in floor.machines]
        self._due: list[tuple[float, int]] = []
        self._news: list[tuple[float, News]] = []
        self._read_at = keys.NEWS_INTERVAL_S
        self._reread_at = keys.SWEEP_INTERVAL_S
        self._dirty = [False] * len(floor.machines)
        floor.watch = self._changed

    @property
    def next_at(self) -> float:
        return min(self._due[0][0] if self._due else inf, self._read_at, self._reread_at)

    async def came(self, job: Job, now: float) -> None:
        desk = self._desks[job.number % len(self._desks)]
        arrival = job.arrival
        request = PlacementRequest(prefix=prefix_of(arrival), max_tokens=None)
        ranking = desk.rank(request, now)
        order = Order(f"c{job.number}", arrival.team, ranking.charge / self._weights.get(arrival.team, 1.0))
        wait_limits = WaitLimits(now, served=True, queue_deadline=inf, start_deadline=inf)
        waiter = Waiter(order, MODEL, request, frozenset(), wait_limits, job.due_at, ranking, Offers())
        waiter.offers = _offers(waiter, now)
        desk.jobs[order.id] = job
        desk.line.add(waiter)
        desk.line.note_preferred(waiter)
        answer = await self._store.acquire(
            desk.id,
            MODEL,
            order,
            waiter.offers,
            ticket_ttl_s=FOREVER_S,
            max_queue=10**9,
            max_team_queue=10**9,
        )
        match answer:
            case Lease():
                self._start(desk, waiter, answer, now)
            case Filed():
                desk.line.note_filed(waiter, answer)
            case _:
                raise AssertionError(f"a line without bounds is full: {answer}")
        await self._granted(now)

    async def ended(self, job: Job, now: float) -> None:
        self._reporters[job.machine].ended(job)
        self._changed(self.floor.machines[job.machine], now)
        desk = self._desks[job.number % len(self._desks)]
        lease, order = desk.leases.pop(job.number)
        desk.line.remove_lease(lease, now)
        await self._store.release(desk.id, lease, job.took / self._weights.get(order.team, 1.0))
        await self._granted(now)

    async def tick(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            _, number = heapq.heappop(self._due)
            self._dirty[number] = False
            self._news.append((now, self._reporters[number].news(now)))
        if self._read_at <= now:
            self._read_at += keys.NEWS_INTERVAL_S
            self._read()
        if self._reread_at <= now:
            self._reread_at += keys.SWEEP_INTERVAL_S
            for desk in self._desks:
                await self._reread(desk, now)

    def _changed(self, machine: Machine, now: float) -> None:
        if not self._dirty[machine.number]:
            self._dirty[machine.number] = True
            told_at = self._reporters[machine.number].told_at
            heapq.heappush(self._due, (max(now, told_at + keys.NEWS_INTERVAL_S), machine.number))

    def _read(self) -> None:
        for told_at, news in self._news:
            for desk in self._desks:
                if not desk.book.apply(news, told_at):
                    raise AssertionError(f"news of {news.worker} do not follow on one another")
        self._news.clear()

    async def _reread(self, desk: Desk, now: float) -> None:
        desk.line.tidy(now)
        waiters = desk.line.filed_waiters(MODEL)
        desk.line.set_num_queued(MODEL, await self._store.redis.zcard(keys.queue(MODEL)))
        for first in range(0, len(waiters), REREAD_AT_ONCE):
            some = waiters[first : first + REREAD_AT_ONCE]
            tickets = []
            for at, waiter in enumerate(some):
                offers = desk.refreshed(waiter, now) if first == 0 and at < REFRESHED else None
                if waiter.filed is not None:
                    tickets.append(Ticket(waiter.order, waiter.filed, FOREVER_S, offers))
            positions = await self._store.reread(desk.id, MODEL, tickets)
            for waiter in some:
                if waiter.filed is not None and positions[waiter.id]:
                    waiter.filed = replace(waiter.filed, position=positions[waiter.id])
        await self._granted(now)

    async def _granted(self, now: float) -> None:
        """Claims what the scripts so far have granted: Redis answers the ping after it has published."""
        if not any(desk.line.waiters for desk in self._desks):
            return
        await self._grants.ping("over")
        while (message := await self._grants.get_message(timeout=10.0)) is not None:
            if message["type"] == "pong":
                return
            await self._claim(message["data"].decode(), now)
        raise AssertionError("Redis does not answer")

    async def _claim(self, ticket: str, now: float) -> None:
        for desk in self._desks:
            waiter = desk.line.waiters.get(ticket)
            if waiter is None:
                continue
            lease = await self._store.claim(desk.id, MODEL, ticket, waiter.offers)
            if lease is not None:
                self._start(desk, waiter, lease, now)

    def _start(self, desk: Desk, waiter: Waiter, lease: Lease, now: float) -> None:
        job = desk.jobs.pop(waiter.id)
        desk.line.remove(waiter)
        prefill_ms = next((bid.cost_ms for bid in waiter.ranking.bids if bid.worker == lease.at.worker), 0.0)
        desk.line.add_lease(lease, now, prefill_ms)
        desk.leases[job.number] = lease, waiter.order
        self.floor.start(job, machine_number(lease.at.worker), now)

    async def join(self) -> None:
        """All workers are there, with empty caches."""
        async with self._store.redis.pipeline(transaction=False) as pipeline:
            pipeline.sadd(keys.MODELS, MODEL)
            for reporter in self._reporters:
                beat = reporter.heartbeat(0.0)
                pipeline.sadd(keys.workers(MODEL), beat.worker)
                pipeline.hset(keys.worker(MODEL, beat.worker), mapping=record_of(beat, SECRET))
                for desk in self._desks:
                    desk.book.join(beat, now=0.0)
            await pipeline.execute()


@asynccontextmanager
async def paddock(
    floor: Floor, client: redis.asyncio.Redis, *, gateways: int = 1, weights: Mapping[str, float] | None = None
) -> AsyncIterator[Paddock]:
    """Empties the Redis first."""
    await client.flushall()
    desks = [Desk(number) for number in range(gateways)]
    store = Store(client, lease_ttl_s=FOREVER_S, grant_ttl_s=FOREVER_S)
    grants = client.pubsub()
    await grants.subscribe(*(keys.grants_channel(desk.id) for desk in desks))
    for _ in desks:
        await grants.get_message(timeout=10.0)
    policy = Paddock(floor, store, grants, desks, weights or {})
    await policy.join()
    try:
        yield policy
    finally:
        await grants.aclose()  # type: ignore[no-untyped-call]
        await store.close()
