"""The parameters of a call that an alias sets or drops, by the names of OpenAI's chats and of llama-server."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from workers.models.generation import DefaultSampling
from workers.models.spec import kwargs_fault
from workers.protocol.requests import MAX_BUDGET_MESSAGE_CHARS, MAX_THINKING_BUDGET

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
StopText = Annotated[str, Meta(min_length=1, max_length=512)]

OtherName = Literal[
    "best_of",
    "echo",
    "grammar",
    "id_slot",
    "json_schema",
    "logit_bias",
    "logprobs",
    "lora",
    "n_keep",
    "n_probs",
    "prediction",
    "priority",
    "reasoning_format",
    "response_format",
    "return_progress",
    "return_tokens",
    "special",
    "stop_token_ids",
    "tool_choice",
    "tools",
    "top_logprobs",
    "verbose",
]
"""Names of parameters that an alias can only drop. `cache_salt` is none of them: it keeps callers of a team apart."""

NAMED_BESIDE = {
    "enable_thinking": "enable_thinking",
    "thinking": "enable_thinking",
    "reasoning_effort": "reasoning_effort",
}
"""Variable of a chat template -> the parameter that sets it."""


class AliasParameters(DefaultSampling, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of a call and their values; the bounds are those of a caller's request.

    Left out on purpose: what a key may or may not do (`priority`, `lora`, `cache_salt`), and what only a conversation
    can say (its messages and tools)."""

    max_tokens: Annotated[Count, Meta(description="most tokens of an answer")] | None = None
    min_tokens: Annotated[Count, Meta(description="least tokens of an answer")] | None = None
    n: Annotated[int, Meta(ge=1, le=32, description="answers to one prompt")] | None = None
    stop: Annotated[tuple[StopText, ...], Meta(max_length=16, description="texts that end an answer")] | None = None
    ignore_eos: bool | None = None
    context_shift: bool | None = None
    cache_prompt: bool | None = None
    speculation: Annotated[Literal["auto"] | bool, Meta(description="whether drafts are tried")] | None = None
    t_max_predict_ms: Annotated[Count, Meta(description="milliseconds after which an answer ends")] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: (
        Annotated[
            Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"], Meta(description="how much to think")
        ]
        | None
    ) = None
    reasoning_budget_tokens: (
        Annotated[int, Meta(ge=0, le=MAX_THINKING_BUDGET, description="most tokens of thought")] | None
    ) = None
    reasoning_budget_message: (
        Annotated[
            str,
            Meta(max_length=MAX_BUDGET_MESSAGE_CHARS, description="what ends a thought that is at its budget"),
        ]
        | None
    ) = None
    chat_template_kwargs: (
        Annotated[dict[str, Any], Meta(max_length=64, description="variables for the chat template, each for itself")]
        | None
    ) = None
    dimensions: Annotated[Count, Meta(description="numbers of a vector")] | None = None
    embd_normalize: Annotated[int, Meta(ge=-1, le=1024, description="norm of vectors")] | None = None
    top_n: Annotated[Count, Meta(description="documents that a ranking tells")] | None = None

    def __post_init__(self) -> None:
        DefaultSampling.__post_init__(self)
        variables = self.chat_template_kwargs or {}
        if named := sorted(NAMED_BESIDE.keys() & variables.keys()):
            raise ValueError(f"chat_template_kwargs: give {named[0]!r} as `{NAMED_BESIDE[named[0]]}`, beside it")
        if fault := kwargs_fault(variables):
            raise ValueError(f"chat_template_kwargs: {fault}")

    def values(self) -> dict[str, Any]:
        """Return name -> value as JSON has it, of the parameters that are set."""
        # Through JSON, as tuples are none of its arrays.
        values: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return values


SETTABLE = frozenset(field.name for field in msgspec.structs.fields(AliasParameters))
DROPPABLE = SETTABLE | set(get_args(OtherName))
"""Names that an alias's `strip` may have."""
