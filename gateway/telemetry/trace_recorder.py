"""Records what a trace has beside waits and attempts: where it comes from, its events, its links."""

from __future__ import annotations

import time

from workers.tracing.span import SpanEvent, TraceContext
from workers.tracing.tracer import Tracer


class TraceRecorder:
    """The trace of one request. Without a tracer it records nothing, at no cost, and hands on the caller's context."""

    __slots__ = ("context", "events", "links", "parent_id", "tracer")

    def __init__(self, context: TraceContext | None = None, tracer: Tracer | None = None, parent_id: str = "") -> None:
        self.context = context
        """Context of the span that the request's other spans lie in; None: it is in no trace."""
        self.tracer = tracer
        self.parent_id = parent_id
        """Id of the caller's span; empty: the trace begins here."""
        self.events: list[SpanEvent] = []
        self.links: list[TraceContext] = []

    @property
    def trace_id(self) -> str:
        """Id of the trace; empty: there is none."""
        return "" if self.context is None else self.context.trace_id

    def child(self) -> TraceContext | None:
        """Return the context of a new span of the trace; where nothing is recorded, the context that spans lie in."""
        return self.context if self.tracer is None or self.context is None else self.context.inside()

    def add_event(self, event: str, **facts: str) -> None:
        if self.tracer is not None:
            self.events.append(SpanEvent(event, time.monotonic(), facts))

    def add_link(self, other: TraceContext | None) -> None:
        """Link the trace of the other request that made the answer that is sent."""
        if self.tracer is not None and other is not None and self.context and other.span_id != self.context.span_id:
            self.links.append(other)

    def for_inner_request(self) -> TraceRecorder:
        """Return the recorder of a request inside this one, where the connection carries several."""
        return self if self.tracer is None else begin_trace(self.tracer, self.context)


UNRECORDED = TraceRecorder()


def begin_trace(tracer: Tracer, caller: TraceContext | None) -> TraceRecorder:
    """Return the recorder of a request that begins. `caller`: the trace context that it came with."""
    own = tracer.inside(caller)
    if own is None:
        # A caller's trace goes on through this gateway though no span of it is recorded here.
        return UNRECORDED if caller is None else TraceRecorder(caller)
    return TraceRecorder(own, tracer, "" if caller is None else caller.span_id)
