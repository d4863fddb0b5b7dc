"""The log of one answer on its way to a worker: its queue position, waits and attempts; and its request's trace."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from workers.protocol.events import Failed, Finished
from workers.protocol.heartbeat import WorkerAddress
from workers.tracing.span import SpanEvent, TraceContext
from workers.tracing.tracer import Tracer


class TraceRecorder:
    """The trace of one request. Without a tracer it records nothing, at no cost, and passes on the caller's trace
    context."""

    __slots__ = ("context", "events", "links", "parent_id", "tracer")

    def __init__(self, context: TraceContext | None = None, tracer: Tracer | None = None, parent_id: str = "") -> None:
        self.context = context
        """Context of the span that the request's other spans lie in; None: the request is in no trace."""
        self.tracer = tracer
        self.parent_id = parent_id
        """Id of the caller's span; empty: the trace begins here."""
        self.events: list[SpanEvent] = []
        self.links: list[TraceContext] = []

    @property
    def trace_id(self) -> str:
        """Id of the trace; empty: the request is in no trace."""
        return "" if self.context is None else self.context.trace_id

    def child(self) -> TraceContext | None:
        """Return the context of a new span in the trace; if nothing is recorded, the context that the request came
        with."""
        return self.context if self.tracer is None or self.context is None else self.context.inside()

    def add_event(self, event: str, **facts: str) -> None:
        if self.tracer is not None:
            self.events.append(SpanEvent(event, time.monotonic(), facts))

    def add_link(self, other: TraceContext | None) -> None:
        """Link this request's trace to that of another request: the one whose answer this request gets."""
        if self.tracer is not None and other is not None and self.context and other.span_id != self.context.span_id:
            self.links.append(other)

    def for_inner_request(self) -> TraceRecorder:
        """Return a recorder for one of the requests on this request's connection; its trace lies inside this one."""
        return self if self.tracer is None else begin_trace(self.tracer, self.context)


UNRECORDED = TraceRecorder()


def begin_trace(tracer: Tracer, caller: TraceContext | None) -> TraceRecorder:
    """Return the recorder of a request that begins. `caller`: the trace context that the request came with."""
    own = tracer.inside(caller)
    if own is None:
        # A caller's trace goes on through this gateway though no span of it is recorded here.
        return UNRECORDED if caller is None else TraceRecorder(caller)
    return TraceRecorder(own, tracer, "" if caller is None else caller.span_id)


class QueuePosition:
    """A call's position in the queue: admission writes it, and the code that answers the caller reads it."""

    __slots__ = (
        *("_told_at", "_wait_s", "filed", "for_worker", "loading", "on_wait", "position", "predicted_s", "wait_filed"),
        "wait_predicted_s",
    )

    def __init__(self) -> None:
        self.filed = 0
        """Position in the queue, from 1, when the call was queued first; 0: it never had to wait."""
        self.position = 0
        """Latest known position; 0: the call does not wait at the moment."""
        self.for_worker = False
        """Whether the call's model has no worker: the call waits for the first worker, and nobody can say how long."""
        self.loading = ""
        """How far the call's model is loaded, such as `loading=43%`; empty: it has a worker, or is not being loaded."""
        self.predicted_s: float | None = None
        """Predicted wait in seconds when the call was queued first; None: it never had to wait, or no prediction was
        possible."""
        self.wait_filed = 0
        self.wait_predicted_s: float | None = None
        """`filed` and `predicted_s` of the present wait: a call that was given back, or fell back, waits again."""
        self.on_wait: Callable[[], None] | None = None
        """Called whenever the call begins to wait or still waits, in the queue or for something else; None: nothing is
        called."""
        self._wait_s = 0.0
        self._told_at = 0.0

    def waits(self, position: int, wait_s: float, *, for_worker: bool = False) -> None:
        """Set the call's position in the queue. `wait_s`: predicted seconds that it still has to wait."""
        self.for_worker = for_worker
        predicted_s = None if for_worker else wait_s
        if not self.wait_filed:
            self.wait_filed, self.wait_predicted_s = position, predicted_s
        if not self.filed:
            self.filed, self.predicted_s = position, predicted_s
        self.position = position
        self._wait_s = wait_s
        self._told_at = time.monotonic()
        self.note_wait()

    def note_wait(self) -> None:
        """Call `on_wait`, because the call waits: in the queue, or for a worker or an adapter to come."""
        if self.on_wait is not None:
            self.on_wait()

    def served(self) -> None:
        """Note that the call has a slot, or no longer waits."""
        self.position, self.loading = 0, ""

    @property
    def wait_s(self) -> float:
        """Seconds left of the predicted wait; 0 if the predicted time is over or the call does not wait."""
        return max(0.0, self._told_at + self._wait_s - time.monotonic()) if self.position else 0.0


