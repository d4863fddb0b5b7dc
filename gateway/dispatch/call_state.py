"""Keeps the state of one call until a worker begins its answer. Its transitions are methods of `CallState`:

begin_attempt -> begin_answer -> end_attempt         the worker answers
              -> fail_attempt -> begin_attempt       it does not, and the dispatcher decides to ask another worker
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
"""Seconds that a call avoids a worker that lost it: by then the worker's event stream shows whether it is gone."""
TIMER_S = 0.05
"""Seconds by which a timer can fire early."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The time limits of every call, and the limit of retries."""

    queue_timeout_s: float
    start_timeout_s: float
    """Maximum seconds that a call waits while its model has no worker."""
    request_timeout_s: float
    retry_share: float = 0.2
    """Share of a model's calls that may be retried on another worker (`RetryBudget`)."""
    answer_timeout_s: float = math.inf
    """Maximum seconds from an answer's first token to its end, unless its API key sets another limit."""


@dataclass(slots=True, eq=False)
class CallState:
    """The state of one call. The methods also record each transition in the metrics and in the log of the answer."""

    call: Call
    """The call, with its current model and the remaining fallbacks of its chain."""
    answer_log: AnswerLog
    asked: GenerateRequest | PoolRequest
    """The request as the caller sent it."""
    metrics: Metrics
    limits: Limits
    budget: RetryBudget
    request: GenerateRequest = field(default_factory=GenerateRequest)
    """The request in the form for the current model. Pooled work leaves the default here and sends `asked`."""
    placement_request: PlacementRequest = ANYWHERE
    """The placement request: the facts that the choice of a worker depends on."""
    placement_request_is_stale: bool = False
    """Whether `placement_request` must be made anew: the call has moved to a model with other adapters."""
    at: WorkerAddress | None = None
    """The worker process that was asked for the answer and has neither begun it nor failed; None: there is none."""
    first_error: PaddockError | None = None
    """The error of the first model that had no slot for the call."""
    lost: set[str] = field(default_factory=set)
    """Boot ids of worker processes that were lost while they had the call, or could not be reached to send it."""
    resting: dict[str, float] = field(default_factory=dict)
    """Boot id -> time.monotonic() until which this call leaves that worker process alone."""

    def enter(self) -> None:
        """Count the call as in flight until `leave`, and as a new call of its model in the retry budget."""
        self.budget.count_call(self.call.model, time.monotonic())
        self.metrics.in_flight.labels(self.call.model).inc()

    def leave(self) -> None:
        self.metrics.in_flight.labels(self.call.model).dec()

    @property
    def attempt(self) -> AttemptLog:
        """The log of the attempt at the worker that was asked last."""
        return self.answer_log.attempts[-1]

    @property
    def patience_s(self) -> float:
        """Seconds that the caller still waits for a slot."""
        left_s = self.call.queue_deadline - time.monotonic()
        return min(left_s, self.call.begin_by - time.time()) if self.call.begin_by else left_s

    @property
    def used_up_at(self) -> WorkerAddress | None:
        """The worker process that had the call, but had not begun its answer, when its time was up; None: none."""
        return self.at if time.monotonic() >= self.call.deadline - TIMER_S else None

    def begin_attempt(self, at: WorkerAddress, ranking: Ranking, fingerprint: str) -> None:
        """Record that the call goes to a worker. `ranking`: the ranking that chose it."""
        bid, log = ranking.bid_for(at.worker), self.answer_log
        placement = ranking.summary(at.worker) if log.explains else ""
        log.begin_attempt(at, fingerprint, bid.cached_tokens if bid else 0, placement)
        self.at = at

    def begin_answer(self) -> None:
        self.at = None
        self.attempt.begin_answer()
        self.metrics.attempts.labels(self.call.model, "started").inc()

    def end_attempt(self, end: Finished | Failed | None, error: str = "") -> None:
        """Record the end of an answer that had begun. `end`: its last event; None: none came, because of `error`."""
        self.attempt.end(error, end)

    def fail_attempt(self, at: WorkerAddress, failure: Failure) -> None:
        """Record that the attempt at worker `at` failed before the answer began."""
        self.at = None
        self.attempt.end(failure.code.value)
        self.metrics.attempts.labels(self.call.model, failure.code.value).inc()
        if failure.code is FailureCode.WORKER_LOST:
            self.lost.add(at.boot)

    def rest(self, at: WorkerAddress, code: FailureCode) -> None:
        """Make the call avoid a worker process that failed it: for a while, or for good if the process drains."""
        rest_s = LOST_REST_S if code is FailureCode.WORKER_LOST else REST_S
        self.resting[at.boot] = math.inf if code is FailureCode.DRAINING else time.monotonic() + rest_s

    def take_retry(self) -> bool:
        """Return whether the model's retry budget allows one more retry; if so, charge it to the budget."""
        granted = self.budget.take(self.call.model, time.monotonic())
        self.metrics.retries.labels(self.call.model, "granted" if granted else "denied").inc()
        return granted

    def avoid(self, boots: Iterable[str]) -> None:
        """Make the call avoid these processes for good."""
        self.resting |= dict.fromkeys(boots, math.inf)

    def wait_anew(self) -> None:
        """Restart the two time limits on the call's waiting: for a slot, and for the first worker of its model."""
        limits = self.limits
        self.call = self.call.waiting(time.monotonic(), queue_s=limits.queue_timeout_s, start_s=limits.start_timeout_s)

    def move_to(self, model: str, reason: Reason) -> None:
        """Continue the call on `model`, a fallback of its chain."""
        self.metrics.fallbacks.labels(self.call.model, model, reason.value).inc()
        self.answer_log.trace.add_event("fallback", model=self.call.model, fallback=model, reason=reason.value)
        self.leave()
        self.call = self.call.on_model(model)
        self.enter()  # the fallback's workers are needed now
        self.answer_log.model = model
