"""Maintains the state of one gateway process in Redis, by loops: heartbeat, renewing leases, receiving grants,
re-reading tickets, sweeping.

Each loop goes on after an outage of Redis. A missed round does no harm: the next round, on this gateway or another,
does its work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from gateway.admission.degraded import DegradedPlacement, GatewayRing
from gateway.admission.local_queue import LocalQueue, Waiter
from gateway.admission.ranker import Ranker
from gateway.errors import StoreUnavailable
from gateway.registry.fleet import Fleet
from gateway.store.client import Lease, Store, Ticket
from gateway.store.heartbeats import GatewayHeartbeats
from gateway.store.outage import NO_ANSWER, Outage, Unreadable, raise_if_cancelled
from gateway.telemetry.metrics import CROWDED, EXPIRED, VOID
from workers.process.ticks import wait_tick
from workers.protocol import keys
from workers.redis.channel import follow

log = logging.getLogger(__name__)

SHORTEST_TTL_S = 0.05

REFRESHED = 64
"""Number of tickets per model, from the front of the queue, for which the workers are ranked anew each round. These
tickets get the next slots."""
LOAN_CHECK_AFTER_S = 0.3
"""Seconds from a call's queuing to an extra sweep, which may lend its team an extra slot (lua/shared_overdraft.lua)."""
REREAD_AT_ONCE = 256
"""Maximum number of tickets per run of the script `reread`; the others follow in further runs. A longer run would delay
other clients of Redis."""
RENEWED_AT_ONCE = 128
"""Maximum number of leases per run of the script `renew`. A run for a thousand held the event loop for 5 ms."""
ASKING_AT_ONCE = 64
"""Maximum number of waiting calls that ask Redis for slots together after an outage; the next ones ask when these have
answers. If Redis goes away again, at most this many fall back to this gateway's share of slots in one loop turn."""
ASKED_POLL_S = 0.002


