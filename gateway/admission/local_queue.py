"""The local queue of one gateway process: its waiting calls, its leases and its recent placements. Without Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gateway.back_pressure import QueueState
from gateway.registry.model_states import Refusal
from gateway.routing.placement import PlacementRequest, Ranking
from gateway.store.client import Filed, Lease, Offers, Order
from gateway.telemetry.answer_log import QueuePosition

REMEMBERED_S = 2.0
"""Seconds for which a call that was placed or ended is remembered. By then its worker's own report takes account of it,
except in fleets of thousands of workers."""


@dataclass(slots=True)
class _RecentMoves:
    """The calls recently placed at one worker or ended there. `moves` has for each: time.monotonic(); 1 if it was
    placed, -1 if it ended; its predicted prefill in ms, 0 if it ended."""

    moves: deque[tuple[float, int, float]] = field(default_factory=deque)
    num_waiting: int = 0
    """Number of calls that wait and for which this worker is best."""
    waiting_ms: float = 0.0
    """Sum of the predicted prefill, in ms, of the waiting calls for which this worker is best."""


class RecentPlacements:
    """Keeps one model's recent placements. `gateway.routing.rank` calls `since` dozens of times per call."""

    def __init__(self) -> None:
        self._workers: dict[str, _RecentMoves] = {}
        self._preferred: dict[str, tuple[str, float]] = {}
        """Ticket -> the worker that is best for it, and its predicted prefill there in ms."""

    def note_placed(self, worker: str, now: float, prefill_ms: float) -> None:
        self._note(worker, now, 1, prefill_ms)

    def note_given_back(self, worker: str, now: float) -> None:
        self._note(worker, now, -1, 0.0)

    def add_waiting(self, ticket: str, worker: str, prefill_ms: float) -> None:
        """Note that a call waits and that this worker is best for it: later calls count it as ahead of them at that
        worker."""
        self.remove_waiting(ticket)
        self._preferred[ticket] = worker, prefill_ms
        recent = self._moves_at(worker)
        recent.num_waiting += 1
        recent.waiting_ms += prefill_ms

    def remove_waiting(self, ticket: str) -> None:
        """Remove a ticket that no longer waits."""
        found = self._preferred.pop(ticket, None)
        if found is not None:
            recent = self._moves_at(found[0])
            recent.num_waiting -= 1
            recent.waiting_ms = recent.waiting_ms - found[1] if recent.num_waiting else 0.0

    def since(self, worker: str, at: float) -> tuple[int, float]:
        """Return how many calls were placed at the worker after `at`, minus those that ended after it, plus those that
        wait for the worker; and the predicted prefill, in ms, of the calls placed and waiting."""
        recent = self._workers.get(worker)
        if recent is None:
            return 0, 0.0
        num, ms = recent.num_waiting, recent.waiting_ms
        for when, change, prefill_ms in reversed(recent.moves):
            if when <= at:
                break
            num += change
            ms += prefill_ms
        return num, ms

    def tidy(self, now: float) -> None:
        """Forget the workers that have no recent moves and for which no call waits."""
        for worker, recent in list(self._workers.items()):
            while recent.moves and recent.moves[0][0] < now - REMEMBERED_S:
                recent.moves.popleft()
            if not recent.moves and not recent.num_waiting:
                del self._workers[worker]

    def _moves_at(self, worker: str) -> _RecentMoves:
        return self._workers.setdefault(worker, _RecentMoves())

    def _note(self, worker: str, now: float, change: int, prefill_ms: float) -> None:
        moves = self._moves_at(worker).moves
        moves.append((now, change, prefill_ms))
        while moves[0][0] < now - REMEMBERED_S:
            moves.popleft()


class WaitLimits:
    """The two wait limits of one call: one clock runs while its model has workers, the other while it has none.

    Thus workers that come and go neither end a wait early nor make it endless. Times are time.monotonic()."""

    __slots__ = ("_other_s", "deadline", "served")

    def __init__(self, now: float, *, served: bool, queue_deadline: float, start_deadline: float) -> None:
        """`queue_deadline`: when the call stops waiting for a slot; `start_deadline`: when it stops waiting for a
        worker."""
        self.served = served
        """Whether the call's model has workers that take calls."""
        self.deadline = queue_deadline if served else start_deadline
        """When the call stops waiting, unless `served` changes first."""
        self._other_s = (start_deadline if served else queue_deadline) - now

    def set_served(self, now: float, *, served: bool) -> bool:
        """Set whether the model has workers, and switch clocks if that has changed. Return True if it has changed."""
        if served == self.served:
            return False
        self.served = served
        self.deadline, self._other_s = now + self._other_s, self.deadline - now
        return True


