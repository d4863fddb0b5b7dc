"""Gives each call a slot of some worker, or a place in the queue until a slot comes free.

A call gets an id, which is its ticket while it waits and its lease while it runs. `slot` ranks the workers and asks
Redis once. If no slot is free, the call waits until Redis grants it one: the grant is announced on the gateway's
channel, or found when tickets are re-read (`maintenance`). However the wait or the call ends, the id is given back by
one message that needs no answer, sent after every earlier message about it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Container, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from gateway.admission.degraded import DegradedPlacement, GatewayRing
from gateway.admission.demand import DemandReport
from gateway.admission.local_queue import LocalQueue, Waiter, WaitLimits
from gateway.admission.maintenance import Maintenance
from gateway.admission.ranker import Ranker
from gateway.back_pressure import (
    model_not_loaded,
    no_slot_in_time,
    no_worker_in_time,
    not_loaded_unasked,
    queue_full,
    stopping,
    unloaded_by_admin,
)
from gateway.call import Call, Principal
from gateway.errors import ModelNotLoaded, QueueFull, QueueTimeout, StoreUnavailable
from gateway.registry.desired_models import DesiredModels
from gateway.registry.fleet import Fleet
from gateway.registry.model_states import ModelStates, Refusal
from gateway.routing.explain import Explanation
from gateway.routing.placement import ANYWHERE, PlacementRequest, Ranking, priority_class
from gateway.store.client import UNFENCED, Filed, Lease, Order, QueueLimitReached, Store
from gateway.store.outage import Unreadable, raise_if_cancelled
from gateway.telemetry.answer_log import QueuePosition
from workers.protocol import keys
from workers.protocol.heartbeat import WorkerAddress

log = logging.getLogger(__name__)

KNOWN_AFTER_S = 2 * keys.GATEWAY_INTERVAL_S
"""Seconds after which all other gateways have read the name of a gateway that joined the list of gateways."""
MISSED_S = 1.5 * keys.GATEWAY_INTERVAL_S


@dataclass(frozen=True, slots=True)
class HeldSlot:
    """A slot that a call holds until the block of `Admission.slot` ends or `give_back` is called."""

    lease: Lease
    ranking: Ranking
    """The latest ranking of workers, by which the call was placed."""
    weight: float
    """Weight of the call's key in the fair shares of teams."""
    predicted: float
    """Tokens that the call was predicted to take. Its team is charged for them until the call ends."""
    release: Callable[[Lease, float | None], None]

    def give_back(self, took: float | None = None) -> None:
        """Give the slot back after the call. Never waits; only the first time counts.

        `took`: tokens to charge the call for; None: those predicted."""
        self.release(self.lease, None if took is None else took / self.weight)

    @property
    def at(self) -> WorkerAddress:
        """The worker process that has the slot."""
        return self.lease.at

    @property
    def overtaken(self) -> int:
        return self.lease.overtaken


def _ignore_lost_leases(model: str, why: str, count: int) -> None:
    """Do nothing about leases that ended before their calls did."""


def _only_its_own(principal: Principal) -> Container[str] | None:
    """Return no models, if the key is limited to some: the default of `told_of`."""
    return None if principal.aliases is None else ()


