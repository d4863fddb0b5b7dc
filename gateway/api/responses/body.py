"""Declares the body of `POST /v1/responses`: types and limits as pydantic models, and parameters ignored or refused.

Source of names and types: OpenAI's API reference, "Create a model response". Sampling parameters, grammars and
hints beyond that reference are those of llama-server, vLLM and Paddock, as in chat completions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag
from pydantic_core import PydanticKnownError

from gateway.api.parameters.base import Also, Body, Entry, Loose, text_or_parts
from gateway.api.parameters.custom_tools import CustomFormat
from gateway.api.parameters.messages import MAX_PARTS, Content, Part
from gateway.api.parameters.options import (
    LENGTHS,
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    HintsBody,
    LoraBody,
    ProgressBody,
    Stop,
)
from gateway.api.parameters.response_format import GrammarBody
from gateway.api.parameters.sampling import SamplingBody
from gateway.api.parameters.thinking import ThinkingBody
from gateway.api.parameters.unsupported import OTHERS_IGNORED, OTHERS_REFUSED, Refusal

MAX_ITEMS = 10_000
MAX_TOOLS = 128
MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_CHARS = 512
MAX_ID_CHARS = 128

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS)]


class ItemBody(Entry):
    """An input item of any type; `gateway.api.responses.items` checks the fields that the type needs."""

    type: str | None = None
    id: Id | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    summary: Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    call_id: Id | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    input: str | None = None


Input = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[ItemBody], Field(max_length=MAX_ITEMS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


class ToolBody(Loose):
    type: str
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")] | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class NamedTool(Loose):
    type: str
    name: str | None = None


class ChoiceBody(NamedTool):
    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[NamedTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


def _choice_kind(value: Any) -> str:
    return "<object>" if isinstance(value, dict) else "<word>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<word>")] | Annotated[ChoiceBody, Tag("<object>")],
    Discriminator(_choice_kind),
]


class FormatBody(Loose):
    type: str
    name: str | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextBody(Body):
    format: FormatBody | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningBody(Loose):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class StreamOptions(Loose):
    include_obfuscation: bool | None = None


Include = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]

Metadata = dict[
    Annotated[str, Field(max_length=MAX_METADATA_KEY_CHARS)], Annotated[str, Field(max_length=MAX_METADATA_CHARS)]
]


def _few(value: Any) -> Any:
    """Refuse metadata with more than MAX_METADATA fields before the fields are checked: each could add an error."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        known = {"field_type": "Dictionary", "max_length": MAX_METADATA, "actual_length": len(value)}
        raise PydanticKnownError("too_long", known)
    return value


class ResponsesBody(SamplingBody, GrammarBody, ThinkingBody, LoraBody, HintsBody, ProgressBody):
    model: str = ""
    input: Input | None = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextBody = TextBody()
    reasoning: ReasoningBody = ReasoningBody()
    max_output_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None,
        Also("max_tokens", "max_completion_tokens", "n_predict", *LENGTHS),
    ] = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    include: Annotated[list[Include], Field(max_length=16, fail_fast=True)] | None = None
    stop: Stop | None = None
    truncation: Literal["auto", "disabled"] = "disabled"
    metadata: Annotated[Metadata, BeforeValidator(_few)] | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


IGNORED = {
    **OTHERS_IGNORED,
    "client_metadata": "what a client says of itself, as Codex does",
    "max_tool_calls": "it bounds calls of the provider's own tools, of which there are none",
    "moderation": "there is no moderation to choose",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
}
"""Parameter -> why it is accepted without an effect on the answer."""

REFUSED: dict[str, Refusal] = {
    **OTHERS_REFUSED,
    "context_management": Refusal("Leave it out, and send the items that the model is to see."),
    "conversation": Refusal("Use `previous_response_id`, or send the whole conversation as `input`."),
    "prompt": Refusal("Paddock keeps no prompt templates; send the text as `input` and `instructions`."),
    "service_tier": Refusal("There is one tier.", ("auto", "default"), is_hint=True),
}
