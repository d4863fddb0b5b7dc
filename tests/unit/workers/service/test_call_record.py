"""What a worker tells of a call when it is over: its log line, and its part of the trace."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from msgspec.structs import replace

from tests.unit.workers.service.test_generate import Bench, submit
from workers.protocol.events import (
    CallFailed,
    Failed,
    Failure,
    FailureCode,
    Finished,
    FinishReason,
    Started,
    Text,
    Timings,
    Usage,
)
from workers.protocol.requests import Cancel
from workers.service.calls.call_record import CallRecords
from workers.tracing.span import Span, TraceContext, new_context
from workers.tracing.tracer import Journey

GATEWAY = new_context()


class Tracer:
    def __init__(self) -> None:
        self.spans: list[Span] = []

    def inside(self, caller: TraceContext | None) -> TraceContext | None:
        return caller.inside() if caller is not None and caller.is_sampled else None

    def tell(self, journey: Journey) -> None:
        self.spans += journey.spans()


class TracedBench(Bench):
    def __init__(self) -> None:
        super().__init__()
        self.tracer = Tracer()
        records = CallRecords(self.tracer, "w1", "m")
        self.wire(records=records)

    async def take(self, context: TraceContext = GATEWAY) -> int:
        """A call that lies in that span; the engine's key."""
        await self.calls.submit(replace(submit(7), traceparent=context.traceparent, tracestate="vendor=a"))
        return self.engine.taken[-1].key


def finished(key: int, num_preempted: int = 0) -> Finished:
    timings = Timings(1, 3, 10.0, 5, 2000.0)
    return Finished(key, FinishReason.STOP, Usage(4, 5, 1), timings, num_preempted=num_preempted)


def line(caplog: pytest.LogCaptureFixture) -> tuple[str, dict[str, Any]]:
    (record,) = [record for record in caplog.records if record.getMessage() == "call"]
    return record.levelname, vars(record)["fields"]


@pytest.fixture
async def bench(caplog: pytest.LogCaptureFixture) -> TracedBench:
    caplog.set_level(logging.INFO, logger="workers")  # another test may have set its own
    return TracedBench()


async def test_a_call_that_went_well(bench: TracedBench, caplog: pytest.LogCaptureFixture) -> None:
    key = await bench.take()
    bench.delivery.deliver(1, [Started(key, 2, 4, 1), Text(key, "Hel")])
    bench.delivery.deliver(2, [finished(key, num_preempted=2)])
    call, queue, prefill, decode = bench.tracer.spans
    assert [span.name for span in bench.tracer.spans] == ["generate", "queue", "prefill", "decode"]
    assert (call.context.trace_id, call.parent_id) == (GATEWAY.trace_id, GATEWAY.span_id)
    assert {span.parent_id for span in (queue, prefill, decode)} == {call.context.span_id}
    assert {span.context.state for span in bench.tracer.spans} == {"vendor=a"}
    assert queue.ended_at == prefill.began_at
    assert prefill.ended_at == decode.began_at
    assert call.began_at == queue.began_at
    assert call.ended_at == decode.ended_at
    assert prefill.attributes == {"paddock.tokens": 3, "paddock.cached_tokens": 1}
    assert decode.attributes == {"paddock.tokens": 5, "paddock.tokens_per_s": 2.0}
    told = call.attributes
    assert (told["paddock.worker"], told["paddock.slot"], told["paddock.preempted"]) == ("w1", 2, 2)
    assert told["paddock.request_id"] == "req-7"
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert call.error == ""
    level, fields = line(caplog)
    assert level == "INFO"
    assert (fields["request_id"], fields["trace_id"], fields["outcome"]) == ("req-7", GATEWAY.trace_id, "stop")
    assert (fields["prompt_tokens"], fields["cached_tokens"], fields["completion_tokens"]) == (4, 1, 5)
    assert fields["preempted"] == 2


async def test_a_call_that_fails_before_and_after_it_began(
    bench: TracedBench, caplog: pytest.LogCaptureFixture
) -> None:
    key = await bench.take()
    bench.delivery.deliver(1, [Failed(key, Failure(FailureCode.INTERNAL, "it broke at `secret`"))])
    assert [(span.name, span.error) for span in bench.tracer.spans] == [("generate", "internal"), ("queue", "")]
    level, fields = line(caplog)
    assert (level, fields["outcome"]) == ("WARNING", "internal")
    assert "secret" not in repr((fields, bench.tracer.spans))


async def test_a_call_that_is_refused(bench: TracedBench, caplog: pytest.LogCaptureFixture) -> None:
    bench.engine.refusal = Failure(FailureCode.CONTEXT_OVERFLOW, "too long")
    with pytest.raises(CallFailed):
        await bench.take()
    call, queue = bench.tracer.spans
    assert (call.error, call.attributes["error.type"], queue.name) == ("context_overflow", "context_overflow", "queue")
    assert line(caplog)[0] == "INFO"


async def test_a_call_that_nobody_wants_any_more(bench: TracedBench, caplog: pytest.LogCaptureFixture) -> None:
    key = await bench.take()
    bench.delivery.deliver(1, [Started(key, 0, 4, 1), Text(key, "Hel")])
    bench.calls.cancel(Cancel("g", (7,)))
    assert [span.name for span in bench.tracer.spans] == ["generate", "queue", "prefill", "decode"]
    assert (bench.tracer.spans[0].error, bench.tracer.spans[0].attributes["error.type"]) == ("", "cancelled")
    assert line(caplog)[1]["outcome"] == "cancelled"


async def test_what_the_gateway_does_not_record_is_found_in_the_log_only(
    bench: TracedBench, caplog: pytest.LogCaptureFixture
) -> None:
    context = TraceContext("1" * 32, "2" * 16, is_sampled=False)
    key = await bench.take(context)
    bench.delivery.deliver(1, [Started(key, 0, 4, 1), finished(key)])
    assert bench.tracer.spans == []
    assert line(caplog)[1]["trace_id"] == context.trace_id
