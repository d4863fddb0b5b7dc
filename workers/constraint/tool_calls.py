"""The grammar of tool calls in the form of Hermes and Qwen (`workers.chat.tools.hermes`), as Lark."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from workers.chat.tools.hermes import CLOSE, OPEN
from workers.constraint.failures import Unusable, refused
from workers.constraint.guidance import schema_to_lark
from workers.constraint.schema import MAX_BYTES, enforceable
from workers.protocol.requests import Constraint, GenerateRequest, Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def constraint_of(request: GenerateRequest) -> Constraint | None:
    """What the whole request asks of the answer's form. Raises CallFailed.

    A forced call is one from the answer's first token. Where the model decides, its calls are constrained from their
    opening tag on, if a tool is strict. An answer that must follow a schema may be a call as well, if there are tools.
    """
    asked, tools = request.constraint, request.tools
    if request.forced_tools:
        if asked is not None:
            raise refused("an answer can't follow it and be a forced tool call too; leave one out", asked.param)
        chosen = [tool for tool in tools if tool.name in request.forced_tools]
        return Constraint("lark", _calls(chosen, "start"), param="tools")
    if asked is None:
        strict = any(tool.strict for tool in tools)
        return Constraint("lark", _calls(tools, "start"), (OPEN,), param="tools") if strict else None
    if tools:
        if asked.kind != "json_schema":
            raise refused("a grammar can't be combined with `tools`; leave one out", asked.param)
        try:
            answer = schema_to_lark(enforceable(json.loads(asked.text)), "answer")
        except (Unusable, ValueError, RecursionError) as error:
            raise refused(str(error), asked.param) from None
        return Constraint("lark", f"start: answer | calls\n{answer}{_calls(tools, 'calls')}", param=asked.param)
    return asked


def _calls(tools: Sequence[Tool], rule: str) -> str:
    """One call after the other; each names one of the tools and has arguments that follow its schema."""
    heads = "\n    | ".join(f"{_literal(tool.name)} arguments_{n}" for n, tool in enumerate(tools))
    return (
        f"{rule}: call (SPACE? call)*\n"
        f'call: "{OPEN}" SPACE? "{{" SPACE? "\\"name\\":" SPACE? body SPACE? "}}" SPACE? "{CLOSE}"\n'
        f"body: {heads}\n"
        'arguments: "," SPACE? "\\"arguments\\":" SPACE?\n'
        "SPACE: /[ \\n]{1,2}/\n"
        + "".join(
            f"arguments_{n}: arguments {rule}_{n}\n" + schema_to_lark(_arguments(tool, n), f"{rule}_{n}")
            for n, tool in enumerate(tools)
        )
    )


def _arguments(tool: Tool, number: int) -> Any:
    """The schema that the arguments are kept to. Raises CallFailed where a strict one can't be."""
    # An object of the properties that are named: models that may add others do.
    schema = {**ANY_OBJECT, "additionalProperties": False, **(tool.parameters or {})}
    try:
        if len(json.dumps(schema)) > MAX_BYTES:
            raise Unusable(f"the schema has more than {MAX_BYTES >> 10} KiB; send a smaller one")
        return enforceable(schema)
    except Unusable as error:
        if tool.strict:
            raise refused(str(error), f"tools.{number}.function.parameters") from None
        return ANY_OBJECT


def _literal(text: str) -> str:
    """A JSON string as a Lark string."""
    return json.dumps(json.dumps(text))
