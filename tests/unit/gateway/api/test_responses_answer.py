"""Writing the Responses dialect: every event and object against OpenAI's specification, in every combination."""

from __future__ import annotations

import itertools
import json
from functools import cache
from typing import Any

import pytest

from gateway.api.http.streaming import LongEvent, Written, whole_events
from gateway.api.parameters.custom_tools import INPUT_SCHEMA
from gateway.api.responses.events import EventWriter
from gateway.api.responses.output import INLINE_PROBS, MAX_BRIEF_PROBS, WholeWriter
from gateway.api.responses.records import decode_record, encode_record
from gateway.api.responses.request import ResponseRequest, read_draft
from gateway.call import Call, Principal
from gateway.errors import ContextOverflow, InvalidRequest, QueueFull, UnsupportedParameter, WorkerLost
from tests.support.openai_schema import check, specification
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Logprobs,
    Reasoning,
    Started,
    Text,
    Timings,
    TokenLogprob,
    ToolCallDelta,
    Usage,
)
from workers.protocol.requests import Constraint

CALL = Call("req-1", Principal("key", "team", None, False), "m", "m", 0.0, 0.0, 0.0)
TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)


def end(reason: FinishReason = FinishReason.STOP) -> Finished:
    return Finished(1, reason, Usage(7, 5, 3), TIMINGS)


def probs(piece: bytes) -> Logprobs:
    one = TokenLogprob(len(piece), piece, -0.5)
    return Logprobs(1, one, (one, TokenLogprob(99, b"\xe2", -3.5)))


START: list[CallEvent] = [Started(1, 0, 7, 3)]
THOUGHT: list[CallEvent] = [Reasoning(1, "Hm", 2), Reasoning(1, "m.")]
SPEECH: list[CallEvent] = [probs(b"H\xc3"), probs(b"\xa9"), Text(1, "Hé", 2), Text(1, "llo"), probs(b"!"), Text(1, "!")]
CALLS: list[CallEvent] = [
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a":'),
    ToolCallDelta(1, 1, "call_b", "sub", "{}"),
    ToolCallDelta(1, 0, "", "", "1}"),
]
PARTS = {"thought": THOUGHT, "speech": SPEECH, "calls": CALLS}
ORDERS = [order for n in range(4) for order in itertools.permutations(PARTS, n)]

BODIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "instructions": "Be brief.",
        "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": True}],
        "tool_choice": {"type": "function", "name": "add"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        "reasoning": {"effort": "high", "summary": "auto"},
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.5,
        "max_output_tokens": 20,
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "user": "u",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "background": True,
        "parallel_tool_calls": False,
    },
    "words": {"tool_choice": "none", "text": {"format": {"type": "json_object"}}, "store": False},
}


def asked(**body: Any) -> ResponseRequest:
    return read_draft(json.dumps({"model": "m", "input": "hi", **body}).encode()).resolved({}).complete()


def events_in(stream: bytes) -> list[dict[str, Any]]:
    found = []
    for block in stream.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        found.append(document)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def streamed(events: list[CallEvent], size: int = 1, **body: Any) -> list[dict[str, Any]]:
    writer = EventWriter(asked(**body), CALL)
    stream = (writer.queued() if body.get("background") else b"") + writer.opening()
    for n in range(0, len(events), size):
        stream += all_of(writer.chunks(events[n : n + size], 0))
    return events_in(stream + all_of(writer.closing()))


def begun(writer: EventWriter) -> bytes:
    return writer.opening() + all_of(writer.chunks([Text(1, "Hel")], 0))


def all_of(body: Written) -> bytes:
    """Return events as a stream of server-sent events has them."""
    pieces = [body] if isinstance(body, bytes) else body
    return b"".join(piece if isinstance(piece, bytes) else b"".join(piece.parts) for piece in pieces)


def whole(events: list[CallEvent], **body: Any) -> dict[str, Any]:
    writer = WholeWriter(asked(**body), CALL)
    writer.add(events, 0)
    parts = list(writer.parts())
    assert len(parts) == 1, "a short answer is one message"
    document: dict[str, Any] = json.loads(parts[0])
    return document


