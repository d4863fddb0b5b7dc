"""vLLM's `min_tokens`, `stop_token_ids` and `skip_special_tokens` through the front door, in every dialect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.stack import Stack

MESSAGES: Any = [{"role": "user", "content": "Who are you?"}]
PROMPT = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_stack.gateways[0].url}/v1", api_key=demo_stack.key, max_retries=0) as opened:
        yield opened


@pytest.fixture
def http(demo_stack: Stack) -> Iterator[httpx2.Client]:
    headers = {"authorization": f"Bearer {demo_stack.key}"}
    with httpx2.Client(base_url=demo_stack.gateways[0].url, headers=headers, timeout=60) as opened:
        yield opened


def completion(http: httpx2.Client, **more: Any) -> dict[str, Any]:
    asked = {"model": DEMO_ALIAS, "prompt": PROMPT, "temperature": 0, "n_predict": 120, "return_tokens": True, **more}
    answer = http.post("/completion", json=asked)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_chat_is_as_long_as_it_must_be(client: openai.OpenAI) -> None:
    def lengths(**extra: Any) -> tuple[int, str]:
        answer = client.chat.completions.create(
            model=DEMO_ALIAS, messages=MESSAGES, temperature=0, max_tokens=120, extra_body=extra
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens, answer.choices[0].message.content or ""

    num_plain, plain = lengths()
    num_longer, longer = lengths(min_tokens=num_plain + 10)
    assert num_longer >= num_plain + 10 > num_plain
    assert longer.startswith(plain)
    assert lengths(min_new_tokens=num_plain + 10) == (num_longer, longer)


def test_a_form_is_complete_whatever_its_length(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [True, False]}}}
    answer = client.chat.completions.create(
        model=DEMO_ALIAS, messages=MESSAGES, max_tokens=60, response_format=form, extra_body={"min_tokens": 40}
    )
    assert json.loads(answer.choices[0].message.content or "") in (True, False)
    assert answer.choices[0].finish_reason == "stop"


def test_an_answer_ends_at_a_stop_token(client: openai.OpenAI, http: httpx2.Client) -> None:
    plain = completion(http)
    stop = plain["tokens"][6]
    first = plain["tokens"].index(stop)
    told = completion(http, stop_token_ids=[stop])
    assert (told["tokens_predicted"], told["stop_type"]) == (first + 1, "eos")
    assert plain["content"].startswith(told["content"])
    assert len(told["content"]) < len(plain["content"])
    chat = client.chat.completions.create(
        model=DEMO_ALIAS, messages=MESSAGES, temperature=0, extra_body={"stop_token_ids": [stop]}
    )
    assert (chat.choices[0].message.content, chat.choices[0].finish_reason) == (told["content"], "stop")
    whole = client.completions.create(
        model=DEMO_ALIAS, prompt=PROMPT, temperature=0, max_tokens=50, extra_body={"stop_token_ids": [stop]}
    )
    assert whole.choices[0].text == told["content"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/messages", {"messages": MESSAGES, "max_tokens": 90}),
        ("/v1/responses", {"input": "Who are you?", "max_output_tokens": 90, "store": False}),
    ],
)
def test_the_other_dialects_do_it_too(http: httpx2.Client, path: str, body: dict[str, Any]) -> None:
    def tokens(**more: Any) -> int:
        answer = http.post(path, json={"model": DEMO_ALIAS, "temperature": 0, **body, **more})
        assert answer.status_code == 200, answer.text
        count: int = answer.json()["usage"]["output_tokens"]
        return count

    num_plain = tokens()
    assert tokens(min_tokens=num_plain + 5) >= num_plain + 5
    assert tokens(stop_token_ids=list(range(128))) < num_plain


def test_control_tokens_are_shown_where_they_are_not_to_be_skipped(http: httpx2.Client) -> None:
    assert completion(http, skip_special_tokens=False)["content"].endswith("<|im_end|>")
    assert not completion(http, skip_special_tokens=True)["content"].endswith("<|im_end|>")


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids.0"),
        ({"stop_token_ids": [3, 10**6]}, "stop_token_ids.1"),
        ({"stop_token_ids": list(range(129))}, "stop_token_ids"),
        ({"stop_token_ids": "x"}, "stop_token_ids"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_is_named(http: httpx2.Client, wrong: dict[str, Any], param: str, stream: bool) -> None:
    body = {"model": DEMO_ALIAS, "messages": MESSAGES, "stream": stream, **wrong}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
