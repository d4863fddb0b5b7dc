"""What users of OpenAI's SDK do, in Python."""

from __future__ import annotations

import openai
from openai import OpenAI
from pydantic import BaseModel
from steps import CHAT, EMBEDDER, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

client = OpenAI(base_url=f"{URL}/v1", api_key=KEY, max_retries=0)
ask = client.chat.completions
ASKED = [{"role": "user", "content": WHO}]


class Person(BaseModel):
    name: str
    age: int


class GetWeather(BaseModel):
    """Current weather of a city"""

    city: str


TOOLS = [openai.pydantic_function_tool(GetWeather, name="get_weather")]
RESPONSES_TOOLS = [{"type": "function", "strict": True, **TOOLS[0]["function"]}]


def chat():
    messages = [{"role": "system", "content": "Be brief."}, *ASKED]
    ask.create(model=CHAT, messages=messages, temperature=0.7, top_p=0.9, max_tokens=60, user="anna")


def chat_streamed():
    list(ask.create(model=CHAT, messages=ASKED, stream=True, stream_options={"include_usage": True}))


def every_setting():
    ask.create(
        model=CHAT,
        messages=[{"role": "developer", "content": [{"type": "text", "text": "Be brief."}]}, *ASKED],
        max_completion_tokens=40,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={"50": -1},
        logprobs=True,
        top_logprobs=2,
        n=2,
        seed=7,
        stop=["\n\n"],
        safety_identifier="anna",
        prompt_cache_key="page",
    )


def settings_of_the_provider():
    ask.create(
        model=CHAT,
        messages=ASKED,
        store=True,
        metadata={"page": "1"},
        service_tier="auto",
        verbosity="low",
        reasoning_effort="low",
        parallel_tool_calls=False,
        modalities=["text"],
        prediction={"type": "content", "content": "I am Paddock."},
        tools=TOOLS,
    )


def tier_flex():
    ask.create(model=CHAT, messages=ASKED, service_tier="flex")


def tools():
    messages = [{"role": "user", "content": WEATHER}]
    answer = ask.parse(model=CHAT, messages=messages, tools=TOOLS, temperature=0).choices[0].message
    messages.append(answer)
    messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in answer.tool_calls]
    ask.create(model=CHAT, messages=messages, tools=TOOLS, temperature=0)


def tools_streamed():
    with ask.stream(model=CHAT, messages=[{"role": "user", "content": WEATHER}], tools=TOOLS, temperature=0) as stream:
        stream.until_done()


def one_tool():
    choice = {"type": "function", "function": {"name": "get_weather"}}
    ask.create(model=CHAT, messages=[{"role": "user", "content": WEATHER}], tools=TOOLS, tool_choice=choice)


def a_tool_of_any_name():
    ask.create(model=CHAT, messages=[{"role": "user", "content": WEATHER}], tools=TOOLS, tool_choice="required")


def functions():
    function = [TOOLS[0]["function"]]
    ask.create(model=CHAT, messages=[{"role": "user", "content": WEATHER}], functions=function, function_call="auto")


def parsed():
    ask.parse(model=CHAT, messages=[{"role": "user", "content": PERSON}], response_format=Person)


def parsed_streamed():
    with ask.stream(model=CHAT, messages=[{"role": "user", "content": PERSON}], response_format=Person) as stream:
        stream.until_done()


def any_json():
    form = {"type": "json_object"}
    ask.create(model=CHAT, messages=[{"role": "user", "content": PERSON}], response_format=form, temperature=0)


def completions():
    client.completions.create(model=CHAT, prompt="In a small town", max_tokens=16, logprobs=1, echo=True, best_of=1)
    list(client.completions.create(model=CHAT, prompt=["In a small town"], max_tokens=16, stream=True))


def vectors():
    client.embeddings.create(model=EMBEDDER, input=["a fox", "a lamp"])
    client.embeddings.create(model=EMBEDDER, input="a fox", encoding_format="float")
    client.embeddings.create(model=EMBEDDER, input=[[300, 301]], dimensions=16, user="anna")


def models():
    client.models.list()
    client.models.retrieve(CHAT)


def responses():
    first = client.responses.create(model=CHAT, input=WHO, instructions="Be brief.", max_output_tokens=40)
    client.responses.create(model=CHAT, input="What is 4 + 5?", previous_response_id=first.id)
    client.responses.retrieve(first.id)
    client.responses.input_items.list(first.id)
    client.responses.delete(first.id)


def responses_streamed():
    with client.responses.stream(model=CHAT, input=[{"role": "user", "content": WHO}]) as stream:
        stream.until_done()


def responses_settings():
    client.responses.create(
        model=CHAT,
        input=WHO,
        reasoning={"effort": "low", "summary": "auto"},
        text={"verbosity": "low"},
        truncation="auto",
        store=False,
        service_tier="auto",
        include=["reasoning.encrypted_content"],
        metadata={"page": "1"},
        temperature=0.5,
        top_p=0.9,
        max_tool_calls=3,
        prompt_cache_key="page",
        safety_identifier="anna",
    )


def responses_tools():
    items = [{"role": "user", "content": WEATHER}]
    answer = client.responses.create(model=CHAT, input=items, tools=RESPONSES_TOOLS, temperature=0)
    items += answer.output
    items += [
        {"type": "function_call_output", "call_id": item.call_id, "output": RESULT}
        for item in answer.output
        if item.type == "function_call"
    ]
    client.responses.create(model=CHAT, input=items, tools=RESPONSES_TOOLS, temperature=0)


def responses_parsed():
    client.responses.parse(model=CHAT, input=PERSON, text_format=Person)


def responses_counted():
    client.responses.input_tokens.count(model=CHAT, input=WHO)


run(
    chat,
    chat_streamed,
    every_setting,
    settings_of_the_provider,
    tier_flex,
    tools,
    tools_streamed,
    one_tool,
    a_tool_of_any_name,
    functions,
    parsed,
    parsed_streamed,
    any_json,
    completions,
    vectors,
    models,
    responses,
    responses_streamed,
    responses_settings,
    responses_tools,
    responses_parsed,
    responses_counted,
)
