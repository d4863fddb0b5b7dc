"""The official `openai` Python client against the whole path, streamed and whole."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionTokenLogprob, ChatCompletionToolParam

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.stack import Stack

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


QUESTION = "Who are you?"


@pytest.fixture
def client(demo_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo_stack.gateways[0].url}/v1", api_key=demo_stack.key, max_retries=0) as opened:
        yield opened


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [DEMO_ALIAS]
    assert client.models.retrieve(DEMO_ALIAS).id == DEMO_ALIAS


def test_whole(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=DEMO_ALIAS, messages=[{"role": "user", "content": "Who are you?"}], temperature=0
    )
    assert "Paddock" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 5
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_text_is_the_whole_text(client: openai.OpenAI) -> None:
    question: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Who are you?"}]
    whole = client.chat.completions.create(model=DEMO_ALIAS, messages=question, temperature=0)
    stream = client.chat.completions.create(
        model=DEMO_ALIAS, messages=question, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert whole.system_fingerprint is not None
    assert whole.system_fingerprint.startswith("b0.")
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    # Which prompt tokens were cached may differ: the whole answer came first.
    counts = {"completion_tokens", "prompt_tokens", "total_tokens"}
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.model_dump(include=counts) == whole.usage.model_dump(include=counts)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert len(chunks) > 5


def test_same_seed_same_text(client: openai.OpenAI) -> None:
    def ask(seed: int) -> str | None:
        answer = client.chat.completions.create(
            model=DEMO_ALIAS,
            messages=[{"role": "user", "content": "Tell me a short story about a lamp."}],
            temperature=1.5,
            seed=seed,
        )
        return answer.choices[0].message.content

    assert ask(7) == ask(7)
    assert len({ask(seed) for seed in range(4)}) > 1


def test_stop_and_max_tokens(client: openai.OpenAI) -> None:
    question: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Who are you?"}]
    stopped = client.chat.completions.create(model=DEMO_ALIAS, messages=question, temperature=0, stop=["Paddock"])
    assert "Paddock" not in (stopped.choices[0].message.content or "")
    assert stopped.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(model=DEMO_ALIAS, messages=question, temperature=0, max_completion_tokens=3)
    assert short.choices[0].finish_reason == "length"
    assert short.usage is not None
    assert short.usage.completion_tokens == 3


def test_a_tool_call_and_its_result(client: openai.OpenAI) -> None:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris?"}
    ]
    first = client.chat.completions.create(model=DEMO_ALIAS, messages=messages, tools=[WEATHER], temperature=0)
    assert first.choices[0].finish_reason == "tool_calls"
    assert first.choices[0].message.tool_calls is not None
    call = first.choices[0].message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages.append(
        {
            "role": "assistant",
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": call.function.arguments},
                }
            ],
        }
    )
    messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny, 21 degrees"})
    second = client.chat.completions.create(model=DEMO_ALIAS, messages=messages, tools=[WEATHER], temperature=0)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content


def test_a_streamed_tool_call_is_the_whole_one(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=DEMO_ALIAS,
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        tools=[WEATHER],
        temperature=0,
        stream=True,
    )
    name, arguments, reason = "", "", None
    for chunk in stream:
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or []:
            assert delta.function is not None
            name += delta.function.name or ""
            arguments += delta.function.arguments or ""
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Paris"}, "tool_calls")


async def test_async_and_many_at_once(demo_stack: Stack) -> None:
    url = f"{demo_stack.gateways[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=demo_stack.key, max_retries=0) as client:
        stream = await client.chat.completions.create(
            model=DEMO_ALIAS, messages=[{"role": "user", "content": "Who are you?"}], stream=True, temperature=0
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert "Paddock" in text


def test_errors_are_the_clients_own(demo_stack: Stack, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match=DEMO_ALIAS):
        client.chat.completions.create(model="nobody", messages=[{"role": "user", "content": "x"}])
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens"):
        client.chat.completions.create(model=DEMO_ALIAS, messages=[{"role": "user", "content": "word " * 4000}])
    stranger = openai.OpenAI(base_url=f"{demo_stack.gateways[0].url}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


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


def test_how_likely_a_text_is(client: openai.OpenAI) -> None:
    """As programs ask that compare models by it: the prompt comes back with a probability for each token."""
    text = "Once upon a time there was a little girl named Lily."
    said = client.completions.create(model=DEMO_ALIAS, prompt=text, echo=True, logprobs=2, max_tokens=1, temperature=0)
    [choice] = said.choices
    assert said.usage is not None
    told = choice.logprobs
    assert told is not None
    assert told.tokens
    assert told.token_logprobs
    assert told.text_offset
    assert told.top_logprobs
    num_prompt = said.usage.prompt_tokens
    assert choice.text.startswith(text)
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == num_prompt + 1
    first: float | None = told.token_logprobs[0]
    assert first is None
    assert all(told.top_logprobs[at][told.tokens[at]] == told.token_logprobs[at] for at in range(1, num_prompt))
    starts = [text[at:] for at in told.text_offset[2:num_prompt]]
    assert all(rest.startswith(token) for rest, token in zip(starts, told.tokens[2:], strict=False))
    longer = client.completions.create(
        model=DEMO_ALIAS, prompt=text + " She was sad.", echo=True, logprobs=0, max_tokens=0
    )
    assert longer.choices[0].text == text + " She was sad."
    assert longer.choices[0].logprobs is not None
    again = (longer.choices[0].logprobs.token_logprobs or [])[1:num_prompt]
    assert again == pytest.approx(told.token_logprobs[1:num_prompt], abs=0.02), "by what comes before it alone"
    streamed: list[float] = []
    for chunk in client.completions.create(
        model=DEMO_ALIAS, prompt=text, echo=True, logprobs=2, max_tokens=1, temperature=0, stream=True
    ):
        for part in chunk.choices:
            streamed += (part.logprobs.token_logprobs or []) if part.logprobs else []
    assert streamed[1:] == pytest.approx(told.token_logprobs[1:], abs=0.02)
    with pytest.raises(openai.BadRequestError, match="the probabilities of 48 at most") as caught:
        client.completions.create(model=DEMO_ALIAS, prompt=["x " * 200] * 128, echo=True, logprobs=20, max_tokens=1)
    assert caught.value.param == "prompt"


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
    alone = {"mirostat": 2, "mirostat_tau": 9.0, "cache_prompt": False}
    # Further on, two tokens of its answer are about as likely, and which it is depends on what it is batched with.
    mirostat = [said(ask(client, alone, temperature=2, seed=5, max_tokens=12)) for _ in range(2)]
    assert mirostat[0] == mirostat[1]
    assert not plain.startswith(mirostat[0])


def test_what_a_call_says_of_caches_and_order_is_taken(client: openai.OpenAI) -> None:
    extra = {"cache_salt": "mine", "cache_prompt": False, "priority": 5, "n_keep": 1}
    assert said(ask(client, extra)) == said(ask(client))
