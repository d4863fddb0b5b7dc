from __future__ import annotations

import json
import time
from typing import Any

import pytest

from gateway.api.openai.requests import read_chat
from gateway.api.parameters.response_format import GrammarBody, one_constraint, schema_constraint
from gateway.errors import InvalidRequest
from workers.protocol.requests import Constraint, GenerateRequest

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}, "required": ["b"]}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))
ADD = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}
SUB = {"type": "function", "function": {"name": "sub", "parameters": None}}


def read(**parameters: Any) -> GenerateRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **parameters}
    return read_chat(json.dumps(body).encode()).requests[0]


@pytest.mark.parametrize(
    ("parameters", "constraint"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Constraint("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            Constraint("json_schema", TEXT),
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Constraint("json_schema", TEXT, param="response_format.json_schema.schema"),
        ),
        (
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            Constraint("json_schema", TEXT, param="response_format.schema"),
        ),
        ({"json_schema": SCHEMA}, Constraint("json_schema", TEXT, param="json_schema")),
        ({"grammar": 'root ::= "a"'}, Constraint("gbnf", 'root ::= "a"', param="grammar")),
        ({"grammar": ""}, None),
        (
            {"grammar": '%llguidance {}\nstart: "a"'},
            Constraint("lark", '%llguidance {}\nstart: "a"', param="grammar"),
        ),
        ({"guided_json": SCHEMA}, Constraint("json_schema", TEXT, param="guided_json")),
        ({"guided_json": TEXT}, Constraint("json_schema", TEXT, param="guided_json")),
        ({"guided_regex": "[a-z]+"}, Constraint("regex", "[a-z]+", param="guided_regex")),
        ({"guided_choice": ["a", 'say "b"']}, Constraint("lark", r'start: "a" | "say \"b\""', param="guided_choice")),
        ({"structured_outputs": {"regex": "a"}}, Constraint("regex", "a", param="structured_outputs.regex")),
        ({"structured_outputs": {"json": SCHEMA}}, Constraint("json_schema", TEXT, param="structured_outputs.json")),
    ],
)
def test_every_way_to_ask_for_a_form(parameters: dict[str, Any], constraint: Constraint | None) -> None:
    assert read(**parameters).constraint == constraint


@pytest.mark.parametrize(
    ("parameters", "param", "words"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type", "`json_schema`"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}}, None, "an object"),
        ({"grammar": "root ::= x", "json_schema": SCHEMA}, "json_schema", "one of them"),
        ({"guided_choice": []}, "guided_choice", "at least 1"),
        ({"format": "json"}, "format", "`response_format`"),
        ({"tool_choice": "required"}, "tool_choice", "no `tools`"),
        ({"tool_choice": "maybe", "tools": [ADD]}, "tool_choice", "`required`"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "mul"}}, "tools": [ADD]},
            "tool_choice",
            "none of `tools`",
        ),
    ],
)
def test_what_can_not_be_read_is_named(parameters: dict[str, Any], param: str | None, words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**parameters)
    assert words in caught.value.message
    if param is not None:
        assert caught.value.param == param


@pytest.mark.serial
def test_a_schema_of_many_numbers_is_written_quickly() -> None:
    """Half a million of them held the interpreter for a quarter of a second."""
    schema = {"enum": [n + 0.123456789012 for n in range(50_000)]}
    began = time.process_time()
    text = json.dumps(schema)
    dumped = time.process_time()
    assert json.loads(schema_constraint(schema, "json_schema").text) == json.loads(text)
    read = time.process_time()
    json.loads(text)
    json.loads(text)
    assert 2 * (read - dumped - (time.process_time() - read)) < dumped - began


def test_a_schema_that_is_too_deep() -> None:
    schema: dict[str, Any] = {}
    for _ in range(60):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequest, match="100 levels"):
        read(json_schema=schema)


def test_forced_calls() -> None:
    tools = [ADD, SUB]
    assert read(tools=tools).forced_tools == ()
    assert read(tools=tools, tool_choice="auto").forced_tools == ()
    assert read(tools=tools, tool_choice="required").forced_tools == ("add", "sub")
    named = {"type": "function", "function": {"name": "sub"}}
    asked = read(tools=tools, tool_choice=named)
    assert asked.forced_tools == ("sub",)
    assert [tool.name for tool in asked.tools] == ["add", "sub"]


def test_strict_tools() -> None:
    function = {"name": "add", "parameters": SCHEMA, "strict": True}
    assert read(tools=[{"type": "function", "function": function}]).tools[0].strict
    assert not read(tools=[ADD]).tools[0].strict


@pytest.mark.serial
@pytest.mark.parametrize("choices", [["x" * (8 << 20)], ["x" * 1024] * 257])
def test_choices_are_bounded_before_they_are_written(choices: list[str]) -> None:
    body = GrammarBody(guided_choice=choices)
    began = time.process_time()
    with pytest.raises(InvalidRequest, match=r"in all\. Send at most 262144") as raised:
        one_constraint(None, body)
    assert raised.value.param == "guided_choice"
    assert time.process_time() - began < 0.01
    assert one_constraint(None, GrammarBody(guided_choice=["x" * 256] * 1024)) is not None
