"""Keeps a record of each call. When the call has ended, its log line (with the gateway's request id) and its trace are
made from the record.

Source: OpenTelemetry's semantic conventions for generative AI. docs/tracing.md explains each attribute.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from workers.protocol.events import Failed, FailureCode, Finished
from workers.tracing.span import PROVIDER, Kind, Span, TraceContext, Value, read_context
from workers.tracing.tracer import OFF, Tracer

log = logging.getLogger(__name__)

CANCELLED = "cancelled"
"""Outcome of a call that was cancelled or given up."""
ANSWERED = "ok"
"""Outcome of pooled work (vectors or scores) that was answered."""
ALARMING = frozenset({FailureCode.INTERNAL.value, FailureCode.WORKER_LOST.value})
FAILURES = frozenset(code.value for code in FailureCode)


@dataclass(slots=True)
class CallRecord:
    """The record of one call, filled in while the call runs. Times are time.monotonic()."""

    operation: str
    """The kind of work: generate, embed or rank."""
    request_id: str
    caller: TraceContext | None
    """The gateway's span of the call; None: the gateway sent none, so the call is in no trace."""
    own: TraceContext | None
    """The call's own span; None: no span is recorded."""
    began_at: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    """Time at which the call got a slot; 0: it never did."""
    first_token_at: float = 0.0
    ended_at: float = 0.0
    slot: int = -1
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    end: Finished | Failed | None = None
    """The call's last event; None: the call was cancelled, or is pooled work, which has no such event."""
    outcome: str = CANCELLED
    """Why the call ended: a finish reason, the code of a failure, `ANSWERED` or `CANCELLED`."""

    @property
    def failed(self) -> bool:
        return self.outcome in FAILURES

    def line(self) -> dict[str, object]:
        """Return the fields of the call's log line, without times of events that never happened."""
        fields: dict[str, object] = {"request_id": self.request_id}
        if self.caller is not None:
            fields["trace_id"] = self.caller.trace_id
        fields["outcome"] = self.outcome
        fields["total_ms"] = _ms(self.began_at, self.ended_at)
        if self.num_prompt_tokens:
            fields["prompt_tokens"], fields["cached_tokens"] = self.num_prompt_tokens, self.num_cached_tokens
        if self.started_at:
            fields["queue_ms"] = _ms(self.began_at, self.started_at)
        if self.first_token_at:
            fields["prefill_ms"] = _ms(self.started_at, self.first_token_at)
        if isinstance(self.end, Finished):
            fields["completion_tokens"] = self.end.usage.completion_tokens
            if self.end.num_preempted:
                fields["preempted"] = self.end.num_preempted
        return fields


class CallRecords:
    """Begins and ends the records of one worker's calls."""

    def __init__(self, tracer: Tracer = OFF, worker: str = "", model: str = "") -> None:
        self._tracer = tracer
        self._worker = worker
        self._model = model

    def begin(self, operation: str, request_id: str, traceparent: str, tracestate: str) -> CallRecord:
        """Return the record of a new call. Its span is recorded if its gateway records the trace."""
        caller = read_context(traceparent, tracestate) if traceparent else None
        own = None if caller is None else self._tracer.inside(caller)
        return CallRecord(operation, request_id, caller, own)

    def end(self, record: CallRecord, end: Finished | Failed | None = None) -> None:
        """Log a call that is over, and hand its trace to the tracer. `end`: as in `CallRecord`."""
        record.ended_at, record.end = time.monotonic(), end
        if isinstance(end, Finished):
            record.outcome = end.reason.value
        elif isinstance(end, Failed):
            record.outcome = end.failure.code.value
        log.log(
            logging.WARNING if record.outcome in ALARMING else logging.INFO, "call", extra={"fields": record.line()}
        )
        if record.own is not None and record.caller is not None:
            self._tracer.tell(CallJourney(record, record.caller, record.own, self._worker, self._model))


class CallJourney:
    """The trace of an ended call, as a `workers.tracing.tracer.Journey`."""

    __slots__ = ("_caller", "_model", "_own", "_record", "_worker")

    def __init__(self, record: CallRecord, caller: TraceContext, own: TraceContext, worker: str, model: str) -> None:
        self._record = record
        self._caller = caller
        self._own = own
        self._worker = worker
        self._model = model

    def spans(self) -> Sequence[Span]:
        record = self._record
        began_at, started_at, first_at, ended_at = (
            record.began_at,
            record.started_at,
            record.first_token_at,
            record.ended_at,
        )
        spans = [self._call()]
        if record.operation == "generate":
            spans.append(self._part("queue", began_at, started_at or ended_at, {}))
        if started_at:
            computed = record.num_prompt_tokens - record.num_cached_tokens
            attributes: dict[str, Value] = {
                "paddock.tokens": computed,
                "paddock.cached_tokens": record.num_cached_tokens,
            }
            spans.append(self._part("prefill", started_at, first_at or ended_at, attributes))
        if first_at:
            spans.append(self._part("decode", first_at, ended_at, _decoded(record.end)))
        return spans

    def _call(self) -> Span:
        record, end = self._record, self._record.end
        failed = record.outcome if record.failed else ""
        attributes: dict[str, Value] = {
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": self._model,
            "gen_ai.response.model": self._model,
            "paddock.worker": self._worker,
            "paddock.request_id": record.request_id,
            "error.type": failed or (CANCELLED if record.outcome == CANCELLED else ""),
        }
        if record.slot >= 0:
            attributes["paddock.slot"] = record.slot
        if isinstance(end, Finished):
            attributes["gen_ai.usage.input_tokens"] = end.usage.prompt_tokens
            attributes["gen_ai.usage.output_tokens"] = end.usage.completion_tokens
            attributes["gen_ai.usage.cache_read.input_tokens"] = end.usage.cached_tokens
            attributes["gen_ai.response.finish_reasons"] = (record.outcome,)
            if end.num_preempted:
                attributes["paddock.preempted"] = end.num_preempted
        elif record.num_prompt_tokens:
            attributes["gen_ai.usage.input_tokens"] = record.num_prompt_tokens
        parent_id = self._caller.span_id
        return Span(
            record.operation, self._own, parent_id, record.began_at, record.ended_at, Kind.SERVER, attributes, failed
        )

    def _part(self, name: str, began_at: float, ended_at: float, attributes: dict[str, Value]) -> Span:
        return Span(name, self._own.inside(), self._own.span_id, began_at, ended_at, attributes=attributes)


def _decoded(end: Finished | Failed | None) -> dict[str, Value]:
    if not isinstance(end, Finished):
        return {}
    count, seconds = end.timings.predicted_n, end.timings.predicted_ms / 1e3
    pace: dict[str, Value] = {"paddock.tokens_per_s": round((count - 1) / seconds, 2)} if seconds and count > 1 else {}
    return {"paddock.tokens": count, **pace}


def _ms(began_at: float, ended_at: float) -> float:
    return round((ended_at - began_at) * 1e3, 2)
