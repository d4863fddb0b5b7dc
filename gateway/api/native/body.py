"""Holds the bodies of `/completion` and `/infill` as pydantic models, and tables of ignored and refused parameters.

Source of names, types and aliases: tools/server/README.md and server-schema.cpp of llama.cpp; `cache_salt`, `priority`,
`context_shift` and `special` are our own. The parameters that set an answer's form are those of `/v1/chat/completions`.
"""

from __future__ import annotations

from math import inf
from typing import Annotated, Any

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from gateway.api.parameters.base import Also, Loose, text_or_parts
from gateway.api.parameters.options import (
    LENGTHS,
    MAX_ANSWERS,
    MAX_N_PROBS,
    MAX_STOPS,
    AnswerTokens,
    HintsBody,
    LoraBody,
    NoticesBody,
    TokenProbsBody,
)
from gateway.api.parameters.response_format import ResponseFormatBody, Schema
from gateway.api.parameters.sampling import SamplingBody
from gateway.api.parameters.unsupported import ONE_OF_SEVERAL, OTHERS_IGNORED, OTHERS_REFUSED, Refusal

MAX_INDENT = 1024
MAX_FIELDS = 64
MAX_FIELD_CHARS = 128
MAX_TRIGGERS = 32
MAX_TRIGGER_CHARS = 512
MAX_FILES = 1024


CLAMPED: dict[str, tuple[float, float]] = {
    "temperature": (0, inf),
    "top_k": (0, inf),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "xtc_probability": (0, 1),
    "xtc_threshold": (0, 1),
    "mirostat": (0, 2),
    "adaptive_target": (-inf, 1),
}
"""Limits of the parameters whose numbers, as in llama-server, are moved to the limit instead of refused."""


def _any_object(schema: Any) -> Any:
    """Return the schema; in place of an empty one, a schema that any JSON object fits, as llama-server does."""
    return {"type": "object"} if schema == {} else schema


class Trigger(Loose):
    type: int
    value: Annotated[str, Field(min_length=1, max_length=MAX_TRIGGER_CHARS)]


class GenerationBody(SamplingBody, TokenProbsBody, ResponseFormatBody, HintsBody, NoticesBody, LoraBody):
    """Holds the fields that the bodies of `/completion` and `/infill` have in common."""

    @model_validator(mode="before")
    @classmethod
    def _clamp(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        beyond = {
            name: min(max(value[name], least), most)
            for name, (least, most) in CLAMPED.items()
            if type(value.get(name)) in (int, float) and not least <= value[name] <= most
        }
        return value | beyond if beyond else value

    model: str = ""
    stream: bool = False
    n_predict: Annotated[AnswerTokens, Also("max_completion_tokens", "max_tokens", *LENGTHS)] = -1
    n_indent: Annotated[int, Field(ge=0, le=MAX_INDENT)] = 0
    n_cmpl: Annotated[int, Field(ge=1, le=MAX_ANSWERS), Also("n")] = 1
    n_probs: Annotated[int, Field(ge=0, le=MAX_N_PROBS), Also("logprobs")] = 0
    stop: (
        Annotated[
            Annotated[str, Tag("<text>")]
            | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<parts>")],
            Discriminator(text_or_parts),
        ]
        | None
    ) = None
    json_schema: Annotated[Schema | None, BeforeValidator(_any_object)] = None
    grammar_lazy: bool = False
    grammar_triggers: Annotated[list[Trigger], Field(max_length=MAX_TRIGGERS, fail_fast=True)] | None = None
    response_fields: (
        Annotated[list[Annotated[str, Field(max_length=MAX_FIELD_CHARS)]], Field(max_length=MAX_FIELDS, fail_fast=True)]
        | None
    ) = None


class CompletionBody(GenerationBody):
    prompt: Any
    """A prompt in one of the forms of `gateway.api.native.request`."""


class ExtraFile(Loose):
    filename: str = ""
    text: str


class InfillBody(GenerationBody):
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[list[ExtraFile], Field(max_length=MAX_FILES, fail_fast=True)] | None = None
    prompt: str = ""


_UNPARSED = "the text of a completion is not parsed"

IGNORED = {
    **OTHERS_IGNORED,
    "backend_sampling": "a worker draws tokens where it draws them fastest",
    "chat_format": _UNPARSED,
    "chat_parser": _UNPARSED,
    "continue_final_message": _UNPARSED,
    "echo": _UNPARSED,
    "generation_prompt": _UNPARSED,
    "message_delimiters": "the prompt cache finds what it knows by itself",
    "n_cache_reuse": "the prompt cache finds what it knows by itself",
    "parse_tool_calls": _UNPARSED,
    "preserved_tokens": "a grammar's triggers are found in the text, whichever tokens they are made of",
    "reasoning_budget_end_tag": "without a budget it has no meaning",
    "reasoning_budget_end_tags": "without a budget it has no meaning",
    "reasoning_budget_message": "without a budget it has no meaning",
    "reasoning_budget_start_tag": "without a budget it has no meaning",
    "reasoning_control": "nothing can end a thought from outside",
    "reasoning_format": _UNPARSED,
    "sse_ping_interval": "the gateway's `ping_interval_s` decides",
    "stream_options": "the last event tells the counts in any case",
    "t_max_prompt_ms": "llama-server knows the name and does nothing with it",
    "verbose": "there is nothing more to tell",
}
"""Parameters that are accepted and have no effect on the answer, and why."""

REFUSED: dict[str, Refusal] = {
    **OTHERS_REFUSED,
    "best_of": ONE_OF_SEVERAL,
    "n_discard": Refusal("A shift drops the older half of the context; leave it out.", (0,)),
    "reasoning_budget_tokens": Refusal(
        "A completion has no thoughts; bound them in `/v1/chat/completions`, which knows the model's tags.", (-1,)
    ),
}
