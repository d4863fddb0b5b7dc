"""Who may start now: a slot of some worker for each call, or a place in the line until one comes free.

A call gets an id, which is its ticket while it waits and its lease while it runs. `slot` asks Redis once; if no slot is
free the call waits until a grant is announced on the gateway's channel or found by re-reading (`upkeep`). Whatever ends
the wait or the call, the id is given back by one message that needs no answer, sent after everything asked for before.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace

from gateway.admission.line import Line, Waiter
from gateway.admission.upkeep import Upkeep
from gateway.call import Call
from gateway.errors import QueueFull, QueueTimeout, Stopping, StoreUnavailable
from gateway.registry.fleet import Fleet
from gateway.routing.rank import rank
from gateway.store.client import Filed, Lease, LineFull, Store, Taken
from workers.protocol import keys

__all__ = ["Admission", "Lease"]

log = logging.getLogger(__name__)

MAX_RETRY_AFTER_S = 60.0


class Admission:
    """Hands out slots, first come first served over all gateways of one Redis. One event loop; `run` keeps it alive."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        gateway_id: str,
        *,
        max_queue: int,
        ticket_ttl_s: float = keys.TICKET_TTL_S,
        renew_s: float = keys.LEASE_RENEW_S,
        sweep_s: float = keys.SWEEP_INTERVAL_S,
    ) -> None:
        self._store = store
        self._fleet = fleet
        self._gateway = gateway_id
        self._max_queue = max_queue
        self._ticket_ttl_s = ticket_ttl_s
        self._line = Line()
        self._turns = itertools.count()
        self._closed = False
        self._upkeep = Upkeep(
            store, fleet, gateway_id, self._line, ticket_ttl_s=ticket_ttl_s, renew_s=renew_s, sweep_s=sweep_s
        )

    async def run(self) -> None:
        """Renews, listens, re-reads and sweeps until cancelled; goes on after Redis was away."""
        await self._upkeep.run()

    def waiting(self, model: str) -> int:
        """Calls of this process that wait for a slot of the model."""
        return self._line.waiting(model)

    def in_flight(self, model: str) -> int:
        """Calls of this process that hold a slot of the model."""
        return self._line.in_flight(model)

    def slot(self, call: Call, avoid: frozenset[str] = frozenset()) -> AbstractAsyncContextManager[Lease]:
        """A slot for the time of the block, waited for until `call.queue_deadline`.

        `avoid` names workers that have failed this call; they are used only if no other lives. Raises QueueFull,
        QueueTimeout, StoreUnavailable, Stopping. Cancelling it gives back whatever it had got to.
        """
        return self._slot(call, avoid)

    @asynccontextmanager
    async def _slot(self, call: Call, avoid: frozenset[str]) -> AsyncIterator[Lease]:
        asked_at = time.monotonic()
        taken = await self._admit(call, avoid)
        now = time.monotonic()
        lease = replace(taken.lease, queue_ms=(now - asked_at) * 1000)
        self._line.hold(lease, now)
        try:
            yield lease
        finally:
            if self._line.let_go(lease, time.monotonic()):
                self._line.expect(lease.model, lease.worker, -1)
                self._store.post_release(self._gateway, lease)

    async def _admit(self, call: Call, avoid: frozenset[str]) -> Taken:
        if self._closed:
            raise self._stopping()
        waiter = Waiter(secrets.token_hex(8), call.model, avoid, call.queue_deadline)
        taken, refused = None, False
        self._line.enter(waiter)
        try:
            async with asyncio.timeout(max(0.0, call.queue_deadline - time.monotonic())):
                taken = await self._ask(waiter) or await self._wait(waiter)
        except TimeoutError:
            raise self._timed_out(call) from None
        except QueueFull:
            refused = True
            raise
        finally:
            self._line.leave(waiter)
            if taken is None and not refused and not self._closed:
                # Whatever ended the wait, Redis may have it in line, granted or even leased by now.
                self._store.post_withdraw(self._gateway, call.model, [waiter.id])
        if self._closed:
            raise self._stopping()
        self._line.heard(call.model, taken.lease.worker, taken.in_use)
        return taken

    async def _ask(self, waiter: Waiter) -> Taken | None:
        """A slot at once, or None with the ticket filed. Raises QueueFull, StoreUnavailable."""
        model = waiter.model
        workers = self._fleet.snapshot.of(model)
        ranking = rank(workers, self._line.in_use(model), waiter.avoid, next(self._turns))
        for first in ranking.order[:1]:
            self._line.expect(model, first, +1)
        ttl_s = self._upkeep.ticket_ttl(waiter)
        answer = await self._store.acquire(
            self._gateway, model, waiter.id, ranking.order, waiter.avoid, ttl_s, self._max_queue
        )
        match answer:
            case Taken():
                return answer
            case Filed(arrival):
                waiter.arrival = arrival
                return None
            case LineFull(waiting):
                raise self._full(model, waiting)

    async def _wait(self, waiter: Waiter) -> Taken:
        while True:
            await waiter.woken.wait()
            waiter.woken.clear()
            if self._closed:
                raise self._stopping()
            try:
                taken = await self._store.claim(self._gateway, waiter.model, waiter.id)
            except StoreUnavailable:
                continue  # the ticket is re-read when Redis is back
            if taken is not None:
                return taken

    def _slots(self, model: str) -> int:
        return sum(worker.slots for worker in self._fleet.snapshot.of(model) if not worker.draining)

    def _full(self, model: str, waiting: int) -> QueueFull:
        wait_s = self._line.predicted_wait_s(model, waiting, self._slots(model))
        return QueueFull(
            f"{waiting} calls wait for model {model!r} and at most {self._max_queue} may (max_queue); try again later",
            retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, wait_s)),
        )

    def _stopping(self) -> Stopping:
        return Stopping("this gateway is stopping; send the request again", retry_after_s=1.0)

    def _timed_out(self, call: Call) -> QueueTimeout:
        waited_s = time.monotonic() - call.received_at
        slots = self._slots(call.model)
        pool = f"its {slots} slots were taken" if slots else "no worker serves it now"
        wait_s = self._line.predicted_wait_s(call.model, self._line.waiting(call.model), slots)
        return QueueTimeout(
            f"no slot of model {call.model!r} came free in {waited_s:.1f} s (queue_timeout_s): {pool}; try again later",
            retry_after_s=min(MAX_RETRY_AFTER_S, max(1.0, wait_s)),
        )

    async def close(self) -> None:
        """Gives back everything: waiting calls end with Stopping, leases are released, the heartbeat goes."""
        self._closed = True
        for waiter in self._line.waiters.values():
            waiter.woken.set()
        await self._upkeep.give_back()
        await self._store.close()
