"""Reading the Responses dialect: items into messages, parameters into the canonical request, refusals by name."""

from __future__ import annotations

import json
import time
from typing import Any

import msgspec
import pytest

from gateway.api.responses.body import IGNORED, MAX_ITEMS, REFUSED, ResponsesBody
from gateway.api.responses.items import Item, input_id, new_response_id, output_id
from gateway.api.responses.records import NewRecord, Record, decode_record, encode_record
from gateway.api.responses.request import LONG_CHARS, MAX_REPEATED_BYTES, Draft, ResponseRequest, draft_of, read_draft
from gateway.errors import (
    InvalidRequest,
    PreviousNotFound,
    ResponseNotFound,
    TakesTooMuch,
    UnsupportedParameter,
)
from gateway.telemetry.request_log import Ignored
from tests.support.openai_schema import properties
from tests.support.tools import tool_of
from workers.protocol.requests import Message, Thinking, Tool, ToolCall

ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "adds",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    "strict": True,
}
SUB = {**ADD, "name": "sub", "strict": None}
OURS = {
    *("stop", "reasoning_effort", "reasoning_format", "reasoning_budget_tokens", "thinking_budget_tokens"),
    *("chat_template_kwargs", "documents", "add_generation_prompt", "continue_final_message", "lora"),
}


def draft(**body: Any) -> Draft:
    return read_draft(json.dumps({"model": "m", "input": "hi", **body}).encode())


def kept_of(asked: ResponseRequest) -> tuple[Item, ...]:
    """Of a short input, which is kept as it is."""
    assert isinstance(asked.to_keep, tuple)
    return asked.to_keep


def read(**body: Any) -> ResponseRequest:
    return draft(**body).resolved({}).complete()


def user(text: str) -> Message:
    return Message(role="user", content=text)


def test_long_instructions_are_encoded_once() -> None:
    """A response that is stored and streamed says them ten times, each of which took 5 ms of the loop for 6 MiB."""
    text = 'say "' + "x" * LONG_CHARS
    asked = read(instructions=text)
    assert isinstance(asked.echo["instructions"], msgspec.Raw)
    assert asked.requests[0].messages[0].content == text
    record = NewRecord(response={"id": "r", "output": [], **asked.echo}, input=asked.to_keep)
    assert decode_record(encode_record(record)).response["instructions"] == text
    assert read(instructions="short").echo["instructions"] == "short"


def test_tools_format_and_choice_are_encoded_once() -> None:
    """Each event with the whole response encoded them again, 3 ms for 1 MiB: 32 calls that began together 365 ms."""
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "description": "x"}}
    asked = read(tools=[tool], tool_choice={"type": "function", "name": "f"})
    assert all(isinstance(asked.echo[name], msgspec.Raw) for name in ("tools", "tool_choice", "text"))
    record = Record(response=dict(asked.echo), input=(), chain=())
    assert decode_record(encode_record(record)).response["tools"][0]["parameters"] == tool["parameters"]


def test_a_long_input_is_written_once() -> None:
    """A response in the background is kept three times, each of which took 6 ms of the loop for 6 MiB."""
    text = "word " * LONG_CHARS
    asked = read(input=text)
    assert isinstance(asked.to_keep, bytes)
    kept = NewRecord(response={"id": "r", "output": []}, input=asked.to_keep)
    [item] = decode_record(encode_record(kept)).input
    assert item["content"] == [{"type": "input_text", "text": text}]
    assert isinstance(read(input="short").to_keep, tuple)


def test_what_each_event_repeats_is_bounded() -> None:
    """Six MiB of instructions were written ten times, on the loop."""
    long = "x" * MAX_REPEATED_BYTES
    tool = {"type": "function", "name": "f", "description": long, "parameters": {}}
    for name, fields in (("instructions", {"instructions": long}), ("tools", {"tools": [tool]})):
        with pytest.raises(TakesTooMuch, match="as a system message in `input`") as refused:
            read(**fields)
        assert refused.value.param == name
    assert read(input=[{"role": "system", "content": long}, {"role": "user", "content": "Hi"}])


