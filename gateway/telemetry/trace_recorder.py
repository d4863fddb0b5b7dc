"""Records a request's waits and attempts for its trace, and the queue position of a call that waits.

A request without a trace records nothing, at no cost.

    recorder = begun(tracer, caller)            when the request arrives
    wait = recorder.waits(model, position)      at each wait for a slot
    attempt = recorder.asks(model, ...)         at each attempt at a worker
    finish.tell(request_log)                    when the request is over
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.protocol.events import Failed, Finished
from workers.tracing.span import SpanEvent, TraceContext
from workers.tracing.tracer import Tracer


class QueuePosition:
    """A call's queue position: admission writes it, the code that answers the caller reads it."""

    __slots__ = ("_told_at", "_wait_s", "filed", "for_worker", "on_wait", "position", "predicted_s")

    def __init__(self) -> None:
        self.filed = 0
        """Position in the queue when the call was filed, from 1; 0: it never had to wait."""
        self.position = 0
        """Latest known position; 0: it does not wait now."""
        self.for_worker = False
        """Whether its model has no worker: it waits for the first one, and how long is not known."""
        self.predicted_s: float | None = None
        """Predicted wait in seconds when it was filed; None: it never had to wait, or it could not be predicted."""
        self.on_wait: Callable[[], None] | None = None
        """Called whenever the call waits, in the queue or not."""
        self._wait_s = 0.0
        self._told_at = 0.0

    def waits(self, position: int, wait_s: float, *, for_worker: bool = False) -> None:
        """Set the position. `wait_s`: predicted seconds from now on."""
        self.for_worker = for_worker
        if not self.filed:
            self.filed, self.predicted_s = position, None if for_worker else wait_s
        self.position = position
        self._wait_s = wait_s
        self._told_at = time.monotonic()
        self.waits_aside()

    def waits_aside(self) -> None:
        """Call `on_wait`: the call waits, in the queue, or for a worker or an adapter to come."""
        if self.on_wait is not None:
            self.on_wait()

    def served(self) -> None:
        """Note that the call has a slot, or waits no more."""
        self.position = 0

    @property
    def wait_s(self) -> float:
        """Seconds left of the predicted wait; 0 where it should be over, or the call does not wait."""
        return max(0.0, self._told_at + self._wait_s - time.monotonic()) if self.position else 0.0


class Wait:
    """A wait for a slot. This class records nothing."""

    __slots__ = ()

    def over(self, error: str = "", overtaken: int = 0) -> None:
        """Record the end of the wait. `error`: why it was in vain. Only the first call counts."""


class Attempt:
    """An attempt to get the answer from one worker. This class records nothing."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context
        """The trace context that the worker gets; None: none."""

    def begun(self) -> None:
        """TraceRecorder that the answer has begun."""

    def over(self, error: str = "", end: Finished | Failed | None = None) -> None:
        """Record the end of the attempt. `end`: its last event; None: it has none. Only the first call counts."""


NO_WAIT = Wait()


class TraceRecorder:
    """The record of a request for its trace. This class records nothing."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context
        """Context of the span that the request's other spans lie in; None: it is in no trace."""

    def waits(self, model: str, queue_position: QueuePosition) -> Wait:
        return NO_WAIT

    def asks(self, model: str, worker: str, address: str, number: int) -> Attempt:
        """Record the beginning of an attempt. `number`: counts the attempts of one answer, from 1."""
        return Attempt(self.context)

    def notes(self, event: str, **facts: str) -> None:
        """Record an event of the request."""

    def follows(self, other: TraceContext | None) -> None:
        """Link the trace of the other request that made the answer that is sent."""

    def beside(self) -> TraceRecorder:
        """Return the record of a request inside this one, where the connection carries several."""
        return self


UNRECORDED = TraceRecorder()


def begun(tracer: Tracer, caller: TraceContext | None) -> TraceRecorder:
    """Return the record of a request that begins. `caller`: the trace context that it came with."""
    own = tracer.inside(caller)
    if own is None:
        # A caller's trace goes on through this gateway though no span of it is recorded here.
        return UNRECORDED if caller is None else TraceRecorder(caller)
    return KeptTraceRecorder(tracer, own, "" if caller is None else caller.span_id)


@dataclass(slots=True)
class KeptWait(Wait):
    """A wait that is recorded. Times are time.monotonic()."""

    context: TraceContext
    model: str
    queue_position: QueuePosition
    was_filed: bool
    """Whether `queue_position` has the queue position of an earlier wait of the same call."""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    error: str = ""
    position: int = 0
    """Position in the queue when it was filed; 0: there was a slot at once."""
    predicted_s: float | None = None
    overtaken: int = 0

    def over(self, error: str = "", overtaken: int = 0) -> None:
        if self.ended_at:
            return
        self.ended_at, self.error, self.overtaken = time.monotonic(), error, overtaken
        if not self.was_filed:
            self.position, self.predicted_s = self.queue_position.filed, self.queue_position.predicted_s


class KeptAttempt(Attempt):
    __slots__ = ("address", "began_at", "begun_at", "end", "ended_at", "error", "model", "number", "own", "worker")

    def __init__(self, own: TraceContext, model: str, worker: str, address: str, number: int) -> None:
        super().__init__(own)
        self.own = own
        self.model, self.worker, self.address, self.number = model, worker, address, number
        self.began_at = time.monotonic()
        self.begun_at = self.ended_at = 0.0
        """time.monotonic() when the answer began, and when the attempt ended; 0: it has not."""
        self.error = ""
        self.end: Finished | Failed | None = None

    def begun(self) -> None:
        self.begun_at = time.monotonic()

    def over(self, error: str = "", end: Finished | Failed | None = None) -> None:
        if self.ended_at:
            return
        self.ended_at, self.end = time.monotonic(), end
        self.error = end.failure.code.value if isinstance(end, Failed) else error


class KeptTraceRecorder(TraceRecorder):
    """A record that is kept, shared by all answers to the request."""

    __slots__ = ("attempts", "events", "links", "own", "parent_id", "tracer", "waits_kept")

    def __init__(self, tracer: Tracer, own: TraceContext, parent_id: str) -> None:
        super().__init__(own)
        self.tracer = tracer
        self.own = own
        self.parent_id = parent_id
        """Id of the caller's span; empty: the trace begins here."""
        self.waits_kept: list[KeptWait] = []
        self.attempts: list[KeptAttempt] = []
        self.events: list[SpanEvent] = []
        self.links: list[TraceContext] = []

    def waits(self, model: str, queue_position: QueuePosition) -> Wait:
        wait = KeptWait(self.own.inside(), model, queue_position, was_filed=queue_position.filed > 0)
        self.waits_kept.append(wait)
        return wait

    def asks(self, model: str, worker: str, address: str, number: int) -> Attempt:
        attempt = KeptAttempt(self.own.inside(), model, worker, address, number)
        self.attempts.append(attempt)
        return attempt

    def notes(self, event: str, **facts: str) -> None:
        self.events.append(SpanEvent(event, time.monotonic(), facts))

    def follows(self, other: TraceContext | None) -> None:
        if other is not None and other.span_id != self.own.span_id:
            self.links.append(other)

    def beside(self) -> TraceRecorder:
        return begun(self.tracer, self.own)
