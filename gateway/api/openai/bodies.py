"""Holds the bodies of OpenAI's generating routes as pydantic models, and tables of ignored and refused parameters.

Sources of names and types: OpenAI's API reference, "Create chat completion" and "Create completion". Other parameters
are llama-server's (tools/server/README.md of llama.cpp) or our own: `cache_salt`, `priority`, `special`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from gateway.api.parameters.base import Also, Body
from gateway.api.parameters.messages import ConversationBody
from gateway.api.parameters.options import (
    LENGTHS,
    MAX_ANSWERS,
    AnswerTokens,
    HintsBody,
    LoraBody,
    NoticesBody,
    Prediction,
    ProbsBody,
    Stop,
    TokenProbsBody,
)
from gateway.api.parameters.prompts import FORMS, MAX_PROMPTS
from gateway.api.parameters.response_format import ResponseFormatBody
from gateway.api.parameters.sampling import SamplingBody
from gateway.api.parameters.thinking import ChatThinkingBody
from gateway.api.parameters.unsupported import ONE_OF_SEVERAL, OTHERS_IGNORED, OTHERS_REFUSED, Refusal
from gateway.errors import InvalidRequest


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


@dataclass(frozen=True, slots=True)
class StreamUsageOptions:
    """Holds which chunks of a stream report the usage, the number of tokens used."""

    at_end: bool = False
    """Whether a chunk of its own reports the usage after the answers (`include_usage`)."""
    always: bool = False
    """Whether every chunk reports the usage so far (`continuous_usage_stats`)."""


NO_USAGE = StreamUsageOptions()


def read_stream_options(options: StreamOptions | None, *, stream: bool) -> StreamUsageOptions:
    """Return which chunks report the usage. Raises InvalidRequest for options without `stream: true`."""
    if options is None:
        return NO_USAGE
    if not stream:
        message = "`stream_options` needs `stream: true`. Leave it out, or stream."
        raise InvalidRequest(message, param="stream_options")
    always = bool(options.continuous_usage_stats)
    return StreamUsageOptions(bool(options.include_usage), always)


class ChatBody(
    ConversationBody, ChatThinkingBody, SamplingBody, ProbsBody, ResponseFormatBody, HintsBody, NoticesBody, LoraBody
):
    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    stream: bool = False
    verbose: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[AnswerTokens | None, Also(*LENGTHS)] = None
    max_completion_tokens: AnswerTokens | None = None
    n_predict: AnswerTokens | None = None
    stop: Stop | None = None
    prediction: Prediction | None = None


DEFAULT_MAX_TOKENS = 16
"""Maximum tokens of a completion whose request has neither `max_tokens` nor `n_predict`: OpenAI's default."""

MAX_LOGPROBS = 20


class CompletionBody(SamplingBody, TokenProbsBody, ResponseFormatBody, HintsBody, NoticesBody, LoraBody):
    model: str = ""
    prompt: Annotated[Any, Field(description=f"{FORMS}, up to {MAX_PROMPTS}")]
    suffix: str | None = None
    echo: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    best_of: Annotated[int, Field(ge=0, le=MAX_ANSWERS)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    stream: bool = False
    verbose: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[AnswerTokens | None, Also(*LENGTHS)] = None
    n_predict: AnswerTokens | None = None
    stop: Stop | None = None


END_USER = "a label for the provider's own bookkeeping, unless the key may name end users (docs/keys.md)"
LABELS = {
    "metadata": "a label for the provider's own bookkeeping",
    "safety_identifier": END_USER,
    "user": END_USER,
}

SERVER_SIDE = {
    "backend_sampling": "where sampling runs is the worker's choice; the answer is the same",
    "n_cache_reuse": "the prompt cache finds what it knows by itself",
    "sse_ping_interval": "the gateway's `ping_interval_s` says how often a waiting stream is kept alive",
    "t_max_prompt_ms": "the header `x-slo-ttft-ms` says how urgent the first token is",
}
"""llama-server's parameters that are accepted in chats and completions and have no effect, and why."""

IGNORED = {
    **LABELS,
    **SERVER_SIDE,
    **OTHERS_IGNORED,
    "moderation": "there is no moderation to choose",
    "prompt_cache_key": "the prompt cache finds what it knows by itself",
    "prompt_cache_options": "the prompt cache finds what it knows by itself",
    "prompt_cache_retention": "the prompt cache keeps what pays",
    "reasoning_control": "nothing ends a thought from outside; a budget bounds it",
}
"""Parameters of chat that are accepted and have no effect on the answer, and why."""

LLAMA_SERVER: dict[str, Refusal] = {
    "n_discard": Refusal("A context shift drops the older half; leave it out.", (0,)),
    "response_fields": Refusal("Fields can be chosen at POST /completion; leave it out.", ([],), is_hint=True),
}
"""llama-server's parameters that are refused in chats and completions."""

STORE = Refusal("Paddock keeps no answers of this route; leave it out or send false.", (False,), is_hint=True)

REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    **OTHERS_REFUSED,
    "add_special_tokens": Refusal("The model's template begins the prompt; leave it out.", (False,)),
    "audio": Refusal("Paddock answers in text; leave it out."),
    "best_of": ONE_OF_SEVERAL,
    "chat_template": Refusal("Templates come with the model or its catalog entry; leave it out."),
    "echo": Refusal("An answer is told without its prompt; leave it out.", (False,)),
    "modalities": Refusal('Paddock answers in text; leave it out or send ["text"].', (["text"],)),
    "parse_tool_calls": Refusal("Tool calls are parsed where `tools` are given; leave it out.", (True,)),
    "service_tier": Refusal("There is one tier.", ("auto", "default"), is_hint=True),
    "store": STORE,
    "verbosity": Refusal("Say in the prompt how long the answer should be.", ("medium",), is_hint=True),
    "web_search_options": Refusal("Paddock does not search; leave it out."),
}
"""Parameters of chat that are refused."""

COMPLETION_IGNORED = {**LABELS, **SERVER_SIDE, **OTHERS_IGNORED}
COMPLETION_REFUSED: dict[str, Refusal] = {
    **LLAMA_SERVER,
    **OTHERS_REFUSED,
    "add_special_tokens": Refusal("A prompt begins as the model wants it; send tokens to leave that out.", (True,)),
    "store": STORE,
}

POOLED_IGNORED = {**LABELS}

RERANK_REFUSED: dict[str, Refusal] = {
    "max_chunks_per_doc": Refusal("Documents are ranked whole; leave it out."),
    "raw_scores": Refusal("Scores are told as the model gives them; leave it out or send true.", (True,)),
    "truncate": Refusal("A document that is too long is refused; shorten it.", (False,)),
}
