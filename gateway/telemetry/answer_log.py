"""The log of one answer on its way to a worker: its queue position, its waits for a slot, its attempts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.telemetry.trace_recorder import UNRECORDED, TraceRecorder
from workers.protocol.events import Failed, Finished
from workers.protocol.heartbeat import WorkerAddress
from workers.tracing.span import TraceContext


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
        self.note_wait()

    def note_wait(self) -> None:
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


@dataclass(slots=True)
class WaitLog:
    """One wait for a slot, and for workers that would do. Times are time.monotonic()."""

    model: str
    queue_position: QueuePosition
    context: TraceContext | None
    """The wait's own span; None: no trace is recorded."""
    was_filed: bool
    """Whether `queue_position` is that of an earlier wait of the same call."""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    error: str = ""
    """Why it was in vain; empty: it was not."""
    position: int = 0
    """Position in the queue when it was filed; 0: there was a slot at once."""
    predicted_s: float | None = None
    overtaken: int = 0
    """How often a slot went to another call that was behind this one in the queue."""

    def end(self, error: str = "", overtaken: int = 0) -> None:
        """Note the end of the wait."""
        self.ended_at, self.error, self.overtaken = time.monotonic(), error, overtaken
        if not self.was_filed:
            self.position, self.predicted_s = self.queue_position.filed, self.queue_position.predicted_s


@dataclass(slots=True)
class AttemptLog:
    """One attempt to get the answer from a worker. Times are time.monotonic()."""

    at: WorkerAddress
    context: TraceContext | None
    """The trace context that the worker gets: the attempt's own span, where the trace is recorded; None: none."""
    fingerprint: str = ""
    """`Heartbeat.fingerprint` of the worker; empty: not known."""
    expected_cached: int = 0
    """Tokens of the prompt that the worker was expected to have cached."""
    placement: str = ""
    """The reasons for the choice of the worker, in one line of ASCII; empty: the caller does not want to know."""
    slot: int | None = None
    """The worker's slot; None: it has not said."""
    submitted_at: float = field(default_factory=time.monotonic)
    begun_at: float = 0.0
    ended_at: float = 0.0
    """When the answer began, and when the attempt ended; 0: it has not."""
    error: str = ""
    last_event: Finished | Failed | None = None

    def begin_answer(self) -> None:
        self.begun_at = time.monotonic()

    def end(self, error: str = "", last_event: Finished | Failed | None = None) -> None:
        """Note the end of the attempt. `last_event`: None: there was none, because of `error`."""
        self.ended_at, self.last_event = time.monotonic(), last_event
        self.error = last_event.failure.code.value if isinstance(last_event, Failed) else error


@dataclass(slots=True)
class AnswerLog:
    """The log of one answer. Dispatch and admission write it, until the answer has begun."""

    trace: TraceRecorder = UNRECORDED
    """Of its request: all answers to it share one."""
    explains: bool = False
    """Whether attempts note why they were placed where they were."""
    model: str = ""
    """The pool that serves it: that of the last fallback."""
    priority: int | None = None
    """The priority that its key allows, where it asked for a more urgent one."""
    queue_position: QueuePosition = field(default_factory=QueuePosition)
    waits: list[WaitLog] = field(default_factory=list)
    attempts: list[AttemptLog] = field(default_factory=list)

    def begin_wait(self, model: str) -> WaitLog:
        position = self.queue_position
        wait = WaitLog(model, position, self.trace.child(), position.filed > 0)
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
        """Seconds of all its waits, those in vain included."""
        total_s = 0.0
        for wait in self.waits:
            total_s += (wait.ended_at or time.monotonic()) - wait.began_at
        return total_s

    @property
    def failed_s(self) -> float:
        """Seconds at workers that failed before its first token."""
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
