"""Places calls without Redis (degraded placement): by the last snapshot, on this gateway's share of slots (`share`).

A model is without Redis from the first failing request until this gateway has told Redis again what it holds
(`upkeep`). Meanwhile waiting calls get the slots of the share as they come free, by class and then by arrival. Their
leases are like any other, but for the fencing token, which Redis gives later.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from gateway.admission.local_queue import Line, Waiter
from gateway.admission.slot_share import Roll, Seat
from gateway.back_pressure import QueueState, degraded_queue_full, store_unavailable
from gateway.registry.fleet import Fleet
from gateway.routing.worker_state import NOT_KNOWN
from gateway.store.client import UNFENCED, Lease

log = logging.getLogger(__name__)

LOAN_AFTER_S = 0.5
"""Seconds that a call waits before its team, which has no slot, is lent one."""

MOST_ENDED = 16_384
"""Most ended ids per model that are kept to tell Redis: those of some seconds. Earlier ones have expired there."""

LINGER = 2.0
"""Calls of other gateways count as over after this multiple of the mean time that calls hold a slot."""


@dataclass(frozen=True, slots=True)
class _Others:
    """Slots that other gateways held when Redis went away, maybe more of a worker's than their share."""

    busy: Counter[str]
    until: float
    """time.monotonic() after which they count no more. If they still run, the worker queues what is too much."""

    def now(self, now: float) -> Counter[str]:
        return self.busy if now < self.until else Counter()


