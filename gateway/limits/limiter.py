"""Counts each call for the limits and budgets of its subjects, before it is computed and after it.

async with limits.permit(call, asked, request_log) as permit:
    await permit.granted()                                   before the call goes to a worker

The counters are in Redis: one script takes all of them or none (`lua/reserve.lua`). The call looks for its slot
meanwhile; only a call of a subject that was refused lately waits first. While Redis is away, this process admits its
share of what was left (`share`), and `sync` tells Redis later.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from time import monotonic, time
from typing import Any, Protocol

from accounts.protocol.limit_counters import DAY_TOKENS, MONTH_TOKENS
from gateway.back_pressure import store_unavailable
from gateway.call import FREE, Call, Permit, Principal, Subject
from gateway.limits.cost import Prices
from gateway.limits.counts import RedisClock, SubjectCounts
from gateway.limits.estimate import estimate, estimate_pooled
from gateway.limits.messages import NOT_RUN, Message, Messages
from gateway.limits.plan import Plan, SubjectPlan, plan_of
from gateway.limits.refusals import Refusal
from gateway.limits.reservation import Reservation, State
from gateway.limits.share import Away, GatewayShare, decide
from gateway.routing.pool import Pool
from gateway.store.limits import ADMITTED, RAN_BEFORE, REPORTING, UNREADABLE, WINDOW_S, LimitStore
from gateway.telemetry.request_log import Headroom, RequestLog
from workers.protocol.events import NO_USAGE
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Seconds that a call waits for Redis before this process decides by its share."""
ROUND_WAIT_S = 4.0
"""Seconds that a call waits while gateways report to a Redis that has lost counters; a round takes about one."""
REFUSED_LATELY_S = 2.0
"""Seconds for which calls of a subject wait for their permission before they look for slots, after a refusal."""
MOST_PLANS = 20_000
PER_SUBJECT = 6
"""Numbers in an answer per subject, besides those of its budgets."""


class AliasSubjects(Protocol):
    """The part of the directory of access that limits need."""

    def alias(self, name: str) -> Subject | None: ...


def _pairs(reservation: Reservation) -> Iterator[tuple[SubjectPlan, SubjectCounts]]:
    return zip(reservation.plan.subjects, reservation.counts, strict=True)


def _less(known: Headroom | None, limit: int | None, used: int) -> Headroom | None:
    """Return what is left of the limit, or `known` if that has less left."""
    if limit is None:
        return known
    left = max(0, limit - used)
    return known if known is not None and known.remaining <= left else Headroom(limit, left, WINDOW_S if used else 0.0)


def _count_nothing(kind: str, limit: str) -> None:
    """Do nothing about a refusal."""


