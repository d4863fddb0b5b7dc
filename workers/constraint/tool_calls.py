"""Writes the grammar of tool calls in Lark, in the form of the model's family: with JSON arguments, or with each
parameter as plain text between its own marks.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from workers.chat.tools.family import CallSyntax
from workers.chat.tools.typed_text import kinds_of
from workers.constraint.guidance import schema_to_lark
from workers.constraint.languages.input_grammar import input_rules
from workers.constraint.languages.regex_rules import NotTranslatable
from workers.constraint.languages.schema import ANNOTATIONS, MAX_BYTES, enforceable, parse
from workers.constraint.languages.schema_rules import Comparisons
from workers.constraint.mask import Unusable, refused
from workers.protocol.requests import Constraint, GenerateRequest, Tool

logger = logging.getLogger(__name__)

PLAIN_OBJECT = frozenset({"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema"})
"""Keywords of a tool's schema that can be enforced in calls that are not JSON, with marks around each parameter."""
PLAIN_TEXT = frozenset({"type", "enum", "const"})
"""Keywords that can be enforced for a parameter whose value is plain text."""


MAX_READ_BYTES = 1 << 20
"""Maximum product of the number of a tool's parameters and the bytes of its schema's definitions. All definitions are
read for each parameter: 1,000 parameters with tens of thousands of definitions would take minutes. Beyond the maximum,
a tool with `strict` is refused; the JSON parameters of a tool without `strict` are not constrained."""


@dataclass(frozen=True, slots=True)
class Parameter:
    name: str
    required: bool
    is_text: bool
    """Whether the value is written as plain text, and not as JSON."""
    values: tuple[str, ...]
    """Allowed values; empty: any text."""
    schema: Any
    """Schema of the value if it is JSON."""


def parameters_of(tool: Tool, *, closes: bool = False, comparisons: Comparisons | None = None) -> Iterator[Parameter]:
    """Yield a tool's parameters in the schema's order. Raises Unusable if a strict tool's schema can't be enforced.

    `closes`, `comparisons`: see `enforceable`."""
    comparisons = comparisons or Comparisons()
    root = tool.schema()
    properties, required = root.get("properties"), root.get("required")
    if tool.strict:
        _check(root, PLAIN_OBJECT)
    definitions: dict[str, Any] = {key: root[key] for key in ("$defs", "definitions") if key in root}
    named: dict[str, Any] = properties if isinstance(properties, dict) else {}
    needed = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    too_much = bool(definitions) and len(msgspec.json.encode(definitions)) * len(named) > MAX_READ_BYTES
    if too_much and tool.strict:
        size = f"{MAX_READ_BYTES >> 10} KiB"
        raise Unusable(f"the schema's definitions, times its parameters, are more than {size}; send smaller ones")
    for name, schema in named.items():
        if too_much and kinds_of(schema) != {"string"}:
            yield Parameter(name, name in needed, False, (), True)
        else:
            yield _parameter(name, schema, definitions, tool, name in needed, closes, comparisons)


def _parameter(
    name: str,
    schema: Any,
    definitions: dict[str, Any],
    tool: Tool,
    required: bool,
    closes: bool,
    comparisons: Comparisons,
) -> Parameter:
    if kinds_of(schema) == {"string"}:
        values = [schema["const"]] if "const" in schema else schema.get("enum", ())
        if tool.strict:
            _check(schema, PLAIN_TEXT)
        told = tuple(value for value in values if isinstance(value, str)) if isinstance(values, list | tuple) else ()
        return Parameter(name, required, True, told, None)
    try:
        whole = {**schema, **definitions} if isinstance(schema, dict) else schema
        return Parameter(name, required, False, (), enforceable(whole, closes=closes, comparisons=comparisons))
    except Unusable:
        if tool.strict:
            raise
        return Parameter(name, required, False, (), True)


def _check(schema: dict[str, Any], kept: frozenset[str]) -> None:
    """Raise Unusable for a keyword that can't be enforced in calls that are not JSON: not in `kept`, no annotation."""
    for key in schema:
        if key not in kept and key not in ANNOTATIONS:
            raise Unusable(f"the keyword `{key}` can't be enforced in this model's form of calls; leave it out")


ANY_OBJECT: dict[str, Any] = {"type": "object"}
INPUT = "input"
"""Name of a custom tool's one parameter."""
INPUT_OBJECT: dict[str, Any] = {"type": "object", "required": [INPUT], "additionalProperties": False}
MAX_INPUT_REGEX_BYTES = 16 << 10
MAX_TOOLS_BYTES = 1 << 20
"""Maximum bytes, as JSON, of all tools' schemas for one answer; more are refused. While Python reads schemas, no other
thread runs."""
MAX_INPUTS_CHARS = 128 << 10
"""Maximum characters of all custom tools' grammars for one answer; each is translated in some tenths of a second."""
SPACE = "SPACE: /[ \\n]{1,2}/\n"


