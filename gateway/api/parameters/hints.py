"""Reads how a caller wants its request to be treated: caches, slots, urgency, how an answer ends.

Sources: tools/server/README.md of llama.cpp; `priority` is vLLM's, where the lower number is the more urgent one;
`cache_salt`, `min_tokens`, `stop_token_ids` and `skip_special_tokens` are vLLM's as well.
"""

from __future__ import annotations

from typing import Annotated

from msgspec.structs import replace
from pydantic import Field

from gateway.api.parameters.base import Also, Body
from gateway.errors import InvalidRequest
from workers.protocol.requests import GenerateRequest

MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_SLOT = 65_535
MAX_INDENT = 1024
MAX_STOP_TOKENS = 128

Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
AnswerTokens = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
"""Most tokens of an answer; -1: no bound."""
LENGTHS = ("max_new_tokens", "num_predict")
"""Other names of an answer's length: those of Hugging Face's programs and of Ollama."""


class HintsBody(Body):
    ignore_eos: bool = False
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), Also("min_new_tokens")] = 0
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    special: bool = False
    skip_special_tokens: bool = True
    cache_prompt: bool = True
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    id_slot: Annotated[int, Field(ge=-1, le=MAX_SLOT)] = -1
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    context_shift: bool = False
    n_keep: Annotated[int, Field(ge=-1, le=MAX_TOKENS), Also("num_keep")] = 0
    n_indent: Annotated[int, Field(ge=0, le=MAX_INDENT)] = 0
    t_max_predict_ms: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] = 0


def with_hints(request: GenerateRequest, body: HintsBody) -> GenerateRequest:
    """Return the request with its hints. Raises InvalidRequest for an answer that must be longer than it may be."""
    if request.max_tokens is not None and body.min_tokens > request.max_tokens:
        message = f"`min_tokens` is {body.min_tokens}, and the answer may have {request.max_tokens}. Send less."
        raise InvalidRequest(message, param="min_tokens")
    return replace(
        request,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        stop_tokens=tuple(dict.fromkeys(body.stop_token_ids or ())),
        special=body.special or not body.skip_special_tokens,
        cache_prompt=body.cache_prompt,
        cache_salt=body.cache_salt,
        slot=body.id_slot,
        priority=-body.priority,
        context_shift=body.context_shift,
        n_keep=body.n_keep,
        n_indent=body.n_indent,
        max_predict_ms=max(0, body.t_max_predict_ms),
    )