class Alone:
    """Degraded placement of one gateway process. It never calls Redis or waits: it sets `Waiter.local` and wakes."""

    def __init__(self, line: Line, fleet: Fleet, roll: Roll, *, max_queue: int, max_team_queue: int) -> None:
        self._line = line
        self._fleet = fleet
        self._roll = roll
        self._max_queue = max_queue
        self._max_team_queue = max_team_queue
        self._away: dict[str, float] = {}
        """Model that is without Redis -> since when, time.monotonic()."""
        self._others: dict[str, _Others] = {}
        self._ended: defaultdict[str, deque[str]] = defaultdict(lambda: deque(maxlen=MOST_ENDED))

    def is_away(self, model: str) -> bool:
        """Return whether the model's calls are placed without Redis now."""
        return model in self._away

    def away_since(self, model: str) -> float:
        """Return time.monotonic() since which a model is without Redis."""
        return self._away[model]

    @property
    def models(self) -> frozenset[str]:
        """Models that are without Redis now."""
        return frozenset(self._away)

    @property
    def has_share(self) -> bool:
        """Whether this gateway knows which slots are its own."""
        return self._roll.seat() is not None

    def lost(self, model: str) -> None:
        """Place the model's calls without Redis from now on, after a failed request: waiting calls get the share."""
        if model not in self._away:
            self._away[model] = time.monotonic()
            self._others[model] = self._held_by_others(model)
            told = "placing calls on this gateway's share of the slots" if self.has_share else "nothing can be placed"
            log.warning("Redis does not take requests for model %s: %s", model, told)
            self.offer(model)

    def back(self, model: str) -> None:
        """Go back to Redis, which knows what this gateway holds: the model's waiting calls may ask there again."""
        if model in self._away:
            del self._away[model]
            log.info("Redis takes requests for model %s again", model)

    def ended(self, model: str, id: str) -> None:
        """Remember a ticket or lease that is over while Redis is away, to tell it when it is back."""
        self._ended[model].append(id)

    def unheard(self, model: str, id: str) -> None:
        """Remember one that Redis was told of in vain, and begin to do without Redis."""
        self.ended(model, id)
        self.lost(model)

    def keep_ended(self, model: str, ids: list[str]) -> None:
        """Put back ended ids, since Redis still can't be told."""
        self._ended[model] += ids

    def take_ended(self, model: str) -> list[str]:
        return list(self._ended.pop(model, ()))

    def enter(self, waiter: Waiter) -> None:
        """Give a call that can't ask Redis a slot of the share, or let it wait for one. Raises StoreUnavailable,
        QueueFull.
        """
        seat = self._roll.seat()
        if seat is None:
            raise store_unavailable("this gateway does not know yet which slots are its own meanwhile")
        # The model's first worker, and Redis, may come.
        starts = all(beat.draining for beat in self._fleet.snapshot.of(waiter.model))
        if not starts and not self.num_slots(waiter.model):
            raise store_unavailable(f"none of the slots of model {waiter.model!r} is this gateway's share meanwhile")
        self.offer(waiter.model)
        if waiter.local is None:
            self._check_bounds(waiter, seat)

    def num_slots(self, model: str) -> int:
        """Return the number of the model's slots in this gateway's share."""
        seat = self._roll.seat()
        if seat is None:
            return 0
        beats = self._fleet.snapshot.of(model)
        return sum(seat.slots_of(beat.worker, beat.slots) for beat in beats if not beat.draining)

    def queue_state(self, model: str) -> QueueState:
        """Return the state of the model's queue, for this gateway's share of the slots."""
        return self._line.state(model, self.num_slots(model))

    def ahead_of(self, waiter: Waiter) -> int:
        """Return the number of this gateway's calls before it: those of higher classes, and earlier ones of its own."""
        ahead, its_class, came = 0, waiter.order.priority, False
        for other in self._waiting(waiter.model):
            came = came or other is waiter
            ahead += other.order.priority > its_class or (other.order.priority == its_class and not came)
        return ahead

    def offer(self, model: str) -> None:
        """Give free slots of the share to waiting calls, while Redis is away."""
        seat = self._roll.seat()
        if seat is None or model not in self._away:
            return
        free = self._free(model, seat)
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
        self._lend(model, seat)

    def _lend(self, model: str, seat: Seat) -> None:
        """Lend a place beyond the slots to each team that waits without any while others have all, as Redis does."""
        now = time.monotonic()
        holders = {lease.team for lease in self._line.leases_of(model)}
        holders |= {w.order.team for w in self._line.waiters.values() if w.model == model and w.local is not None}
        waiting = [w for w in self._waiting(model) if w.order.team not in holders and now - w.since >= LOAN_AFTER_S]
        if not waiting:
            return
        held, beyond = self._held(model), Counter[str]()
        for beat in self._fleet.snapshot.of(model):
            lent = max(0, held[beat.worker] - seat.slots_of(beat.worker, beat.slots))
            left = seat.slots_of(beat.worker, beat.overdraft) - lent
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

    def _free(self, model: str, seat: Seat) -> Counter[str]:
        """Return worker -> slots of the share that no call here holds, for workers with any."""
        held, others = self._held(model), self._others[model].now(time.monotonic())
        free = Counter[str]()
        for beat in self._fleet.snapshot.of(model):
            usable = min(seat.slots_of(beat.worker, beat.slots), beat.slots - others[beat.worker])
            left = usable - held[beat.worker]
            if left > 0 and not beat.draining:
                free[beat.worker] = left
        return free

    def _held(self, model: str) -> Counter[str]:
        held = Counter(lease.at.worker for lease in self._line.leases_of(model))
        held.update(w.local.at.worker for w in self._line.waiters.values() if w.model == model and w.local is not None)
        return held

    def _held_by_others(self, model: str) -> _Others:
        mine, beats = self._held(model), [one.beat for one in self._fleet.pool(model).states.values()]
        busy = Counter({beat.worker: max(0, beat.load.slots_busy - mine[beat.worker]) for beat in beats})
        hold_ms = max((beat.load.hold_ms for beat in beats), default=0.0) or NOT_KNOWN.hold_ms
        return _Others(busy, time.monotonic() + LINGER * hold_ms / 1000)

    def _waiting(self, model: str) -> Iterator[Waiter]:
        """Yield the model's calls that have no slot yet, in the order in which they came."""
        return (w for w in self._line.waiters.values() if w.model == model and w.local is None)

    def _lease(self, waiter: Waiter, free: Counter[str]) -> Lease | None:
        """Return a lease on the best worker with a free slot that would do; None where none would."""
        for worker, kv_tokens in _wanted(waiter, free):
            beat = next((beat for beat in self._fleet.snapshot.of(waiter.model) if beat.worker == worker), None)
            if beat is not None:
                id = secrets.token_hex(8)
                return Lease(id, UNFENCED, beat.at, kv_tokens)
        return None

    def _check_bounds(self, waiter: Waiter, seat: Seat) -> None:
        own = waiter.order.team
        teams = Counter(other.order.team for other in self._waiting(waiter.model) if other is not waiter)
        bounds = (
            (teams.total(), self._max_queue, "max_queue", None),
            (teams[own], self._max_team_queue, "max_queue_per_team", own),
        )
        for waiting, bound, setting, team in bounds:
            if waiting >= seat.part_of(bound):
                raise degraded_queue_full(waiter.model, waiting, seat.part_of(bound), setting, team)


def _by_class(waiting: Iterable[Waiter]) -> list[Waiter]:
    """Return waiting calls by class, and within a class in the order in which they came."""
    return sorted(waiting, key=lambda waiter: -waiter.order.priority)


def _wanted(waiter: Waiter, free: Counter[str]) -> Iterator[tuple[str, int]]:
    """Yield the workers with a free slot that would do for the call, best first, and its predicted KV tokens there."""
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