class CallForms:
    """Makes the constraints of requests, for models that write calls in the form of `syntax`. Immutable."""

    def __init__(
        self, syntax: CallSyntax, controls: Mapping[int, bytes] | None = None, *, open_objects: bool = False
    ) -> None:
        """`controls`: the model's control tokens that the syntax names, with their texts. `open_objects`: whether
        objects may have keys that their schema does not list, where the schema says nothing about such keys."""
        self._syntax = syntax
        self._closes = not open_objects
        self.controls = controls or {}
        self._tokens = {text.decode(): token for token, text in self.controls.items()}
        self._marks = re.compile("|".join(map(re.escape, self._tokens)) or r"(?!)")

    def enforced(self, schema: str) -> Any:
        """Parse `schema`, a JSON text. Return the schema that is enforced in its place. Raises Unusable."""
        return enforceable(parse(schema), closes=self._closes)

    def constraint_of(self, request: GenerateRequest) -> Constraint | None:
        """Return the constraint on the answer, from the request's form and tools together, if any. Raises CallFailed.

        A forced call is constrained from the answer's first token. If the model decides whether to call, its calls are
        constrained from their beginning on, provided that a tool is strict. An answer that must follow a schema may
        also be a call if there are tools."""
        asked, tools, single = request.constraint, request.tools, not request.parallel_tool_calls
        if request.forced_tools:
            if asked is not None:
                raise refused("an answer can't follow it and be a forced tool call too; leave one out", asked.param)
            chosen = [tool for tool in tools if tool.name in request.forced_tools]
            return Constraint("lark", self._calls(chosen, "start", single), param="tools")
        if asked is not None:
            return self._answer(asked, tools, single)
        if not any(tool.strict for tool in tools):
            return None
        if not self._syntax.triggers:
            message = "this model's calls can't be kept to `strict`; leave it out, or set `tool_choice` to required"
            raise refused(message, "tools")
        return Constraint("lark", self._calls(tools, "start", single), self._syntax.triggers, param="tools")

    def _answer(self, asked: Constraint, tools: Sequence[Tool], single: bool) -> Constraint:
        if asked.kind != "json_schema":
            if tools:
                raise refused("a grammar can't be combined with `tools`; leave one out", asked.param)
            return asked
        if not tools and not self._syntax.answer:
            return asked
        try:
            answer = schema_to_lark(self.enforced(asked.text), "answer")
        except Unusable as error:
            raise refused(str(error), asked.param) from None
        start = f"start: {self._lead()} {self._text(self._syntax.answer)} answer"
        calls = self._calls(tools, "calls", single) if tools else SPACE
        return Constraint("lark", f"{start}{' | calls' if tools else ''}\n{answer}{calls}", param=asked.param)

    def _lead(self) -> str:
        return f"({self._text(self._syntax.lead)})?" if self._syntax.lead else ""

    def _calls(self, tools: Sequence[Tool], rule: str, single: bool) -> str:
        """Return the Lark rules of one or more calls. Each call names one of `tools`, and its arguments follow that
        tool's schema. `rule`: the first rule's name. `single`: at most one call.

        Raises CallFailed if the schemas are larger than one request may have."""
        if sum(len((tool.parameters or "").encode()) for tool in tools) > MAX_TOOLS_BYTES:
            message = f"their schemas have more than {MAX_TOOLS_BYTES >> 20} MiB together; send fewer tools"
            raise refused(message, "tools")
        if sum(len(tool.grammar.text) for tool in tools if tool.grammar is not None) > MAX_INPUTS_CHARS:
            message = (
                f"their grammars have more than {MAX_INPUTS_CHARS:,} characters together; send fewer or shorter ones"
            )
            raise refused(message, "tools")
        syntax, comparisons = self._syntax, Comparisons()
        more = "" if single else f" ({self._text(syntax.between)} call)*"
        alternatives = "\n    | ".join(
            f"{self._text(syntax.before)} {_literal(_name(tool, syntax))} {self._text(syntax.middle)} {rule}_{number}"
            for number, tool in enumerate(tools)
        )
        return (
            f"{rule}: {self._lead()} {self._text(syntax.open)} call{more} {self._text(syntax.close)}\n"
            f"call: heads {self._text(syntax.after)}\n"
            f"heads: {alternatives}\n{SPACE}"
            + "".join(
                self._arguments(tool, number, f"{rule}_{number}", comparisons) for number, tool in enumerate(tools)
            )
        )

    def _arguments(self, tool: Tool, number: int, rule: str, comparisons: Comparisons) -> str:
        """Return the rule of one tool's arguments. Raises CallFailed if a strict tool's schema can't be enforced."""
        try:
            if self._syntax.parameter is not None:
                return self._parameters(tool, rule, self._syntax.parameter, comparisons)
            if tool.grammar is not None:
                return _input(tool.grammar, rule)
            return schema_to_lark(_object_of(tool, closes=self._closes, comparisons=comparisons), rule)
        except Unusable as error:
            if tool.grammar is not None:
                raise refused(str(error), f"tools.{number}") from None
            raise refused(str(error), f"tools.{number}.function.parameters") from None

    def _parameters(
        self, tool: Tool, rule: str, marks: tuple[str, tuple[str, ...], str], comparisons: Comparisons
    ) -> str:
        """Return the Lark rules of a tool's parameters; a call must have them in the schema's order."""
        before, named, end = marks
        parts, rules = [], []
        for number, one in enumerate(parameters_of(tool, closes=self._closes, comparisons=comparisons)):
            name = f"{rule}_{number}"
            parts.append(f"({name} SPACE?)" if one.required else f"({name} SPACE?)?")
            head = f"{self._text(before)} {_literal(one.name)} {self._text(named[0 if one.is_text else -1])}"
            if one.values:
                rules.append(f"{name}: {head} ({' | '.join(map(_literal, one.values))}) {_literal(end)}\n")
            elif one.is_text:
                rules.append(f"{name}: {head} {name}_value\n{name}_value[suffix={_literal(end)}]: /(?s:.*)/\n")
            else:
                rules.append(f"{name}: {head} {name}_value {_literal(end)}\n")
                rules.append(schema_to_lark(one.schema, f"{name}_value"))
        return f"{rule}: {' '.join(parts) or chr(34) * 2}\n{''.join(rules)}"

    def _text(self, text: str) -> str:
        """Return Lark for `text`, a part of the syntax. A control token in it may come as a token or spelled out."""
        parts = []
        for word in re.split("( {1,2})", text):
            if word in (" ", "  "):
                parts.append("SPACE?" if word == " " else _literal(" "))
                continue
            position = 0
            for found in self._marks.finditer(word):
                parts.append(_literal(word[position : found.start()]))
                parts.append(f"({_literal(found.group())} | <[{self._tokens[found.group()]}]>)")
                position = found.end()
            parts.append(_literal(word[position:]))
        return " ".join(part for part in parts if part)


