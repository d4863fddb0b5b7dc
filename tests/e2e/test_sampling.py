"""Sampling parameters and log probabilities through the whole path, asked for with the official client."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.stack import Stack

QUESTION = "Who are you?"


@pytest.fixture
def client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_stack.gateways[0].url}/v1", api_key=demo_stack.key, max_retries=0) as opened:
        yield opened


def ask(client: openai.OpenAI, extra: dict[str, Any] | None = None, **parameters: Any) -> ChatCompletion:
    answer: ChatCompletion = client.chat.completions.create(
        model=DEMO_ALIAS,
        messages=[{"role": "user", "content": QUESTION}],
        extra_body=extra,
        **{"temperature": 0, **parameters},
    )
    return answer


def entries(answer: ChatCompletion) -> list[ChatCompletionTokenLogprob]:
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    return logprobs.content


def said(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def test_log_probabilities_of_a_whole_answer(client: openai.OpenAI) -> None:
    answer = ask(client, logprobs=True, top_logprobs=3)
    assert answer.usage is not None
    told = entries(answer)
    assert len(told) == answer.usage.completion_tokens - 1, "all but the end token"
    assert b"".join(bytes(one.bytes or ()) for one in told).decode() == said(answer)
    for one in told:
        likeliest = [other.logprob for other in one.top_logprobs]
        assert len(likeliest) == 3
        assert likeliest == sorted(likeliest, reverse=True)
        assert one.top_logprobs[0].token == one.token, "greedy"
        assert one.logprob == likeliest[0] <= 0
        assert sum(map(math.exp, likeliest)) <= 1.0001


def test_log_probabilities_in_a_stream(client: openai.OpenAI) -> None:
    whole = entries(ask(client, logprobs=True, top_logprobs=2))
    chunks = client.chat.completions.create(
        model=DEMO_ALIAS,
        messages=[{"role": "user", "content": QUESTION}],
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream=True,
    )
    told: list[ChatCompletionTokenLogprob] = []
    for chunk in chunks:
        [choice] = chunk.choices
        content = choice.logprobs.content or [] if choice.logprobs else []
        assert bool(content) == bool(choice.delta.content)
        assert b"".join(bytes(one.bytes or ()) for one in content).decode() == (choice.delta.content or "")
        told += content
    assert [one.token for one in told] == [one.token for one in whole]
    # A second reading of a cached prompt may round otherwise.
    assert [one.logprob for one in told] == pytest.approx([one.logprob for one in whole], abs=0.02)


def test_the_chosen_tokens_alone(client: openai.OpenAI) -> None:
    told = entries(ask(client, logprobs=True))
    assert told
    assert all(one.top_logprobs == [] for one in told)
    assert ask(client).choices[0].logprobs is None


def test_a_bias_rules_a_token_out(client: openai.OpenAI) -> None:
    first = entries(ask(client, {"n_probs": 1}))[0].model_dump()["id"]
    plain = said(ask(client))
    for bias in ({str(first): -100}, {str(first): False}):
        assert said(ask(client, {"logit_bias": bias}))[:3] != plain[:3]
    with pytest.raises(openai.BadRequestError, match="there is no token 768; this model's are 0 to 767") as caught:
        ask(client, logit_bias={"768": 1})
    assert caught.value.param == "logit_bias"


def test_samplers_that_only_llama_server_has(client: openai.OpenAI) -> None:
    plain = said(ask(client))
    assert said(ask(client, {"samplers": ["top_k"], "top_k": 1}, temperature=2)) == plain
    assert said(ask(client, {"xtc_probability": 1.0, "xtc_threshold": 0.001})) != plain
    assert (
        said(ask(client, {"dry_multiplier": 5.0, "dry_allowed_length": 0, "ignore_eos": True}, max_tokens=60)) != plain
    )
    mirostat = [said(ask(client, {"mirostat": 2, "mirostat_tau": 9.0}, temperature=2, seed=5)) for _ in range(2)]
    assert mirostat[0] == mirostat[1] != plain


def test_what_a_call_says_of_caches_and_order_is_taken(client: openai.OpenAI) -> None:
    extra = {"cache_salt": "mine", "cache_prompt": False, "priority": 5, "n_keep": 1}
    assert said(ask(client, extra)) == said(ask(client))