def test_a_text_is_one_message_below_the_instructions() -> None:
    asked = read(instructions="Be brief.")
    assert asked.requests[0].messages == (Message(role="system", content="Be brief."), user("hi"))
    assert asked.model == "m"
    assert (asked.stream, asked.store, asked.background) == (False, True, False)
    assert [(item["type"], item["role"], item["content"]) for item in kept_of(asked)] == [
        ("message", "user", [{"type": "input_text", "text": "hi"}])
    ]


def test_an_assistants_turn_is_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "rules"},
        {
            "type": "message",
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "id": "msg_1",
            "content": [{"type": "output_text", "text": "Let me see."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "c2", "name": "sub", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "2"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "3"}]},
        {"role": "assistant", "content": "Two and three."},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No more."}]},
        {"role": "user", "content": "thanks"},
    ]
    calls = (ToolCall("c1", "add", '{"a":1}'), ToolCall("c2", "sub", "{}"))
    assert read(input=items).requests[0].messages == (
        Message(role="developer", content="rules"),
        user("a\nb"),
        Message(role="assistant", content="Let me see.", reasoning="hm", tool_calls=calls),
        Message(role="tool", content="2", name="add", tool_call_id="c1"),
        Message(role="tool", content="3", name="sub", tool_call_id="c2"),
        Message(role="assistant", content="Two and three."),
        Message(role="assistant", content="No more."),
        user("thanks"),
    )


def test_reasoning_that_only_has_a_summary_or_nothing() -> None:
    items = [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"},
        {"role": "assistant", "content": "a"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"role": "assistant", "content": "b"},
    ]
    first, second = read(input=items).requests[0].messages
    assert (first.reasoning, second.reasoning) == ("short", None)


def test_tools_and_choices() -> None:
    tools = (tool_of("add", "adds", ADD["parameters"], strict=True), tool_of("sub", "adds", ADD["parameters"]))

    def chosen(choice: Any) -> tuple[tuple[Tool, ...], tuple[str, ...]]:
        request = read(tools=[ADD, SUB], tool_choice=choice).requests[0]
        return request.tools, request.forced_tools

    assert chosen("auto") == (tools, ())
    assert chosen("none") == ((), ())
    assert chosen("required") == (tools, ("add", "sub"))
    assert chosen({"type": "function", "name": "sub"}) == (tools, ("sub",))
    some = {"type": "allowed_tools", "tools": [{"type": "function", "name": "sub"}]}
    assert chosen({**some, "mode": "auto"}) == (tools[1:], ())
    assert chosen({**some, "mode": "required"}) == (tools[1:], ("sub",))
    assert not read(tools=[ADD], parallel_tool_calls=False).requests[0].parallel_tool_calls


