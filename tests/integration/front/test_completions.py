"""Completions, embeddings and reranking as a client sees them; several prompts and answers beside each other."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from tests.support.caller import Caller
from tests.support.openai_schema import check
from tests.support.stack import Stack
from tests.support.waiting import until

EIGHT = "t0 t1 t2 t3 t4 t5 t6 t7 "
COMPLETIONS = "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def ask(caller: Caller, path: str, headers: dict[str, str] | None = None, **body: Any) -> tuple[int, Any]:
    async with caller.session.post(caller.url + path, json=body, headers=headers) as response:
        return response.status, await response.json()


@asynccontextmanager
async def streaming(caller: Caller, path: str, **body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
    """Leaving it closes the connection."""
    response = await caller.session.post(caller.url + path, json={**body, "stream": True})
    try:
        yield response
    finally:
        response.close()


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """What comes before `[DONE]`, which must come."""
    async for line in response.content:
        if line.strip() == b"data: [DONE]":
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
    raise AssertionError("the stream has no end")


async def test_prompts_times_answers(caller: Caller) -> None:
    prompts = ["one", [1, 2, 3], "three is longer"]
    status, body = await ask(caller, COMPLETIONS, model="quick", prompt=prompts, n=2, max_tokens=8)
    assert status == 200
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(n, EIGHT) for n in range(6)]
    assert body["usage"]["completion_tokens"] == 48
    single = [(await ask(caller, COMPLETIONS, model="quick", prompt=prompt))[1]["usage"] for prompt in prompts]
    assert body["usage"]["prompt_tokens"] == sum(usage["prompt_tokens"] for usage in single), "each prompt counts once"
    check("CreateCompletionResponse", body)


async def test_a_stream_of_prompts_times_answers(caller: Caller) -> None:
    options = {"include_usage": True}
    texts, ends = [""] * 4, [0] * 4
    async with streaming(
        caller, COMPLETIONS, model="quick", prompt=["a", "b"], n=2, stream_options=options
    ) as response:
        chunks = [chunk async for chunk in events(response)]
    for chunk in chunks[:-1]:
        [choice] = chunk["choices"]
        texts[choice["index"]] += choice["text"]
        ends[choice["index"]] += choice["finish_reason"] is not None
        assert chunk["usage"] is None
    assert (texts, ends) == ([EIGHT] * 4, [1] * 4)
    assert chunks[-1]["usage"]["completion_tokens"] == 32


async def test_an_echo_and_a_suffix(caller: Caller) -> None:
    status, body = await ask(caller, COMPLETIONS, model="quick", prompt=["one", [6647407]], echo=True, max_tokens=1)
    assert status == 200
    assert body["choices"][0]["text"] == "onet0 "
    assert body["choices"][1]["text"].endswith("t0 ")
    status, body = await ask(caller, COMPLETIONS, model="quick", prompt="def f(", suffix="return", max_tokens=1)
    assert (status, body["choices"][0]["text"]) == (200, "t0 ")


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_a_client_that_leaves_frees_all_its_slots(caller: Caller, stack: Stack, path: str) -> None:
    asked: dict[str, Any] = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi", "max_tokens": 500}
    async with streaming(caller, path, model="slow", n=2, **asked) as response:
        seen: set[int] = set()
        async for chunk in events(response):
            seen |= {choice["index"] for choice in chunk["choices"] if choice.get("text") or choice.get("delta")}
            if seen == {0, 1}:
                break
        assert stack.leases("slow") == 2
    await until(lambda: stack.leases("slow") == 0, 2, "both slots are free")
    beat = stack.heartbeat("slow", "slow-a")
    began = time.monotonic()
    while beat is None or beat.slots_busy:
        assert time.monotonic() - began < 3, "the worker still computes"
        await asyncio.sleep(0.05)
        beat = stack.heartbeat("slow", "slow-a")


async def test_one_answer_that_can_not_be_fails_the_request(caller: Caller, stack: Stack) -> None:
    prompts = ["short", "x" * 4000]
    status, body = await ask(caller, COMPLETIONS, model="quick", prompt=prompts)
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    await until(lambda: stack.leases("quick") == 0, 2, "the other answer's slot is free")


async def test_one_answer_that_fails_half_way_ends_the_stream(caller: Caller, stack: Stack) -> None:
    async with streaming(caller, COMPLETIONS, model="failing", prompt="hi", n=3) as response:
        chunks = [chunk async for chunk in events(response)]
    assert "--fail-after" in chunks[-1]["error"]["message"]
    assert [chunk for chunk in chunks if "error" in chunk] == chunks[-1:], "it is told once"
    status, body = await ask(caller, COMPLETIONS, model="failing", prompt="hi", n=3)
    assert (status, body["error"]["type"]) == (500, "internal_error")
    await until(lambda: stack.leases("failing") == 0, 2, "all slots are free")


async def test_embeddings(caller: Caller) -> None:
    status, body = await ask(caller, "/v1/embeddings", model="vectors", input=["a text", [1, 2, 3]])
    assert status == 200
    assert [len(one["embedding"]) for one in body["data"]] == [8, 8]
    assert body["usage"]["prompt_tokens"] == 6
    check("CreateEmbeddingResponse", body)
    status, short = await ask(caller, "/v1/embeddings", model="vectors", input="a text", dimensions=3)
    assert sum(number**2 for number in short["data"][0]["embedding"]) == pytest.approx(1)
    status, refused = await ask(caller, "/v1/embeddings", model="vectors", input="x" * 4000)
    assert (status, refused["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v1/reranking", "/reranking"])
async def test_reranking(caller: Caller, path: str) -> None:
    documents = ["short", {"text": "one that is longer"}, "another that is the longest"]
    status, body = await ask(caller, path, model="ranks", query="q", documents=documents, top_n=2)
    assert (status, [one["index"] for one in body["results"]]) == (200, [2, 1])


@pytest.mark.parametrize(
    ("path", "body", "model", "words"),
    [
        ("/v1/embeddings", {"input": "a"}, "quick", "generates text and can't make embeddings"),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}, "quick", "generates text and can't rank documents"),
        ("/v1/rerank", {"query": "q", "documents": ["a"]}, "vectors", "makes embeddings and can't rank"),
        ("/v1/chat/completions", {"messages": MESSAGES}, "vectors", "Ask it through POST /v1/embeddings"),
        ("/v1/chat/completions", {"messages": MESSAGES, "stream": True}, "vectors", "can't generate text"),
        (COMPLETIONS, {"prompt": "a"}, "ranks", "Ask it through POST /v1/rerank"),
    ],
)
async def test_a_model_does_one_kind_of_work(
    caller: Caller, path: str, body: dict[str, Any], model: str, words: str
) -> None:
    status, answer = await ask(caller, path, model=model, **body)
    error = answer["error"]
    assert (status, error["type"], error["code"]) == (501, "not_supported_error", "not_supported")
    assert words in error["message"]


async def test_models_say_what_they_do(caller: Caller) -> None:
    async with caller.session.get(f"{caller.url}/v1/models") as response:
        cards = {card["id"]: card for card in (await response.json())["data"]}
    outputs = {name: cards[name]["architecture"]["output_modalities"] for name in ("quick", "vectors", "ranks")}
    assert outputs == {"quick": ["text"], "vectors": ["embeddings"], "ranks": ["scores"]}


@pytest.mark.parametrize(("slo", "status"), [("250", 200), ("0.5", 200), ("0", 400), ("soon", 400), ("nan", 400)])
async def test_the_header_for_urgency(caller: Caller, slo: str, status: int) -> None:
    headers = {"x-slo-ttft-ms": slo}
    got, body = await ask(caller, COMPLETIONS, headers, model="quick", prompt="hi", max_tokens=1)
    assert got == status
    if status != 200:
        assert body["error"]["param"] == "x-slo-ttft-ms"


async def test_functions_in_the_older_form_are_taken(caller: Caller) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "function_call": {"name": "add", "arguments": "{}"}},
        {"role": "function", "name": "add", "content": "2"},
    ]
    functions = [{"name": "add", "parameters": {"type": "object"}}]
    path = "/v1/chat/completions"
    status, body = await ask(caller, path, model="slow", messages=messages, functions=functions, max_tokens=2)
    assert (status, body["choices"][0]["message"]["content"]) == (200, "t0 t1 ")
