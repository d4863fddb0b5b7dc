"""What is kept of a request's way, for its trace; nothing where it has none, which costs nothing.

record = begun(tracer, caller)              at the door
wait = record.waits(model, standing)        for a slot, each time
attempt = record.asks(model, ...)           of a worker, each time
request_spans.tell(record, trail)           when the request is over
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from gateway.telemetry.standing import Standing
from workers.protocol.events import Failed, Finished
from workers.tracing.context import TraceContext
from workers.tracing.span import SpanEvent
from workers.tracing.tracer import Tracer


class Wait:
    """For a slot. This one is not kept."""

    __slots__ = ()

    def over(self, error: str = "", overtaken: int = 0) -> None:
        """`error`: why it was in vain. Only the first time counts."""


class Attempt:
    """Of one worker to answer. This one is not kept."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context
        """What the worker is told; None: nothing."""

    def begun(self) -> None:
        """The answer has begun."""

    def over(self, error: str = "", end: Finished | Failed | None = None) -> None:
        """`end`: its last event; None: it has none. Only the first time counts."""


NO_WAIT = Wait()


class Record:
    """Of a request that is not recorded."""

    __slots__ = ("context",)

    def __init__(self, context: TraceContext | None = None) -> None:
        self.context = context
        """Span that everything about the request lies in; None: it is in no trace."""

    def waits(self, model: str, standing: Standing) -> Wait:
        return NO_WAIT

    def asks(self, model: str, worker: str, address: str, number: int) -> Attempt:
        """`number`: from 1, of the attempts of one answer."""
        return Attempt(self.context)

    def notes(self, event: str, **facts: str) -> None:
        """Something that happened on its way."""

    def follows(self, other: TraceContext | None) -> None:
        """What is sent was made for that request."""

    def beside(self) -> Record:
        """Of a request inside this one: the connection carries several."""
        return self


UNRECORDED = Record()


def begun(tracer: Tracer, caller: TraceContext | None) -> Record:
    """`caller`: the context that the request came with."""
    own = tracer.inside(caller)
    if own is None:
        # A caller's trace goes on through this gateway though it leaves no mark in it.
        return UNRECORDED if caller is None else Record(caller)
    return KeptRecord(tracer, own, "" if caller is None else caller.span_id)


@dataclass(slots=True)
class KeptWait(Wait):
    """Times are time.monotonic()."""

    context: TraceContext
    model: str
    standing: Standing
    was_filed: bool
    """It tells of an earlier wait of the same call, which had to wait then."""
    began_at: float = field(default_factory=time.monotonic)
    ended_at: float = 0.0
    error: str = ""
    position: int = 0
    """In the line when it was filed; 0: there was a slot at once."""
    predicted_s: float | None = None
    overtaken: int = 0

    def over(self, error: str = "", overtaken: int = 0) -> None:
        if self.ended_at:
            return
        self.ended_at, self.error, self.overtaken = time.monotonic(), error, overtaken
        if not self.was_filed:
            self.position, self.predicted_s = self.standing.filed, self.standing.predicted_s


class KeptAttempt(Attempt):
    __slots__ = ("address", "began_at", "begun_at", "end", "ended_at", "error", "model", "number", "own", "worker")

    def __init__(self, own: TraceContext, model: str, worker: str, address: str, number: int) -> None:
        super().__init__(own)
        self.own = own
        self.model, self.worker, self.address, self.number = model, worker, address, number
        self.began_at = time.monotonic()
        self.begun_at = self.ended_at = 0.0
        """0: it has not."""
        self.error = ""
        self.end: Finished | Failed | None = None

    def begun(self) -> None:
        self.begun_at = time.monotonic()

    def over(self, error: str = "", end: Finished | Failed | None = None) -> None:
        if self.ended_at:
            return
        self.ended_at, self.end = time.monotonic(), end
        self.error = end.failure.code.value if isinstance(end, Failed) else error


class KeptRecord(Record):
    """Shared by all answers to the request."""

    __slots__ = ("attempts", "events", "links", "own", "parent_id", "tracer", "waits_kept")

    def __init__(self, tracer: Tracer, own: TraceContext, parent_id: str) -> None:
        super().__init__(own)
        self.tracer = tracer
        self.own = own
        self.parent_id = parent_id
        """The caller's span; empty: the trace begins here."""
        self.waits_kept: list[KeptWait] = []
        self.attempts: list[KeptAttempt] = []
        self.events: list[SpanEvent] = []
        self.links: list[TraceContext] = []

    def waits(self, model: str, standing: Standing) -> Wait:
        wait = KeptWait(self.own.inside(), model, standing, was_filed=standing.filed > 0)
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

    def beside(self) -> Record:
        return begun(self.tracer, self.own)