def test_forms() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    asked = read(text={"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}})
    constraint = asked.requests[0].constraint
    assert constraint is not None
    assert (constraint.kind, json.loads(constraint.text), constraint.param) == (
        "json_schema",
        schema,
        "text.format.schema",
    )
    form = msgspec.json.decode(asked.echo["text"])["format"]
    assert form == {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    plain = read(text={"format": {"type": "json_object"}}).requests[0].constraint
    assert plain is not None
    assert json.loads(plain.text) == {"type": "object"}
    assert read(text={"format": {"type": "text"}}).requests[0].constraint is None
    grammar = read(grammar='root ::= "a"').requests[0].constraint
    assert grammar is not None
    assert grammar.kind == "gbnf"


def test_the_rest_of_the_parameters() -> None:
    request = read(
        reasoning={"effort": "low", "summary": "auto"},
        max_output_tokens=5,
        temperature=0.5,
        top_p=0.9,
        min_p=0.1,
        seed=3,
        stop=["x"],
        cache_salt="s",
        priority=-2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        top_logprobs=4,
    ).requests[0]
    assert request.thinking == Thinking(effort="low")
    assert (request.max_tokens, request.stop, request.cache_salt, request.priority) == (5, ("x",), "s", 2)
    assert (request.sampling.temperature, request.sampling.top_p, request.sampling.min_p) == (0.5, 0.9, 0.1)
    assert (request.sampling.seed, request.n_probs) == (3, 4)
    assert read(reasoning={"effort": "none"}).requests[0].thinking.enabled is False
    assert read(include=["message.output_text.logprobs"]).requests[0].n_probs == -1
    assert read(include=["reasoning.encrypted_content"]).requests[0].n_probs == 0


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"input": None}, InvalidRequest, "input"),
        ({"input": []}, InvalidRequest, "input"),
        ({"input": [{"type": "message", "role": "user"}]}, InvalidRequest, "input.0.content"),
        ({"input": [{"type": "message", "content": "x"}]}, InvalidRequest, "input.0.role"),
        ({"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}, InvalidRequest, "input.0.arguments"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, InvalidRequest, "input.0.call_id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, UnsupportedParameter, "input.0"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            InvalidRequest,
            "input.0.content.0.image_url",
        ),
        ({"input": [{"role": "user", "content": [{"type": "hologram"}]}]}, UnsupportedParameter, "input.0.content.0"),
        ({"tools": [{"type": "web_search"}]}, UnsupportedParameter, "tools.0"),
        ({"tools": [{"type": "function"}]}, InvalidRequest, "tools.0.name"),
        ({"tool_choice": "required"}, InvalidRequest, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "sub"}}, InvalidRequest, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "mcp"}}, UnsupportedParameter, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "allowed_tools"}}, InvalidRequest, "tool_choice.tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, InvalidRequest, "text.format.schema"),
        ({"text": {"format": {"type": "yaml"}}}, InvalidRequest, "text.format.type"),
        ({"truncation": "some"}, InvalidRequest, "truncation"),
        ({"background": True, "store": False}, InvalidRequest, "background"),
        ({"stream_options": {}}, InvalidRequest, "stream_options"),
        ({"include": ["everything"]}, InvalidRequest, "include.0"),
        ({"metadata": {"a": 1}}, InvalidRequest, "metadata.a"),
        ({"conversation": "conv_1"}, UnsupportedParameter, "conversation"),
        ({"prompt": {"id": "p"}}, UnsupportedParameter, "prompt"),
        ({"max_tokens": 0}, InvalidRequest, "max_output_tokens"),
        ({"reasoning": {"effort": "some"}}, InvalidRequest, "reasoning.effort"),
        ({"reasoning": {"effort": "low"}, "reasoning_effort": "high"}, InvalidRequest, "reasoning_effort"),
    ],
)
def test_what_can_not_be_had_is_named(body: dict[str, Any], kind: type[Exception], param: str) -> None:
    with pytest.raises(kind) as caught:
        read(**body)
    assert type(caught.value) is kind
    assert getattr(caught.value, "param", None) == param


def test_what_harms_nobody_is_ignored_or_refused_by_the_setting() -> None:
    asked: dict[str, Any] = {"text": {"verbosity": "low"}, "service_tier": "flex", "surprise": 1}
    ignored = Ignored()
    raw = json.dumps({"model": "m", "input": "hi", **asked}).encode()
    assert read_draft(raw, ignored).request == draft().request
    assert ignored.header == "service_tier, surprise, verbosity"
    for name, param in (("text", "text.verbosity"), ("service_tier", "service_tier"), ("surprise", "surprise")):
        with pytest.raises(UnsupportedParameter) as caught:
            draft_of({"model": "m", "input": "hi", name: asked[name]}, Ignored(refuses=True))
        assert caught.value.param == param


def test_the_names_of_other_dialects_bound_the_answer() -> None:
    assert draft(max_tokens=3).request.max_tokens == draft(num_predict=3).request.max_tokens == 3


def test_every_parameter_of_the_specification_is_read_ignored_or_refused() -> None:
    assert properties("CreateResponse") <= {*ResponsesBody.model_fields, *IGNORED, *REFUSED}
    assert set(ResponsesBody.model_fields) >= OURS


def kept(id_: str, said: str, answer: str, chain: tuple[str, ...] = (), status: str = "completed") -> Record:
    message = {"id": output_id(id_, "message", 0), "type": "message", "role": "assistant", "status": "completed"}
    part = {"type": "output_text", "text": answer, "annotations": [], "logprobs": []}
    own = {"id": input_id(id_, "message", 0), "type": "message", "role": "user", "status": "completed"}
    record = Record(
        response={"id": id_, "status": status, "output": [{**message, "content": [part]}]},
        input=({**own, "content": [{"type": "input_text", "text": said}]},),
        chain=chain,
    )
    return decode_record(encode_record(record))


