"""The form of an answer as pydantic models: types and nothing else. `gateway.api.parameters.form` reads them."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Loose

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
    """The parameters of llama-server and vLLM."""

    grammar: str | None = None
    json_schema: Schema | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class FormBody(GrammarBody):
    response_format: ResponseFormat | None = None
