"""The grammar of tool calls in the form of the model's family, as Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from workers.chat.tools.family import CallSyntax
from workers.constraint.failures import Unusable, refused
from workers.constraint.guidance import schema_to_lark
from workers.constraint.schema import MAX_BYTES, enforceable
from workers.protocol.requests import Constraint, GenerateRequest, Tool

ANY_OBJECT: dict[str, Any] = {"type": "object"}


class CallForms:
    """What requests ask of an answer's form, for models that write calls in one `syntax`. Immutable."""

    def __init__(self, syntax: CallSyntax, controls: Mapping[int, bytes] | None = None) -> None:
        """`controls`: control tokens of the model's that the syntax names, with their texts."""
        self._syntax = syntax
        self.controls = controls or {}
        self._tokens = {text.decode(): token for token, text in self.controls.items()}
        self._marks = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")

    def constraint_of(self, request: GenerateRequest) -> Constraint | None:
        """What the whole request asks of the answer's form. Raises CallFailed.

        A forced call is one from the answer's first token. Where the model decides, its calls are constrained from
        where they begin on, if a tool is strict. An answer that must follow a schema may be a call as well, if there
        are tools.
        """
        asked, tools, single = request.constraint, request.tools, not request.parallel_tool_calls
        if request.forced_tools:
            if asked is not None:
                raise refused("an answer can't follow it and be a forced tool call too; leave one out", asked.param)
            chosen = [tool for tool in tools if tool.name in request.forced_tools]
            return Constraint("lark", self._calls(chosen, "start", single), param="tools")
        if asked is None:
            if not any(tool.strict for tool in tools):
                return None
            if not self._syntax.triggers:
                raise refused("this model's calls can't be kept to a schema unless one is required", "tools")
            return Constraint("lark", self._calls(tools, "start", single), self._syntax.triggers, param="tools")
        if not tools:
            return asked
        if asked.kind != "json_schema":
            raise refused("a grammar can't be combined with `tools`; leave one out", asked.param)
        try:
            answer = schema_to_lark(enforceable(json.loads(asked.text)), "answer")
        except (Unusable, ValueError, RecursionError) as error:
            raise refused(str(error), asked.param) from None
        calls = self._calls(tools, "calls", single)
        return Constraint("lark", f"start: answer | calls\n{answer}{calls}", param=asked.param)

    def _calls(self, tools: Sequence[Tool], rule: str, single: bool) -> str:
        """One call after the other; each names one of the tools and has arguments that follow its schema."""
        syntax = self._syntax
        more = "" if single else f" ({self._text(syntax.between)} call)*"
        alternatives = "\n    | ".join(
            f"{self._text(syntax.before)} {_literal(_name(tool, syntax))} {self._text(syntax.middle)} {rule}_{number}"
            for number, tool in enumerate(tools)
        )
        return (
            f"{rule}: {self._text(syntax.open)} call{more} {self._text(syntax.close)}\n"
            f"call: heads {self._text(syntax.after)}\n"
            f"heads: {alternatives}\n"
            "SPACE: /[ \\n]{1,2}/\n"
            + "".join(schema_to_lark(_arguments(tool, n), f"{rule}_{n}") for n, tool in enumerate(tools))
        )

    def _text(self, text: str) -> str:
        """As Lark: a space is whitespace that may be left out, a control token may be one or be spelled."""
        parts = []
        for number, word in enumerate(text.split(" ")):
            parts += ["SPACE?"] if number else []
            position = 0
            for found in self._marks.finditer(word):
                parts.append(_literal(word[position : found.start()]))
                parts.append(f"({_literal(found.group())} | <[{self._tokens[found.group()]}]>)")
                position = found.end()
            parts.append(_literal(word[position:]))
        return " ".join(part for part in parts if part)


def _name(tool: Tool, syntax: CallSyntax) -> str:
    """As it stands in a call; inside of quotes it is JSON."""
    return json.dumps(tool.name)[1:-1] if syntax.before.endswith('"') else tool.name


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
    return json.dumps(text, ensure_ascii=False) if text else ""