class Admission:
    """Gives calls slots, in fair order over all gateways of one Redis. Use it on one event loop, on which `run` must
    run."""

    def __init__(
        self,
        store: Store,
        fleet: Fleet,
        gateway_id: str,
        *,
        max_queue: int,
        max_queue_per_team: int | None = None,
        ticket_ttl_s: float = keys.TICKET_TTL_S,
        renew_s: float = keys.LEASE_RENEW_S,
        sweep_s: float = keys.SWEEP_INTERVAL_S,
        known_after_s: float = KNOWN_AFTER_S,
        lost: Callable[[str, str, int], None] = _ignore_lost_leases,
        unreadable: Unreadable | None = None,
        states: ModelStates | None = None,
        told_of: Callable[[Principal], Container[str] | None] = _only_its_own,
    ) -> None:
        """`max_queue`: maximum number of calls that wait for one model; `max_queue_per_team`: the same for the calls of
        one team (None: `max_queue`). More calls are refused with QueueFull. `known_after_s`: seconds that this gateway
        must be on the list of gateways before it places calls without Redis. `lost` is called for leases that ended
        before their calls did, with the model, the cause (`metrics.LEASE_ENDS`) and the number of leases. `states`: the
        states of the models that are loaded on demand, read by its own `run`. `told_of` returns the models that a
        caller may be told of, None: all of them."""
        self._store = store
        self._fleet = fleet
        self._gateway = gateway_id
        self._max_queue = max_queue
        self._max_team_queue = max_queue if max_queue_per_team is None else max_queue_per_team
        self._queue = LocalQueue()
        self._ranker = Ranker(fleet, self._queue)
        self._ring = GatewayRing(gateway_id, known_after_s, MISSED_S)
        self._degraded = DegradedPlacement(
            self._queue, fleet, self._ring, max_queue=max_queue, max_team_queue=self._max_team_queue
        )
        self._states = ModelStates(store.redis) if states is None else states
        self._desired = DesiredModels(store.redis)
        self._demand = DemandReport(
            store.redis, gateway_id, self._queue, self.predicted_wait_s, self._states.is_on_demand
        )
        self._states.listen(self._on_states_read, self._waits_for_worker)
        self._told_of = told_of
        self._closed = False
        fleet.listen(lambda _: self._on_fleet_change())
        self._maintenance = Maintenance(
            store,
            fleet,
            gateway_id,
            self._queue,
            self._ranker,
            self._degraded,
            self._ring,
            ticket_ttl_s=ticket_ttl_s,
            renew_s=renew_s,
            sweep_s=sweep_s,
            lost=lost,
            unreadable=unreadable,
        )

    def _on_fleet_change(self) -> None:
        now, served = time.monotonic(), dict[str, bool]()
        for waiter in self._queue.waiters.values():
            model = waiter.model
            if model not in served:
                served[model] = bool(self._ranker.num_slots(model))
            if waiter.set_served(now, served=served[model]) and not served[model]:
                self._note_unserved(waiter)

    def _note_unserved(self, waiter: Waiter) -> None:
        """Have supervisors told that a call waits for a model without a worker, and their states read. A call that has
        no model loaded is refused."""
        if not waiter.may_load and not self._states.comes(waiter.model):
            waiter.is_unasked = True
            waiter.woken.set()
            return
        self._demand.tell_soon(waiter.model)
        self._states.read_soon()

    def _waits_for_worker(self) -> bool:
        """Return whether a call waits for a model without a worker."""
        return any(not waiter.wait_limits.served for waiter in self._queue.waiters.values())

    def _on_states_read(self) -> None:
        """Refuse the calls for models that no machine can load, and note how far the others' models are loaded."""
        refusals: dict[str, Refusal | None] = {}
        for waiter in self._queue.waiters.values():
            if waiter.wait_limits.served:
                continue
            model = waiter.model
            if model not in refusals:
                refusals[model] = self._states.refusal(model)
            refusal = refusals[model]
            waiter.is_unasked = not waiter.may_load and not self._states.comes(model)
            if waiter.is_unasked:
                waiter.woken.set()
            elif refusal is not None and waiter.since <= refusal.known_since:
                waiter.refusal = refusal
                waiter.woken.set()
            if waiter.queue_position is not None:
                waiter.queue_position.loading = self._states.loading(model)

    async def run(self) -> None:
        """Renew leases, listen for grants, re-read tickets, sweep and tell which models are wanted, until cancelled.
        Goes on after an outage of Redis."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._maintenance.run())
            tasks.create_task(self._demand.run())

    def report_also(self, unqueued: Callable[[], Mapping[str, tuple[int, float]]]) -> None:
        """Have calls that wait before they are queued count as demand. `unqueued` returns model -> (number of these
        calls, longest wait so far in seconds)."""
        self._demand.unqueued = unqueued

    def may_load(self, model: str) -> bool:
        """Return whether a call that waits for a model without a worker may have it loaded."""
        return self._states.of(model) is not None and self._states.refusal(model) is None

    def want(self, model: str) -> None:
        """Have a model loaded for calls to come: this one goes to a fallback. Never waits."""
        self._demand.want(model)

    @property
    def can_place_degraded(self) -> bool:
        """Whether calls can be placed while Redis is away: only if this gateway's share of the slots is known."""
        return self._degraded.has_share

    @property
    def degraded_models(self) -> frozenset[str]:
        """Models whose calls are placed without Redis at the moment."""
        return self._degraded.models

    @property
    def redis_up(self) -> bool:
        """Whether Redis accepted this gateway's last heartbeat."""
        return self._maintenance.redis_up

    def takes_writes(self, model: str) -> bool:
        """Return whether Redis accepts writes of a model's keys, judging by this gateway's own writes."""
        return self._maintenance.redis_up and not self._degraded.is_degraded(model)

    @property
    def models(self) -> set[str]:
        """Models for which calls of this process wait or hold slots."""
        return self._queue.models()

    def oldest_wait_s(self) -> dict[str, float]:
        """Return model -> seconds that the oldest waiting call of this process has waited; only models with such
        calls."""
        now = time.monotonic()
        return {model: now - since for model, since in self._queue.oldest_waits().items()}

    def waiting(self, model: str) -> int:
        """Return the number of calls of this process that wait for a slot of the model."""
        return self._queue.num_waiting(model)

    def in_flight(self, model: str) -> int:
        """Return the number of calls of this process that hold a slot of the model."""
        return self._queue.num_in_flight(model)

    def explain(self, model: str, request: PlacementRequest) -> Explanation:
        """Return how a call would be placed if it came now, and why. Takes no slot."""
        return self._ranker.explain(model, request)

    def predicted_wait_s(self, model: str) -> float:
        """Return the predicted seconds that a call would wait for a slot of the model if it came now."""
        queue = self._ranker.queue_state(model)
        return queue.predicted_wait_s(queue.num_waiting) if queue.num_waiting else 0.0

    def slot(
        self,
        call: Call,
        avoid: frozenset[str] = frozenset(),
        request: PlacementRequest = ANYWHERE,
        priority: int = 0,
        queue_position: QueuePosition | None = None,
        avoid_now: Callable[[], frozenset[str]] | None = None,
    ) -> AbstractAsyncContextManager[HeldSlot]:
        """Return a context manager that holds a slot for the time of its block. On entry the call waits for a slot
        until `call.queue_deadline`, or until `call.start_deadline` while its model has no worker.

        `avoid`: workers that have failed this call; they are used only if no other worker is alive. `avoid_now`: called
        while the call waits, returns the current value of `avoid`; None: it does not change. `priority`: the priority
        that the request asks for, from which its priority class in the queue is computed. `queue_position` is kept up
        to date. Raises QueueFull, QueueTimeout, ModelNotLoaded, StoreUnavailable, Stopping. Cancelling gives back the
        ticket or lease.
        """
        waiter = self._waiter(call, avoid, request, priority)
        waiter.avoid_now = avoid_now
        return self._slot(call, waiter, queue_position or QueuePosition())

    @asynccontextmanager
    async def _slot(self, call: Call, waiter: Waiter, queue_position: QueuePosition) -> AsyncIterator[HeldSlot]:
        asked_at = time.monotonic()
        taken = await self._admit(waiter, call, queue_position)
        now = time.monotonic()
        team, weight = waiter.order.team, waiter.order.weight
        lease = replace(taken, queue_ms=(now - asked_at) * 1000, team=team, weight=weight)
        self._queue.add_lease(lease, now, _prefill_ms(waiter.ranking, lease.at.worker))
        held = HeldSlot(lease, waiter.ranking, weight, waiter.order.share * weight, self._give_back)
        try:
            yield held
        finally:
            held.give_back()

    def _give_back(self, lease: Lease, share: float | None) -> None:
        """Give a slot back once. `share`: tokens to charge, divided by the call's weight; None: the predicted share."""
        lease = self._queue.held.get(lease.id, lease)  # it may have got its fencing token since
        if not self._queue.remove_lease(lease, time.monotonic()):
            return
        if self._degraded.is_degraded(lease.at.model) or lease.fence == UNFENCED:
            self._withdraw(lease.at.model, lease.id)
        else:
            lost = partial(self._degraded.note_undelivered, lease.at.model, lease.id)
            self._store.post_release(self._gateway, lease, share, lost)
        self._degraded.offer(lease.at.model)

    def _withdraw(self, model: str, id: str) -> None:
        """Withdraw an id from Redis, whether it stands for a ticket, a grant or a lease by now."""
        if self._degraded.is_degraded(model):
            self._degraded.note_ended(model, id)
        else:
            self._store.post_withdraw(self._gateway, model, id, partial(self._degraded.note_undelivered, model, id))

    def _waiter(self, call: Call, avoid: frozenset[str], request: PlacementRequest, priority: int) -> Waiter:
        ranking = self._ranker.rank(call.model, request, avoid)
        team, weight = call.principal.team, call.principal.weight
        order = Order(secrets.token_hex(8), team, ranking.charge / weight, priority_class(priority), weight)
        begin_by = time.monotonic() + call.begin_by - time.time() if call.begin_by else 0.0
        offers = self._ranker.offers(ranking, begin_by)
        now, served = time.monotonic(), bool(self._ranker.num_slots(call.model))
        start_deadline = call.start_deadline or call.queue_deadline
        wait_limits = WaitLimits(now, served=served, queue_deadline=call.queue_deadline, start_deadline=start_deadline)
        may_load = call.autoload is not False
        return Waiter(order, call.model, request, avoid, wait_limits, begin_by, ranking, offers, may_load=may_load)

    async def _check_autoload(self, call: Call) -> None:
        """Check whether a call for a model without a worker may have it loaded: a call may not want that, an admin's
        has it loaded although the catalog says that calls don't, and no call has one loaded that should always have
        workers and that an admin has unloaded. Raises ModelNotLoaded, StoreUnavailable."""
        if call.autoload is False and not self._states.comes(call.model):
            raise not_loaded_unasked(call.model)
        state = self._states.of(call.model) if call.autoload and call.principal.admin else None
        if state is not None and state.status == "unloaded":  # one that has failed is tried again when its time comes
            await self._desired.ask_for(call.model)
        elif not self._states.is_on_demand(call.model) and await self._desired.unloaded([call.model]):
            raise unloaded_by_admin(call.model)

    async def _admit(self, waiter: Waiter, call: Call, queue_position: QueuePosition) -> Lease:
        if not waiter.wait_limits.served:
            await self._check_autoload(call)
        # Redis' client can swallow a cancellation before Python 3.12 (python/cpython#86296): the call of a caller who
        # has left would wait, and have its model loaded, until its time is over.
        raise_if_cancelled()
        if self._closed:
            raise stopping()
        taken = None
        self._queue.add(waiter)
        try:
            if not waiter.wait_limits.served:
                self._note_unserved(waiter)
            async with asyncio.timeout(max(0.0, waiter.deadline - time.monotonic())) as waiter.timer:
                while taken is None:
                    taken = await self._request_slot(waiter, queue_position) or await self._wait(waiter, call)
        except TimeoutError:
            raise self._timeout_error(call, waiter) from None
        finally:
            queue_position.served()
            waiter.timer = None  # it refers to the task, and so to every frame of a call that was cut off
            self._queue.remove(waiter)
            if taken is None:
                self._demand.note_left(waiter.model)
            if not self._closed:
                self._give_back_rest(waiter, taken)
        if self._closed:
            raise stopping()
        return taken

    def _give_back_rest(self, waiter: Waiter, taken: Lease | None) -> None:
        """Give back everything that a call got besides the slot `taken`, once the call no longer waits: a ticket, grant
        or lease in Redis, or a slot of this gateway's share."""
        model, local = waiter.model, waiter.local
        if waiter.asked and (taken is None or taken is local):
            # Whatever ended the wait: by now Redis may have queued the call, granted it a slot or leased it one.
            self._withdraw(model, waiter.id)
        if local is not None and taken is not local:
            self._degraded.offer(model)

    async def _request_slot(self, waiter: Waiter, queue_position: QueuePosition) -> Lease | None:
        """Return a slot that Redis gives at once; None if the call must go on with `_wait`, queued in Redis or, while
        Redis is away, in this process. Raises QueueFull, StoreUnavailable."""
        self._queue.note_preferred(waiter)  # so that calls that are ranked meanwhile count it
        answer = await self._acquire(waiter)
        match answer:
            case None:
                self._degraded.place(waiter)
                if waiter.local is None:
                    ahead = self._degraded.ahead_of(waiter)
                    wait_s = self._degraded.queue_state(waiter.model).predicted_wait_s(ahead)
                    queue_position.waits(ahead + 1, wait_s, for_worker=not self._ranker.num_slots(waiter.model))
                return None
            case Lease():
                return answer
            case Filed():
                waiter.queue_position = queue_position
                self._queue.note_filed(waiter, answer)
                self._maintenance.update_position(waiter)
                self._maintenance.check_for_loan_soon(waiter)
                return None
            case QueueLimitReached():
                waiter.asked = False
                raise self._queue_full_error(waiter, answer)

    async def _acquire(self, waiter: Waiter) -> Lease | Filed | QueueLimitReached | None:
        """Ask Redis for a slot or, if none is free, a place in the queue. Return the answer; None if Redis is away."""
        if self._degraded.is_degraded(waiter.model):
            return None
        waiter.asked = True
        answer = None
        try:
            answer = await self._store.acquire(
                self._gateway,
                waiter.model,
                waiter.order,
                waiter.offers,
                ticket_ttl_s=self._maintenance.ticket_ttl(waiter),
                max_queue=self._max_queue,
                max_team_queue=self._max_team_queue,
            )
        except StoreUnavailable:
            self._degraded.start(waiter.model)
        return None if self._is_void(waiter) else answer

    def _is_void(self, waiter: Waiter) -> bool:
        """Return whether Redis's answer to a call no longer counts, since the model became degraded meanwhile.
        If so, note the call's id, so that it is withdrawn before the call asks Redis again."""
        if self._degraded.is_degraded(waiter.model):
            self._degraded.note_ended(waiter.model, waiter.id)
            return True
        return False

    async def _wait(self, waiter: Waiter, call: Call) -> Lease | None:
        """Wait for a slot, one of this gateway's share or one from Redis. Return None if Redis is back and must be
        asked again."""
        while waiter.local is None:
            await waiter.woken.wait()
            waiter.woken.clear()
            if self._closed:
                raise stopping()
            if waiter.is_unasked and waiter.local is None:
                raise not_loaded_unasked(call.model)
            if waiter.refusal is not None and waiter.local is None:
                raise self._not_loaded_error(call, waiter.refusal)
            if waiter.local is not None or self._degraded.is_degraded(waiter.model):
                continue
            if waiter.filed is None:
                return None
            taken = None
            try:
                taken = await self._store.claim(self._gateway, waiter.model, waiter.id, waiter.offers)
            except StoreUnavailable:
                self._degraded.start(waiter.model)
            if not self._is_void(waiter) and taken is not None:
                return taken
        return waiter.local

    def _queue_full_error(self, waiter: Waiter, line: QueueLimitReached) -> QueueFull:
        queue = self._ranker.queue_state(waiter.model, line.waiting)
        if line.of_team:
            return queue_full(queue, self._max_team_queue, waiter.order.team)
        return queue_full(queue, self._max_queue)

    def _not_loaded_error(self, call: Call, refusal: Refusal) -> ModelNotLoaded:
        why = refusal.state.why.shown(self._told_of(call.principal))
        return model_not_loaded(call.model, why, refusal.retry_in_s(time.time()))

    def _timeout_error(self, call: Call, waiter: Waiter) -> QueueTimeout:
        waited_s = time.monotonic() - call.received_at
        if not waiter.wait_limits.served:
            state = self._states.of(call.model)
            why = "" if state is None else state.why.shown(self._told_of(call.principal))
            return no_worker_in_time(call.model, waited_s, why)
        queue = self._ranker.queue_state(call.model)
        return no_slot_in_time(queue, waited_s, is_degraded=self._degraded.is_degraded(call.model))

    async def close(self) -> None:
        """Give back everything: end waiting calls with Stopping, release all leases, remove this gateway's
        heartbeat."""
        self._closed = True
        for waiter in self._queue.waiters.values():
            waiter.woken.set()
        await asyncio.gather(self._demand.give_back(), self._maintenance.give_back())
        await self._store.close()


def _prefill_ms(ranking: Ranking, worker: str) -> float:
    for bid in ranking.bids:
        if bid.worker == worker:
            return bid.cost_ms
    return 0.0 if ranking.elsewhere is None else ranking.elsewhere.cost_ms