def alike(response: dict[str, Any]) -> dict[str, Any]:
    """Without what differs between two answers to one question."""
    text = json.dumps({name: value for name, value in response.items() if name not in ("created_at", "completed_at")})
    document: dict[str, Any] = json.loads(text.replace(response["id"].removeprefix("resp_"), "*"))
    return document


@cache
def schemas() -> dict[str, str]:
    """Type of an event -> name of its schema: a choice of 58 would be tried one by one."""
    components = specification()["components"]["schemas"]
    names = [choice["$ref"].rsplit("/", 1)[-1] for choice in components["ResponseStreamEvent"]["anyOf"]]
    return {components[name]["properties"]["type"]["enum"][0]: name for name in names}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("order", ORDERS, ids="+".join)
def test_every_event_and_object_is_as_the_specification_says(order: tuple[str, ...], body: str) -> None:
    for reason in (FinishReason.STOP, FinishReason.LENGTH):
        events = [*START, *(event for part in order for event in PARTS[part]), end(reason)]
        stream = streamed(events, **BODIES[body])
        last = stream[-1]["response"]
        assert stream[-1]["type"] == f"response.{'incomplete' if reason is FinishReason.LENGTH else 'completed'}"
        assert alike(last) == alike(whole(events, **BODIES[body]))
        assert alike(streamed(events, size=3, **BODIES[body])[-1]["response"]) == alike(last)
        for event in stream:
            check(schemas()[event["type"]], event)


def test_deltas_add_up() -> None:
    stream = streamed([*START, *THOUGHT, *SPEECH, *CALLS, end(FinishReason.TOOL_CALLS)])
    response = stream[-1]["response"]
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call", "function_call"]
    for index, item in enumerate(response["output"]):
        own = [event for event in stream if event.get("output_index") == index]
        added, done = own[0], own[-1]
        assert (added["type"], done["type"]) == ("response.output_item.added", "response.output_item.done")
        assert (added["item"]["id"], done["item"]) == (item["id"], item)
        said = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert said == text
    assert response["output"][2]["arguments"] == '{"a":1}'
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 3}
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 3


