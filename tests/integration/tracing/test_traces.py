"""One call, one trace: over gateway and worker, in the caller's trace, with what went wrong in it."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.caller import Caller, taken
from tests.support.otlp_sink import OtlpSink, Received
from tests.support.stack import Stack

SERVER, CLIENT = 2, 3
PARENT_TRACE, PARENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
WHOLE = ("POST /v1/chat/completions", "queue", "attempt", "generate", "queue", "prefill", "decode")


async def traced(caller: Caller, path: str = "/v1/chat/completions", headers: Any = None, **body: Any) -> str:
    """Asks, reads the whole answer; the id of its trace, empty where it has none."""
    asked = body or caller.body()
    async with caller.session.post(f"{caller.url}{path}", json=asked, headers=headers or {}) as response:
        await response.read()
        return response.headers.get("x-paddock-trace-id", "")


async def spans_of(sink: OtlpSink, trace_id: str, *names: str) -> list[Received]:
    return await asyncio.to_thread(sink.wait_for, trace_id, *names)


def one(spans: list[Received], name: str, service: str = "paddock-gateway") -> Received:
    found = [span for span in spans if span.name == name and span.service == service]
    assert len(found) == 1, (name, service, found)
    return found[0]


def of_worker(spans: list[Received], name: str) -> Received:
    return one(spans, name, "paddock-worker")


def assert_nested(spans: list[Received]) -> None:
    """One tree, and nobody ends after the span that it lies in, as far as two processes' clocks agree."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    tops = [span for span in spans if span.parent_id not in by_id]
    assert [span.service for span in tops] == ["paddock-gateway"], tops
    for span in spans:
        outer = by_id.get(span.parent_id, span)
        assert span.began_ns <= span.ended_ns
        assert outer.began_ns - 3_000_000 <= span.began_ns, (outer, span)
        assert span.ended_ns <= outer.ended_ns + 3_000_000, (outer, span)


async def test_one_connected_trace_over_a_true_worker(caller: Caller, sink: OtlpSink) -> None:
    caller.model = "demo"
    trace_id = await traced(caller, **caller.body(max_tokens=12, stream=True))
    spans = await spans_of(sink, trace_id, *WHOLE)
    assert sorted(span.name for span in spans) == sorted(WHOLE)
    assert_nested(spans)
    top, attempt, work = one(spans, WHOLE[0]), one(spans, "attempt"), of_worker(spans, "generate")
    assert top.kind == SERVER
    assert attempt.kind == CLIENT
    assert work.kind == SERVER
    assert (top.parent_id, attempt.parent_id, work.parent_id) == ("", top.span_id, attempt.span_id)
    assert work.instance == "demo-a"
    told = top.attributes
    assert told["http.request.method"] == "POST"
    assert told["http.route"] == told["url.path"] == "/v1/chat/completions"
    assert told["http.response.status_code"] == 200
    assert (told["gen_ai.operation.name"], told["gen_ai.provider.name"]) == ("chat", "paddock")
    assert (told["gen_ai.request.model"], told["gen_ai.response.model"]) == ("demo", "demo")
    assert "error.type" not in told
    prefill, decode = of_worker(spans, "prefill"), of_worker(spans, "decode")
    num_prompt, num_said = told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]
    assert prefill.attributes["paddock.tokens"] + prefill.attributes["paddock.cached_tokens"] == num_prompt > 0
    assert decode.attributes["paddock.tokens"] == num_said == work.attributes["gen_ai.usage.output_tokens"] > 1
    assert decode.attributes["paddock.tokens_per_s"] > 0
    assert told["gen_ai.response.finish_reasons"] == work.attributes["gen_ai.response.finish_reasons"]
    assert prefill.ended_ns == decode.began_ns
    assert attempt.attributes["server.address"] == "127.0.0.1"
    assert attempt.attributes["paddock.worker"] == "demo-a"


async def test_a_caller_s_trace_goes_on(caller: Caller, sink: OtlpSink) -> None:
    headers = {"traceparent": f"00-{PARENT_TRACE}-{PARENT_SPAN}-01", "tracestate": "vendor=a,other=b"}
    assert await traced(caller, headers=headers) == PARENT_TRACE
    spans = await spans_of(sink, PARENT_TRACE, *WHOLE)
    assert one(spans, WHOLE[0]).parent_id == PARENT_SPAN
    assert_nested(spans)
    assert {span.state for span in spans} == {"vendor=a,other=b"}


