"""What users of openai-agents do."""

from __future__ import annotations

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import CHAT, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def get_weather(city: str) -> str:
    """Current weather of a city"""
    return RESULT


def of(kind):
    client = AsyncOpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
    model = kind(model=CHAT, openai_client=client)

    async def chat():
        await Runner.run(Agent("A", instructions="Be brief.", model=model), WHO)

    async def tools():
        agent = Agent("A", model=model, tools=[get_weather], model_settings=ModelSettings(temperature=0))
        await Runner.run(agent, WEATHER, max_turns=3)

    async def streamed():
        settings = ModelSettings(include_usage=True, store=False, parallel_tool_calls=True, verbosity="low")
        agent = Agent("A", model=model, tools=[get_weather], model_settings=settings)
        async for _ in Runner.run_streamed(agent, WEATHER, max_turns=3).stream_events():
            pass

    async def parsed():
        await Runner.run(Agent("A", model=model, output_type=Person), PERSON)

    async def handed_off():
        other = Agent("Other", model=model, handoff_description="Knows the weather", tools=[get_weather])
        await Runner.run(Agent("A", model=model, handoffs=[other]), WEATHER, max_turns=4)

    async def as_a_tool():
        other = Agent("Other", model=model)
        tool = other.as_tool("ask_other", "Asks the other one")
        settings = ModelSettings(tool_choice="required", truncation="auto", metadata={"page": "1"})
        await Runner.run(Agent("A", model=model, tools=[tool], model_settings=settings), WHO, max_turns=3)

    return chat, tools, streamed, parsed, handed_off, as_a_tool


run(*of(OpenAIChatCompletionsModel), *of(OpenAIResponsesModel))
