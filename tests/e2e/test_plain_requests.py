"""A plain loop over `requests` that takes each chunk from the network for one event: many clients are no cleverer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import requests

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.stack import Stack

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Who are you?"}], "temperature": 0}
PROMPT: dict[str, Any] = {"prompt": ["Once upon a time", "The"], "max_tokens": 30, "temperature": 0}


def post(stack: Stack, path: str, body: dict[str, Any], **more: Any) -> requests.Response:
    headers = {"Authorization": f"Bearer {stack.key}"}
    url = stack.gateways[0].url + path
    return requests.post(url, json={"model": DEMO_ALIAS, **body}, headers=headers, timeout=60, **more)


def chunks(stack: Stack, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One `json.loads` per chunk, and nothing else."""
    with post(stack, path, {**body, "stream": True}, stream=True) as response:
        assert response.status_code == 200
        for chunk in response.iter_content(chunk_size=None):
            if chunk.startswith(b":"):
                continue
            if chunk == b"data: [DONE]\n\n":
                return
            yield json.loads(chunk.removeprefix(b"data: "))
    raise AssertionError("the stream has no end")


@pytest.mark.parametrize("n", [1, 4])
def test_chat(kinds_stack: Stack, n: int) -> None:
    texts = [""] * n
    last: dict[str, Any] = {}
    body = {**CHAT, "n": n, "stream_options": {"include_usage": True}}
    for chunk in chunks(kinds_stack, "/v1/chat/completions", body):
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
        last = chunk
    whole = post(kinds_stack, "/v1/chat/completions", {**CHAT, "n": n}).json()
    assert texts == [choice["message"]["content"] for choice in whole["choices"]]
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]


def test_completions(kinds_stack: Stack) -> None:
    texts = ["", ""]
    for chunk in chunks(kinds_stack, "/v1/completions", PROMPT):
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    whole = post(kinds_stack, "/v1/completions", PROMPT).json()
    assert texts == [choice["text"] for choice in whole["choices"]]


def test_everything_beside_the_text(kinds_stack: Stack) -> None:
    wishes = {"return_progress": True, "timings_per_token": True, "return_tokens": True, "logprobs": True}
    seen = list(chunks(kinds_stack, "/v1/chat/completions", {**CHAT, **wishes, "cache_prompt": False}))
    assert any("prompt_progress" in chunk for chunk in seen)
    said = [chunk["choices"][0] for chunk in seen if chunk["choices"][0]["delta"].get("content")]
    assert all(choice["tokens"] for choice in said)
    assert all("timings" in chunk for chunk in seen if chunk["choices"][0]["delta"].get("content"))
    assert all(choice["logprobs"]["content"] for choice in said)


def test_an_error_is_json(kinds_stack: Stack) -> None:
    response = post(kinds_stack, "/v1/completions", {"prompt": 5, "stream": True})
    assert response.status_code == 400
    assert "`prompt`" in response.json()["error"]["message"]
