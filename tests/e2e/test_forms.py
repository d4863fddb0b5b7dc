"""Answers in a form that the caller asked for, through gateway and worker, by a small model that knows no better."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jsonschema
import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Stack

ALIAS = "paddock-demo"
OPEN = "open"
"""Served with objects that may have keys which their schema does not list."""

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
ORDER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "order",
        "parameters": {
            "type": "object",
            "properties": {"item": {"enum": ["tea", "coffee"]}, "count": {"type": "integer", "maximum": 9}},
            "required": ["item", "count"],
        },
    },
}
CRASHES = "\n".join(f"r{n} ::= r{n + 1} r{n + 1}" for n in range(40)) + '\nr40 ::= "a"?\nroot ::= r0'


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        running.worker(DEMO_MODEL, ALIAS, slots=4)
        running.worker(DEMO_MODEL, OPEN, slots=2, open_objects=True)
        running.gateway()
        yield running


@pytest.fixture
async def caller(stack: Stack) -> AsyncIterator[Caller]:
    async with calling(stack.gateways[0].url, stack.key, ALIAS) as one:
        yield one


async def whole(caller: Caller, **parameters: Any) -> dict[str, Any]:
    status, body = await caller.whole("Tell me about Jane.", **{"max_tokens": 200, **parameters})
    assert status == 200, body
    choice: dict[str, Any] = body["choices"][0]
    return choice


@pytest.mark.parametrize("seed", range(3))
async def test_a_schema_is_followed(caller: Caller, seed: int) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    choice = await whole(caller, response_format=form, temperature=1, seed=seed)
    jsonschema.validate(json.loads(choice["message"]["content"]), PERSON)
    assert choice["finish_reason"] == "stop"


async def test_a_streamed_answer_is_the_whole_one(caller: Caller) -> None:
    async with caller.stream("Tell me about Jane.", max_tokens=200, json_schema=PERSON, temperature=0) as stream:
        await stream.finish()
    choice = await whole(caller, json_schema=PERSON, temperature=0)
    assert stream.text == choice["message"]["content"]
    jsonschema.validate(json.loads(stream.text), PERSON)


async def test_other_languages(caller: Caller) -> None:
    assert (await whole(caller, guided_choice=["certainly", "never"]))["message"]["content"] in ("certainly", "never")
    assert (await whole(caller, guided_regex="[0-9]{3}-[a-f]{2}", temperature=1))["message"]["content"][3] == "-"
    assert (await whole(caller, grammar='root ::= ("ab" | "cd"){2} "!"'))["message"]["content"][4:] == "!"


async def test_a_forced_call(caller: Caller) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "order"}}):
        answer = await whole(caller, tools=[ORDER], tool_choice=choice, temperature=1)
        call = answer["message"]["tool_calls"][0]["function"]
        assert call["name"] == "order"
        jsonschema.validate(json.loads(call["arguments"]), ORDER["function"]["parameters"])
        assert answer["finish_reason"] == "tool_calls"


ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Tea, please."}],
        "tools": [ORDER],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}},
    },
    "/v1/responses": {
        "input": "Tea, please.",
        "tools": [{"type": "function", **ORDER["function"]}],
        "tool_choice": "required",
        "text": {"format": {"type": "json_schema", "name": "person", "schema": PERSON}},
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": "Tea, please."}],
        "tools": [{"name": "order", "input_schema": ORDER["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
    },
}
"""Of each dialect, what forces a call and sends a schema beside it, as instructor does."""

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Current weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
PARIS = "What is the weather in Paris?"
FREE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": PARIS}],
        "tools": [{"type": "function", "function": WEATHER}],
        "tool_choice": "auto",
    },
    "/v1/responses": {"input": PARIS, "tools": [{"type": "function", **WEATHER}], "tool_choice": "auto"},
    "/v1/messages": {
        "messages": [{"role": "user", "content": PARIS}],
        "tools": [{"name": WEATHER["name"], "input_schema": WEATHER["parameters"]}],
        "tool_choice": {"type": "auto"},
    },
}
"""Of each dialect, what lets the model choose, which then calls."""
LIMITS = {"length", "max_tokens", "max_output_tokens"}
"""Why an answer ended that was cut."""


@dataclass(frozen=True)
class Said:
    text: str
    calls: list[tuple[str, str]]
    """Names and arguments, the latter as JSON text."""
    reason: str


async def ask(
    caller: Caller, path: str, max_tokens: int, *, stream: bool, bodies: dict[str, dict[str, Any]] = ROUTES
) -> tuple[Said, str]:
    """What the answer says, and which parameters were ignored."""
    bound = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    asked = {"model": ALIAS, **bodies[path], bound: max_tokens, "temperature": 0, "stream": stream}
    async with caller.session.post(f"{caller.url}{path}", json=asked) as answer:
        raw = await answer.text()
        assert answer.status == 200, raw
        events = [json.loads(line[6:]) for line in raw.splitlines() if line.startswith("data: {")]
        said = READERS[path](events) if stream else WHOLE_READERS[path](json.loads(raw))
        return said, answer.headers.get("x-paddock-ignored", "")


def of_chat(body: dict[str, Any]) -> Said:
    [choice] = body["choices"]
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in choice["message"].get("tool_calls", ())]
    return Said(choice["message"]["content"] or "", calls, choice["finish_reason"])


def of_chat_events(events: list[dict[str, Any]]) -> Said:
    choices = [event["choices"][0] for event in events if event["choices"]]
    calls: list[tuple[str, str]] = []
    for delta in (one for choice in choices for one in choice["delta"].get("tool_calls", ())):
        if "id" in delta:
            calls.append((delta["function"]["name"], delta["function"]["arguments"]))
        else:
            calls[-1] = (calls[-1][0], calls[-1][1] + delta["function"]["arguments"])
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    return Said(text, calls, choices[-1]["finish_reason"])


def of_response(body: dict[str, Any]) -> Said:
    calls = [(item["name"], item["arguments"]) for item in body["output"] if item["type"] == "function_call"]
    texts = [part["text"] for item in body["output"] if item["type"] == "message" for part in item["content"]]
    return Said("".join(texts), calls, (body["incomplete_details"] or {}).get("reason", body["status"]))


def of_message(body: dict[str, Any]) -> Said:
    calls = [(one["name"], json.dumps(one["input"])) for one in body["content"] if one["type"] == "tool_use"]
    return Said("".join(one.get("text", "") for one in body["content"]), calls, body["stop_reason"])


def of_message_events(events: list[dict[str, Any]]) -> Said:
    text, calls, reason = "", list[tuple[str, str]](), ""
    for event in events:
        if event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
            calls.append((event["content_block"]["name"], ""))
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            calls[-1] = (calls[-1][0], calls[-1][1] + event["delta"]["partial_json"])
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
        elif event["type"] == "message_delta":
            reason = event["delta"]["stop_reason"]
    return Said(text, calls, reason)


WHOLE_READERS = {"/v1/chat/completions": of_chat, "/v1/responses": of_response, "/v1/messages": of_message}
READERS: dict[str, Callable[[list[dict[str, Any]]], Said]] = {
    "/v1/chat/completions": of_chat_events,
    "/v1/responses": lambda events: of_response(events[-1]["response"]),
    "/v1/messages": of_message_events,
}


async def test_objects_end_after_the_keys_that_are_listed(caller: Caller) -> None:
    """A schema as most people write it; where it may go on, a model that does not like to end goes on to its limit."""
    loose = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    schema = {"type": "object", "properties": {"one": loose, "two": loose}, "required": ["one", "two"]}
    asked: dict[str, Any] = {"json_schema": schema, "max_tokens": 100, "logit_bias": [["}", -30], ['"}', -30]]}
    for seed in range(3):
        choice = await whole(caller, **asked, temperature=1, seed=seed)
        told = json.loads(choice["message"]["content"])
        assert {key: set(value) for key, value in told.items()} == {"one": {"name"}, "two": {"name"}}
        assert choice["finish_reason"] == "stop"
    choice = await whole(caller, model=OPEN, **asked, temperature=1, seed=0)
    assert choice["finish_reason"] == "length", "the setting has the old way back"


async def test_unique_items(caller: Caller) -> None:
    tags = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "uniqueItems": True, "minItems": 2}
    for seed in range(4):
        told = json.loads((await whole(caller, json_schema=tags, temperature=2, seed=seed))["message"]["content"])
        jsonschema.validate(told, tags)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_forced_call_goes_before_a_schema_beside_it(caller: Caller, path: str) -> None:
    said, ignored = await ask(caller, path, 200, stream=False)
    [(name, arguments)] = said.calls[:1]
    assert (name, said.text) == ("order", "")
    jsonschema.validate(json.loads(arguments), ORDER["function"]["parameters"])
    assert "schema" in ignored, "the answer tells what it did not follow"
    status, body = await caller.whole("Tea, please.", tools=[ORDER], tool_choice="required", guided_regex="[0-9]+")
    assert (status, body["error"]["param"]) == (400, "guided_regex")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
async def test_a_call_that_the_token_limit_cuts_is_a_call(caller: Caller, path: str, stream: bool) -> None:
    """As far as it came, and nothing of it is text, whatever the number of tokens."""
    reasons = set()
    for max_tokens in (1, 2, 4, 6, 8, 10, 12, 14):
        said, _ = await ask(caller, path, max_tokens, stream=stream)
        assert (said.text, [name for name, _ in said.calls]) == ("", ["order"]), max_tokens
        reasons.add(said.reason)
    assert reasons <= LIMITS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", FREE)
async def test_a_call_of_the_models_own_choice_that_is_cut_leaks_no_mark(
    caller: Caller, path: str, stream: bool
) -> None:
    """The mark that begins a call, and what stands in the call, are never text, wherever the answer is cut."""
    whole, _ = await ask(caller, path, 100, stream=stream, bodies=FREE)
    assert [name for name, _ in whole.calls] == ["get_weather"]
    assert not any(mark in whole.text for mark in "<{")
    num_cut, names = 0, set[str]()
    for max_tokens in range(1, 100):
        said, _ = await ask(caller, path, max_tokens, stream=stream, bodies=FREE)
        assert whole.text.startswith(said.text), (max_tokens, said)
        if said.reason not in LIMITS:
            break
        num_cut += 1
        names |= {name for name, _ in said.calls}
    assert num_cut > 8
    assert names == {"get_weather"}


async def test_a_cut_answer_says_so(caller: Caller) -> None:
    choice = await whole(caller, json_schema=PERSON, max_tokens=3)
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"json_schema": {"not": {"type": "string"}}}, "json_schema", "`not`"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-around"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"grammar": CRASHES}, "grammar", "simpler"),
    ],
)
async def test_what_can_not_be_kept_costs_its_own_request_only(
    caller: Caller, parameters: dict[str, Any], param: str, words: str
) -> None:
    async with caller.stream("Count for me.", max_tokens=300, ignore_eos=True) as beside:
        status, body = await caller.whole("Tell me about Jane.", **parameters)
        await beside.finish()
    assert (status, body["error"]["param"]) == (400, param)
    assert words in body["error"]["message"]
    assert beside.done
    assert beside.error is None
