"""Conversations of every kind, as bodies of a chat request, and the groups in which prompts are compared."""

from __future__ import annotations

from typing import Any

Body = dict[str, Any]


def _tool(name: str, description: str, **properties: str) -> Body:
    fields = {field: {"type": kind} for field, kind in properties.items()}
    parameters = {"type": "object", "properties": fields, "required": list(fields)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def _call(id_: str, name: str, arguments: str) -> Body:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(id_: str, name: str, content: str) -> Body:
    return {"role": "tool", "tool_call_id": id_, "name": name, "content": content}


TOOLS = [_tool("get_weather", "Look up the weather", city="string"), _tool("add", "Add numbers", a="integer")]
SYSTEM, USER = {"role": "system", "content": "Be brief, Sq."}, {"role": "user", "content": "Weather, Uq?"}
WEATHER, SUM = _call("q7a123456", "get_weather", '{"city": "Vq"}'), _call("q7b123456", "add", '{"a": 1}')
CALLED: Body = {"role": "assistant", "content": None, "tool_calls": [WEATHER]}
RESULT = _result("q7a123456", "get_weather", "Rq")
ANSWER, THANKS = {"role": "assistant", "content": "It is Aq."}, {"role": "user", "content": "Thanks, Nq."}
BEGUN, THOUGHT = {"role": "assistant", "content": "Once upon"}, {"reasoning_content": "Tq thought"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}


def _said(*messages: Body, tools: bool = False, **more: Any) -> Body:
    return {"messages": list(messages), **({"tools": TOOLS} if tools else {}), **more}


def _switched(body: Body) -> tuple[Body, Body]:
    """With thinking on, and off."""
    on, off = ({**body, "chat_template_kwargs": {"enable_thinking": value}} for value in (True, False))
    return on, off


PLAIN, OFFERED = _said(SYSTEM, USER), _said(SYSTEM, USER, tools=True)
TURNS = _said(SYSTEM, USER, {**ANSWER, **THOUGHT}, THANKS)
RESULTED = _said(SYSTEM, USER, CALLED, RESULT, tools=True)
PREFILLED = _said(SYSTEM, USER, BEGUN)

GROUPS: dict[str, tuple[Body, ...]] = {
    "turns": (_said(USER), PLAIN, _said(SYSTEM, USER, ANSWER, THANKS), TURNS),
    "developer": (_said({**SYSTEM, "role": "developer"}, USER),),
    "schema": ({**PLAIN, "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},),
    "thinking switched": (*_switched(PLAIN), *_switched(TURNS)),
    "effort": tuple({**PLAIN, "reasoning_effort": effort} for effort in ("none", "low", "high")),
    "tools": (OFFERED, _said(USER, tools=True), *_switched(OFFERED)),
    "calls": (
        RESULTED,
        *_switched(RESULTED),
        _said(SYSTEM, USER, CALLED, RESULT, ANSWER, THANKS, tools=True),
        _said(SYSTEM, USER, {**CALLED, **THOUGHT}, RESULT, tools=True),
    ),
    "two calls": (
        _said(
            *(SYSTEM, USER, {**CALLED, "tool_calls": [WEATHER, SUM]}, RESULT, _result("q7b123456", "add", "3")),
            tools=True,
        ),
    ),
    "words and a call": (_said(SYSTEM, USER, {**CALLED, "content": "Wq."}, RESULT, tools=True),),
    "prefill": (
        PREFILLED,
        _said(SYSTEM, USER, {**BEGUN, **THOUGHT}),
        _said(SYSTEM, USER, ANSWER, THANKS, BEGUN),
        {**PREFILLED, "continue_final_message": True, "add_generation_prompt": False},
    ),
    "prefill, thinking switched": (*_switched(PREFILLED), *_switched(_said(SYSTEM, USER, {**BEGUN, **THOUGHT}))),
    "prefill with tools": (_said(SYSTEM, USER, BEGUN, tools=True),),
    "prefill after a result": (_said(SYSTEM, USER, CALLED, RESULT, BEGUN, tools=True),),
    "prefill of a thought": (_said(SYSTEM, USER, {"role": "assistant", "content": "", **THOUGHT}),),
    "parts": (_said({"role": "user", "content": [{"type": "text", "text": text} for text in ("Weather,", "Uq?")]}),),
    "a finished answer": (
        _said(SYSTEM, USER, ANSWER, add_generation_prompt=False, continue_final_message=False),
        _said(SYSTEM, USER, ANSWER, add_generation_prompt=True),
    ),
}
