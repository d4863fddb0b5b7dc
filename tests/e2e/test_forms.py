"""Answers in a form that the caller asked for, through gateway and worker, by a small model that knows no better."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import jsonschema
import pytest

from tests.support.caller import Caller, calling
from tests.support.stack import DEMO_MODEL, Stack

ALIAS = "paddock-demo"

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
ORDER = {
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
        jsonschema.validate(json.loads(call["arguments"]), ORDER["function"]["parameters"])  # type: ignore[index]
        assert answer["finish_reason"] == "tool_calls"


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
