"""The body of `POST /v1/chat/completions` as pydantic models: types, limits and nothing else.

Source of names and types: OpenAI's API reference, "Create chat completion"; what it lacks is llama-server's
(tools/server/README.md of llama.cpp) or our own: `cache_salt`, `priority`, `special`.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gateway.api.openai.stream_options import StreamOptions
from gateway.api.parameters.base import Also
from gateway.api.parameters.conversation_body import ConversationBody
from gateway.api.parameters.form_body import FormBody
from gateway.api.parameters.hints import LENGTHS, AnswerTokens, HintsBody
from gateway.api.parameters.lora import LoraBody
from gateway.api.parameters.notices import NoticesBody
from gateway.api.parameters.probs import ProbsBody
from gateway.api.parameters.repeats import MAX_ANSWERS
from gateway.api.parameters.sampling_body import SamplingBody
from gateway.api.parameters.stops import Stop
from gateway.api.parameters.thinking import ChatThinkingBody


class ChatBody(ConversationBody, ChatThinkingBody, SamplingBody, ProbsBody, FormBody, HintsBody, NoticesBody, LoraBody):
    model: str = ""
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    stream: bool = False
    verbose: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[AnswerTokens | None, Also(*LENGTHS)] = None
    max_completion_tokens: AnswerTokens | None = None
    n_predict: AnswerTokens | None = None
    stop: Stop | None = None
