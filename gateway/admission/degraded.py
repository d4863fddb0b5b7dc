"""Places calls while Redis is away (degraded placement): by the last snapshot of the fleet, and only in slots that are
this gateway's share (`SlotShare`).

Slot k of a worker belongs to one of the n gateways: that at place (k + hash of the worker) mod n in their list. If all
gateways use the same list, each slot belongs to exactly one, and their shares of a worker differ by one slot at most.

A model is degraded from the first request to Redis that fails until this gateway has reported to Redis again which
leases it holds (`maintenance`). Meanwhile slots of the share go to waiting calls as they come free, by priority class
and then by arrival. A lease made so differs from others only in its fencing token, which Redis assigns later.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from gateway.admission.local_queue import LocalQueue, Waiter
from gateway.back_pressure import QueueState, degraded_queue_full, store_unavailable
from gateway.registry.fleet import Fleet
from gateway.routing.worker_state import NOT_KNOWN
from gateway.store.client import UNFENCED, Lease

log = logging.getLogger(__name__)

LEND_AFTER_S = 0.5
"""Seconds that a call waits before its team, if it holds no slot, is lent one beyond the worker's own (`overdraft`)."""

MOST_ENDED = 16_384
"""Maximum number of ids of ended calls, per model, that are kept to be reported to Redis; the oldest are dropped. It
takes seconds until so many have ended; by then the tickets and leases of the oldest have expired in Redis anyway."""

LINGER = 2.0
"""Once Redis is away for this many times a call's mean time in a slot, other gateways' calls count as over."""


