"""The body of `POST /v1/completions` as a pydantic model: types, limits and nothing else.

Source of names and types: OpenAI's API reference, "Create completion"; what it lacks is llama-server's
(tools/server/README.md of llama.cpp) or our own, as in chat.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from gateway.api.openai.stream_options import StreamOptions
from gateway.api.parameters.base import Also
from gateway.api.parameters.form_body import FormBody
from gateway.api.parameters.hints import LENGTHS, AnswerTokens, HintsBody
from gateway.api.parameters.lora import LoraBody
from gateway.api.parameters.notices import NoticesBody
from gateway.api.parameters.probs import TokenProbsBody
from gateway.api.parameters.prompts import FORMS, MAX_PROMPTS
from gateway.api.parameters.repeats import MAX_ANSWERS
from gateway.api.parameters.sampling_body import SamplingBody
from gateway.api.parameters.stops import Stop

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default; llama-server's clients ask for more by `n_predict`."""

MAX_LOGPROBS = 20


class CompletionBody(SamplingBody, TokenProbsBody, FormBody, HintsBody, NoticesBody, LoraBody):
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