async def test_a_caller_that_does_not_record_is_not_recorded(stack: Stack, caller: Caller, sink: OtlpSink) -> None:
    trace_id = "1" * 32
    assert await traced(caller, headers={"traceparent": f"00-{trace_id}-{PARENT_SPAN}-00"}) == trace_id
    later = await traced(caller)
    await spans_of(sink, later, *WHOLE)
    assert sink.of_trace(trace_id) == []
    # Its lines are found by it all the same, at both processes.
    for process in (stack.gateways[0], stack.workers[0]):
        assert any(line.get("trace_id") == trace_id for line in lines_of(process.text())), process.name


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00",
        f"ff-{PARENT_TRACE}-{PARENT_SPAN}-01",
        f"00-{'0' * 32}-{PARENT_SPAN}-01",
        f"00-{PARENT_TRACE}-01",
        "x" * 9000,
    ],
)
async def test_a_malformed_parent_is_as_none(caller: Caller, sink: OtlpSink, traceparent: str) -> None:
    trace_id = await traced(caller, headers={"traceparent": traceparent})
    assert len(trace_id) == 32
    assert trace_id != PARENT_TRACE
    assert one(await spans_of(sink, trace_id, *WHOLE), WHOLE[0]).parent_id == ""


async def test_nothing_begins_where_the_share_is_nothing(unsampled: Caller, sink: OtlpSink) -> None:
    assert await traced(unsampled) == ""
    parent = "2" * 32
    await traced(unsampled, headers={"traceparent": f"00-{parent}-{PARENT_SPAN}-01"})
    spans = await spans_of(sink, parent, *WHOLE)
    assert len(spans) == len(WHOLE)


async def test_a_wait_says_where_it_stood(caller: Caller, sink: OtlpSink) -> None:
    caller.model = "slow"
    async with taken(caller, 1):
        asked = asyncio.create_task(traced(caller))
        await asyncio.sleep(0.05)
    trace_id = await asked
    wait = one(await spans_of(sink, trace_id, *WHOLE), "queue")
    assert wait.attributes["paddock.queue.position"] == 1
    assert wait.attributes["paddock.queue.predicted_ms"] > 0
    assert wait.ms > 20


async def test_a_retry_is_two_attempts(caller: Caller, sink: OtlpSink) -> None:
    caller.model = "refusing"
    trace_id = await traced(caller)
    spans = await spans_of(sink, trace_id, *WHOLE, "attempt", "queue")
    first, second = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.began_ns)
    assert first.error == first.attributes["error.type"] == "internal"
    assert second.error is None
    assert second.attributes["paddock.attempt"] == 2
    assert one(spans, WHOLE[0]).error is None


async def test_an_answer_that_breaks_off_is_an_error(caller: Caller, sink: OtlpSink) -> None:
    caller.model = "failing"
    trace_id = await traced(caller, **caller.body(stream=True))
    spans = await spans_of(sink, trace_id, *WHOLE)
    for span in (one(spans, WHOLE[0]), one(spans, "attempt"), of_worker(spans, "generate")):
        assert span.error, span
        assert span.attributes["error.type"] == span.error
    assert one(spans, WHOLE[0]).attributes["http.response.status_code"] == 200


async def test_a_caller_s_mistake_is_no_error_of_ours(caller: Caller, sink: OtlpSink) -> None:
    trace_id = await traced(caller, model="nobody", messages=[{"role": "user", "content": "hi"}])
    top = one(await spans_of(sink, trace_id, WHOLE[0]), WHOLE[0])
    assert (top.error, top.attributes["error.type"]) == (None, "model_not_found")
    assert top.attributes["http.response.status_code"] == 404
    unknown = await traced(caller, "/v1/nowhere/" + "x" * 3000, a=1)
    top = one(await spans_of(sink, unknown, "POST"), "POST")
    assert len(top.attributes["url.path"]) == 512


async def test_a_fallback_is_an_event(unsampled: Caller, sink: OtlpSink) -> None:
    parent = "3" * 32
    headers = {"traceparent": f"00-{parent}-{PARENT_SPAN}-01"}
    await traced(unsampled, headers=headers, **unsampled.body(model="steady"))
    top = one(await spans_of(sink, parent, *WHOLE), WHOLE[0])
    assert top.events == (("fallback", {"model": "absent", "fallback": "quick", "reason": "no_worker"}),)
    assert top.attributes["gen_ai.request.model"] == "steady"
    assert top.attributes["gen_ai.response.model"] == "quick"


