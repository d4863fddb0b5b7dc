"""The body of `POST /v1/chat/completions` as pydantic models: types, limits and nothing else.

Source of names and types: OpenAI's API reference, "Create chat completion"; the sampling parameters that it lacks are
llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 512
MAX_TOKENS = 2**31 - 1

TAG = "<"
"""First character of a union's tags, which are no part of a parameter's path."""


def _content_kind(value: Any) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def _choice_kind(value: Any) -> str:
    return "<named>" if isinstance(value, dict) else "<word>"


class Body(BaseModel):
    """Values are taken as they are: "1" is no number, 1 is no boolean. Unknown names are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class Loose(BaseModel):
    """Unknown names are ignored: clients send back what other servers once added to a message."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Part(Loose):
    type: str
    text: str | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS), Tag("<parts>")],
    Discriminator(_content_kind),
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


class ResponseFormat(Loose):
    type: str


class ChatBody(Body):
    model: Annotated[str, Field(min_length=1)]
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1, le=2**31 - 1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    seed: Annotated[int, Field(ge=-1, le=2**32 - 1)] | None = None
    stop: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=MAX_STOPS), Tag("<parts>")],
            Discriminator(_content_kind),
        ]
        | None
    ) = None
    ignore_eos: bool = False
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[str, Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
    response_format: ResponseFormat | None = None
