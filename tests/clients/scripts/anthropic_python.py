"""What users of Anthropic's SDK do, in Python."""

from __future__ import annotations

from anthropic import Anthropic, beta_tool
from pydantic import BaseModel
from steps import CHAT, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

client = Anthropic(base_url=URL, api_key=KEY, max_retries=0)
ASKED = [{"role": "user", "content": WHO}]
TOOL = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED_WEATHER = [{"role": "user", "content": WEATHER}]


class Person(BaseModel):
    name: str
    age: int


@beta_tool
def get_weather(city: str) -> str:
    """Current weather of a city"""
    return RESULT


def message():
    client.messages.create(model=CHAT, max_tokens=60, messages=ASKED, system="Be brief.", stop_sequences=["\n\n"])


def message_streamed():
    with client.messages.stream(model=CHAT, max_tokens=60, messages=ASKED) as stream:
        stream.until_done()
    list(client.messages.create(model=CHAT, max_tokens=60, messages=ASKED, stream=True))


def every_setting():
    client.messages.create(
        model=CHAT,
        max_tokens=60,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": WHO, "cache_control": {"type": "ephemeral"}}]},
            {"role": "assistant", "content": "I am"},
        ],
        metadata={"user_id": "anna"},
        service_tier="auto",
        extra_body={"temperature": 0.5, "top_p": 0.9, "top_k": 20},
    )


def thinking():
    budget = {"type": "enabled", "budget_tokens": 1024}
    client.messages.create(model=CHAT, max_tokens=2048, messages=ASKED, thinking=budget)
    client.messages.create(model=CHAT, max_tokens=200, messages=ASKED, thinking={"type": "disabled"})
    effort = {"effort": "low"}
    client.messages.create(
        model=CHAT, max_tokens=200, messages=ASKED, thinking={"type": "adaptive"}, output_config=effort
    )


def tools():
    first = client.messages.create(model=CHAT, max_tokens=80, messages=ASKED_WEATHER, tools=[TOOL])
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": RESULT}]}
        for block in first.content
        if block.type == "tool_use"
    ]
    if not results:
        return
    messages = [*ASKED_WEATHER, {"role": "assistant", "content": first.content}, {"role": "user", "content": results}]
    client.messages.create(model=CHAT, max_tokens=80, messages=messages, tools=[TOOL])


def tools_streamed():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    with client.messages.stream(
        model=CHAT, max_tokens=80, messages=ASKED_WEATHER, tools=[TOOL], tool_choice=choice
    ) as stream:
        stream.until_done()


def one_tool():
    choice = {"type": "tool", "name": "get_weather"}
    client.messages.create(model=CHAT, max_tokens=80, messages=ASKED_WEATHER, tools=[TOOL], tool_choice=choice)


def tools_that_are_run():
    runner = client.beta.messages.tool_runner(
        model=CHAT, max_tokens=80, messages=ASKED_WEATHER, tools=[get_weather], max_iterations=3
    )
    runner.until_done()


def parsed():
    asked = [{"role": "user", "content": PERSON}]
    client.messages.parse(model=CHAT, max_tokens=80, messages=asked, output_format=Person)


def counted():
    client.messages.count_tokens(model=CHAT, messages=ASKED, system="Be brief.", tools=[TOOL])


def models():
    client.models.list(limit=10)
    client.models.retrieve(CHAT)


run(
    message,
    message_streamed,
    every_setting,
    thinking,
    tools,
    tools_streamed,
    one_tool,
    tools_that_are_run,
    parsed,
    counted,
    models,
)
