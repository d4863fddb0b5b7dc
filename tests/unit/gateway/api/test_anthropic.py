"""Anthropic's dialect: what is read, what is refused, and the order of what is written."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from gateway.api.anthropic.error_shape import ANTHROPIC
from gateway.api.anthropic.request import MessagesRequest, read_messages_request, read_prompt
from gateway.api.anthropic.writing import MessagesDialect
from gateway.call import Call, Principal
from gateway.errors import (
    InvalidRequest,
    ModelNotFound,
    NotSupported,
    PaddockError,
    QueueFull,
    Unavailable,
    UnsupportedParameter,
)
from gateway.telemetry.request_log import Ignored, RequestLog
from tests.support.tools import tool_of
from workers.protocol.events import (
    CallEvent,
    Finished,
    FinishReason,
    Reasoning,
    Started,
    Text,
    Timings,
    ToolCallDelta,
    Usage,
)
from workers.protocol.requests import Message, Thinking, ToolCall, decode_object

USER = {"role": "user", "content": "hi"}
FORM = {"type": "json_schema", "schema": {"type": "integer"}}
TOOL = {"name": "add", "description": "d", "input_schema": {"type": "object"}}
CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)
TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)


@pytest.mark.serial
def test_others_run_while_the_input_of_a_tool_is_written() -> None:
    """In one step, half a million numbers held the interpreter for a quarter of a second."""
    given = {"a": [n + 0.123456789012 for n in range(200_000)]}
    block = {"type": "tool_use", "id": "t1", "name": "add", "input": given}
    raw = json.dumps({"model": "m", "messages": [USER, {"role": "assistant", "content": [block]}], "max_tokens": 1})
    read, longest_s = list[MessagesRequest](), 0.0
    began = time.process_time()
    text = json.dumps(given)
    dumped_s = time.process_time() - began
    reading = threading.Thread(target=lambda: read.append(read_messages_request(raw.encode())))
    reading.start()
    while reading.is_alive():
        began = time.process_time()
        time.sleep(0.001)
        longest_s = max(longest_s, time.process_time() - began)
    [call] = read[0].requests[0].messages[1].tool_calls
    assert call.arguments == text
    assert longest_s < dumped_s / 2


def end(reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> Finished:
    return Finished(1, reason, Usage(7, 2, 3), TIMINGS, stop)


EVENTS: list[CallEvent] = [
    Started(1, 0, 7, 3),
    Reasoning(1, "h"),
    Reasoning(1, "m"),
    Text(1, "Hé"),
    Text(1, "!"),
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a":1}'),
    ToolCallDelta(1, 1, "call_b", "sub", "{}"),
    end(FinishReason.TOOL_CALLS),
]


def read(**parameters: Any) -> MessagesRequest:
    body = {"model": "m", "max_tokens": 5, "messages": [USER], **parameters}
    return read_messages_request(json.dumps(body).encode())


def refusal(**parameters: Any) -> PaddockError:
    with pytest.raises(PaddockError) as caught:
        read(**parameters)
    return caught.value


def streamed(events: list[CallEvent]) -> list[dict[str, Any]]:
    writer = MessagesDialect().stream_writer(read(), CALL, RequestLog("r", "POST", "/v1/messages"))
    raw = writer.opening() + b"".join(writer.chunks([event], 0) for event in events) + writer.closing()
    told = []
    for block in raw.decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        document = json.loads(data.removeprefix("data: "))
        assert name == f"event: {document['type']}"
        told.append(document)
    return told


def test_a_conversation_with_everything_in_it() -> None:
    asked = read(
        system=[
            {"type": "text", "text": "be "},
            {"type": "text", "text": "kind", "cache_control": {"type": "ephemeral"}},
        ],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "x"},
                    {"type": "text", "text": "well"},
                    {"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "2"}]},
                    {"type": "tool_result", "tool_use_id": "t2", "content": "no", "is_error": True},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
        tools=[TOOL],
    )
    assert asked.requests[0].messages == (
        Message("system", "be kind"),
        Message("user", "hi"),
        Message("assistant", "well", reasoning="hm", tool_calls=(ToolCall("t1", "add", '{"a": 1}'),)),
        Message("tool", "2", tool_call_id="t1"),
        Message("tool", "Error: no", tool_call_id="t2"),
        Message("user", "and now?"),
    )
    assert asked.requests[0].tools == (tool_of("add", "d", {"type": "object"}),)
    assert asked.requests[0].max_tokens == 5


def test_texts_of_a_user_are_lines_and_those_of_the_system_follow_each_other() -> None:
    def texts(*told: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in told]

    asked = read(system=texts("a", "b"), messages=[{"role": "user", "content": texts("<reminder/>", "hi")}])
    assert asked.requests[0].messages == (Message("system", "ab"), Message("user", "<reminder/>\nhi"))


def test_a_document_of_text_is_text_and_others_are_refused() -> None:
    def document(source: object) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "document", "source": source}, {"type": "text", "text": "?"}]}]

    plain = {"type": "text", "media_type": "text/plain", "data": "All foxes."}
    assert read(messages=document(plain)).requests[0].messages == (Message("user", "All foxes.\n?"),)
    for source in (
        {"type": "base64", "media_type": "application/pdf", "data": "AA"},
        {"type": "text", "data": 5},
        7,
        None,
    ):
        assert isinstance(refusal(messages=document(source)), NotSupported)


@pytest.mark.parametrize("as_blocks", [True, False])
def test_what_claude_code_stamps_its_prompts_with_does_not_keep_them_from_the_cache(as_blocks: bool) -> None:
    def told(stamp: str) -> str | None:
        text = f"x-anthropic-billing-header: cc_version=2.1.101.e51; cc_entrypoint=cli; cch={stamp};You are Claude."
        system = [{"type": "text", "text": text}, {"type": "text", "text": "cch=12345;"}] if as_blocks else text
        return read(system=system).requests[0].messages[0].content

    one = told("a5145")
    assert one == told("09fe2")
    assert one is not None
    assert "cch=fffff;You are Claude." in one
    assert ("cch=12345;" in one) == as_blocks
    plain = "cch=a5145; is no stamp"
    assert read(system=plain).requests[0].messages[0].content == plain


def test_how_tools_are_chosen() -> None:
    def chosen(choice: dict[str, Any]) -> tuple[tuple[str, ...], bool, int]:
        request = read(tools=[TOOL], tool_choice=choice).requests[0]
        return request.forced_tools, request.parallel_tool_calls, len(request.tools)

    assert chosen({"type": "auto"}) == ((), True, 1)
    assert chosen({"type": "any"}) == (("add",), True, 1)
    assert chosen({"type": "tool", "name": "add", "disable_parallel_tool_use": True}) == (("add",), False, 1)
    assert chosen({"type": "none"}) == ((), True, 0)


def test_thinking_and_forms() -> None:
    assert read(thinking={"type": "enabled", "budget_tokens": 40}).requests[0].thinking == Thinking(True, None, 40)
    assert read(thinking={"type": "disabled"}).requests[0].thinking == Thinking(enabled=False)
    assert read(thinking={"type": "adaptive"}).requests[0].thinking == Thinking(enabled=True)
    kwargs = {"enable_thinking": False, "reasoning_effort": "high", "colour": "red"}
    request = read(thinking={"type": "enabled"}, chat_template_kwargs=kwargs).requests[0]
    assert (request.thinking, decode_object(request.template_values)) == (Thinking(enabled=False), {"colour": "red"})
    request = read(thinking={"type": "enabled", "budget_tokens": 4}, reasoning_budget_message="So.").requests[0]
    assert request.thinking == Thinking(True, None, 4, "So.")
    config = {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "integer"}}}
    request = read(output_config=config).requests[0]
    assert request.thinking.effort == "low"
    assert request.constraint is not None
    assert (request.constraint.kind, request.constraint.text) == ("json_schema", '{"type":"integer"}')


def test_an_assistant_that_has_begun_goes_on() -> None:
    begun = [USER, {"role": "assistant", "content": "The answer is"}]
    assert decode_object(read(messages=begun).requests[0].template_values) == {"continue_final_message": True}
    assert read().requests[0].template_values == ""


def test_llama_cpps_parameters_and_hints_are_read_as_well() -> None:
    request = read(top_k=3, min_p=0.25, mirostat=2, cache_salt="mine", priority=4, lora=[{"id": "x"}]).requests[0]
    assert (request.sampling.top_k, request.sampling.min_p, request.sampling.mirostat) == (3, 0.25, 2)
    assert (request.cache_salt, request.priority, request.adapters[0].name) == ("mine", -4, "x")


@pytest.mark.parametrize(
    ("parameters", "param", "said"),
    [
        ({"max_tokens": None}, "max_tokens", "missing"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages.0.content.0.text", "missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
            "messages.0.content.0.tool_use_id",
            "id",
        ),
        ({"tools": [{"name": "a"}]}, "tools.0.input_schema", "missing"),
        ({"tool_choice": {"type": "any"}}, "tool_choice", "no `tools`"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "b"}}, "tool_choice.name", "none of"),
        ({"stop_sequences": [""]}, "stop_sequences.0", "1 to"),
        ({"stop_sequences": ["x" * 512] * 17}, "stop_sequences", "at most 8192"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name", "pattern"),
        ({"output_format": FORM, "output_config": {"format": FORM}}, "output_format", "Send one of them"),
        ({"output_config": {"format": {"type": "json"}}}, "output_config.format", "schema"),
    ],
)
def test_what_is_wrong_is_named(parameters: dict[str, Any], param: str, said: str) -> None:
    error = refusal(**parameters)
    assert isinstance(error, InvalidRequest)
    assert error.param == param
    assert said in error.message


def test_what_no_model_reads_is_not_supported() -> None:
    image = {"type": "image", "source": {"type": "file", "file_id": "f"}}
    error = refusal(messages=[{"role": "user", "content": [image]}])
    assert isinstance(error, NotSupported)
    assert ANTHROPIC.status(error) == 501
    assert error.param == "messages.0.content.0.source"


def test_tools_and_servers_of_the_provider_are_refused() -> None:
    error = refusal(tools=[{"type": "web_search_20250305", "name": "web_search"}])
    assert isinstance(error, UnsupportedParameter)
    assert isinstance(refusal(mcp_servers=[{"url": "x"}]), UnsupportedParameter)


def test_only_thoughts_may_be_cleared() -> None:
    assert read(context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}) == read()
    assert isinstance(
        refusal(context_management={"edits": [{"type": "clear_tool_uses_20250919"}]}), UnsupportedParameter
    )


def test_counting_looks_at_the_prompt_only() -> None:
    asked = {"model": "m", "messages": [USER], "betas": ["x"], "max_tokens": 1, "surprise": 1}
    ignored = Ignored()
    model, request = read_prompt(json.dumps(asked).encode(), ignored)
    assert (model, request.messages) == ("m", (Message("user", "hi"),))
    assert ignored.header == "betas, surprise", "what messages have beside their prompt is known"


def test_a_stream_is_blocks_one_after_the_other() -> None:
    told = streamed(EVENTS)
    assert [document["type"] for document in told] == [
        "message_start",
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        *("content_block_start", "content_block_delta", "content_block_stop"),
        "message_delta",
        "message_stop",
    ]
    message = told[0]["message"]
    assert (message["role"], message["content"], message["model"]) == ("assistant", [], "alias")
    assert message["usage"]["input_tokens"] == 4
    assert message["usage"]["cache_read_input_tokens"] == 3
    starts = [document for document in told if document["type"] == "content_block_start"]
    assert [(start["index"], start["content_block"]["type"]) for start in starts] == [
        (0, "thinking"),
        (1, "text"),
        (2, "tool_use"),
        (3, "tool_use"),
    ]
    deltas = [document["delta"] for document in told if document["type"] == "content_block_delta"]
    assert deltas[0] == {"type": "thinking_delta", "thinking": "h"}
    assert deltas[3] == {"type": "text_delta", "text": "!"}
    assert deltas[4] == {"type": "input_json_delta", "partial_json": '{"a":1}'}
    assert told[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert told[-2]["usage"]["output_tokens"] == 2


def test_a_whole_message() -> None:
    writer = MessagesDialect().whole_writer(read(), CALL, RequestLog("r", "POST", "/v1/messages"))
    writer.add(EVENTS[:4], 0)
    writer.add(EVENTS[4:], 0)
    body = json.loads(b"".join(writer.parts()))
    assert body["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Hé!"},
        {"type": "tool_use", "id": "call_a", "name": "add", "input": {"a": 1}},
        {"type": "tool_use", "id": "call_b", "name": "sub", "input": {}},
    ]
    assert (body["stop_reason"], body["type"], body["role"]) == ("tool_use", "message", "assistant")


def test_a_long_text_is_not_copied_with_each_of_its_pieces() -> None:
    """Two megabytes in a hundred thousand pieces: copied with each, they took the event loop most of a minute."""
    writer = MessagesDialect().whole_writer(read(), CALL, RequestLog("r", "POST", "/v1/messages"))
    began = time.process_time()
    for _ in range(100_000):
        writer.add([Text(1, "twenty letters of it")], 0)
    writer.add(EVENTS[-1:], 0)
    body = json.loads(b"".join(writer.parts()))
    assert len(body["content"][0]["text"]) == 2_000_000
    assert time.process_time() - began < 2.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("", {}),
        ('{"ci', {}),
        ('{"city": "Pa', {"city": "Pa"}),
        ('{"city": "Paris", "days": [1, 2', {"city": "Paris", "days": [1, 2]}),
    ],
)
def test_arguments_that_were_cut_are_told_as_far_as_they_came(arguments: str, told: dict[str, Any]) -> None:
    writer = MessagesDialect().whole_writer(read(), CALL, RequestLog("r", "POST", "/v1/messages"))
    writer.add([Started(1, 0, 7, 3), ToolCallDelta(1, 0, "call_a", "add", arguments, 1), end(FinishReason.LENGTH)], 0)
    body = json.loads(b"".join(writer.parts()))
    assert (body["content"][0]["input"], body["stop_reason"]) == (told, "max_tokens")


@pytest.mark.parametrize(
    ("last", "reason", "sequence"),
    [
        (end(), "end_turn", None),
        (end(FinishReason.LENGTH), "max_tokens", None),
        (end(stop="###"), "stop_sequence", "###"),
    ],
)
def test_why_an_answer_ends(last: Finished, reason: str, sequence: str | None) -> None:
    told = streamed([Started(1, 0, 7, 3), Text(1, "a"), last])
    assert told[-2]["delta"] == {"stop_reason": reason, "stop_sequence": sequence}


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "invalid_request_error"),
        (ModelNotFound("x"), 404, "not_found_error"),
        (QueueFull("x"), 429, "rate_limit_error"),
        (Unavailable("x"), 529, "overloaded_error"),
    ],
)
def test_errors(error: PaddockError, status: int, kind: str) -> None:
    assert ANTHROPIC.status(error) == status
    body = json.loads(ANTHROPIC.body(error, RequestLog("r", "POST", "/v1/messages")))
    assert body == {"type": "error", "error": {"type": kind, "message": "x"}, "request_id": "r"}


def test_a_thread_is_refused_in_the_words_that_make_the_sdk_do_without() -> None:
    error = refusal(thread={"type": "create"})
    body = json.loads(ANTHROPIC.body(error, RequestLog("r", "POST", "/v1/messages")))
    assert body["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert ANTHROPIC.status(error) == 400
