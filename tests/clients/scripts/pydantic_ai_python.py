"""What users of Pydantic AI do."""

from __future__ import annotations

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from steps import CHAT, KEY, PERSON, RESULT, URL, WEATHER, WHO, run


class Person(BaseModel):
    name: str
    age: int


def of(make):
    async def chat():
        await Agent(make(), instructions="Be brief.").run(WHO, model_settings={"temperature": 0.5, "max_tokens": 60})

    async def streamed():
        async with Agent(make()).run_stream(WHO) as answer:
            async for _ in answer.stream_text():
                pass

    async def tools():
        agent = Agent(make())

        @agent.tool_plain
        def get_weather(city: str) -> str:
            """Current weather of a city"""
            return RESULT

        await agent.run(WEATHER, model_settings={"temperature": 0})

    def parsed_as(form):
        async def parsed():
            await Agent(make(), output_type=form, retries=0).run(PERSON, model_settings={"temperature": 0})

        return parsed

    # Of a model of Anthropic's that it doesn't know, Pydantic AI says that it can't answer in a form by itself.
    return chat, streamed, tools, *map(parsed_as, (ToolOutput(Person), NativeOutput(Person), PromptedOutput(Person)))


run(
    *of(lambda: OpenAIChatModel(CHAT, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))),
    *of(lambda: OpenAIResponsesModel(CHAT, provider=OpenAIProvider(base_url=f"{URL}/v1", api_key=KEY))),
    *of(lambda: AnthropicModel(CHAT, provider=AnthropicProvider(base_url=URL, api_key=KEY))),
)