def _name(tool: Tool, syntax: CallSyntax) -> str:
    """Return a tool's name as a call has it: escaped as JSON if the syntax puts it between quotes."""
    return json.dumps(tool.name)[1:-1] if syntax.before.endswith('"') else tool.name


def _object_of(tool: Tool, *, closes: bool, comparisons: Comparisons) -> Any:
    """Return the schema to enforce for a tool's arguments. Raises Unusable if a strict tool's schema can't be."""
    # By default only the named properties are allowed: models that may add others do so.
    schema = {**ANY_OBJECT, "additionalProperties": False, **tool.schema()}
    try:
        if len(msgspec.json.encode(schema)) > MAX_BYTES:
            raise Unusable(f"the schema has more than {MAX_BYTES >> 10} KiB; send a smaller one")
        return enforceable(schema, closes=closes, comparisons=comparisons)
    except Unusable:
        if tool.strict:
            raise
        return ANY_OBJECT


def _input(grammar: Constraint, rule: str) -> str:
    """Return the Lark rules of a custom tool's arguments: an object whose one member is a text of the grammar.

    A grammar that can't be translated leaves the text free. Raises Unusable for one that is wrong or too large."""
    if grammar.kind == "regex":
        if len(grammar.text.encode()) > MAX_INPUT_REGEX_BYTES:
            raise Unusable(f"the expression has more than {MAX_INPUT_REGEX_BYTES >> 10} KiB; send a shorter one")
        whole = grammar.text.removeprefix("^").removesuffix("$") if grammar.text[-2:] != "\\$" else grammar.text
        text: dict[str, Any] = {"type": "string", "pattern": f"^(?:{whole})$"}
        return schema_to_lark(enforceable({**INPUT_OBJECT, "properties": {INPUT: text}}), rule)
    try:
        rules = input_rules(grammar.text, f"{rule}_input")
    except NotTranslatable:  # it is the caller's text, which does not belong into the log
        logger.info("the grammar of a custom tool's input has no translation here, and is not enforced")
        return schema_to_lark({**INPUT_OBJECT, "properties": {INPUT: {"type": "string"}}}, rule)
    name, quote = _literal(f'"{INPUT}"'), _literal('"')
    object_ = f'"{{" SPACE? {name} SPACE? ":" SPACE? {quote} {rule}_input {quote} SPACE? "}}"'
    return f"{rule}: {object_}\n{rules}"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
