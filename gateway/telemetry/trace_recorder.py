"""Records a request's trace except for its waits and attempts: the caller's span that it continues, its events, its
links.
"""

from __future__ import annotations

import time

from workers.tracing.span import SpanEvent, TraceContext
from workers.tracing.tracer import Tracer


class TraceRecorder:
    """The trace of one request. Without a tracer it records nothing, at no cost, and passes on the caller's trace
    context.
    """

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
        with.
        """
        return self.context if self.tracer is None or self.context is None else self.context.inside()

    def add_event(self, event: str, **facts: str) -> None:
        if self.tracer is not None:
            self.events.append(SpanEvent(event, time.monotonic(), facts))

    def add_link(self, other: TraceContext | None) -> None:
        """Link to the trace of another request, which made the answer that this request is sent."""
        if self.tracer is not None and other is not None and self.context and other.span_id != self.context.span_id:
            self.links.append(other)

    def for_inner_request(self) -> TraceRecorder:
        """Return the recorder of a request inside this one, for a connection that carries several requests."""
        return self if self.tracer is None else begin_trace(self.tracer, self.context)


UNRECORDED = TraceRecorder()


def begin_trace(tracer: Tracer, caller: TraceContext | None) -> TraceRecorder:
    """Return the recorder of a request that begins. `caller`: the trace context that the request came with."""
    own = tracer.inside(caller)
    if own is None:
        # A caller's trace goes on through this gateway though no span of it is recorded here.
        return UNRECORDED if caller is None else TraceRecorder(caller)
    return TraceRecorder(own, tracer, "" if caller is None else caller.span_id)
