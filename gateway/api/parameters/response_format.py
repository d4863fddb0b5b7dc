"""Reads the parameters that set an answer's form (schema, grammar, regex or choices) as one canonical `Constraint`:
OpenAI's `response_format`, llama-server's `grammar` and `json_schema`, vLLM's `guided_*` and `structured_outputs`. The
worker refuses a form that it can't enforce.

Sources: OpenAI's API reference, "Create chat completion"; tools/server/README.md and docs/llguidance.md of
llama.cpp; "Structured Outputs" of vLLM's documentation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Loose, quote
from gateway.errors import InvalidRequest
from gateway.telemetry.request_log import Ignored
from workers.protocol.requests import Constraint

MAX_CHOICES = 1024

Schema = dict[str, Any]


class JsonSchemaBody(Loose):
    name: str | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


class ResponseFormat(Loose):
    type: str
    json_schema: JsonSchemaBody | None = None
    schema_: Annotated[Schema | None, Field(alias="schema")] = None


def _schema_kind(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<object>"


SchemaOrText = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[Schema, Tag("<object>")],
    Discriminator(_schema_kind),
]
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class GrammarBody(Body):
    """Holds the parameters by which llama-server and vLLM set an answer's form."""

    grammar: str | None = None
    json_schema: Schema | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class ResponseFormatBody(GrammarBody):
    response_format: ResponseFormat | None = None


MAX_SCHEMA_DEPTH = 100

MAX_CHOICES_CHARS = 256 << 10
"""Maximum characters of all texts in a list of choices; more are refused. Workers refuse a grammar longer than this."""

LARK_MARK = "%llguidance"
"""The beginning of a `grammar` that is in Lark; any other grammar is in GBNF. As in llama.cpp."""

ANY_OBJECT: dict[str, Any] = {"type": "object"}


def read_constraint(body: ResponseFormatBody) -> Constraint | None:
    """Return the form that a body asks for. Raises InvalidRequest."""
    return one_constraint(_response_format(body.response_format), body)


def one_constraint(own: Constraint | None, body: GrammarBody) -> Constraint | None:
    """Return `own` (from the dialect's parameter) or the form in `body`, or None. Raises InvalidRequest for several."""
    forms = [form for form in (own, *_extensions(body)) if form is not None]
    if len(forms) > 1:
        first, second = forms[0].param, forms[1].param
        message = f"`{first}` and `{second}` both set the answer's form. Send one of them."
        raise InvalidRequest(message, param=second)
    return forms[0] if forms else None


def drop_beside_tools(form: Constraint | None, forced: Sequence[str], ignored: Ignored) -> Constraint | None:
    """Return the answer's form, or None if it is dropped because the answer must call one of the `forced` tools.

    A schema is dropped, and noted in `ignored`, since the tools' own schemas apply: the client library instructor sends
    both, and reads the tool call. A grammar is kept, and the worker refuses it."""
    if form is None or not forced or form.kind != "json_schema":
        return form
    ignored.note(form.param)
    return None


def to_json(value: Any) -> str:
    """Return a part of a decoded body as JSON. `json.dumps` takes ten times as long: 0.2 s for 8 MiB of numbers."""
    return msgspec.json.encode(value).decode()


def schema_json(schema: Any, path: str) -> str:
    """Return a schema as JSON. `path`: its name for messages. Raises InvalidRequest if it is nested too deeply."""
    if is_too_deep(schema):
        message = f"`{path}` is nested more than {MAX_SCHEMA_DEPTH} levels deep. Send a flatter schema."
        raise InvalidRequest(message, param=path)
    return to_json(schema)


def is_too_deep(schema: Any) -> bool:
    """Return whether a schema is nested more than MAX_SCHEMA_DEPTH levels deep; workers refuse such a schema."""
    try:
        text = msgspec.json.encode(schema)
    except RecursionError:
        return True
    if text.count(b"{") + text.count(b"[") <= MAX_SCHEMA_DEPTH:
        return False  # true of nearly all schemas; the walk below takes far longer
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        inner: list[Any] = []
        for outer in level:
            if isinstance(outer, dict):
                inner += outer.values()
            elif isinstance(outer, list):
                inner += outer
        if not inner:
            return False
        level = inner
    return True


def _response_format(form: ResponseFormat | None) -> Constraint | None:
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return schema_constraint(ANY_OBJECT if form.schema_ is None else form.schema_, "response_format")
    if form.type != "json_schema":
        message = f"`response_format.type` is {quote(form.type)}. Send `text`, `json_object` or `json_schema`."
        raise InvalidRequest(message, param="response_format.type")
    if form.json_schema is not None:
        schema = form.json_schema.schema_
        return schema_constraint(ANY_OBJECT if schema is None else schema, "response_format.json_schema.schema")
    if form.schema_ is None:
        message = "`response_format.json_schema` is missing. Send an object with a `name` and a `schema`."
        raise InvalidRequest(message, param="response_format.json_schema")
    return schema_constraint(form.schema_, "response_format.schema")


def _extensions(body: GrammarBody) -> list[Constraint | None]:
    forms = [_grammar(body.grammar, "grammar")]
    if body.json_schema is not None:
        forms.append(schema_constraint(body.json_schema, "json_schema"))
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    forms += _vllm("guided_", *guided)
    asked = body.structured_outputs
    if asked is not None:
        forms += _vllm("structured_outputs.", asked.json_, asked.regex, asked.choice, asked.grammar)
    return forms


def _vllm(
    prefix: str, schema: dict[str, Any] | str | None, regex: str | None, choices: list[str] | None, grammar: str | None
) -> list[Constraint | None]:
    forms = [_grammar(grammar, f"{prefix}grammar")]
    if isinstance(schema, str):
        forms.append(Constraint("json_schema", schema, param=f"{prefix}json"))
    elif schema is not None:
        forms.append(schema_constraint(schema, f"{prefix}json"))
    if regex is not None:
        forms.append(Constraint("regex", regex, param=f"{prefix}regex"))
    if choices is not None:
        forms.append(_choice(choices, f"{prefix}choice"))
    return forms


def _choice(choices: Sequence[str], path: str) -> Constraint:
    num_chars = sum(map(len, choices))
    if num_chars > MAX_CHOICES_CHARS:
        message = f"`{path}` has {num_chars} characters in all. Send at most {MAX_CHOICES_CHARS}."
        raise InvalidRequest(message, param=path)
    return Constraint("lark", "start: " + " | ".join(map(json.dumps, choices)), param=path)


def _grammar(text: str | None, path: str) -> Constraint | None:
    if not text:
        return None
    return Constraint("lark" if text.startswith(LARK_MARK) else "gbnf", text, param=path)


def schema_constraint(schema: Any, path: str) -> Constraint:
    """Return the form that a schema sets. Raises InvalidRequest if it is nested too deeply."""
    return Constraint("json_schema", schema_json(schema, path), param=path)
