"""Writing OpenAI's chat dialect: order and shape of chunks, and whole objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gateway.api.openai.chat_answer import ChunkWriter, WholeWriter
from gateway.errors import InternalError, WorkerLost
from gateway.telemetry.trail import Trail
from workers.protocol.events import (
    CallEvent,
    Failed,
    Finished,
    FinishReason,
    Started,
    Text,
    Timings,
    ToolCallDelta,
    Usage,
)
from workers.protocol.failures import Failure, FailureCode

SPEC = Path(__file__).resolve().parents[4].parent / "shared" / "specs" / "openai_openapi.json"

TIMINGS = Timings(cache_n=3, prompt_n=4, prompt_ms=8.0, predicted_n=2, predicted_ms=10.0)
END = Finished(1, FinishReason.STOP, Usage(7, 2, 3), TIMINGS)
TOOLS: list[CallEvent] = [
    ToolCallDelta(1, 0, "call_a", "add", ""),
    ToolCallDelta(1, 0, "", "", '{"a":'),
    ToolCallDelta(1, 1, "call_b", "sub", "{}"),
    ToolCallDelta(1, 0, "", "", "1}"),
    Finished(1, FinishReason.TOOL_CALLS, Usage(7, 2, 3), TIMINGS),
]


@pytest.fixture
def trail() -> Trail:
    return Trail("r", "POST", "/v1/chat/completions")


@pytest.fixture(scope="module")
def spec() -> dict[str, Any]:
    if not SPEC.is_file():
        pytest.skip("shared/specs is not there")
    document: dict[str, Any] = json.loads(SPEC.read_text())
    return document


def check(spec: dict[str, Any], schema: str, document: dict[str, Any]) -> None:
    wanted = {"$ref": f"#/components/schemas/{schema}", "components": spec["components"]}
    jsonschema.Draft202012Validator(_nullable(wanted)).validate(document)


def _nullable(schema: Any) -> Any:
    """OpenAPI 3.0's `nullable`, which the file still uses in places, in JSON Schema's words."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: _nullable(value) for name, value in schema.items()}
    return {"anyOf": [inner, {"type": "null"}]} if inner.pop("nullable", False) is True else inner


def chunks(writer: ChunkWriter, *steps: list[CallEvent]) -> list[dict[str, Any]]:
    raw = writer.opening() + b"".join(writer.chunks(step) for step in steps)
    blocks = raw.decode().split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [json.loads(block[6:]) for block in blocks]


def test_chunks_in_order(trail: Trail, spec: dict[str, Any]) -> None:
    writer = ChunkWriter("alias", False, trail)
    said = chunks(writer, [Started(1, 0, 7, 3)], [Text(1, "Hé")], [Text(1, '"\n'), Text(1, "\u2028😀"), END])
    assert [chunk["choices"][0]["delta"] for chunk in said] == [
        {"role": "assistant", "content": ""},
        {"content": "Hé"},
        {"content": '"\n'},
        {"content": "\u2028😀"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in said] == [None] * 4 + ["stop"]
    assert len({chunk["id"] for chunk in said}) == 1
    assert said[0]["model"] == "alias"
    assert all("usage" not in chunk for chunk in said)
    assert said[-1]["timings"] == {
        "cache_n": 3,
        "prompt_n": 4,
        "prompt_ms": 8.0,
        "prompt_per_token_ms": 2.0,
        "prompt_per_second": 500.0,
        "predicted_n": 2,
        "predicted_ms": 10.0,
        "predicted_per_token_ms": 5.0,
        "predicted_per_second": 200.0,
    }
    assert trail.usage == END.usage
    assert trail.first_token_at is not None
    for chunk in said:
        check(spec, "CreateChatCompletionStreamResponse", chunk)


def test_usage_comes_last_with_no_choices(trail: Trail, spec: dict[str, Any]) -> None:
    said = chunks(ChunkWriter("alias", True, trail), [Text(1, "a")], [END])
    assert [chunk["usage"] for chunk in said[:-1]] == [None] * 3
    assert said[-1]["choices"] == []
    assert said[-1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 2,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    assert "timings" in said[-1]
    assert "timings" not in said[-2]
    for chunk in said:
        check(spec, "CreateChatCompletionStreamResponse", chunk)


def test_tool_calls_in_a_stream(trail: Trail, spec: dict[str, Any]) -> None:
    said = chunks(ChunkWriter("alias", False, trail), *([event] for event in TOOLS))
    deltas = [chunk["choices"][0]["delta"]["tool_calls"][0] for chunk in said[1:-1]]
    first = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "add", "arguments": ""}}
    assert deltas[0] == first
    assert deltas[1] == {"index": 0, "function": {"arguments": '{"a":'}}
    assert [delta["index"] for delta in deltas] == [0, 0, 1, 0]
    assert said[-1]["choices"][0]["finish_reason"] == "tool_calls"
    for chunk in said:
        check(spec, "CreateChatCompletionStreamResponse", chunk)


def test_a_failure_comes_after_what_was_said_before_it(trail: Trail) -> None:
    writer = ChunkWriter("alias", False, trail)
    failed = Failed(1, Failure(FailureCode.WORKER_LOST, "gone"))
    said = chunks(writer, [Text(1, "a"), failed])
    assert said[-1]["choices"][0]["delta"] == {"content": "a"}
    assert isinstance(writer.failure, WorkerLost)


def test_a_whole_answer(trail: Trail, spec: dict[str, Any]) -> None:
    writer = WholeWriter("alias", trail)
    writer.add([Started(1, 0, 7, 3), Text(1, "a")])
    writer.add([Text(1, "b"), END])
    body = json.loads(writer.body())
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "ab", "refusal": None}
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["total_tokens"] == 9
    assert body["timings"]["predicted_per_second"] == 200.0
    check(spec, "CreateChatCompletionResponse", body)


def test_a_whole_answer_with_tool_calls(trail: Trail, spec: dict[str, Any]) -> None:
    writer = WholeWriter("alias", trail)
    writer.add(TOOLS)
    message = json.loads(writer.body())["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"a":1}'}},
        {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
    ]
    check(spec, "CreateChatCompletionResponse", json.loads(writer.body()))


def test_a_whole_answer_that_fails_is_an_error(trail: Trail) -> None:
    writer = WholeWriter("alias", trail)
    with pytest.raises(InternalError, match="broke"):
        writer.add([Text(1, "a"), Failed(1, Failure(FailureCode.INTERNAL, "broke"))])
