"""The body of `POST /v1/chat/completions` as pydantic models: types, limits and nothing else.

Source of names and types: OpenAI's API reference, "Create chat completion"; what it lacks is llama-server's
(tools/server/README.md of llama.cpp) or our own: `cache_salt`, `priority`, `special`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.openai.body_base import Body, Loose, text_or_parts
from gateway.api.openai.sampling_body import SamplingBody

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_CHOICES = 1024
MAX_STOP_CHARS = 512
MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100


def _choice_kind(value: Any) -> str:
    return "<named>" if isinstance(value, dict) else "<word>"


class Part(Loose):
    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("<parts>")],
    Discriminator(text_or_parts),
]


class FunctionCall(Loose):
    name: str
    arguments: str


class ToolCallBody(Loose):
    id: str
    type: str = "function"
    function: FunctionCall | None = None


class MessageBody(Loose):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class FunctionBody(Body):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolBody(Loose):
    type: str
    function: FunctionBody | None = None


class NamedFunction(Loose):
    name: str


class NamedChoice(Loose):
    type: str
    function: NamedFunction | None = None


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


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
Choices = Annotated[list[str], Field(min_length=1, max_length=MAX_CHOICES)]


class StructuredOutputs(Body):
    """vLLM's."""

    json_: Annotated[SchemaOrText | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None


class ChatBody(SamplingBody):
    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=MAX_STOPS), Tag("<parts>")],
            Discriminator(text_or_parts),
        ]
        | None
    ) = None
    ignore_eos: bool = False
    special: bool = False
    cache_prompt: bool = True
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    context_shift: bool = False
    n_keep: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = 0
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[str, Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
    grammar: str | None = None
    json_schema: Schema | None = None
    guided_json: SchemaOrText | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
