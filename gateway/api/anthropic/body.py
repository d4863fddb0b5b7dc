"""Holds the bodies of Anthropic's messages as pydantic models, and tables of ignored and refused parameters.

Source of names and types: Anthropic's API reference, "Create a Message". Other parameters are llama-server's
(tools/server/README.md of llama.cpp) or our own.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Body, Entry, Loose, text_or_parts
from gateway.api.parameters.options import MAX_STOPS, MAX_TOKENS, HintsBody, LoraBody
from gateway.api.parameters.sampling import SamplingBody
from gateway.api.parameters.thinking import TemplateKwargs, ThinkingSwitch
from gateway.api.parameters.unsupported import OTHERS_IGNORED, OTHERS_REFUSED, Refusal
from workers.protocol.requests import MAX_BUDGET_MESSAGE_CHARS

MAX_MESSAGES = 10_000
MAX_BLOCKS = 4_000
MAX_TOOLS = 128


class Block(Loose):
    """A content block of any type; which of the fields are read depends on `type`."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None
    source: Any = None
    is_error: bool | None = None


Content = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[Block], Field(max_length=MAX_BLOCKS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


class MessageBody(Entry):
    role: Literal["user", "assistant", "system"]
    content: Content


class ToolBody(Loose):
    type: str | None = None
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoiceBody(Loose):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class FormatBody(Loose):
    type: str
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class OutputConfigBody(Loose):
    effort: str | None = None
    format: FormatBody | None = None


class PromptBody(Body):
    """Holds the fields that the prompt depends on. It is also the body of `count_tokens`."""

    model: str = ""
    messages: Annotated[list[MessageBody], Field(max_length=MAX_MESSAGES, fail_fast=True)]
    system: Content | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingSwitch | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    output_config: OutputConfigBody | None = None
    output_format: FormatBody | None = None
    reasoning_budget_message: Annotated[str, Field(max_length=MAX_BUDGET_MESSAGE_CHARS)] = ""


class MessagesBody(PromptBody, SamplingBody, HintsBody, LoraBody):
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)]
    stream: bool = False
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None


_LABEL = "a label for the provider's own bookkeeping; its `user_id` counts if the key may name end users (docs/keys.md)"
_CACHE = "the prompt cache finds what it knows by itself"

IGNORED = {
    **OTHERS_IGNORED,
    "cache_control": _CACHE,
    "inference_geo": "the models run where the workers are",
    "metadata": _LABEL,
}
"""Parameters that are accepted and have no effect on the answer, and why."""

_CLEAR_THOUGHTS = "clear_thinking_20251015"

THOUGHTS_ONLY: tuple[dict[str, Any], ...] = (
    {"edits": []},
    {"edits": [{"type": _CLEAR_THOUGHTS, "keep": "all"}]},
    {"edits": [{"type": _CLEAR_THOUGHTS, "keep": {"type": "thinking_turns", "value": 1}}]},
)
"""Accepted values of `context_management`, sent by Claude Code. The model's template decides which thoughts stay."""

THREAD = "thread"
"""Parameter with which Anthropic's SDK (its tool runner) asks the server to keep the conversation; it is refused."""

REFUSED = {
    **OTHERS_REFUSED,
    "container": Refusal("Paddock runs no code; leave it out."),
    "context_management": Refusal("The client shortens its conversations; leave it out.", THOUGHTS_ONLY),
    "mcp_servers": Refusal("Paddock calls no servers for the model; offer their tools in `tools`.", ([],)),
    "service_tier": Refusal("There is one tier.", ("auto", "standard_only"), is_hint=True),
    "speed": Refusal("There is one speed.", ("standard",), is_hint=True),
    THREAD: Refusal("Paddock keeps no messages; send the whole conversation without it."),
}