def test_a_previous_response_brings_its_whole_chain() -> None:
    one, two = new_response_id(), new_response_id()
    found = {one: kept(one, "first", "1"), two: kept(two, "second", "2", (one,))}
    sent = draft(previous_response_id=two, input="third", instructions="new ones")
    assert sent.needs == (two,)
    asked = sent.resolved(found).complete()
    assert [message.content for message in asked.requests[0].messages] == [
        "new ones",
        "first",
        "1",
        "second",
        "2",
        "third",
    ]
    assert asked.chain == (one, two)
    assert len(kept_of(asked)) == 1
    with pytest.raises(PreviousNotFound):
        sent.resolved({two: found[two]}).complete()
    with pytest.raises(InvalidRequest, match="not complete"):
        sent.resolved({**found, two: kept(two, "x", "", (one,), "in_progress")}).complete()


def test_items_are_found_by_their_ids() -> None:
    one = new_response_id()
    record = kept(one, "first", "1")
    sent = draft(
        input=[
            {"type": "item_reference", "id": input_id(one, "message", 0)},
            {"id": output_id(one, "message", 0)},
            {"role": "user", "content": "more"},
        ]
    )
    assert sent.needs == (one,)
    asked = sent.resolved({one: record}).complete()
    assert [message.content for message in asked.requests[0].messages] == ["first", "1", "more"]
    assert kept_of(asked)[:2] == record.items
    for unknown in (output_id(one, "message", 7), "msg_of_another_server"):
        with pytest.raises(ResponseNotFound):
            draft(input=[{"type": "item_reference", "id": unknown}]).resolved({one: record}).complete()


def test_as_many_references_as_may_be_sent_hold_nobody_up() -> None:
    one = new_response_id()
    ids = [input_id(one, "message", number) for number in range(MAX_ITEMS)]
    parts = [{"type": "input_text", "text": "x"}]
    items = tuple({"id": id_, "type": "message", "role": "user", "content": parts} for id_ in ids)
    record = Record(response={"id": one, "status": "completed", "output": []}, input=items)
    sent = draft(input=[{"type": "item_reference", "id": id_} for id_ in ids])
    began = time.process_time()
    kept = sent.resolved({one: record}).complete().to_keep
    assert isinstance(kept, bytes)
    assert msgspec.json.decode(kept, type=tuple[dict[str, Any], ...]) == items
    assert time.process_time() - began < 1.5


def test_one_thought_that_is_referred_to_thousands_of_times_is_copied_once_each_time() -> None:
    """Each time all before it was copied as well: a minute for 250 KB of references to 6 KB."""
    one = new_response_id()
    thought = {"id": output_id(one, "reasoning", 0), "type": "reasoning", "summary": [], "status": "completed"}
    output = [{**thought, "content": [{"type": "reasoning_text", "text": "x" * 6300}]}]
    record = Record(response={"id": one, "status": "completed", "output": output}, input=())
    sent = draft(input=[{"type": "item_reference", "id": thought["id"]}] * 5100)
    began = time.process_time()
    resolved = sent.resolved({one: record}, 64 << 20)
    assert resolved.num_bytes > 5100 * 6300
    asked = resolved.complete()
    assert time.process_time() - began < 1.5
    [message] = asked.requests[0].messages
    assert message.reasoning == "x" * 6300 * 5100
    assert isinstance(asked.to_keep, bytes)
    assert msgspec.json.decode(asked.to_keep) == output * 5100


def test_a_warmup_computes_the_prompt_only() -> None:
    sent = draft_of({"model": "m", "instructions": "Be brief.", "max_output_tokens": 9}, Ignored(), generates=False)
    asked = sent.resolved({}).complete()
    assert asked.requests[0].messages == (Message(role="system", content="Be brief."),)
    assert (asked.requests[0].max_tokens, asked.generates) == (0, False)
    with pytest.raises(InvalidRequest, match="`input` is missing"):
        draft_of({"model": "m"}, Ignored(), generates=False).resolved({}).complete()