class RateLimits:
    """The limits and budgets of this gateway process's calls. Use it on one event loop."""

    def __init__(
        self,
        store: LimitStore,
        aliases: AliasSubjects,
        prices: Prices,
        pool: Callable[[str], Pool],
        refused: Callable[[str, str], None] = _count_nothing,
    ) -> None:
        """`pool` returns a model's workers. `refused` is called with a subject's kind and the limit that refuses."""
        self._aliases = aliases
        self._prices = prices
        self._pool = pool
        self._refused = refused
        self._plans: dict[tuple[str, str], Plan | None] = {}
        self.messages = Messages(store, self._on_lost)
        self.counts: dict[str, SubjectCounts] = {}
        self.clock = RedisClock()
        self.share = GatewayShare()
        self.heard_at = 0.0
        """time.monotonic() when Redis last told what others use."""
        self.used: dict[str, tuple[str, ...]] = {}
        """Subject -> fields of its budgets, of those that calls counted for since the last pulse."""
        self.untold: dict[SubjectCounts, None] = {}
        """The subjects with something to be told to Redis."""
        self.on_lost: Callable[[], None] | None = None
        """Called when Redis does not take messages any more."""
        self._waiting: dict[Reservation, None] = {}
        """Calls to ask Redis about as soon as it takes messages again."""

    @asynccontextmanager
    async def permit(
        self, call: Call, asked: Sequence[GenerateRequest] | PoolRequest, request_log: RequestLog
    ) -> AsyncIterator[Permit]:
        """Count a request while it is under way, and settle it at the end. Calls of subjects that were refused lately
        wait on entry until they are permitted. Raises RateLimited, StoreUnavailable."""
        reservation = self.reserve(call, asked, request_log)
        if reservation is None:
            yield FREE
            return
        try:
            if self._is_doubtful(reservation):
                await reservation.granted()
            yield reservation
        finally:
            self.end(reservation)

    def reserve(
        self, call: Call, asked: Sequence[GenerateRequest] | PoolRequest, request_log: RequestLog
    ) -> Reservation | None:
        """Ask for the permission of a call; None: it needs none. `end` must be called."""
        plan = self._plan(call.principal, call.alias)
        if plan is None:
            return None
        bounds = [most for most in (call.principal.bounds.max_tokens, plan.max_tokens) if most is not None]
        if isinstance(asked, PoolRequest):
            expected = estimate_pooled(asked, self._pool(call.model))
        else:
            expected = estimate(asked, self._pool(call.model), min(bounds, default=None))
        adapter = request_log.adapter
        counts = [self.counts.get(one.name) or self._new_counts(one.name) for one in plan.subjects]
        cost = self._prices.cost_nano(expected.usage, expected.compute_ms, call.model, adapter, time())
        reservation = Reservation(plan, counts, request_log, adapter, expected, cost, self._refused)
        if plan.subjects:
            self._ask(reservation)
        else:
            reservation.decide(State.LOCAL)
        return reservation

    def end(self, reservation: Reservation) -> None:
        """Settle a call by what it took. One that was sent to no worker counts for nothing; one that was left before an
        answer began, for its prompt."""
        if reservation.closed:
            return
        reservation.closed = True
        reservation.stop_timer()
        self._waiting.pop(reservation, None)
        if reservation.state not in (State.TOLD, State.LOCAL) or not reservation.plan.subjects:
            return
        log = reservation.request_log
        if not any(answer.attempts for answer in log.answers):
            self._settle(reservation, -1, -reservation.tokens, -reservation.cost)
            return
        usage = log.usage or reservation.left_in_prefill or NO_USAGE
        cost = self._prices.cost_nano(usage, log.compute_s * 1000, log.model, reservation.adapter, time())
        tokens = usage.prompt_tokens + usage.completion_tokens
        self._settle(reservation, 0, tokens - reservation.tokens, cost - reservation.cost)

    def ask_waiting(self) -> None:
        """Ask Redis about the calls that wait for it to take messages again."""
        waiting, self._waiting = self._waiting, {}
        for reservation in waiting:
            reservation.stop_timer()
            if not reservation.closed and reservation.state is State.ASKED:
                self._ask(reservation)

    def _plan(self, principal: Principal, alias_name: str) -> Plan | None:
        alias = self._aliases.alias(alias_name)
        if alias is None and not principal.subjects:
            return None
        key, now = (principal.key_id, alias_name), time()
        plan = self._plans.get(key)
        if plan is None or plan.principal is not principal or plan.alias is not alias or now >= plan.valid_until:
            if len(self._plans) >= MOST_PLANS:
                self._plans.clear()
            plan = self._plans[key] = plan_of(principal, alias, now)
        return plan

    def _new_counts(self, name: str) -> SubjectCounts:
        counts = self.counts[name] = SubjectCounts(name)
        return counts

    def _is_doubtful(self, reservation: Reservation) -> bool:
        now = monotonic()
        return not self.messages.ready or any(
            one.refused_at and now - one.refused_at < REFUSED_LATELY_S for one in reservation.counts
        )

    def _on_lost(self) -> None:
        if self.on_lost is not None:
            self.on_lost()

    # Asking Redis

    def _ask(self, reservation: Reservation) -> None:
        for one in reservation.plan.subjects:
            self.used[one.name] = one.budget_fields
        if not self.messages.ready:
            self._wait(reservation)
            return
        message = Message(0, partial(self._answered, reservation), partial(self._found, reservation))
        self.messages.reserve((reservation.tokens, reservation.cost, *reservation.plan.arguments), message)
        self._decide_in(reservation, WAIT_S)

    def _wait(self, reservation: Reservation) -> None:
        """Have the call wait until Redis takes messages again, or this process decides by its share."""
        self._waiting[reservation] = None
        now, until = monotonic(), reservation.asked_at + ROUND_WAIT_S
        if self.messages.away_since:
            until = min(until, self.messages.away_since + WAIT_S)
        self._decide_in(reservation, until - now)

    def _decide_in(self, reservation: Reservation, seconds: float) -> None:
        """Decide without Redis, unless it has decided within so many seconds."""
        reservation.stop_timer()
        if seconds <= 0:
            self._decide(reservation)
        else:
            loop = asyncio.get_running_loop()
            reservation.timer = loop.call_later(seconds, self._decide, reservation)

    def _answered(self, reservation: Reservation, answer: list[Any]) -> None:
        if answer[0] == REPORTING:
            if not reservation.closed and reservation.state is State.ASKED:
                reservation.stop_timer()
                loop = asyncio.get_running_loop()
                reservation.timer = loop.call_later(answer[1] / 1000 + 0.002, self._ask_again, reservation)
        elif answer[0] == RAN_BEFORE:
            self._found(reservation, answer[1])
        elif answer[0] == UNREADABLE:
            log.error("a counter of limits in Redis can't be read: %r; see what else writes there", answer[1])
            reservation.refuse(store_unavailable("what it holds of this caller's limits can't be read"))
        elif answer[0] == ADMITTED:
            tick = answer[2]
            self.clock.set(answer[1])
            numbers = self._hear(reservation, tick, answer, 3)
            self._admitted(reservation, tick, numbers)
        else:
            self.clock.set(answer[1])
            self._hear(reservation, answer[2], answer, 7)
            if reservation.state is State.ASKED and not reservation.closed:
                self._refuse(reservation, Refusal(answer[3] - 1, answer[4], answer[5], answer[6]))

    def _found(self, reservation: Reservation, tick: int) -> None:
        """Go on with a call whose answer was lost. `tick`: that of its admission; else it was not admitted."""
        if tick > 0:
            self._admitted(reservation, tick, ())
        elif reservation.state is State.ASKED and not reservation.closed:
            if tick == NOT_RUN:
                self._wait(reservation)
            else:
                self._ask_again(reservation)

    def _ask_again(self, reservation: Reservation) -> None:
        if reservation.closed or reservation.state is not State.ASKED:
            return
        if monotonic() - reservation.asked_at > ROUND_WAIT_S:
            self._decide(reservation)
        else:
            self._ask(reservation)

    def _hear(self, reservation: Reservation, tick: int, answer: list[Any], at: int) -> list[int]:
        """Note the counters in an answer, from `at` on. Return the number of the newest tick in each window."""
        now, numbers = monotonic(), list[int]()
        least_requests, least_tokens = reservation.request_log.requests_left, reservation.request_log.tokens_left
        for subject, counts in _pairs(reservation):
            number, requests, tokens, calls, day, month = answer[at : at + PER_SUBJECT]
            numbers.append(number)
            at += PER_SUBJECT
            counts.hear(tick, now, requests, tokens, calls)
            limits, periods = subject.subject.limits, counts.periods
            if limits.tokens_per_day is not None:
                periods[DAY_TOKENS] = (subject.day.begins_at, day)
            if limits.tokens_per_month is not None:
                periods[MONTH_TOKENS] = (subject.month.begins_at, month)
            for budget in subject.budgets:
                periods[budget.field] = (budget.span.begins_at, answer[at])
                at += 1
            least_requests = _less(least_requests, limits.requests_per_minute, requests)
            least_tokens = _less(least_tokens, limits.tokens_per_minute, tokens)
        reservation.request_log.requests_left, reservation.request_log.tokens_left = least_requests, least_tokens
        return numbers

    # Decisions

    def _admitted(self, reservation: Reservation, tick: int, numbers: Sequence[int]) -> None:
        """Note that Redis has counted a call."""
        was_wanted = not reservation.closed and reservation.state in (State.ASKED, State.LOCAL)
        if was_wanted and reservation.state is State.LOCAL:  # it was decided without Redis, whose answer came late
            self._count_untold(reservation, reservation.tick, -1, -reservation.tokens, -reservation.cost, calls=-1)
        for subject, counts in _pairs(reservation):
            if subject.has_window:
                counts.count_told(tick, 1, reservation.tokens)
            if subject.has_calls:
                counts.calls += 1
                counts.calls_told += 1
        reservation.decide(State.TOLD, tick, numbers)
        if not was_wanted:  # the caller has gone, or the call was counted without Redis, or refused
            reservation.closed = True
            self._settle(reservation, -1, -reservation.tokens, -reservation.cost)

    def _refuse(self, reservation: Reservation, refusal: Refusal) -> None:
        now, subject = monotonic(), reservation.plan.subjects[refusal.place].subject
        for one in reservation.counts:
            one.refused_at = now
        self._refused(subject.kind, refusal.name)
        reservation.refuse(refusal.error(reservation.plan, reservation.tokens, self._prices.currency))

    def _decide(self, reservation: Reservation) -> None:
        """Decide about a call without Redis."""
        self._waiting.pop(reservation, None)
        if reservation.closed or reservation.state is not State.ASKED:
            return
        now, tick = monotonic(), self.clock.tick
        since = self.messages.away_since or reservation.asked_at
        away = Away(self.share, tick, now, since, self.heard_at)
        found = decide(reservation.plan, reservation.counts, reservation.tokens, reservation.cost, away)
        if isinstance(found, str):
            reservation.refuse(store_unavailable(found))
        elif found is not None:
            self._refuse(reservation, found)
        else:
            self._count_untold(reservation, tick, 1, reservation.tokens, reservation.cost, calls=1)
            reservation.decide(State.LOCAL, tick)

    # Settling

    def _settle(self, reservation: Reservation, requests: int, tokens: int, cost: int) -> None:
        """Correct what a call was counted for, and end it."""
        if reservation.state is State.TOLD and self.messages.ready:
            self._settle_told(reservation, requests, tokens, cost)
            return
        self._count_untold(reservation, reservation.tick, requests, tokens, cost, calls=-1)

    def _settle_told(self, reservation: Reservation, requests: int, tokens: int, cost: int) -> None:
        plan, numbers = reservation.plan, reservation.numbers or [0] * len(reservation.counts)
        arguments: list[str | int] = [reservation.tick, requests, tokens, cost, *plan.arguments[:2]]
        for subject, counts, number in zip(plan.subjects, reservation.counts, numbers, strict=True):
            arguments += subject.settle_arguments(number)
            if subject.has_calls:
                counts.calls -= 1
                counts.calls_told -= 1

        def answered(answer: list[Any]) -> None:
            for subject, counts in _pairs(reservation):
                if not subject.has_window:
                    continue
                counts.count_told(reservation.tick, requests, min(0, tokens))
                if tokens > 0:
                    counts.count_told(self.clock.tick, 0, tokens)

        def found(outcome: int) -> None:
            if outcome != NOT_RUN:
                answered([])
                return
            for subject, counts in _pairs(reservation):
                if subject.has_calls:
                    counts.calls_told += 1
            self._count_untold(reservation, reservation.tick, requests, tokens, cost, calls=0)

        self.messages.settle(arguments, Message(0, answered, found))

    def _count_untold(
        self, reservation: Reservation, tick: int, requests: int, tokens: int, cost: int, *, calls: int
    ) -> None:
        """Count without Redis."""
        for subject, counts in _pairs(reservation):
            if subject.has_window:
                counts.count_untold(tick, requests, tokens)
            if subject.has_calls:
                counts.calls += calls
            self.untold[counts] = None
            for name, begin in subject.token_periods():
                counts.count_period(name, begin, tokens)
            for budget in subject.budgets:
                counts.count_period(budget.field, budget.span.begins_at, cost)
