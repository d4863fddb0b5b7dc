"""What users of litellm do, by the names that it has for servers of this kind."""

from __future__ import annotations

import litellm
from pydantic import BaseModel
from steps import CHAT, EMBEDDER, KEY, PERSON, RESULT, URL, WEATHER, WHO, run

litellm.telemetry = False
OWN = {"api_base": f"{URL}/v1", "api_key": KEY, "num_retries": 0, "max_retries": 0}
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": WHO}]
TOOL = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS = [{"type": "function", "function": TOOL}]
TOO_LONG = [{"role": "user", "content": "word " * 20_000}]


class Person(BaseModel):
    name: str
    age: int


def chat():
    litellm.completion(f"openai/{CHAT}", ASKED, temperature=0.5, max_tokens=40, **OWN)


def chat_streamed():
    list(litellm.completion(f"openai/{CHAT}", ASKED, stream=True, stream_options={"include_usage": True}, **OWN))


def of_other_servers():
    litellm.completion(f"hosted_vllm/{CHAT}", ASKED, reasoning_effort="low", **OWN)
    litellm.completion(f"litellm_proxy/{CHAT}", ASKED, max_completion_tokens=40, **OWN)
    litellm.completion(f"llamafile/{CHAT}", ASKED, **OWN)
    litellm.completion(f"lm_studio/{CHAT}", ASKED, **OWN)


def settings():
    litellm.completion(
        f"openai/{CHAT}",
        ASKED,
        user="anna",
        metadata={"page": "1"},
        seed=3,
        stop=["\n\n"],
        n=1,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.1,
        logit_bias={"50": -1},
        service_tier="auto",
        store=True,
        allowed_openai_params=["service_tier", "store"],
        extra_body={"top_k": 20, "repetition_penalty": 1.1, "chat_template_kwargs": {"enable_thinking": False}},
        **OWN,
    )


def tools():
    messages = [{"role": "user", "content": WEATHER}]
    answer = litellm.completion(f"openai/{CHAT}", messages, tools=TOOLS, tool_choice="auto", temperature=0, **OWN)
    message = answer.choices[0].message
    messages.append(message.model_dump())
    messages += [{"role": "tool", "tool_call_id": call.id, "content": RESULT} for call in message.tool_calls]
    litellm.completion(f"openai/{CHAT}", messages, tools=TOOLS, temperature=0, **OWN)
    list(litellm.completion(f"openai/{CHAT}", messages[:1], tools=TOOLS, stream=True, **OWN))


def parsed():
    asked = [{"role": "user", "content": PERSON}]
    litellm.completion(f"openai/{CHAT}", asked, response_format=Person, **OWN)
    litellm.completion(f"openai/{CHAT}", asked, response_format={"type": "json_object"}, **OWN)


def completions():
    litellm.text_completion(model=f"text-completion-openai/{CHAT}", prompt="In a small town", max_tokens=16, **OWN)


def vectors():
    litellm.embedding(f"openai/{EMBEDDER}", ["a fox", "a lamp"], **OWN)
    litellm.embedding(f"hosted_vllm/{EMBEDDER}", ["a fox"], **OWN)


def responses():
    litellm.responses(input=WHO, model=f"openai/{CHAT}", max_output_tokens=40, **OWN)
    list(litellm.responses(input=WHO, model=f"openai/{CHAT}", stream=True, **OWN))


def anthropic():
    own = {"api_base": URL, "api_key": KEY, "max_tokens": 60, "max_retries": 0}
    litellm.completion(f"anthropic/{CHAT}", ASKED, **own)
    list(litellm.completion(f"anthropic/{CHAT}", ASKED, stream=True, **own))
    litellm.completion(f"anthropic/{CHAT}", [{"role": "user", "content": WEATHER}], tools=TOOLS, **own)


def too_long():
    expect_too_long(f"openai/{CHAT}", **OWN)
    expect_too_long(f"anthropic/{CHAT}", api_base=URL, api_key=KEY, max_tokens=60, max_retries=0)


def expect_too_long(model, **settings):
    try:
        litellm.completion(model, TOO_LONG, **settings)
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError(f"{model}: a prompt that is too long was answered")


run(
    chat, chat_streamed, of_other_servers, settings, tools, parsed, completions, vectors, responses, anthropic, too_long
)
