"""What is kept of a request's way, and the spans that are made of it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from gateway.call import Principal
from gateway.telemetry import finish
from gateway.telemetry.answer_log import UNRECORDED, begin_trace
from gateway.telemetry.request_log import RequestLog
from tests.support.request_logs import attempt
from workers.protocol.events import Failed, Failure, FailureCode, Finished, FinishReason, Timings, Usage
from workers.tracing.span import Span, TraceContext, new_context
from workers.tracing.tracer import OFF, Journey

FINISHED = Finished(1, FinishReason.STOP, Usage(10, 5, 4), Timings(4, 6, 10.0, 5, 20.0))


class Tracer:
    """Records everything, here."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def inside(self, caller: TraceContext | None) -> TraceContext:
        return new_context() if caller is None else caller.inside()

    def tell(self, journey: Journey) -> None:
        self.spans += journey.spans()

    def named(self, name: str) -> list[Span]:
        return [span for span in self.spans if span.name == name]


def asked(tracer: Any, caller: TraceContext | None = None, **facts: Any) -> RequestLog:
    trace = begin_trace(tracer, caller)
    request_log = RequestLog("req-1", "POST", "/v1/messages", route="/v1/messages", trace=trace)
    request_log.asked_by(Principal("ci", "red", None, False))
    request_log.alias, request_log.answer.model, request_log.status, request_log.outcome = "chat", "llama", 200, "ok"
    for name, value in facts.items():
        setattr(request_log, name, value)
    return request_log


def test_a_request_that_is_not_recorded_keeps_nothing() -> None:
    assert begin_trace(OFF, None) is UNRECORDED
    UNRECORDED.add_event("fallback", model="a")
    UNRECORDED.add_link(new_context())
    assert (UNRECORDED.events, UNRECORDED.links, UNRECORDED.child()) == ([], [], None)
    finish.tell(asked(OFF))
    assert "trace_id" not in asked(OFF).line()


def test_a_caller_s_trace_is_handed_on_where_nothing_is_recorded() -> None:
    caller = new_context()
    request_log = asked(OFF, caller)
    attempt(request_log.answer)
    assert request_log.answer.attempts[0].context is caller
    assert request_log.line()["trace_id"] == caller.trace_id
    assert request_log.trace.for_inner_request().context is caller


def test_the_spans_of_a_call_that_went_well() -> None:
    tracer, caller = Tracer(), new_context()
    request_log = asked(tracer, caller, usage=Usage(10, 5, 4))
    wait = request_log.answer.begin_wait("llama")
    request_log.queue_position.waits(3, 1.5)
    wait.end(overtaken=1)
    attempt(request_log.answer, url="http://10.0.0.7:8081")
    request_log.answer.attempts[0].begin_answer()
    request_log.first_token_at = time.monotonic()
    request_log.answer.attempts[0].end(last_event=FINISHED)
    finish.tell(request_log)
    top, queue, tried = tracer.spans
    assert (top.name, queue.name, tried.name) == ("POST /v1/messages", "queue", "attempt")
    assert top.parent_id == caller.span_id
    assert {top.context.trace_id, queue.context.trace_id, tried.context.trace_id} == {caller.trace_id}
    assert queue.parent_id == tried.parent_id == top.context.span_id
    assert tried.context is request_log.answer.attempts[0].context
    assert top.began_at <= queue.began_at <= queue.ended_at <= tried.began_at <= tried.ended_at <= top.ended_at
    assert queue.attributes == {
        "gen_ai.request.model": "llama",
        "paddock.queue.position": 3,
        "paddock.queue.predicted_ms": 1500,
        "paddock.queue.overtaken": 1,
        "error.type": "",
    }
    assert (tried.attributes["server.address"], tried.attributes["server.port"]) == ("10.0.0.7", 8081)
    told = top.attributes
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (10, 5)
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert (told["gen_ai.operation.name"], told["paddock.team"]) == ("chat", "red")
    assert [span.error for span in tracer.spans] == ["", "", ""]


