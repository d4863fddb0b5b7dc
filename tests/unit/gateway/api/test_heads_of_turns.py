"""The heads of a next turn as clients of each dialect send it, against those that a worker made of its own answer."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from gateway.api.anthropic.request import read_messages_request
from gateway.api.openai.requests import read_chat
from gateway.api.responses.request import read_draft
from workers.protocol.prefixes import chain_of, prefix_after, prefix_of
from workers.protocol.requests import GenerateRequest, ToolCall

ASKED = "What is the weather in Köln and in Bonn? " * 8
SAID = "Let me look both up. " * 10
THOUGHT = "They want to know about two cities."
ARGUMENTS = {"city": "Köln", "days": [1, 2], "note": 'a "quoted" word\n'}
WRITTEN = '{"city": "Köln",\n "days": [1,2], "note": "a \\"quoted\\" word\\n"}'
RESULT = "12 °C"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}


def read(reader: Callable[[bytes], Any], body: dict[str, Any]) -> GenerateRequest:
    request = reader(json.dumps(body).encode()).requests[0]
    assert isinstance(request, GenerateRequest)
    return request


def chat(*, with_answer: bool) -> GenerateRequest:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": json.dumps(ARGUMENTS)}}
    answer = {"role": "assistant", "content": SAID, "reasoning_content": THOUGHT, "tool_calls": [call]}
    more = [answer, {"role": "tool", "tool_call_id": "call_1", "content": RESULT}] if with_answer else []
    function = {"name": "look", "parameters": PARAMETERS}
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": ASKED}, *more],
        "tools": [{"type": "function", "function": function}],
    }
    return read(read_chat, body)


def anthropic(*, with_answer: bool) -> GenerateRequest:
    answer = [
        {"type": "thinking", "thinking": THOUGHT, "signature": ""},
        {"type": "text", "text": SAID},
        {"type": "tool_use", "id": "toolu_1", "name": "look", "input": ARGUMENTS},
    ]
    result = [{"type": "tool_result", "tool_use_id": "toolu_1", "content": RESULT}]
    more = [{"role": "assistant", "content": answer}, {"role": "user", "content": result}] if with_answer else []
    body = {
        "model": "m",
        "max_tokens": 9,
        "messages": [{"role": "user", "content": ASKED}, *more],
        "tools": [{"name": "look", "input_schema": PARAMETERS}],
    }
    return read(read_messages_request, body)


def responses(*, with_answer: bool) -> GenerateRequest:
    said = {"type": "output_text", "text": SAID, "annotations": []}
    answer = [
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": THOUGHT}]},
        {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [said]},
        {"type": "function_call", "call_id": "fc_1", "name": "look", "arguments": json.dumps(ARGUMENTS)},
        {"type": "function_call_output", "call_id": "fc_1", "output": RESULT},
    ]
    body = {
        "model": "m",
        "input": [{"role": "user", "content": ASKED}, *(answer if with_answer else [])],
        "tools": [{"type": "function", "name": "look", "parameters": PARAMETERS}],
    }
    return read(lambda raw: read_draft(raw).resolved({}).complete(), body)


@pytest.mark.parametrize("dialect", [chat, anthropic, responses])
def test_the_next_turn_has_the_heads_of_the_workers_answer(dialect: Callable[..., GenerateRequest]) -> None:
    first, second = dialect(with_answer=False), dialect(with_answer=True)
    calls = (ToolCall("made up by the worker", "look", WRITTEN),)
    after = prefix_after(chain_of(first, "t", {}), first, f"\n\n{SAID.strip()}", calls)
    found = prefix_of(second, "t", {})
    assert len(after.digests) > len(prefix_of(first, "t", {}).digests)
    assert after.digests == found.digests[: len(after.digests)]
    other = replace(first, messages=(replace(first.messages[0], content="else " + ASKED),))
    assert not set(prefix_of(other, "t", {}).digests) & set(found.digests)
