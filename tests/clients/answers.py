"""Whether an answer has the shape that its dialect promises, in the words of the SDKs' own types."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from functools import cache
from typing import Any

import jsonschema
import requests
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

from tests.clients.recording import Sent

Event = tuple[str, dict[str, Any]]
"""Its name, and its data."""


def fault(call: Sent, answer: requests.Response) -> str:
    """Return what is wrong with the answer; "" if nothing is."""
    judge = JUDGES.get(call.route) or (_listed if call.route.startswith("GET ") else _any_object)
    try:
        judge(call, answer.text)
    except (ValidationError, ValueError, AssertionError, KeyError, IndexError, jsonschema.ValidationError) as error:
        return f"{type(error).__name__}: {error}"[:500]
    return ""


def _chat(call: Sent, text: str) -> None:
    if not call.body.get("stream"):
        answer = ChatCompletion.model_validate_json(text)
        assert len(answer.choices) == (call.body.get("n") or 1)
        for choice in answer.choices:
            _in_form(call, choice.message.content or "", choice.finish_reason, bool(choice.message.tool_calls))
        return
    events = _events(text)
    assert events[-1] == ("", {"done": True}), "the stream does not end with [DONE]"
    chunks = [_adapter(ChatCompletionChunk).validate_python(data) for _, data in events[:-1]]
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert len(reasons) == (call.body.get("n") or 1), "a choice has no finish_reason"
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.index == 0]
    _in_form(call, "".join(delta.content or "" for delta in deltas), reasons[0], any(d.tool_calls for d in deltas))
    wants_usage = (call.body.get("stream_options") or {}).get("include_usage")
    assert not wants_usage or chunks[-1].usage is not None, "the last chunk has no usage"


def _in_form(call: Sent, content: str, reason: str, has_calls: bool) -> None:
    """Check what was asked of the text: that it is JSON, of that schema, or a call of a tool."""
    if call.body.get("tool_choice") == "required":
        assert has_calls or reason == "length", "a tool was required, and none is called"
    form = call.body.get("response_format") or {}
    if has_calls or reason == "length" or form.get("type") not in ("json_object", "json_schema"):
        return
    schema = (form.get("json_schema") or {}).get("schema")
    jsonschema.validate(json.loads(content), schema or {"type": "object"})


def _completion(call: Sent, text: str) -> None:
    if not call.body.get("stream"):
        document = json.loads(text)
        for choice in document["choices"] if call.body.get("echo") else ():
            # OpenAI's servers tell null of a prompt's first token, which its SDK takes and its types have no place for.
            choice["logprobs"] = {name: values[1:] for name, values in (choice["logprobs"] or {}).items()} or None
        assert Completion.model_validate(document).choices
        return
    events = _events(text)
    assert events[-1] == ("", {"done": True}), "the stream does not end with [DONE]"
    assert any(data["choices"] and data["choices"][0].get("finish_reason") for _, data in events[:-1])


def _responses(call: Sent, text: str) -> None:
    if not call.body.get("stream"):
        answer = Response.model_validate_json(text)
        assert answer.status in ("completed", "incomplete"), f"it is {answer.status}"
        _of_text_format(call, answer)
        return
    events = [_adapter(ResponseStreamEvent).validate_python(data) for _, data in _events(text)]
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete"), f"it ends with {events[-1].type}"
    _of_text_format(call, events[-1].response)


def _of_text_format(call: Sent, answer: Response) -> None:
    form = (call.body.get("text") or {}).get("format") or {}
    if form.get("type") == "json_schema" and answer.status == "completed" and answer.output_text:
        jsonschema.validate(json.loads(answer.output_text), form["schema"])


def _messages(call: Sent, text: str) -> None:
    if not call.body.get("stream"):
        message = Message.model_validate_json(text)
        choice = (call.body.get("tool_choice") or {}).get("type")
        if choice in ("any", "tool") and message.stop_reason != "max_tokens":
            assert message.stop_reason == "tool_use", "a tool was required, and none is called"
        return
    events = _events(text)
    for name, data in events:
        assert name == data["type"], "an event's name is not its type"
        if name != "ping":
            _adapter(RawMessageStreamEvent).validate_python(data)
    kinds = [name for name, _ in events if name != "ping"]
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.count("content_block_start") == kinds.count("content_block_stop")


def _count(call: Sent, text: str) -> None:
    assert MessageTokensCount.model_validate_json(text).input_tokens > 0


def _embeddings(call: Sent, text: str) -> None:
    document = json.loads(text)
    if call.body.get("encoding_format") == "base64":
        for item in document["data"]:
            raw = base64.b64decode(item["embedding"], validate=True)
            assert raw, "an empty vector"
            assert len(raw) % 4 == 0, "no floats of 4 bytes"
            item["embedding"] = [0.0]
    answer = CreateEmbeddingResponse.model_validate(document)
    given = call.body["input"]
    wanted = 1 if isinstance(given, str) or isinstance(given[0], int) else len(given)
    assert len(answer.data) == wanted, f"{len(answer.data)} vectors for {wanted} texts"


def _rerank(call: Sent, text: str) -> None:
    results = json.loads(text)["results"]
    assert results
    assert all({"index", "relevance_score"} <= set(result) for result in results)


def _native(call: Sent, text: str) -> None:
    if not call.body.get("stream"):
        document = json.loads(text)
        fields = call.body.get("response_fields") or ("content", "stop", "timings")
        assert all(name in document for name in fields), f"it has only {sorted(document)}"
        return
    data = [inner for _, inner in _events(text)]
    assert all("content" in piece for piece in data)
    assert [piece["stop"] for piece in data] == [False] * (len(data) - 1) + [True]


def _listed(call: Sent, text: str) -> None:
    if call.route in ("GET /v1/models", "GET /models"):
        assert all(model["id"] for model in json.loads(text)["data"])
    else:
        json.loads(text)


def _any_object(call: Sent, text: str) -> None:
    assert isinstance(json.loads(text), dict | list)


JUDGES: dict[str, Callable[[Sent, str], None]] = {
    "POST /v1/chat/completions": _chat,
    "POST /chat/completions": _chat,
    "POST /v1/completions": _completion,
    "POST /v1/responses": _responses,
    "POST /v1/messages": _messages,
    "POST /v1/messages/count_tokens": _count,
    "POST /v1/embeddings": _embeddings,
    "POST /v1/rerank": _rerank,
    "POST /rerank": _rerank,
    "POST /completion": _native,
    "POST /infill": _native,
}


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _events(text: str) -> list[Event]:
    """Return the events of a stream; comments keep connections alive and are none."""
    found: list[Event] = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line and not line.startswith(":"))
        if "data" in fields:
            data = {"done": True} if fields["data"] == "[DONE]" else json.loads(fields["data"])
            found.append((fields.get("event", ""), data))
    return found
