"""The reservation of one call: what it was counted for, from the estimate before it until it is settled after it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from enum import Enum
from time import monotonic

from gateway.call import Permit
from gateway.errors import PaddockError
from gateway.limits.counts import SubjectCounts
from gateway.limits.estimate import Estimate
from gateway.limits.plan import Plan
from gateway.limits.refusals import PROMPT, prompt_too_long
from gateway.telemetry.request_log import RequestLog
from workers.protocol.events import Usage


class State(Enum):
    ASKED = "asked"
    """It is not decided yet."""
    TOLD = "told"
    """It was admitted by Redis, which counts it."""
    LOCAL = "local"
    """It was admitted without Redis."""
    REFUSED = "refused"


class Reservation(Permit):
    """The permit of a call that counts for limits or budgets. Made and decided by `RateLimits`."""

    __slots__ = (
        *("adapter", "asked_at", "closed", "cost", "counts", "error", "expected", "numbers", "plan"),
        *("request_log", "state", "tick", "timer", "tokens", "_count_refusal", "_cuts", "_decided"),
    )

    def __init__(
        self,
        plan: Plan,
        counts: Sequence[SubjectCounts],
        request_log: RequestLog,
        adapter: str,
        expected: Estimate,
        cost: int,
        count_refusal: Callable[[str, str], None],
    ) -> None:
        """`adapter`: the adapter that the call names; empty: none. `expected` and `cost`: the estimates.
        `count_refusal` is called with a subject's kind and its limit that refuses the call's prompt."""
        self._count_refusal = count_refusal
        self.plan = plan
        self.counts = counts
        self.request_log = request_log
        self.adapter = adapter
        self.expected = expected
        self.tokens = expected.tokens
        self.cost = cost
        self.asked_at = monotonic()
        self.state = State.ASKED
        self.closed = False
        """Whether the call is over, or nobody waits for its permission any more."""
        self.tick = 0
        """The tick in which it was admitted."""
        self.numbers: Sequence[int] = ()
        """Number of that tick in each subject's window; empty: not known."""
        self.error: PaddockError | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Timer that decides the call without Redis, if that does not answer in time."""
        self._decided: asyncio.Event | None = None
        self._cuts: list[Callable[[PaddockError], None]] = []

    @property
    def max_tokens(self) -> int | None:
        return self.plan.max_tokens

    def check_prompt(self, num_tokens: int) -> None:
        subject = self.plan.prompt_subject
        if subject is not None and num_tokens > (subject.limits.max_prompt_tokens or num_tokens):
            self._count_refusal(subject.kind, PROMPT)
            raise prompt_too_long(subject, num_tokens)

    def watch(self, cut: Callable[[PaddockError], None]) -> None:
        self._cuts.append(cut)

    def unwatch(self, cut: Callable[[PaddockError], None]) -> None:
        self._cuts.remove(cut)

    async def granted(self) -> None:
        if self.state is State.ASKED:
            self._decided = self._decided or asyncio.Event()
            await self._decided.wait()
        if self.error is not None:
            raise self.error

    def decide(self, state: State, tick: int = 0, numbers: Sequence[int] = ()) -> None:
        """Set the decision, and wake what waits for it."""
        self.state, self.tick, self.numbers = state, tick, numbers
        self.stop_timer()
        if self._decided is not None:
            self._decided.set()

    def refuse(self, error: PaddockError) -> None:
        self.error = error
        self.decide(State.REFUSED)
        for cut in tuple(self._cuts):
            cut(error)

    @property
    def left_in_prefill(self) -> Usage | None:
        """The expected prompt tokens of a call whose caller left, or whose time was up, before its worker's answer
        began; None: it ended otherwise."""
        attempts = [answer.attempts[-1] for answer in self.request_log.answers if answer.attempts]
        if any(attempt.begun_at or attempt.error for attempt in attempts):
            return None
        return Usage(self.expected.prompt_tokens, 0, 0)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