@dataclass(slots=True, eq=False)
class Waiter:
    """One call that waits for its slot."""

    order: Order
    model: str
    request: PlacementRequest
    avoid: frozenset[str]
    """Workers that have failed the call; they are used only if no other worker is alive."""
    wait_limits: WaitLimits
    begin_by: float
    """time.monotonic() by which the caller wants the first token; 0: the caller named no deadline."""
    ranking: Ranking
    offers: Offers
    filed: Filed | None = None
    """The call's place in the queue; None until Redis has answered that it is queued."""
    avoid_now: Callable[[], frozenset[str]] | None = None
    """Returns the workers that have failed the call by now, the new value of `avoid`; None: `avoid` does not change."""
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when Redis may have granted a slot, and when this gateway stops."""
    queue_position: QueuePosition | None = None
    """The caller's record of the call's position in the queue, updated while the call is queued in Redis."""
    asked: bool = False
    """Whether Redis was asked for a slot: the call may be queued, granted a slot or even leased one there."""
    local: Lease | None = None
    """A slot that the call was given without Redis and has not taken yet."""
    since: float = field(default_factory=time.monotonic)
    """time.monotonic() when the call came."""

    timer: asyncio.Timeout | None = None
    """The timeout that ends the call's wait."""
    refusal: Refusal | None = None
    """Why the call had better not wait any longer, since its model has no worker and gets none; None: it may wait."""
    may_load: bool = True
    """Whether its model may be loaded for it."""
    is_unasked: bool = False
    """Whether the call is refused, since its model is not loaded and is not to be loaded for it."""

    @property
    def id(self) -> str:
        return self.order.id

    @property
    def deadline(self) -> float:
        """time.monotonic() when the call stops waiting, unless its model gets its first worker or loses its last one
        before."""
        return self.wait_limits.deadline

    def set_served(self, now: float, *, served: bool) -> bool:
        """Note whether the call's model has workers that take calls; if that has changed, move the end of the wait.
        Return whether it has changed."""
        if not self.wait_limits.set_served(now, served=served):
            return False
        if self.timer is not None and not self.timer.expired():
            self.timer.reschedule(asyncio.get_running_loop().time() + max(0.0, self.deadline - now))
        return True


class HoldTime:
    """The moving average of the seconds that calls of one model hold a slot; waits are predicted from it."""

    WEIGHT = 0.1
    FIRST_GUESS_S = 2.0

    def __init__(self) -> None:
        self.mean_s = self.FIRST_GUESS_S

    def add(self, held_s: float) -> None:
        self.mean_s += self.WEIGHT * (held_s - self.mean_s)