@dataclass(slots=True)
class WaitLog:
    """The log of one wait for a slot, including the wait for suitable workers. Times are time.monotonic()."""

    model: str
    queue_position: QueuePosition
    context: TraceContext | None
    """Trace context of the wait's own span; None: no trace is recorded."""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    error: str = ""
    """The error that ended the wait without a slot; empty: the call got a slot."""
    position: int = 0
    """Position in the queue when the call was queued; 0: it got a slot at once."""
    predicted_s: float | None = None
    overtaken: int = 0
    """How often a slot went to another call that was behind this call in the queue."""

    def end(self, error: str = "", overtaken: int = 0) -> None:
        """Note that the wait is over. `error`: why there is no slot; empty: there is one."""
        self.ended_at, self.error, self.overtaken = time.monotonic(), error, overtaken
        self.position, self.predicted_s = self.queue_position.wait_filed, self.queue_position.wait_predicted_s


@dataclass(slots=True)
class AttemptLog:
    """The log of one attempt to get the answer from a worker. Times are time.monotonic()."""

    at: WorkerAddress
    context: TraceContext | None
    """The trace context that is sent to the worker: that of the attempt's own span if the trace is recorded; None: no
    context is sent."""
    fingerprint: str = ""
    """`Heartbeat.fingerprint` of the worker; empty: not known."""
    expected_cached: int = 0
    """Tokens of the prompt that the worker was expected to have cached."""
    placement: str = ""
    """The reasons why this worker was chosen, in one line of ASCII; empty: the caller has not asked for them."""
    slot: int | None = None
    """Number of the slot at the worker; None: the worker has not reported it."""
    num_prompt_computed: int = 0
    """Tokens of the prompt that the worker had not cached; 0: the worker has not reported them."""
    submitted_at: float = field(default_factory=time.monotonic)
    begun_at: float = 0.0
    ended_at: float = 0.0
    """When the attempt ended; 0: not yet. `begun_at` is when its answer began."""
    error: str = ""
    last_event: Finished | Failed | None = None

    def begin_answer(self) -> None:
        self.begun_at = time.monotonic()

    def end(self, error: str = "", last_event: Finished | Failed | None = None) -> None:
        """Note the end of the attempt. `last_event`: the answer's last event; None: it had none, because of `error`."""
        self.ended_at, self.last_event = time.monotonic(), last_event
        self.error = last_event.failure.code.value if isinstance(last_event, Failed) else error


def _no_tokens() -> int:
    return 0


@dataclass(slots=True)
class AnswerLog:
    """The log of one answer. Dispatch and admission write it until the answer has begun."""

    trace: TraceRecorder = UNRECORDED
    """The trace of the answer's request: all answers to one request share it."""
    explains: bool = False
    """Whether each attempt records why its worker was chosen."""
    model: str = ""
    """The model whose workers serve the answer; after a fallback, the model that it fell back to."""
    priority: int | None = None
    """The priority that the caller's key allows, if the request asked for a higher one; None: it did not."""
    queue_position: QueuePosition = field(default_factory=QueuePosition)
    waits: list[WaitLog] = field(default_factory=list)
    attempts: list[AttemptLog] = field(default_factory=list)
    num_written: Callable[[], int] = _no_tokens
    """Returns how many tokens of the unfinished answer have come to the code that writes it. It is set by that code,
    which counts them anyway."""
    num_queued: int = 0
    """Tokens of the answer that wait for that code behind other answers to the same request."""

    @property
    def num_generated(self) -> int:
        """Return how many tokens of an answer that has not finished have come."""
        return self.num_written() + self.num_queued

    def begin_wait(self, model: str) -> WaitLog:
        position = self.queue_position
        position.wait_filed, position.wait_predicted_s = 0, None
        wait = WaitLog(model, position, self.trace.child())
        self.waits.append(wait)
        return wait

    def begin_attempt(
        self, at: WorkerAddress, fingerprint: str = "", expected_cached: int = 0, placement: str = ""
    ) -> None:
        attempt = AttemptLog(at, self.trace.child(), fingerprint, expected_cached, placement)
        self.attempts.append(attempt)

    @property
    def last_attempt(self) -> AttemptLog | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def queue_s(self) -> float:
        """Seconds of all the answer's waits, including waits that ended without a slot."""
        total_s = 0.0
        for wait in self.waits:
            total_s += (wait.ended_at or time.monotonic()) - wait.began_at
        return total_s

    @property
    def failed_s(self) -> float:
        """Seconds spent at workers that failed before the answer began."""
        total_s = 0.0
        for attempt in self.attempts:
            if attempt.ended_at and not attempt.begun_at:
                total_s += attempt.ended_at - attempt.submitted_at
        return total_s

    @property
    def overtaken(self) -> int:
        total = 0
        for wait in self.waits:
            total += wait.overtaken
        return total