def test_each_wait_tells_its_own_position() -> None:
    tracer = Tracer()
    request_log = asked(tracer)
    for position, wait_s in ((2, 1.0), (5, 4.0)):
        wait = request_log.answer.begin_wait("llama")
        request_log.queue_position.waits(position, wait_s)
        request_log.queue_position.waits(1, 0.5)
        wait.end()
    finish.tell(request_log)
    told = [span.attributes for span in tracer.named("queue")]
    assert [attributes["paddock.queue.position"] for attributes in told] == [2, 5]
    assert [attributes["paddock.queue.predicted_ms"] for attributes in told] == [1000, 4000]
    assert (request_log.queue_position.filed, request_log.queue_position.predicted_s) == (2, 1.0)


def test_a_second_wait_does_not_tell_of_the_first() -> None:
    tracer = Tracer()
    request_log = asked(tracer)
    first = request_log.answer.begin_wait("llama")
    request_log.queue_position.waits(2, 1.0)
    first.end()
    request_log.answer.begin_wait("llama").end()
    finish.tell(request_log)
    positions = [span.attributes.get("paddock.queue.position") for span in tracer.named("queue")]
    assert positions == [2, None]


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [
        (200, "ok", ""),
        (200, "worker_lost", "worker_lost"),
        (503, "queue_timeout", "queue_timeout"),
        (404, "model_not_found", ""),
        (499, "client_gone", ""),
        (200, "client_gone", ""),
    ],
)
def test_what_is_an_error(status: int, outcome: str, error: str) -> None:
    tracer = Tracer()
    finish.tell(asked(tracer, status=status, outcome=outcome))
    (top,) = tracer.spans
    assert top.error == error
    assert top.attributes["error.type"] == ("" if outcome == "ok" else outcome)


def test_what_a_worker_failed_with_is_told() -> None:
    tracer = Tracer()
    request_log = asked(tracer)
    attempt(request_log.answer)
    request_log.answer.attempts[0].end(last_event=Failed(1, Failure(FailureCode.INTERNAL, "a prompt")))
    finish.tell(request_log)
    assert tracer.named("attempt")[0].error == "internal"
    assert "a prompt" not in repr(tracer.spans)


def test_what_never_ended_ends_with_the_request() -> None:
    tracer = Tracer()
    request_log = asked(tracer, status=503, outcome="request_timeout")
    request_log.answer.begin_wait("llama")
    attempt(request_log.answer)
    finish.tell(request_log)
    top = tracer.spans[0]
    for span in tracer.spans[1:]:
        assert (span.ended_at, span.error) == (top.ended_at, "request_timeout")


def test_an_unknown_method_is_not_told() -> None:
    tracer = Tracer()
    finish.tell(asked(tracer, method="BREW-SECRET", route=""))
    assert tracer.spans[0].name == tracer.spans[0].attributes["http.request.method"] == "_OTHER"


def test_a_stream_that_is_read_leads_to_the_request_that_made_it_but_not_to_itself() -> None:
    tracer, maker = Tracer(), new_context()
    request_log = asked(tracer)
    for context in (None, request_log.trace.context, maker):
        request_log.trace.add_link(context)
    finish.tell(request_log)
    assert tracer.spans[0].links == (maker,)


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("http://10.0.0.7:8081", "10.0.0.7", 8081),
        ("http://[::1]:8081", "::1", 8081),
        ("https://worker.example", "worker.example", 443),
        ("https://worker.example/below", "worker.example", 443),
        ("http://[::1]", "::1", 80),
    ],
)
def test_where_a_worker_is(address: str, host: str, port: int) -> None:
    tracer = Tracer()
    request_log = asked(tracer)
    attempt(request_log.answer, url=address)
    finish.tell(request_log)
    told = tracer.named("attempt")[0].attributes
    assert (told["server.address"], told["server.port"]) == (host, port)