def likely(num_probs: int) -> list[CallEvent]:
    """Return an answer of so many probabilities, 21 with each token."""
    one = TokenLogprob(5, b" token", -12.345678)
    tokens = ((Logprobs(1, one, (one,) * 20), Text(1, " token", 1)) for _ in range(num_probs // 21))
    return [event for token in tokens for event in token]


PROBABLE = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}


def test_many_probabilities_are_told_again_in_parts() -> None:
    """The end of 32,000 tokens was 180 MB, written in one turn of the loop (800 ms), and half a gigabyte of memory."""
    writer = EventWriter(asked(**PROBABLE), CALL)
    said = writer.opening() + all_of(writer.chunks(likely(4 * MAX_BRIEF_PROBS), 0))
    bodies = [writer.chunks([end()], 0), writer.closing()]
    long = [piece for body in bodies if not isinstance(body, bytes) for piece in body if isinstance(piece, LongEvent)]
    assert len(long) == 4
    written = [list(one.parts) for one in long]
    assert max(len(part) for parts in written for part in parts) < 512 << 10
    told = events_in(said + b"".join(b"".join(parts) for parts in written))
    deltas = [one for event in told if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    text, part, item, last = told[-4:]
    message = last["response"]["output"][0]
    assert deltas == text["logprobs"] == message["content"][0]["logprobs"]
    assert (part["part"], item["item"]) == (message["content"][0], message)


@pytest.mark.parametrize(
    ("num_probs", "is_long", "are_repeated"),
    [(INLINE_PROBS, False, True), (MAX_BRIEF_PROBS, True, True), (MAX_BRIEF_PROBS + 21, True, False)],
)
def test_in_one_piece_no_more_probabilities_are_told_again_than_are_short(
    num_probs: int, is_long: bool, are_repeated: bool
) -> None:
    writer, events = EventWriter(asked(**PROBABLE), CALL), [*likely(num_probs), end()]
    bodies = [writer.opening(), *(writer.chunks([event], 0) for event in events), writer.closing()]
    assert any(not isinstance(body, bytes) for body in bodies) is is_long
    pieces = [piece for body in bodies for piece in whole_events(body)]
    assert max(map(len, pieces)) < 2 << 20
    told = events_in(b"".join(pieces))
    all_of_them = [one for event in told if event["type"] == "response.output_text.delta" for one in event["logprobs"]]
    repeated = all_of_them if are_repeated else []
    message = told[-1]["response"]["output"][0]
    assert told[-4]["logprobs"] == message["content"][0]["logprobs"] == repeated
    kept = decode_record(encode_record(writer.record(writer.response(brief=True))))
    assert kept.response["output"] == [message]


def test_log_probabilities_come_with_the_text_that_they_made() -> None:
    stream = streamed([*START, *SPEECH, end()], include=["message.output_text.logprobs"])
    deltas = [event for event in stream if event["type"] == "response.output_text.delta"]
    assert [len(delta["logprobs"]) for delta in deltas] == [2, 0, 1]
    told = stream[-1]["response"]["output"][0]["content"][0]["logprobs"]
    assert told == [one for delta in deltas for one in delta["logprobs"]]
    assert bytes(told[0]["bytes"] + told[1]["bytes"]).decode() == "Hé"


def test_an_answer_that_says_nothing_is_an_empty_message() -> None:
    [item] = whole([*START, end()])["output"]
    assert item["content"][0]["text"] == ""


def test_an_answer_that_was_cut_is_incomplete() -> None:
    response = whole([*START, *THOUGHT, *SPEECH, end(FinishReason.LENGTH)])
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]


def test_trouble_after_the_beginning_is_a_failed_response() -> None:
    codes = {WorkerLost: "server_error", QueueFull: "rate_limit_exceeded", InvalidRequest: "invalid_prompt"}
    for kind, code in codes.items():
        writer = EventWriter(asked(), CALL)
        events = events_in(begun(writer) + all_of(writer.broken(kind("It broke."))))
        for event in events:
            check(schemas()[event["type"]], event)
        assert events[-1]["type"] == "response.failed"
        assert events[-1]["response"]["error"] == {"code": code, "message": "It broke."}
        assert events[-1]["response"]["output"][0]["content"][0]["text"] == "Hel"


def test_a_prompt_that_is_too_long_has_the_code_that_codex_shortens_by() -> None:
    """OpenAI answers so, though its reference has no such code."""
    writer = EventWriter(asked(), CALL)
    long = ContextOverflow("shorten it", num_prompt_tokens=600, n_ctx=512)
    [*_, failed] = events_in(begun(writer) + all_of(writer.broken(long)))
    error = failed["response"]["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in error["message"]


def test_trouble_before_the_beginning_is_an_error() -> None:
    [event] = events_in(all_of(EventWriter(asked(), CALL).broken(QueueFull("Too many wait."))))
    check("ResponseStreamEvent", event)
    assert (event["type"], event["code"], event["message"]) == ("error", "queue_full", "Too many wait.")


CUSTOM: dict[str, Any] = {"tools": [{"type": "custom", "name": "run", "description": "Runs a script"}]}


def test_a_custom_tools_input_is_a_text() -> None:
    told: list[CallEvent] = [
        ToolCallDelta(1, 0, "call_a", "run", ""),
        ToolCallDelta(1, 0, "", "", '{"input": "ls\\n'),
        ToolCallDelta(1, 0, "", "", '-l"}'),
        Finished(1, FinishReason.TOOL_CALLS, Usage(7, 2, 3), Timings(0, 7, 8.0, 2, 10.0)),
    ]
    events = streamed(told, **CUSTOM)
    for event in events:
        check(schemas()[event["type"]], event)
    deltas = [event["delta"] for event in events if event["type"] == "response.custom_tool_call_input.delta"]
    assert deltas == ["ls\n", "-l"], "the input is streamed as it comes"
    done = next(event for event in events if event["type"] == "response.custom_tool_call_input.done")
    assert done["input"] == "ls\n-l"
    last = events[-1]["response"]
    [item] = last["output"]
    assert (item["type"], item["call_id"], item["name"], item["input"]) == (
        "custom_tool_call",
        "call_a",
        "run",
        "ls\n-l",
    )
    assert last["tools"] == [{**CUSTOM["tools"][0], "format": {"type": "text"}}]
    writer = WholeWriter(asked(**CUSTOM), CALL)
    writer.add(told, 0)
    assert json.loads(b"".join(writer.parts()))["output"][0]["input"] == "ls\n-l"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (r'{"input":"a\ud800b"}', r"a\ud800b"),
        (r'{"input":"\uDE00\uD83D"}', r"\ude00\ud83d"),
        (r'{"input":"\uD83D\uDE00"}', "\U0001f600"),
        (r'{"input":"a\ud83d', r"a\ud83d"),
    ],
)
def test_half_a_surrogate_pair_in_a_custom_tools_input_stays_an_escape(arguments: str, text: str) -> None:
    """It can't be told as UTF-8: the call failed, its stream broke off, and in the background it never ended."""
    told: list[CallEvent] = [
        ToolCallDelta(1, 0, "call_a", "run", arguments),
        Finished(1, FinishReason.TOOL_CALLS, Usage(7, 2, 3), Timings(0, 7, 8.0, 2, 10.0)),
    ]
    writer = WholeWriter(asked(**CUSTOM), CALL)
    writer.add(told, 0)
    assert json.loads(b"".join(writer.parts()))["output"][0]["input"] == text
    done = [event for event in streamed(told, **CUSTOM) if event["type"] == "response.custom_tool_call_input.done"]
    assert [event["input"] for event in done] == [text]


