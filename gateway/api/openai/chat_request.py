"""Reads OpenAI's chat dialect into the canonical request."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.api.body import read_object
from gateway.api.openai.chat_body import ChatBody
from gateway.api.openai.lengths import read_max_tokens
from gateway.api.openai.refused import IGNORED, REFUSED
from gateway.api.openai.stream_options import NOT_TOLD, UsageWish, read_stream_options
from gateway.api.parameters.form import beside_call, read_form
from gateway.api.parameters.hints import with_hints
from gateway.api.parameters.lora import read_lora
from gateway.api.parameters.messages import read_messages
from gateway.api.parameters.notices import read_notices, sharing_prompts
from gateway.api.parameters.probs import read_n_probs
from gateway.api.parameters.repeats import requests_of
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.stops import read_stop
from gateway.api.parameters.thinking import other_words, read_template_values, read_thinking
from gateway.api.parameters.tools import Toolbox, read_tools
from gateway.api.parameters.unread import read_body
from gateway.telemetry.ignored import Ignored
from workers.protocol.requests import GenerateRequest


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed chat request, and how its answers are to be written."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    usage: UsageWish = NOT_TOLD
    as_function: bool = False
    """Whether a tool call is told in the older form, as `function_call`."""
    verbose: bool = False
    """Whether the answer tells what it ran with (`__verbose`)."""


def read_chat(raw: bytes, ignored: Ignored | None = None) -> ChatRequest:
    """Return the parsed body; `ignored` notes parameters that nothing is done with.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path.
    """
    ignored = ignored or Ignored()
    body = read_body(ChatBody, read_object(raw), (IGNORED, REFUSED), ignored)
    usage = read_stream_options(body.stream_options, stream=body.stream)
    toolbox = read_tools(body)
    request = with_hints(_request(body, toolbox, ignored), body)
    requests = sharing_prompts(requests_of(request, body.n))
    return ChatRequest(body.model, requests, body.stream, usage, toolbox.as_function, body.verbose)


def _request(body: ChatBody, toolbox: Toolbox, ignored: Ignored) -> GenerateRequest:
    lengths = {name: getattr(body, name) for name in ("max_tokens", "max_completion_tokens", "n_predict")}
    return GenerateRequest(
        messages=read_messages(body.messages),
        tools=toolbox.tools,
        forced_tools=toolbox.forced,
        parallel_tool_calls=toolbox.parallel,
        thinking=read_thinking(body, other_words(body)),
        template_values=read_template_values(body),
        constraint=beside_call(read_form(body), toolbox.forced, ignored),
        sampling=read_sampling(body),
        max_tokens=read_max_tokens(lengths),
        stop=read_stop(body.stop),
        adapters=read_lora(body),
        n_probs=read_n_probs(body),
        post_sampling_probs=body.post_sampling_probs,
        tell=read_notices(body, stream=body.stream, verbose=body.verbose),
    )
