"""The official `anthropic` Python client against the whole path, streamed and whole."""

from __future__ import annotations

import json
from collections.abc import Iterator

import anthropic
import pytest
from anthropic.types import MessageParam, ToolParam

from tests.e2e.conftest import DEMO_ALIAS
from tests.support.stack import Stack

QUESTION: list[MessageParam] = [{"role": "user", "content": "Who are you?"}]
WEATHER: ToolParam = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


@pytest.fixture
def client(demo_stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo_stack.gateways[0].url, api_key=demo_stack.key, max_retries=0) as opened:
        yield opened


def test_whole(client: anthropic.Anthropic) -> None:
    message = client.messages.create(model=DEMO_ALIAS, max_tokens=60, messages=QUESTION, extra_body={"temperature": 0})
    [block] = message.content
    assert block.type == "text"
    assert "Paddock" in block.text
    assert message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 2


def test_the_stream_helper_collects_what_the_whole_answer_says(client: anthropic.Anthropic) -> None:
    extra = {"temperature": 0}
    whole = client.messages.create(model=DEMO_ALIAS, max_tokens=60, messages=QUESTION, extra_body=extra)
    with client.messages.stream(model=DEMO_ALIAS, max_tokens=60, messages=QUESTION, extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert final.content[0].type == "text"
    assert final.content[0].text == text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_async(demo_stack: Stack) -> None:
    url = demo_stack.gateways[0].url
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=demo_stack.key, max_retries=0) as client,
        client.messages.stream(model=DEMO_ALIAS, max_tokens=9, messages=QUESTION) as stream,
    ):
        kinds = [event.type async for event in stream]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"


def test_a_tool_loop(client: anthropic.Anthropic) -> None:
    messages: list[MessageParam] = [{"role": "user", "content": "What is the weather in Paris?"}]
    choice: anthropic.types.ToolChoiceToolParam = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(
        model=DEMO_ALIAS, max_tokens=80, messages=messages, tools=[WEATHER], tool_choice=choice
    ) as stream:
        asked = stream.get_final_message()
    [call] = [block for block in asked.content if block.type == "tool_use"]
    assert asked.stop_reason == "tool_use"
    assert (call.name, set(json.loads(json.dumps(call.input)))) == ("get_weather", {"city"})
    messages += [
        {"role": "assistant", "content": asked.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny, 20 degrees"}]},
    ]
    told = client.messages.create(model=DEMO_ALIAS, max_tokens=40, messages=messages, tools=[WEATHER])
    assert told.content


def test_the_tool_runner_sends_whole_conversations_where_it_learns_that_no_thread_is_kept(
    client: anthropic.Anthropic,
) -> None:
    asked: list[str] = []

    @anthropic.beta_tool
    def get_weather(city: str) -> str:
        """Current weather of a city"""
        asked.append(city)
        return "sunny, 21 degrees"

    runner = client.beta.messages.tool_runner(
        model=DEMO_ALIAS,
        max_tokens=80,
        tools=[get_weather],
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
        extra_body={"temperature": 0},
    )
    last = runner.until_done()
    assert asked == ["Paris"]
    assert last.stop_reason == "end_turn"
    assert last.content[0].type == "text"


def test_a_long_prompt_is_refused_in_the_words_that_claude_code_shortens_by(client: anthropic.Anthropic) -> None:
    long: list[MessageParam] = [{"role": "user", "content": "a" * 9000}]
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > \d+ maximum"):
        client.messages.create(model=DEMO_ALIAS, max_tokens=5, messages=long)


def test_an_answer_that_has_begun(client: anthropic.Anthropic) -> None:
    extra = {"temperature": 0}
    whole = client.messages.create(model=DEMO_ALIAS, max_tokens=60, messages=QUESTION, extra_body=extra).content[0]
    assert whole.type == "text"
    begun, rest = whole.text[: len(whole.text) // 2].rstrip(), whole.text[len(whole.text) // 2 :]
    messages: list[MessageParam] = [*QUESTION, {"role": "assistant", "content": begun}]
    more = client.messages.create(model=DEMO_ALIAS, max_tokens=60, messages=messages, extra_body=extra).content[0]
    assert more.type == "text"
    assert rest.split()[-1] in more.text
    assert not more.text.startswith(begun)


def test_a_stop_sequence(client: anthropic.Anthropic) -> None:
    message = client.messages.create(
        model=DEMO_ALIAS, max_tokens=60, messages=QUESTION, stop_sequences=["Paddock"], extra_body={"temperature": 0}
    )
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "Paddock")


def test_tokens_are_counted_as_the_answer_counts_them(client: anthropic.Anthropic) -> None:
    counted = client.messages.count_tokens(model=DEMO_ALIAS, messages=QUESTION, system="Be brief.").input_tokens
    message = client.messages.create(model=DEMO_ALIAS, max_tokens=1, messages=QUESTION, system="Be brief.")
    usage = message.usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_errors_are_anthropics(client: anthropic.Anthropic, demo_stack: Stack) -> None:
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(model="nobody", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
        client.messages.create(model=DEMO_ALIAS, max_tokens=-1, messages=QUESTION)
    stranger = anthropic.Anthropic(base_url=demo_stack.gateways[0].url, api_key="pk-unknown", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(model=DEMO_ALIAS, max_tokens=1, messages=QUESTION)