def test_a_custom_tools_call_and_result_are_read_again() -> None:
    call = {"type": "custom_tool_call", "call_id": "c", "name": "run", "input": 'say "hi"'}
    result = {"type": "custom_tool_call_output", "call_id": "c", "output": "hi"}
    [request] = asked(input=[{"role": "user", "content": "x"}, call, result], **CUSTOM).requests
    _, called, answered = request.messages
    assert json.loads(called.tool_calls[0].arguments) == {"input": 'say "hi"'}
    assert (answered.role, answered.name, answered.content) == ("tool", "run", "hi")
    [tool] = request.tools
    assert (tool.name, tool.strict, tool.parameters) == ("run", True, INPUT_SCHEMA)


def test_a_custom_tool_may_be_forced_and_have_a_grammar() -> None:
    choice = {"type": "custom", "name": "run"}
    assert asked(**CUSTOM, tool_choice=choice).requests[0].forced_tools == ("run",)
    with pytest.raises(InvalidRequest, match="none of `tools`"):
        asked(**CUSTOM, tool_choice={"type": "function", "name": "run"})
    form = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tool = {**CUSTOM["tools"][0], "format": form}
    [shown] = asked(tools=[tool]).requests[0].tools
    assert shown.grammar == Constraint("lark", "start: /a/", param="tools")
    assert shown.description == "Runs a script\n\nThe input is a text that follows this Lark grammar:\n\nstart: /a/"
    told = whole([*START, end()], tools=[tool])
    check("Response", told)
    assert told["tools"] == [tool]


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"type": "json"}, "tools.0.format.type"),
        ({"type": "grammar", "syntax": "gbnf", "definition": "root ::= x"}, "tools.0.format.syntax"),
        ({"type": "grammar", "definition": "start: x"}, "tools.0.format.syntax"),
        ({"type": "grammar", "syntax": "lark"}, "tools.0.format.definition"),
        ({"type": "grammar", "syntax": "lark", "definition": "x" * 40_000}, "tools.0.format.definition"),
    ],
)
def test_a_format_that_is_none(form: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedParameter)) as refused:
        asked(tools=[{**CUSTOM["tools"][0], "format": form}])
    assert refused.value.param == param
