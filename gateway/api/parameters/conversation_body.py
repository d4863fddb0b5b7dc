"""Messages and tools in OpenAI's shape as pydantic models: types, limits and nothing else.

Source: OpenAI's API reference, "Create chat completion", with its older `functions` and `function_call`;
`reasoning_content` is DeepSeek's and llama-server's, `reasoning` vLLM's.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Entry, Loose, text_or_parts

MAX_MESSAGES = 10_000
MAX_PARTS = 4_000
"""Most parts of one message, which are checked in one go."""
MAX_TOOLS = 128


class Part(Loose):
    type: str
    text: str | None = None
    refusal: str | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


class FunctionCallBody(Loose):
    name: str
    arguments: str


class ToolCallBody(Loose):
    id: str
    type: str = "function"
    function: FunctionCallBody | None = None


class MessageBody(Entry):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    function_call: FunctionCallBody | None = None
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


class NamedTool(Loose):
    type: str
    function: NamedFunction | None = None


class AllowedTools(Loose):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class NamedChoice(NamedTool):
    allowed_tools: AllowedTools | None = None


def _choice_kind(value: Any) -> str:
    return "<named>" if isinstance(value, dict) else "<word>"


ToolChoice = Annotated[
    Annotated[str, Tag("<word>")] | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(_choice_kind),
]
FunctionChoice = Annotated[
    Annotated[str, Tag("<word>")] | Annotated[NamedFunction, Tag("<named>")],
    Discriminator(_choice_kind),
]


class ConversationBody(Body):
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: Annotated[list[FunctionBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    function_call: FunctionChoice | None = None
