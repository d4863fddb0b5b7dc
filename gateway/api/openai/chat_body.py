"""The body of `POST /v1/chat/completions` as pydantic models: types, limits and nothing else.

Source of names and types: OpenAI's API reference, "Create chat completion"; what it lacks is llama-server's
(tools/server/README.md of llama.cpp) or our own: `cache_salt`, `priority`, `special`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Loose, text_or_parts
from gateway.api.parameters.form_body import FormBody
from gateway.api.parameters.hints import MAX_TOKENS, HintsBody
from gateway.api.parameters.probs import ProbsBody
from gateway.api.parameters.repeats import MAX_ANSWERS
from gateway.api.parameters.sampling_body import SamplingBody
from gateway.api.parameters.stops import Stop

MAX_MESSAGES = 10_000
MAX_PARTS = 10_000
MAX_TOOLS = 128


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


class ChatBody(SamplingBody, ProbsBody, FormBody, HintsBody):
    model: str = ""
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES)]
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    stop: Stop | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: (
        Annotated[
            Annotated[str, Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
            Discriminator(_choice_kind),
        ]
        | None
    ) = None
