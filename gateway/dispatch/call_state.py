"""Keeps the state of one call until a worker begins its answer, and makes the transitions of that state.

begin_attempt -> answer_begins -> end_attempt        the worker answers
              -> fail_attempt  -> begin_attempt      it does not: the dispatcher decides whether another one may
move_to                                              a fallback of the model's chain takes over
leave                                                the call is over, however it ended
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from gateway.call import Call
from gateway.errors import PaddockError
from gateway.routing.placement import ANYWHERE, PlacementRequest, Ranking
from gateway.routing.retries import Reason, RetryBudget
from gateway.telemetry.answer_log import AnswerLog, AttemptLog
from gateway.telemetry.metrics import Metrics
from workers.protocol.events import Failed, Failure, FailureCode, Finished
from workers.protocol.heartbeat import WorkerAddress
from workers.protocol.pooled import PoolRequest
from workers.protocol.requests import GenerateRequest

REST_S = 0.1
"""Seconds that a call avoids a worker that refused it."""
LOST_REST_S = 0.5
"""Seconds that a call avoids a worker that lost it: by then its event stream tells whether it is gone."""
TIMER_S = 0.05
"""Seconds by which a timer may fire early."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of every call, in seconds, and of retries."""

    queue_timeout_s: float
    start_timeout_s: float
    """Longest wait of a call while its model has no worker."""
    request_timeout_s: float
    retry_share: float = 0.2
    """Share of a model's calls that may be tried again on another worker."""
    answer_timeout_s: float = math.inf
    """Most seconds from an answer's first token to its end, where its key does not say."""


@dataclass(slots=True, eq=False)
class CallState:
    """The state of one call. Its methods also write what becomes of it into the metrics and the log of its answer."""

    call: Call
    """The call, with its current model and those that are left of its chain."""
    answer_log: AnswerLog
    asked: GenerateRequest | PoolRequest
    """The request as its caller sent it."""
    metrics: Metrics
    limits: Limits
    budget: RetryBudget
    request: GenerateRequest = field(default_factory=GenerateRequest)
    """The request as the current model gets it; empty for pooled work, whose placement depends on nothing of it."""
    placement_request: PlacementRequest = ANYWHERE
    """The placement request: the facts that the choice of a worker depends on."""
    placement_request_is_stale: bool = False
    """Whether `placement_request` is still that of another model, with other adapters."""
    at: WorkerAddress | None = None
    """The process that was asked for the answer and has neither begun it nor failed; None: there is none."""
    first_error: PaddockError | None = None
    """The error of the first model that had no slot for the call."""
    lost: set[str] = field(default_factory=set)
    """Boot ids of the workers that were lost while they had the call, or that could not be reached with it."""
    resting: dict[str, float] = field(default_factory=dict)
    """Boot id -> time.monotonic() until which this call leaves that worker process alone."""

    def enter(self) -> None:
        """Count the call as one of its model's calls, in flight until it `leave`s."""
        self.budget.count_call(self.call.model, time.monotonic())
        self.metrics.in_flight.labels(self.call.model).inc()

    def leave(self) -> None:
        self.metrics.in_flight.labels(self.call.model).dec()

    @property
    def attempt(self) -> AttemptLog:
        """The attempt at the worker that was asked last."""
        return self.answer_log.attempts[-1]

    @property
    def patience_s(self) -> float:
        """Seconds that the caller still waits for a slot."""
        left_s = self.call.queue_deadline - time.monotonic()
        return min(left_s, self.call.begin_by - time.time()) if self.call.begin_by else left_s

    @property
    def used_up_at(self) -> WorkerAddress | None:
        """The process that used up the call's time without beginning the answer; None: there is none."""
        return self.at if time.monotonic() >= self.call.deadline - TIMER_S else None

    def begin_attempt(self, at: WorkerAddress, ranking: Ranking, fingerprint: str) -> None:
        """Note that the call goes to a worker. `ranking`: the ranking that chose it."""
        bid, log = ranking.bid_for(at.worker), self.answer_log
        placement = ranking.summary(at.worker) if log.explains else ""
        log.begin_attempt(at, fingerprint, bid.cached_tokens if bid else 0, placement)
        self.at = at

    def begin_answer(self) -> None:
        self.at = None
        self.attempt.begin_answer()
        self.metrics.attempts.labels(self.call.model, "started").inc()

    def end_attempt(self, end: Finished | Failed | None, error: str = "") -> None:
        """Note the end of an answer that has begun. `end`: its last event; None: none came, because of `error`."""
        self.attempt.end(error, end)

    def fail_attempt(self, at: WorkerAddress, failure: Failure) -> None:
        """Note that the attempt at that worker failed before the answer began."""
        self.at = None
        self.attempt.end(failure.code.value)
        self.metrics.attempts.labels(self.call.model, failure.code.value).inc()
        if failure.code is FailureCode.WORKER_LOST:
            self.lost.add(at.boot)

    def rest(self, at: WorkerAddress, code: FailureCode) -> None:
        """Let the call avoid a process after its failure: for a while, or for good where it drains."""
        rest_s = LOST_REST_S if code is FailureCode.WORKER_LOST else REST_S
        self.resting[at.boot] = math.inf if code is FailureCode.DRAINING else time.monotonic() + rest_s

    def take_retry(self) -> bool:
        """Return whether the retry budget of the model lets one more call be tried again, and count it if so."""
        granted = self.budget.take(self.call.model, time.monotonic())
        self.metrics.retries.labels(self.call.model, "granted" if granted else "denied").inc()
        return granted

    def avoid(self, boots: Iterable[str]) -> None:
        """Let the call avoid these processes for good."""
        self.resting |= dict.fromkeys(boots, math.inf)

    def wait_anew(self) -> None:
        """Start the call's time limits for a slot and for a first worker anew."""
        limits = self.limits
        self.call = self.call.waiting(time.monotonic(), queue_s=limits.queue_timeout_s, start_s=limits.start_timeout_s)

    def move_to(self, model: str, reason: Reason) -> None:
        """Go on with a fallback of the chain."""
        self.metrics.fallbacks.labels(self.call.model, model, reason.value).inc()
        self.answer_log.trace.add_event("fallback", model=self.call.model, fallback=model, reason=reason.value)
        self.leave()
        self.call = self.call.on_model(model)
        self.enter()  # the fallback's workers are needed now
        self.answer_log.model = model
