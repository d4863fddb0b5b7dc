"""What users of LangChain do, in Python."""

from __future__ import annotations

import openai
from langchain.agents import create_agent
from langchain_anthropic import ChatAnthropic
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel
from steps import CHAT, EMBEDDER, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

OWN = {"base_url": f"{URL}/v1", "api_key": KEY, "max_retries": 0}
model = ChatOpenAI(model=CHAT, **OWN)
claude = ChatAnthropic(model=CHAT, base_url=URL, api_key=KEY, max_retries=0, max_tokens=200)


class Person(BaseModel):
    """A person"""

    name: str
    age: int


@tool
def get_weather(city: str) -> str:
    """Current weather of a city"""
    return RESULT


def chat():
    model.invoke([SystemMessage("Be brief."), HumanMessage(WHO)])


def chat_streamed():
    list(model.stream(WHO))


def settings():
    known = ChatOpenAI(
        model=CHAT,
        temperature=0.2,
        max_tokens=40,
        top_p=0.9,
        seed=3,
        stop=["\n\n"],
        presence_penalty=0.1,
        reasoning_effort="low",
        verbosity="low",
        service_tier="auto",
        store=True,
        metadata={"page": "1"},
        logprobs=True,
        n=1,
        **OWN,
    )
    known.invoke(WHO)


def batch():
    model.batch([WHO, "What is 4 + 5?"])


def tools():
    asked = [HumanMessage(WEATHER)]
    bound = model.bind_tools([get_weather])
    answer = bound.invoke(asked)
    asked.append(answer)
    asked += [get_weather.invoke(call) for call in answer.tool_calls]
    bound.invoke(asked)


def one_tool():
    model.bind_tools([get_weather], tool_choice="get_weather").invoke(WEATHER)


def a_tool_of_any_name():
    list(model.bind_tools([get_weather], tool_choice="any", strict=True).stream(WEATHER))


def parsed():
    for method in ("json_schema", "function_calling", "json_mode"):
        model.with_structured_output(Person, method=method).invoke(PERSON)


def parsed_beside_tools():
    model.bind_tools([get_weather], response_format=Person, strict=True).invoke(PERSON)


def agent():
    create_agent(model, [get_weather], system_prompt="Be brief.").invoke({"messages": [HumanMessage(WEATHER)]})


def agent_with_a_form():
    agent = create_agent(model, [get_weather], response_format=Person)
    agent.invoke({"messages": [HumanMessage(PERSON)]}, {"recursion_limit": 6})


def responses():
    spoken = ChatOpenAI(model=CHAT, use_responses_api=True, **OWN)
    spoken.invoke(WHO)
    list(spoken.stream(WHO))
    spoken.bind_tools([get_weather]).invoke(WEATHER)
    spoken.with_structured_output(Person).invoke(PERSON)


def vectors():
    embedder = OpenAIEmbeddings(model=EMBEDDER, check_embedding_ctx_length=False, **OWN)
    embedder.embed_query("a fox")
    embedder.embed_documents(["a fox", "a lamp"])


def completions():
    OpenAI(model=CHAT, max_tokens=16, **OWN).invoke("In a small town")
    list(OpenAI(model=CHAT, max_tokens=16, **OWN).stream("In a small town"))


def anthropic():
    claude.invoke([SystemMessage("Be brief."), HumanMessage(WHO)])
    list(claude.stream(WHO))
    claude.bind_tools([get_weather]).invoke(WEATHER)
    claude.with_structured_output(Person).invoke(PERSON)


def too_long():
    for asked in (model, ChatOpenAI(model=CHAT, use_responses_api=True, **OWN), claude):
        try:
            asked.invoke("word " * 20_000)
        except ContextOverflowError:
            continue
        except openai.BadRequestError as error:
            # LangChain looks for the code in the error's text, which openai 3.40 and later leave it out of.
            if error.code != "context_length_exceeded":
                raise
            continue
        raise AssertionError(f"{type(asked).__name__}: a prompt that is too long was answered")


run(
    chat,
    chat_streamed,
    settings,
    batch,
    tools,
    one_tool,
    a_tool_of_any_name,
    parsed,
    parsed_beside_tools,
    agent,
    agent_with_a_form,
    responses,
    vectors,
    completions,
    anthropic,
    too_long,
)
