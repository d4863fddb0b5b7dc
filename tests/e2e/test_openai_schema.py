"""Every answer and every event, over a table of combinations, is what OpenAI's specification says; prints the table."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterable
from typing import Any

import pytest

from tests.e2e.conftest import DEMO_ALIAS, EMBEDDER
from tests.support.caller import Caller, calling
from tests.support.openai_schema import check
from tests.support.stack import Stack

TOOL = {"name": "get_weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}

SHARED: dict[str, dict[str, Any]] = {
    "n=2": {"n": 2, "seed": 5},
    "stop": {"stop": ["a"]},
    "tokens": {"return_tokens": True},
    "times": {"timings_per_token": True},
    "progress": {"return_progress": True},
    "usage": {"stream_options": {"include_usage": True}},
    "usage always": {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    "samplers": {"samplers": ["top_k", "temperature"], "mirostat": 0, "logit_bias": {"5": -1}},
    "schema": {"json_schema": SCHEMA, "max_tokens": 40},
    "regex": {"guided_regex": "(yes|no)"},
}
CHAT: dict[str, dict[str, Any]] = SHARED | {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "after sampling": {"n_probs": 2, "post_sampling_probs": True},
    "tools": {"tools": [{"type": "function", "function": TOOL}]},
    "tool required": {"tools": [{"type": "function", "function": TOOL}], "tool_choice": "required", "max_tokens": 60},
    "function": {"functions": [TOOL], "function_call": {"name": "get_weather"}, "max_tokens": 60},
    "strict form": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "thinking": {"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}},
}
COMPLETION: dict[str, dict[str, Any]] = SHARED | {
    "prompts": {"prompt": ["Once", [300, 301]]},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 2},
    "llama's logprobs": {"n_probs": 2},
    "nothing": {"max_tokens": 0},
}
EMBEDDINGS: dict[str, dict[str, Any]] = {
    "texts": {"input": ["a", "b"]},
    "tokens": {"input": [[300], [301, 302]]},
    "short": {"dimensions": 4},
    "not normalised": {"embd_normalize": -1},
}
ENDPOINTS: dict[str, tuple[dict[str, Any], dict[str, dict[str, Any]], str, str]] = {
    "/v1/chat/completions": (
        {"model": DEMO_ALIAS, "messages": [{"role": "user", "content": "What is the weather in Paris?"}]},
        CHAT,
        "CreateChatCompletionResponse",
        "CreateChatCompletionStreamResponse",
    ),
    "/v1/completions": (
        {"model": DEMO_ALIAS, "prompt": "Once"},
        COMPLETION,
        "CreateCompletionResponse",
        "CreateCompletionResponse",
    ),
    "/v1/embeddings": ({"model": EMBEDDER, "input": "a"}, EMBEDDINGS, "CreateEmbeddingResponse", ""),
}

Row = tuple[str, str, str, int, int]
"""Endpoint, features, how, status, documents that were checked."""


def combinations(features: Iterable[str], size: int) -> list[tuple[str, ...]]:
    """Nothing special and up to `size` features together."""
    names = list(features)
    return [combo for count in range(size + 1) for combo in itertools.combinations(names, count)]


async def checked(caller: Caller, path: str, combo: tuple[str, ...], *, stream: bool) -> Row:
    base, features, whole, event = ENDPOINTS[path]
    body = {**base, "temperature": 0, "max_tokens": 8} if event else dict(base)
    for name in combo:
        body |= features[name]
    if stream:
        body["stream"] = True
    else:
        body.pop("stream_options", None)
    async with caller.session.post(caller.url + path, json=body) as response:
        raw = await response.read()
    if response.status != 200:
        check("ErrorResponse", json.loads(raw))
        count = 1
    elif stream:
        count = check_events(raw, event)
    else:
        document = json.loads(raw)
        check(whole, as_specified(document) if whole == "CreateCompletionResponse" else document)
        count = 1
    return path, " + ".join(combo) or "-", "streamed" if stream else "whole", response.status, count


def check_events(raw: bytes, schema: str) -> int:
    events = [block for block in raw.decode().split("\n\n") if block and not block.startswith(":")]
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        document = json.loads(event.removeprefix("data: "))
        check(schema, as_specified(document) if schema == "CreateCompletionResponse" else document)
    return len(events) - 1


def as_specified(completion: dict[str, Any]) -> dict[str, Any]:
    """Return a completion with values in the places where OpenAI's servers send null and their specification doesn't:
    a reason, the usage, and how likely the first token of an echoed prompt was.
    """
    for choice in completion["choices"]:
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        if (probs := choice.get("logprobs")) and "token_logprobs" in probs:
            probs["token_logprobs"] = [0.0 if one is None else one for one in probs["token_logprobs"]]
            probs["top_logprobs"] = [one or {} for one in probs["top_logprobs"] or []]
    if completion.get("usage", {}) is None:
        del completion["usage"]
    return completion


@pytest.mark.parametrize("size", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_every_combination(kinds_stack: Stack, size: int) -> None:
    """Pairs are about 500 answers; most of their time goes by in the judge."""
    room = asyncio.Semaphore(8)

    async def one(caller: Caller, path: str, combo: tuple[str, ...], stream: bool) -> Row:
        async with room:
            return await checked(caller, path, combo, stream=stream)

    asked = [
        (path, combo, stream)
        for path, (_, features, _, event) in ENDPOINTS.items()
        for combo in combinations(features, size)
        for stream in ([False, True] if event else [False])
    ]
    async with calling(kinds_stack.gateways[0].url, kinds_stack.key, DEMO_ALIAS) as caller:
        rows = await asyncio.gather(*(one(caller, *what) for what in asked))
    for path, combo, how, status, count in rows:
        print(f"{path:22} {how:9} {combo:34} {status} {count:4}")
    print(f"{len(rows)} combinations, {sum(row[4] for row in rows)} documents")
    assert all(status in (200, 400) for _, _, _, status, _ in rows)
    alone = [row for row in rows if " + " not in row[1]]
    assert all(status == 200 for _, _, _, status, _ in alone), [row for row in alone if row[3] != 200]
    assert sum(row[3] == 200 for row in rows) > 0.8 * len(rows), "pairs that contradict each other are few"