@dataclass(frozen=True, slots=True)
class SlotShare:
    """One gateway's share of the slots, computed from its place in the sorted list of all gateways."""

    number: int
    num_gateways: int

    def slots_of(self, worker: str, slots: int) -> int:
        """Return how many of a worker's slots are this gateway's."""
        first = (self.number - crc32(worker.encode())) % self.num_gateways
        return max(0, -(-(slots - first) // self.num_gateways))

    def part_of(self, bound: int) -> int:
        """Return this gateway's part of `bound`, a limit for all gateways together: at least 1, unless `bound` is 0."""
        return -(-bound // self.num_gateways)


class GatewayRing:
    """The list of gateways (the ring), as this gateway last read it from Redis.

    A gateway that joined a moment ago has no share: others may not have read its name yet, and would use its slots."""

    def __init__(self, gateway: str, settle_s: float, missed_s: float) -> None:
        """`settle_s`: seconds within which every gateway reads the name of one that has joined. `missed_s`: a gateway
        whose last heartbeat is more seconds old counts as cut off from Redis."""
        self._gateway = gateway
        self._settle_s = settle_s
        self._missed_s = missed_s
        self._ids: Sequence[str] = ()
        self._joined_at = 0.0
        self._seen_at = 0.0
        self._missed_at = -math.inf

    def update(self, silent_s: Mapping[str, float], *, stayed: bool, now: float) -> None:
        """Note which gateways are alive, as just read from Redis. `silent_s`: id of each, this one included -> seconds
        since its heartbeat. `stayed`: whether this gateway's previous heartbeat was still valid. `now`:
        time.monotonic()."""
        if not stayed or not self._ids:
            self._joined_at = now
        others = {*self._ids, *silent_s} - {self._gateway}
        # If Redis hung for all gateways, it then processes the heartbeats that were sent while it hung, and the other
        # gateways look as if they had never been silent. So this gateway's own silence counts as well.
        silent = now - self._seen_at > self._missed_s
        if self._ids and any(silent or silent_s.get(id, math.inf) > self._missed_s for id in others):
            self._missed_at = now
        self._ids = sorted(silent_s)
        self._seen_at = now

    def others_were_away(self, since: float) -> bool:
        """Return whether other gateways may have lost Redis, too. `since`: time.monotonic() when this one lost it."""
        return self._missed_at >= since - self._missed_s

    def share(self) -> SlotShare | None:
        """Return this gateway's share of the slots; None while other gateways may not have read its name yet."""
        if self._gateway not in self._ids or self._seen_at - self._joined_at < self._settle_s:
            return None
        return SlotShare(self._ids.index(self._gateway), len(self._ids))


@dataclass(frozen=True, slots=True)
class _OthersSlots:
    """How many slots of each worker other gateways held when Redis went away: it can be more than their shares."""

    busy: Counter[str]
    until: float
    """time.monotonic() after which the calls in these slots count as over. If some still run then, the calls sent in
    their place wait at the worker."""

    def now(self, now: float) -> Counter[str]:
        return self.busy if now < self.until else Counter()


class DegradedPlacement:
    """Places calls of one gateway process without Redis. Never waits: it sets `Waiter.local` and wakes the waiting
    call."""

    def __init__(
        self, queue: LocalQueue, fleet: Fleet, ring: GatewayRing, *, max_queue: int, max_team_queue: int
    ) -> None:
        self._queue = queue
        self._fleet = fleet
        self._ring = ring
        self._max_queue = max_queue
        self._max_team_queue = max_team_queue
        self._degraded_since: dict[str, float] = {}
        """Model -> time.monotonic() since which it is without Redis; only models that are without Redis now."""
        self._others: dict[str, _OthersSlots] = {}
        self._ended: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MOST_ENDED))

    def is_degraded(self, model: str) -> bool:
        """Return whether the model's calls are placed without Redis now."""
        return model in self._degraded_since

    def degraded_since(self, model: str) -> float:
        """Return the time.monotonic() at which the model became degraded. Raises KeyError if it is not degraded."""
        return self._degraded_since[model]

    @property
    def models(self) -> frozenset[str]:
        """Models that are without Redis now."""
        return frozenset(self._degraded_since)

    @property
    def has_share(self) -> bool:
        """Whether this gateway knows which slots are its share."""
        return self._ring.share() is not None

    def start(self, model: str) -> None:
        """Place the model's calls, waiting ones included, without Redis from now on. Call it when a request to Redis
        has failed."""
        if model not in self._degraded_since:
            self._degraded_since[model] = time.monotonic()
            self._others[model] = self._held_by_others(model)
            told = "placing calls on this gateway's share of the slots" if self.has_share else "nothing can be placed"
            log.warning("Redis does not take requests for model %s: %s", model, told)
            self.offer(model)

    def stop(self, model: str) -> None:
        """Let the model's calls ask Redis again. Redis must have been told first which leases this gateway holds."""
        if model in self._degraded_since:
            del self._degraded_since[model]
            log.info("Redis takes requests for model %s again", model)

    def note_ended(self, model: str, id: str) -> None:
        """Remember a ticket or lease that ended while Redis is away, to have Redis remove it later."""
        self._ended[model].append(id)

    def note_undelivered(self, model: str, id: str) -> None:
        """Remember a ticket or lease whose end could not be reported to Redis, and place the model's calls without
        Redis from now on."""
        self.note_ended(model, id)
        self.start(model)

    def restore_ended(self, model: str, ids: list[str]) -> None:
        """Put back the ids from `take_ended` (of ended tickets and leases), as they could not be reported to Redis."""
        self._ended[model] += ids

    def take_ended(self, model: str) -> list[str]:
        return list(self._ended.pop(model, ()))

    def place(self, waiter: Waiter) -> None:
        """Give a slot of this gateway's share to a call that can't ask Redis, or let the call wait for such a slot.
        Raises StoreUnavailable, QueueFull."""
        share = self._ring.share()
        if share is None:
            raise store_unavailable("this gateway does not know yet which slots are its own meanwhile")
        # A model without a worker: the call waits, since the first worker may start or Redis may come back.
        starts = all(beat.draining for beat in self._fleet.snapshot.of(waiter.model))
        if not starts and not self.num_slots(waiter.model):
            raise store_unavailable(f"none of the slots of model {waiter.model!r} is this gateway's share meanwhile")
        self.offer(waiter.model)
        if waiter.local is None:
            self._check_bounds(waiter, share)

    def num_slots(self, model: str) -> int:
        """Return the number of the model's slots in this gateway's share."""
        share = self._ring.share()
        if share is None:
            return 0
        beats = self._fleet.snapshot.of(model)
        return sum(share.slots_of(beat.worker, beat.slots) for beat in beats if not beat.draining)

    def queue_state(self, model: str) -> QueueState:
        """Return the state of the model's queue, counting only this gateway's share of the slots."""
        return self._queue.state(model, self.num_slots(model))

    def ahead_of(self, waiter: Waiter) -> int:
        """Return how many calls of this gateway are served before this one: those of a higher class, and earlier ones
        of its own class."""
        ahead, its_class, came = 0, waiter.order.priority, False
        for other in self._waiting(waiter.model):
            came = came or other is waiter
            ahead += other.order.priority > its_class or (other.order.priority == its_class and not came)
        return ahead

    def offer(self, model: str) -> None:
        """Give free slots of this gateway's share to waiting calls, while Redis is away."""
        share = self._ring.share()
        if share is None or model not in self._degraded_since:
            return
        free = self._free(model, share)
        for waiter in _by_class(self._waiting(model)) if free else ():
            if not free:
                break
            lease = self._lease(waiter, free)
            if lease is None:
                continue
            waiter.local = lease
            waiter.woken.set()
            free[lease.at.worker] -= 1
            if free[lease.at.worker] <= 0:
                del free[lease.at.worker]
        self._lend_slots(model, share)

    def _lend_slots(self, model: str, share: SlotShare) -> None:
        """Lend teams without a slot, after LEND_AFTER_S, one beyond a worker's own (`overdraft`), as Redis does."""
        now = time.monotonic()
        holders = {lease.team for lease in self._queue.leases_of(model)}
        holders |= {w.order.team for w in self._queue.waiters.values() if w.model == model and w.local is not None}
        waiting = [w for w in self._waiting(model) if w.order.team not in holders and now - w.since >= LEND_AFTER_S]
        if not waiting:
            return
        held, beyond = self._held(model), Counter[str]()
        for beat in self._fleet.snapshot.of(model):
            lent = max(0, held[beat.worker] - share.slots_of(beat.worker, beat.slots))
            left = share.slots_of(beat.worker, beat.overdraft) - lent
            if left > 0 and held[beat.worker] and not beat.draining:
                beyond[beat.worker] = left
        for waiter in _by_class(waiting):
            if waiter.order.team in holders:
                continue
            lease = self._lease(waiter, beyond)
            if lease is not None:
                waiter.local = lease
                waiter.woken.set()
                holders.add(waiter.order.team)
                beyond[lease.at.worker] -= 1
                beyond = +beyond

    def _free(self, model: str, share: SlotShare) -> Counter[str]:
        """Return worker -> number of slots of the share that no call holds; only workers with such slots."""
        held, others = self._held(model), self._others[model].now(time.monotonic())
        free = Counter[str]()
        for beat in self._fleet.snapshot.of(model):
            usable = min(share.slots_of(beat.worker, beat.slots), beat.slots - others[beat.worker])
            left = usable - held[beat.worker]
            if left > 0 and not beat.draining:
                free[beat.worker] = left
        return free

    def _held(self, model: str) -> Counter[str]:
        held = Counter(lease.at.worker for lease in self._queue.leases_of(model))
        held.update(w.local.at.worker for w in self._queue.waiters.values() if w.model == model and w.local is not None)
        return held

    def _held_by_others(self, model: str) -> _OthersSlots:
        mine, beats = self._held(model), [one.beat for one in self._fleet.pool(model).states.values()]
        busy = Counter({beat.worker: max(0, beat.load.slots_busy - mine[beat.worker]) for beat in beats})
        hold_ms = max((beat.load.hold_ms for beat in beats), default=0.0) or NOT_KNOWN.hold_ms
        return _OthersSlots(busy, time.monotonic() + LINGER * hold_ms / 1000)

    def _waiting(self, model: str) -> Iterator[Waiter]:
        """Yield the model's waiting calls that have no slot yet, in order of arrival."""
        return (w for w in self._queue.waiters.values() if w.model == model and w.local is None)

    def _lease(self, waiter: Waiter, free: Counter[str]) -> Lease | None:
        """Return a lease on the best suitable worker with a free slot; None if there is no such worker."""
        for worker, kv_tokens in _wanted(waiter, free):
            beat = next((beat for beat in self._fleet.snapshot.of(waiter.model) if beat.worker == worker), None)
            if beat is not None:
                id = secrets.token_hex(8)
                return Lease(id, UNFENCED, beat.at, kv_tokens)
        return None

    def _check_bounds(self, waiter: Waiter, share: SlotShare) -> None:
        own = waiter.order.team
        teams = Counter(other.order.team for other in self._waiting(waiter.model) if other is not waiter)
        bounds = (
            (teams.total(), self._max_queue, "max_queue", None),
            (teams[own], self._max_team_queue, "max_queue_per_team", own),
        )
        for waiting, bound, setting, team in bounds:
            if waiting >= share.part_of(bound):
                raise degraded_queue_full(waiter.model, waiting, share.part_of(bound), setting, team)


def _by_class(waiting: Iterable[Waiter]) -> list[Waiter]:
    """Return waiting calls sorted by class, the most urgent first, and within a class by arrival."""
    return sorted(waiting, key=lambda waiter: -waiter.order.priority)


def _wanted(waiter: Waiter, free: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield the suitable workers with a free slot, best first, each with the KV tokens that the call is predicted to
    take."""
    ranking = waiter.ranking
    for bid in ranking.bids:
        if bid.worker in free:
            yield bid.worker, bid.kv_tokens
    if ranking.bids and ranking.elsewhere is None:
        return
    named = {bid.worker for bid in ranking.bids} | ranking.left_out | waiter.avoid
    kv_tokens = ranking.elsewhere.kv_tokens if ranking.elsewhere is not None else 0
    for worker, _ in free.most_common():
        if worker not in named:
            yield worker, kv_tokens