class LocalQueue:
    """The waiting calls and the leases of this process, by model, and its recent placements."""

    def __init__(self) -> None:
        self.waiters: dict[str, Waiter] = {}
        self.held: dict[str, Lease] = {}
        self._held_since: dict[str, float] = {}
        self._num_waiting: Counter[str] = Counter()
        self._num_in_flight: Counter[str] = Counter()
        self._placements: defaultdict[str, RecentPlacements] = defaultdict(RecentPlacements)
        self._hold_times: dict[str, HoldTime] = {}
        self._num_queued: Counter[str] = Counter()
        self._used_at: dict[str, float] = {}

    def add(self, waiter: Waiter) -> None:
        self.waiters[waiter.id] = waiter
        self._num_waiting[waiter.model] += 1

    def note_filed(self, waiter: Waiter, filed: Filed) -> None:
        waiter.filed = filed
        # An urgent call has a low position, but those behind it still wait.
        self._num_queued[waiter.model] = max(self._num_queued[waiter.model], filed.position)
        self.note_preferred(waiter)

    def note_preferred(self, waiter: Waiter) -> None:
        """Note that a call waits and which worker is best for it by its ranking."""
        if waiter.ranking.bids:
            best = waiter.ranking.bids[0]
            self._placements[waiter.model].add_waiting(waiter.id, best.worker, best.cost_ms)

    def remove(self, waiter: Waiter) -> None:
        if self.waiters.pop(waiter.id, None) is not None:
            self._num_waiting[waiter.model] -= 1
            self._placements[waiter.model].remove_waiting(waiter.id)

    def is_waiting(self, waiter: Waiter) -> bool:
        """Return whether a call still waits."""
        return self.waiters.get(waiter.id) is waiter

    def waiters_of(self, model: str) -> list[Waiter]:
        """Return the model's waiting calls in order of arrival."""
        return [waiter for waiter in self.waiters.values() if waiter.model == model]

    def filed_waiters(self, model: str) -> list[Waiter]:
        """Return the model's calls that are queued in Redis, the next one to be served first."""
        filed = [waiter for waiter in self.waiters.values() if waiter.model == model and waiter.filed is not None]
        return sorted(filed, key=_rank)

    def add_lease(self, lease: Lease, now: float, prefill_ms: float) -> None:
        self.held[lease.id] = lease
        self._held_since[lease.id] = now
        self._num_in_flight[lease.at.model] += 1
        self._used_at[lease.at.model] = now
        self._placements[lease.at.model].note_placed(lease.at.worker, now, prefill_ms)

    def set_fence(self, id: str, fence: int) -> None:
        """Set the fencing token of a lease."""
        if id in self.held:
            self.held[id] = replace(self.held[id], fence=fence)

    def remove_lease(self, lease: Lease, now: float) -> bool:
        """Remove a lease. Return False if it was removed already."""
        if self.held.pop(lease.id, None) is None:
            return False
        self._num_in_flight[lease.at.model] -= 1
        self._used_at[lease.at.model] = now
        self._hold_times.setdefault(lease.at.model, HoldTime()).add(now - self._held_since.pop(lease.id))
        self._placements[lease.at.model].note_given_back(lease.at.worker, now)
        return True

    def num_waiting(self, model: str) -> int:
        return self._num_waiting[model]

    def oldest_waits(self) -> dict[str, float]:
        """Return model -> time.monotonic() when its longest-waiting call came; only models with waiting calls."""
        models = {model for model, number in self._num_waiting.items() if number > 0}
        found: dict[str, float] = {}
        for waiter in self.waiters.values():  # in the order in which they came
            if len(found) == len(models):
                break
            found.setdefault(waiter.model, waiter.since)
        return found

    def teams(self, most: int) -> dict[str, list[str]]:
        """Return model -> the teams whose calls wait for it, the first that came first, at most so many of each."""
        found: dict[str, dict[str, None]] = {}
        for waiter in self.waiters.values():  # in the order in which they came
            teams = found.setdefault(waiter.model, {})
            if len(teams) < most:
                teams[waiter.order.team] = None
        return {model: list(teams) for model, teams in found.items()}

    def num_in_flight(self, model: str) -> int:
        return self._num_in_flight[model]

    def used_at(self, model: str) -> float | None:
        """Return the time.monotonic() when a call last got or left a slot of the model; None: none has."""
        return self._used_at.get(model)

    def used_since(self, since: float) -> set[str]:
        """Return the models with calls that wait or hold slots, or that got or left one after `since`."""
        counts = (*self._num_waiting.items(), *self._num_in_flight.items())
        return {model for model, number in counts if number > 0} | {
            model for model, at in self._used_at.items() if at > since
        }

    def num_queued(self, model: str) -> int:
        """Return how many calls of all gateways wait for the model, as last read from Redis; 0 if no call of this
        gateway waits for it."""
        return self._num_queued[model] if self._num_waiting[model] else 0

    def set_num_queued(self, model: str, waiting: int) -> None:
        self._num_queued[model] = waiting

    def placements(self, model: str) -> RecentPlacements:
        return self._placements[model]

    def tidy(self, now: float) -> None:
        for placements in self._placements.values():
            placements.tidy(now)

    def state(self, model: str, num_slots: int, num_waiting: int | None = None) -> QueueState:
        """Return the state of the model's queue. `num_waiting`: number of calls in it; None: the number last read from
        Redis."""
        hold_s = self._hold_times.get(model, HoldTime()).mean_s
        return QueueState(model, num_slots, self.num_queued(model) if num_waiting is None else num_waiting, hold_s)

    def models(self) -> set[str]:
        """Return the models for which calls of this process wait or hold slots."""
        return {waiter.model for waiter in self.waiters.values()} | {lease.at.model for lease in self.held.values()}

    def leases_of(self, model: str) -> list[Lease]:
        return [lease for lease in self.held.values() if lease.at.model == model]


def _rank(waiter: Waiter) -> float:
    return float(waiter.filed.rank) if waiter.filed is not None else 0.0
