"""The input of custom tools: read out of JSON arguments in any pieces, and told in chats as OpenAI tells it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageCustomToolCall

from gateway.api.openai import chat
from gateway.api.openai.requests import ChatRequest, read_chat
from gateway.api.parameters.custom_tools import INPUT_SCHEMA, InputReader, arguments_of
from gateway.call import Call, Principal
from gateway.errors import InvalidRequest, UnsupportedParameter
from tests.support.request_logs import placed_log
from workers.protocol.events import CallEvent, Finished, FinishReason, Timings, ToolCallDelta, Usage
from workers.protocol.requests import Constraint

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
PATCH: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "patch",
        "description": "Edits",
        "format": {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[a-z\n]+"}},
    },
}
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def read(**more: Any) -> ChatRequest:
    body = {"model": "alias", "messages": [{"role": "user", "content": "hi"}], "tools": [PATCH, ADD], **more}
    return read_chat(json.dumps(body).encode())


def told(reader: InputReader, pieces: list[str]) -> str:
    return "".join([*map(reader.feed, pieces), reader.end()])


@given(st.text(), st.lists(st.integers(0, 60)), st.booleans())
def test_an_input_is_the_same_in_any_pieces(text: str, cuts: list[int], ascii_only: bool) -> None:
    whole = json.dumps({"input": text}, ensure_ascii=ascii_only)
    ends = [*sorted(cut for cut in cuts if cut < len(whole)), len(whole)]
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    assert told(InputReader(), pieces) == text
    assert told(InputReader(), list(whole)) == text


@given(st.text(min_size=1), st.integers(1, 60))
def test_what_came_of_an_input_that_breaks_off_is_its_beginning(text: str, left_out: int) -> None:
    whole = json.dumps({"input": text})
    cut = whole[: max(len('{"input": "'), len(whole) - left_out)]
    found = told(InputReader(), list(cut))
    halves = found.partition("\\ud")[0]
    assert text.startswith(halves)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input":1}', '{"input":1}'),
        ('{"other":1,"input":"x"}', "x"),
        ('{"input":"x","other":"y"}', "x"),
        ("", ""),
        ("{", "{"),
        ('{"input":""}', ""),
        (' { "input" : "\\\\" } ', "\\"),
    ],
)
def test_arguments_of_other_forms(arguments: str, text: str) -> None:
    assert told(InputReader(), [arguments]) == told(InputReader(), list(arguments)) == text


def test_a_custom_tool_is_shown_as_a_function_of_one_text() -> None:
    asked = read(tool_choice={"type": "custom", "custom": {"name": "patch"}})
    patch, add = asked.requests[0].tools
    assert (patch.name, patch.parameters, patch.strict, add.strict) == ("patch", INPUT_SCHEMA, True, False)
    assert patch.grammar == Constraint("regex", "[a-z\n]+", param="tools")
    assert patch.description == "Edits\n\nThe input is a text that follows this regular expression:\n\n[a-z\n]+"
    assert (asked.custom_tools, asked.requests[0].forced_tools) == (frozenset({"patch"}), ("patch",))
    allowed = {"mode": "required", "tools": [{"type": "custom", "custom": {"name": "patch"}}]}
    [one] = read(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}).requests[0].tools
    assert one.name == "patch"


def test_an_earlier_call_of_a_custom_tool_is_read_again() -> None:
    called = {"id": "c", "type": "custom", "custom": {"name": "patch", "input": 'say "a"\n'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
    ]
    [call] = read(messages=messages).requests[0].messages[1].tool_calls
    assert (call.id, call.name, call.arguments) == ("c", "patch", arguments_of('say "a"\n'))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "custom"}]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {"name": "a b"}}]}, "tools.0.custom.name"),
        (
            {"tools": [{"type": "custom", "custom": {"name": "a", "format": {"type": "grammar", "grammar": {}}}}]},
            "tools.0.custom.format.grammar.definition",
        ),
        ({"tool_choice": {"type": "custom", "custom": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice"),
    ],
)
def test_what_is_no_custom_tool_is_named(body: dict[str, Any], param: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedParameter)) as refused:
        read(**body)
    assert refused.value.param == param


CALLED: list[CallEvent] = [
    ToolCallDelta(1, 0, "call_a", "patch", ""),
    ToolCallDelta(1, 0, "", "", '{"inp'),
    ToolCallDelta(1, 0, "", "", 'ut": "a\\'),
    ToolCallDelta(1, 1, "call_b", "add", "{}"),
    ToolCallDelta(1, 0, "", "", 'nb"}'),
    Finished(1, FinishReason.TOOL_CALLS, Usage(7, 2, 3), Timings(0, 7, 8.0, 2, 10.0)),
]


def test_a_call_of_a_custom_tool_in_a_chat() -> None:
    writer = chat.WholeWriter(read(), CALL, placed_log())
    writer.add(CALLED, 0)
    completion = ChatCompletion.model_validate_json(b"".join(writer.parts()))
    custom, function = completion.choices[0].message.tool_calls or []
    assert isinstance(custom, ChatCompletionMessageCustomToolCall)
    assert (custom.id, custom.custom.name, custom.custom.input) == ("call_a", "patch", "a\nb")
    assert function.type == "function"


def test_a_call_of_a_custom_tool_in_a_streamed_chat() -> None:
    """The specification of chunks leaves it out; the form is that of OpenAI's server (openai-openapi, issue 576)."""
    writer = chat.chunk_writer(read(stream=True), CALL, placed_log())
    raw = writer.opening() + b"".join(writer.chunks([event], 0) for event in CALLED) + writer.closing()
    chunks = [json.loads(block[6:]) for block in raw.decode().split("\n\n")[:-2]]
    deltas = [call for chunk in chunks for call in chunk["choices"][0]["delta"].get("tool_calls", ())]
    assert deltas[0] == {"index": 0, "id": "call_a", "type": "custom", "custom": {"name": "patch", "input": ""}}
    assert [one["custom"]["input"] for one in deltas[1:] if one["index"] == 0] == ["a", "\nb"]
    assert [one["function"]["arguments"] for one in deltas if one["index"] == 1] == ["{}"]
    assert all(ChatCompletionChunk.construct(**chunk).choices for chunk in chunks)