async def test_a_caller_that_leaves_is_no_error(caller: Caller, sink: OtlpSink) -> None:
    caller.model = "slow"
    async with caller.stream() as stream:
        await stream.until_text()
        trace_id = stream.headers["x-paddock-trace-id"]
    spans = await spans_of(sink, trace_id, *WHOLE)
    top = one(spans, WHOLE[0])
    assert (top.error, top.attributes["error.type"]) == (None, "client_gone")
    assert of_worker(spans, "generate").attributes["error.type"] == "cancelled"
    assert [span.error for span in spans] == [None] * len(spans)


async def test_vectors_have_a_trace_too(caller: Caller, sink: OtlpSink) -> None:
    trace_id = await traced(caller, "/v1/embeddings", model="vectors", input=["a", "b"])
    names = ("POST /v1/embeddings", "queue", "attempt", "embed")
    spans = await spans_of(sink, trace_id, *names)
    assert sorted(span.name for span in spans) == sorted(names)
    assert_nested(spans)
    assert one(spans, names[0]).attributes["gen_ai.operation.name"] == "embeddings"
    assert of_worker(spans, "embed").attributes["gen_ai.usage.input_tokens"] > 0


async def test_several_answers_are_attempts_beside_each_other(caller: Caller, sink: OtlpSink) -> None:
    trace_id = await traced(caller, **caller.body(n=3))
    spans = await spans_of(sink, trace_id, WHOLE[0], *["attempt", "generate"] * 3)
    assert_nested(spans)


async def test_a_stream_that_is_read_again_leads_to_the_trace_that_made_it(
    stack: Stack, caller: Caller, unsampled: Caller, sink: OtlpSink
) -> None:
    caller.model = "slow"
    body = json.dumps(caller.body(stream=True)).encode()
    asked = {"x-resume-grace": "5", "content-type": "application/json"}
    url = "/v1/chat/completions"
    async with caller.session.post(f"{caller.url}{url}", data=body, headers=asked) as response:
        first_id = response.headers["x-paddock-trace-id"]
        line = await response.content.readuntil(b"\n")
        last = line.decode().partition("id: ")[2].strip()
    parent = "4" * 32
    again = {"last-event-id": last, "traceparent": f"00-{parent}-{PARENT_SPAN}-01", **asked}
    async with unsampled.session.post(f"{unsampled.url}{url}", data=body, headers=again) as response:
        assert response.status == 200
        await response.read()
    reading = one(await spans_of(sink, parent, WHOLE[0]), WHOLE[0])
    assert reading.links == (first_id,)
    making = one(await spans_of(sink, first_id, *WHOLE), WHOLE[0])
    assert making.attributes["paddock.detached"] is True
    assert making.links == ()


async def test_requests_of_a_socket_are_in_the_trace_of_the_connection(caller: Caller, sink: OtlpSink) -> None:
    url = caller.url.replace("http", "ws", 1) + "/v1/responses"
    parent = "5" * 32
    headers = {"traceparent": f"00-{parent}-{PARENT_SPAN}-01"}
    async with caller.session.ws_connect(url, headers=headers) as socket:
        await socket.send_json({"type": "response.create", "model": "quick", "input": "hi"})
        while (await socket.receive_json())["type"] != "response.completed":
            pass
    names = ["WEBSOCKET /v1/responses"] * 2
    spans = await spans_of(sink, parent, *names, "attempt", "generate", "decode")
    assert {span.parent_id for span in spans if span.name == names[0]} >= {PARENT_SPAN}
    assert_nested(spans)


async def test_what_operators_configure_reaches_the_collector(caller: Caller, sink: OtlpSink) -> None:
    await spans_of(sink, await traced(caller), *WHOLE)
    assert any(headers.get("X-Token") == "a b" or headers.get("x-token") == "a b" for headers in sink.headers)


async def test_probes_leave_no_trace(caller: Caller, sink: OtlpSink) -> None:
    for path in ("/health", "/ready", "/metrics"):
        async with caller.session.get(caller.url + path) as response:
            assert "x-paddock-trace-id" not in response.headers
    await spans_of(sink, await traced(caller), *WHOLE)
    assert not {span.attributes.get("url.path") for span in sink.spans} & {"/health", "/ready", "/metrics"}


async def test_lines_of_both_processes_have_the_request_s_ids(stack: Stack, caller: Caller, sink: OtlpSink) -> None:
    trace_id = await traced(caller, headers={"x-request-id": "find-me"})
    await spans_of(sink, trace_id, *WHOLE)
    for process in (stack.gateways[0], stack.workers[0]):
        (line,) = [line for line in lines_of(process.text()) if line.get("request_id") == "find-me"]
        assert line["trace_id"] == trace_id
    assert line["message"] == "call"
    assert line["outcome"] == "stop" or line["outcome"] == "length"
    assert line["completion_tokens"] == 8


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