class Maintenance:
    """Runs the loops that keep this process's tickets and leases valid in Redis. Shares `Admission`'s `LocalQueue`."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        gateway_id: str,
        queue: LocalQueue,
        ranker: Ranker,
        degraded: DegradedPlacement,
        ring: GatewayRing,
        *,
        ticket_ttl_s: float,
        renew_s: float,
        sweep_s: float,
        lost: Callable[[str, str, int], None],
        unreadable: Unreadable | None = None,
    ) -> None:
        """`unreadable` as in `GatewayHeartbeats`. `lost` is called for leases that ended before their calls did, with
        the model, the cause (one of `metrics.LEASE_ENDS`) and the number of leases."""
        self._store = store
        self._fleet = fleet
        self._gateway = gateway_id
        self._queue = queue
        self._ranker = ranker
        self._degraded = degraded
        self._ring = ring
        self._heartbeats = GatewayHeartbeats(store.redis, gateway_id, unreadable=unreadable)
        self._ticket_ttl_s = ticket_ttl_s
        self._renew_s = renew_s
        self._sweep_s = sweep_s
        self._lost = lost
        self._crowded: dict[str, frozenset[str]] = {}
        """Model -> leases for which Redis had no slot left at the last renewal; only models with such leases."""
        self.redis_up = True
        """Whether Redis accepted this gateway's last heartbeat; True before the first heartbeat."""
        self._over = False
        self._renew_now = asyncio.Event()
        self._reread_now = asyncio.Event()
        self._sweep_now = asyncio.Event()
        self._urgent = True
        self._loan_timer: asyncio.TimerHandle | None = None
        fleet.listen(lambda _: self._on_fleet_change())

    async def run(self) -> None:
        """Run the loops until cancelled."""
        channel = keys.grants_channel(self._gateway)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow(self._store.redis, channel, self._on_grant, self._on_subscribed))
            tasks.create_task(self._repeat(self._beat, keys.GATEWAY_INTERVAL_S, asyncio.Event()))
            tasks.create_task(self._repeat(self._renew, self._renew_s, self._renew_now))
            tasks.create_task(self._repeat(self._reread, self._sweep_s, self._reread_now))
            tasks.create_task(self._repeat(self._sweep, self._sweep_s, self._sweep_now))

    def ticket_ttl(self, waiter: Waiter) -> float:
        """Return the seconds until the ticket expires in Redis if not renewed: at most until the call's deadline."""
        return max(SHORTEST_TTL_S, min(self._ticket_ttl_s, waiter.deadline - time.monotonic()))

    def check_for_loan_soon(self, waiter: Waiter) -> None:
        """Schedule a sweep for when the team of a newly queued call may be lent an extra slot. Do nothing if no worker
        of the model lends slots (`Heartbeat.overdraft`)."""
        if self._loan_timer is None and any(beat.overdraft for beat in self._fleet.snapshot.of(waiter.model)):
            self._loan_timer = asyncio.get_running_loop().call_later(LOAN_CHECK_AFTER_S, self._check_for_loan)

    def _check_for_loan(self) -> None:
        self._loan_timer = None
        self._urgent = (
            True  # a sweep of just before came too early for the loan, and the next one is up to a second away
        )
        self._sweep_now.set()

    async def give_back(self) -> None:
        """Withdraw every ticket and lease of this process and remove its heartbeat. Raises nothing if Redis is away."""
        self._over = True
        ids: dict[str, list[str]] = {}
        for waiter in self._queue.waiters.values():
            ids.setdefault(waiter.model, []).append(waiter.id)
            waiter.filed = None  # nothing to re-read any more
        for lease in list(self._queue.held.values()):
            ids.setdefault(lease.at.model, []).append(lease.id)
            self._queue.remove_lease(lease, time.monotonic())
        with suppress(StoreUnavailable, *NO_ANSWER):
            for model, given_up in ids.items():
                await self._store.withdraw(self._gateway, model, given_up)
            await self._heartbeats.leave()

    async def _repeat(self, work: Callable[[], Awaitable[None]], interval_s: float, wake: asyncio.Event) -> None:
        """Do the work every `interval_s`, and at once when `wake` is set."""
        name = work.__name__.strip("_")
        outage = Outage(f"Redis is away, no {name}", "it is tried again and again", f"Redis is back, {name} again")
        while True:
            wake.clear()
            with outage.survive():
                await work()
            raise_if_cancelled()
            await wait_tick(interval_s, wake)

    async def _beat(self) -> None:
        if self._over:
            return
        try:
            gateways = await self._heartbeats.beat()
        except NO_ANSWER:
            self.redis_up = False
            raise
        self.redis_up = True
        if gateways is not None:
            self._ring.update(gateways.silent_s, stayed=gateways.stayed, now=time.monotonic())

    async def _refresh_ring(self) -> None:
        """Send a heartbeat: its reply shows which gateways were without Redis. Do nothing if it fails: on a Cluster,
        the list of gateways can be on a node that is still away."""
        with suppress(*NO_ANSWER):
            await self._beat()

    def _on_subscribed(self) -> None:
        """Make all loops run at once after a new subscription: grants may have been missed, or Redis restarted without
        its data."""
        self._renew_now.set()
        self._reread_now.set()
        self._sweep_now.set()

    def _on_grant(self, message: bytes) -> None:
        waiter = self._queue.waiters.get(message.decode(errors="replace"))
        if waiter is not None:
            waiter.woken.set()

    async def _for_each(self, models: Iterable[str], work: Callable[[str], Awaitable[None]]) -> None:
        """Do the work for all models at the same time, so that a part of a Redis Cluster that is away does not hold up
        the other models. Raises the first error, after all are done."""

        async def try_one(model: str) -> StoreUnavailable | None:
            try:
                await work(model)
            except StoreUnavailable as error:
                self._degraded.start(model)
                return error
            return None

        for error in await asyncio.gather(*(try_one(model) for model in models)):
            if error is not None:
                raise error

    async def _renew(self) -> None:
        models = [model for model in self._queue.models() if not self._degraded.is_degraded(model)]
        await self._for_each(models, self._renew_one)

    async def _renew_one(self, model: str) -> None:
        crowded = await self._renew_leases(model) if self._queue.leases_of(model) else frozenset()
        if not self._degraded.is_degraded(model):  # otherwise the answer is outdated
            self._note_crowded(model, crowded)

    async def _renew_leases(self, model: str, *, was_away: bool = False) -> frozenset[str]:
        """Renew the leases of a model. Return the crowded ones: leases for which Redis has no slot left.

        `was_away`: this gateway was without Redis. All leases are then reported in one run: a slot of one that followed
        in another run could go to somebody else before."""
        ids, crowded = [lease.id for lease in self._queue.leases_of(model)], frozenset[str]()
        at_once = max(1, len(ids)) if was_away else RENEWED_AT_ONCE
        for first in range(0, max(1, len(ids)), at_once):
            # Earlier runs took time: a lease that has been given back meanwhile would be taken anew.
            some = [self._queue.held[id] for id in ids[first : first + at_once] if id in self._queue.held]
            if some or was_away:
                crowded |= await self._renew_some(model, some, was_away=was_away)
        return crowded & self._queue.held.keys()

    async def _renew_some(self, model: str, leases: Sequence[Lease], *, was_away: bool) -> frozenset[str]:
        together = was_away and self._ring.others_were_away(self._degraded.degraded_since(model))
        renewed = await self._store.renew(self._gateway, model, leases, was_away=was_away, settle=together)
        for id, fence in renewed.fences.items():
            self._queue.set_fence(id, fence)
        for lease in leases:
            if lease.id in renewed.void and self._queue.remove_lease(lease, time.monotonic()):
                log.warning("lease %s on worker %s is void: the process it was for is gone", lease.id, lease.at.worker)
                self._lost(model, VOID, 1)
        return renewed.crowded

    def _note_crowded(self, model: str, crowded: frozenset[str]) -> None:
        """Log and count the leases that are newly crowded (Redis has no slot left for them). Each sweep tries again to
        renew the crowded leases."""
        if new := crowded - self._crowded.get(model, frozenset()):
            log.warning("%d leases of %s were lost and their slots are taken", len(new), model)
            self._lost(model, CROWDED, len(new))
        self._crowded.pop(model, None)
        if crowded:
            self._crowded[model] = crowded

    async def _recover(self, model: str) -> None:
        """Place the model's calls by Redis again, if Redis answers: report the leases that are held here and those that
        have ended, then have the waiting calls ask for slots."""
        crowded = await self._renew_leases(model, was_away=True)
        await self._withdraw_ended(model)
        if crowded:  # ended leases may have taken the slots
            crowded = await self._renew_leases(model)
            await self._withdraw_ended(model)
        self._note_crowded(model, crowded)
        self._degraded.stop(model)
        self._reread_now.set()
        await self._ask_again(model)

    async def _ask_again(self, model: str) -> None:
        """Have the model's waiting calls ask Redis for slots, a few at a time, until all have or Redis fails again."""
        waiters = self._queue.waiters_of(model)
        for first in range(0, len(waiters), ASKING_AT_ONCE):
            asking = waiters[first : first + ASKING_AT_ONCE]
            for waiter in asking:
                waiter.woken.set()
            while any(waiter.filed is None and self._queue.is_waiting(waiter) for waiter in asking):
                if self._degraded.is_degraded(model):
                    return
                raise_if_cancelled()
                await asyncio.sleep(ASKED_POLL_S)  # the calls' own tasks ask

    async def _withdraw_ended(self, model: str) -> None:
        """Withdraw from Redis the tickets and leases that ended while it was away, until none is left."""
        while ended := self._degraded.take_ended(model):
            try:
                await self._store.withdraw(self._gateway, model, ended)
            except StoreUnavailable:
                self._degraded.restore_ended(model, ended)
                raise

    async def _reread(self) -> None:
        self._queue.tidy(time.monotonic())
        models = [model for model in self._queue.models() if not self._degraded.is_degraded(model)]
        await self._for_each(models, self._reread_all)

    async def _reread_all(self, model: str) -> None:
        waiters = self._queue.filed_waiters(model)
        for first in range(0, len(waiters), REREAD_AT_ONCE):
            await self._reread_some(model, waiters[first : first + REREAD_AT_ONCE], refresh=first == 0)

    async def _reread_some(self, model: str, waiters: Sequence[Waiter], *, refresh: bool) -> None:
        # Earlier batches took time: a call that has left the queue meanwhile would be put into it anew.
        waiters = [waiter for waiter in waiters if self._queue.is_waiting(waiter)]
        tickets = []
        for at, waiter in enumerate(waiters):
            offers = self._ranker.refresh(waiter) if refresh and at < REFRESHED else None
            if waiter.filed is not None:
                tickets.append(Ticket(waiter.order, waiter.filed, self.ticket_ttl(waiter), offers))
        positions = await self._store.reread(self._gateway, model, tickets)
        for waiter in waiters:
            position = positions.get(waiter.id, 0)
            if position == 0:
                waiter.woken.set()
            elif waiter.filed is not None and self._queue.is_waiting(waiter):
                waiter.filed = replace(waiter.filed, position=position)
                self.update_position(waiter)

    def update_position(self, waiter: Waiter) -> None:
        """Set the call's `queue_position` to its current position and predicted wait."""
        if waiter.queue_position is not None and waiter.filed is not None:
            ahead = waiter.filed.position - 1
            queue = self._ranker.queue_state(waiter.model)
            wait_s = queue.predicted_wait_s(ahead)
            waiter.queue_position.waits(waiter.filed.position, wait_s, for_worker=not queue.num_slots)

    async def _sweep(self) -> None:
        if self._degraded.models:
            await self._refresh_ring()
        urgent, self._urgent = self._urgent, False
        pause_s = 0.0 if urgent else self._sweep_s / 2

        async def sweep(model: str) -> None:
            if self._degraded.is_degraded(model):
                self._degraded.offer(model)  # by now a team may have waited long enough to be lent a slot
                await self._recover(model)
            swept = await self._store.sweep(self._gateway, model, pause_s=pause_s)
            self._queue.set_num_queued(model, swept.waiting)
            if swept.leases_freed:
                self._lost(model, EXPIRED, swept.leases_freed)
            if swept.leases_freed or swept.tickets_dropped:
                log.info("swept %s: %d leases, %d tickets", model, swept.leases_freed, swept.tickets_dropped)
            if model in self._crowded:  # before Redis, once settled, grants the freed slots to waiting calls
                await self._renew_one(model)

        await self._for_each(sorted(self._fleet.snapshot.models | self._queue.models() | self._degraded.models), sweep)

    def _on_fleet_change(self) -> None:
        self._urgent = True
        self._sweep_now.set()
        self._reread_now.set()  # waiting calls may want a worker that has come
