"""The official `openai` client's own helpers against every kind of model: streams, parsed answers, tools, vectors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any, Literal

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

from tests.e2e.conftest import DEMO_ALIAS, EMBEDDER, INFILLER, RERANKER
from tests.support.stack import Stack

QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Who are you?"}]
WEATHER = "What is the weather in Paris?"


class Verdict(BaseModel):
    """A form that any model can fill in."""

    mood: Literal["glad", "sad"]
    grade: Literal[1, 2, 3]


class GetWeather(BaseModel):
    """Current weather of a city"""

    city: str


def weather_tool() -> Any:
    return openai.pydantic_function_tool(GetWeather, name="get_weather", description="Current weather of a city")


@pytest.fixture
def client(kinds_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{kinds_stack.gateways[0].url}/v1", api_key=kinds_stack.key, max_retries=0) as opened:
        yield opened


@pytest.fixture
async def aclient(kinds_stack: Stack) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"{kinds_stack.gateways[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key=kinds_stack.key, max_retries=0) as opened:
        yield opened


def test_the_stream_helper(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    with client.chat.completions.stream(
        model=DEMO_ALIAS, messages=QUESTION, temperature=0, logprobs=True, top_logprobs=1, stream_options=options
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    deltas = "".join(event.delta for event in events if event.type == "content.delta")
    [done] = [event for event in events if event.type == "content.done"]
    assert deltas == done.content == final.choices[0].message.content
    assert "Paddock" in deltas
    assert final.choices[0].finish_reason == "stop"
    assert final.usage is not None
    assert final.choices[0].logprobs is not None
    assert len(final.choices[0].logprobs.content or ()) == final.usage.completion_tokens - 1


async def test_the_stream_helper_async(aclient: openai.AsyncOpenAI) -> None:
    async with aclient.chat.completions.stream(model=DEMO_ALIAS, messages=QUESTION, temperature=0, n=2) as stream:
        final = await stream.get_final_completion()
    assert len(final.choices) == 2
    assert all("Paddock" in (choice.message.content or "") for choice in final.choices)


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    completion = client.chat.completions.parse(model=DEMO_ALIAS, messages=QUESTION, response_format=Verdict)
    parsed = completion.choices[0].message.parsed
    assert isinstance(parsed, Verdict)
    assert json.loads(completion.choices[0].message.content or "") == parsed.model_dump()


async def test_a_parsed_stream(aclient: openai.AsyncOpenAI) -> None:
    async with aclient.chat.completions.stream(
        model=DEMO_ALIAS, messages=QUESTION, response_format=Verdict, temperature=0
    ) as stream:
        final = await stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Verdict)


def test_a_loop_of_tool_calls(client: openai.OpenAI) -> None:
    """Ask, run what the model calls, ask again, until it answers: with arguments parsed by the client."""
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    called = []
    for _ in range(3):
        answer = client.chat.completions.parse(
            model=DEMO_ALIAS, messages=messages, tools=[weather_tool()], temperature=0
        )
        message = answer.choices[0].message
        messages.append(message.to_dict())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            assert isinstance(call.function.parsed_arguments, GetWeather)
            called.append(call.function.parsed_arguments.city)
            result = [{"type": "text", "text": "sunny, "}, {"type": "text", "text": "21 degrees"}]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert called == ["Paris"]
    assert message.content


def test_a_streamed_tool_call_through_the_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=DEMO_ALIAS, messages=[{"role": "user", "content": WEATHER}], tools=[weather_tool()], temperature=0
    ) as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [json.loads(event.arguments) for event in done] == [{"city": "Paris"}]
    assert final.choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
def test_functions_in_the_older_form(client: openai.OpenAI, stream: bool) -> None:
    functions: Any = [weather_tool()["function"]]
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    answer: Any = client.chat.completions.create(
        model=DEMO_ALIAS, messages=messages, functions=functions, temperature=0, stream=stream
    )
    if stream:
        chunks = [chunk.choices[0] for chunk in answer]
        calls = [chunk.delta.function_call for chunk in chunks if chunk.delta.function_call]
        name = "".join(call.name or "" for call in calls)
        arguments = "".join(call.arguments or "" for call in calls)
        reason = chunks[-1].finish_reason
    else:
        call = answer.choices[0].message.function_call
        name, arguments, reason = call.name, call.arguments, answer.choices[0].finish_reason
    assert (name, json.loads(arguments), reason) == ("get_weather", {"city": "Paris"}, "function_call")
    messages.append({"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}})
    messages.append({"role": "function", "name": name, "content": "sunny, 21 degrees"})
    again = client.chat.completions.create(model=DEMO_ALIAS, messages=messages, functions=functions, temperature=0)
    assert again.choices[0].message.content
    assert again.choices[0].finish_reason == "stop"


def test_further_answers_read_the_prompt_once(client: openai.OpenAI) -> None:
    """Eight answers to one long prompt on one worker: its tokens are computed once, whoever comes first."""
    story = "The lamp of the harbour keeper told a story about boats. " * 8
    answer = client.chat.completions.create(
        model=DEMO_ALIAS, messages=[{"role": "user", "content": story}], n=8, seed=1, max_tokens=4
    )
    timings = [choice.model_dump()["timings"] for choice in answer.choices]
    assert answer.usage is not None
    computed = sum(one["prompt_n"] for one in timings)
    assert all(one["prompt_n"] + one["cache_n"] == answer.usage.prompt_tokens for one in timings)
    # Each reads its last token itself; a shared prefix may end on a block's border.
    assert computed < answer.usage.prompt_tokens + 8 * 16
    assert sum(one["cache_n"] > answer.usage.prompt_tokens / 2 for one in timings) == 7


def test_completions(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", "The harbour"]
    whole = client.completions.create(model=DEMO_ALIAS, prompt=prompts, max_tokens=12, temperature=0, logprobs=2, n=2)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert whole.choices[0].text == whole.choices[1].text, "greedy"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == sum(
        len(choice.logprobs.tokens or ()) for choice in whole.choices if choice.logprobs
    )
    for choice in whole.choices:
        told = choice.logprobs
        assert told is not None
        assert "".join(told.tokens or ()) == choice.text
        assert told.text_offset == [len("".join((told.tokens or [])[:n])) for n in range(len(told.tokens or ()))]
        assert all(logprob is not None and logprob <= 0 for logprob in told.token_logprobs or ())
        assert all(len(top) >= 2 for top in told.top_logprobs or ())
    streamed = ["", ""]
    for chunk in client.completions.create(model=DEMO_ALIAS, prompt=prompts, max_tokens=12, temperature=0, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == [whole.choices[0].text, whole.choices[2].text]
    echoed = client.completions.create(model=DEMO_ALIAS, prompt=prompts[0], max_tokens=12, temperature=0, echo=True)
    assert echoed.choices[0].text == prompts[0] + whole.choices[0].text


def test_tokens_are_continued_as_their_text_is(client: openai.OpenAI) -> None:
    text = client.completions.create(
        model=DEMO_ALIAS, prompt="The harbour", max_tokens=8, temperature=0, extra_body={"return_tokens": True}
    )
    tokens = text.choices[0].model_dump()["tokens"]
    echoed = client.completions.create(model=DEMO_ALIAS, prompt=tokens, max_tokens=1, temperature=0, echo=True)
    assert echoed.choices[0].text.removeprefix(text.choices[0].text) != echoed.choices[0].text


def test_what_stands_between(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=INFILLER, prompt="Once upon", suffix="the end", max_tokens=8)
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 8
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle"):
        client.completions.create(model=DEMO_ALIAS, prompt="Once upon", suffix="the end")


def test_embeddings(client: openai.OpenAI) -> None:
    """The client asks for base64 unless it is told otherwise."""
    texts = ["A short text", "another one"]
    packed = client.embeddings.create(model=EMBEDDER, input=texts)
    plain = client.embeddings.create(model=EMBEDDER, input=texts, encoding_format="float")
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
        assert sum(number**2 for number in one.embedding) == pytest.approx(1, abs=1e-4)
    short = client.embeddings.create(model=EMBEDDER, input=texts[0], dimensions=4)
    assert len(short.data[0].embedding) == 4
    tokens = client.embeddings.create(model=EMBEDDER, input=[[300, 301], [302]])
    assert tokens.usage.prompt_tokens == 3
    with pytest.raises(openai.InternalServerError, match="can't make embeddings"):
        client.embeddings.create(model=DEMO_ALIAS, input="x")


def test_reranking(client: openai.OpenAI) -> None:
    body = {"model": RERANKER, "query": "a field", "documents": ["a paddock", {"text": "the stock market"}, "a horse"]}
    ranked: Any = client.post("/rerank", body=body | {"return_documents": True}, cast_to=object)
    scores = [one["relevance_score"] for one in ranked["results"]]
    assert scores == sorted(scores, reverse=True)
    assert {one["index"] for one in ranked["results"]} == {0, 1, 2}
    top: Any = client.post("/rerank", body=body | {"top_n": 1}, cast_to=object)
    assert top["results"][0]["index"] == ranked["results"][0]["index"]


def test_errors_of_every_endpoint_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"\d+ tokens"):
        client.completions.create(model=DEMO_ALIAS, prompt="word " * 4000)
    with pytest.raises(openai.BadRequestError, match="`best_of`"):
        client.completions.create(model=DEMO_ALIAS, prompt="x", best_of=3)
    picture: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    with pytest.raises(openai.InternalServerError, match="reads text only") as caught:
        client.chat.completions.create(model=DEMO_ALIAS, messages=[{"role": "user", "content": picture}])
    assert caught.value.status_code == 501
