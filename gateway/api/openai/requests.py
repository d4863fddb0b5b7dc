"""Reads OpenAI's chats and completions into canonical requests."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from msgspec.structs import replace

from gateway.api.intake.body import read_object
from gateway.api.media.attachments import Attachments
from gateway.api.openai.bodies import (
    COMPLETION_IGNORED,
    COMPLETION_REFUSED,
    DEFAULT_MAX_TOKENS,
    IGNORED,
    NO_USAGE,
    REFUSED,
    ChatBody,
    CompletionBody,
    StreamUsageOptions,
    read_stream_options,
)
from gateway.api.parameters.messages import Toolbox, read_messages, read_tools
from gateway.api.parameters.options import (
    add_hints,
    add_prediction,
    read_lora,
    read_n_probs,
    read_notices,
    read_stop,
    repeat_request,
    share_prompt_chars,
)
from gateway.api.parameters.prompts import read_prompts
from gateway.api.parameters.response_format import drop_beside_tools, read_constraint
from gateway.api.parameters.sampling import read_sampling
from gateway.api.parameters.thinking import other_words, read_template_values, read_thinking
from gateway.api.parameters.unsupported import read_body
from gateway.errors import InvalidRequest, UnsupportedParameter
from gateway.telemetry.request_log import Ignored
from workers.protocol.requests import MAX_PROMPT_CHARS, GenerateRequest, Infill, Prompt, Thinking


def read_max_tokens(given: dict[str, int | None]) -> int | None:
    """Return the maximum number of answer tokens; None: no bound. `given`: parameter -> its value, None if not sent.

    As in llama-server, a negative number means no bound. Raises InvalidRequest if two parameters have different values.
    """
    told = [(name, number) for name, number in given.items() if number is not None]
    for (first, one), (second, other) in pairwise(told):
        if one != other:
            message = f"`{first}` ({one}) and `{second}` ({other}) contradict each other. Send one of them."
            raise InvalidRequest(message, param=second)
    return told[0][1] if told and told[0][1] >= 0 else None


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A parsed chat request, and how its answers are to be written."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    usage: StreamUsageOptions = NO_USAGE
    as_function: bool = False
    """Whether a tool call is written in OpenAI's older form, as `function_call`."""
    verbose: bool = False
    """Whether the answer has llama-server's `__verbose`: the prompt and settings that it was computed with."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the custom tools, whose input is a text and not JSON."""


def read_chat(raw: bytes, ignored: Ignored | None = None, attachments: Attachments | None = None) -> ChatRequest:
    """Return the parsed body; parameters without effect are noted in `ignored`. `attachments`: the files that were cut
    out of the body.

    Raises InvalidRequest, UnsupportedParameter or NotSupported, each naming the parameter by its path."""
    ignored = ignored or Ignored()
    body = read_body(ChatBody, read_object(raw), (IGNORED, REFUSED), ignored)
    usage = read_stream_options(body.stream_options, stream=body.stream)
    toolbox = read_tools(body)
    read = _chat_request(body, toolbox, ignored, attachments or Attachments())
    request = add_prediction(add_hints(read, body), body.prediction)
    requests = share_prompt_chars(repeat_request(request, body.n))
    return ChatRequest(body.model, requests, body.stream, usage, toolbox.as_function, body.verbose, toolbox.custom)


def _chat_request(body: ChatBody, toolbox: Toolbox, ignored: Ignored, attachments: Attachments) -> GenerateRequest:
    messages, media = read_messages(body.messages, attachments)
    lengths = {name: getattr(body, name) for name in ("max_tokens", "max_completion_tokens", "n_predict")}
    return GenerateRequest(
        messages=messages,
        media=media,
        tools=toolbox.tools,
        forced_tools=toolbox.forced,
        parallel_tool_calls=toolbox.parallel,
        thinking=read_thinking(body, other_words(body)),
        template_values=read_template_values(body),
        constraint=drop_beside_tools(read_constraint(body), toolbox.forced, ignored),
        sampling=read_sampling(body),
        max_tokens=read_max_tokens(lengths),
        stop=read_stop(body.stop),
        adapters=read_lora(body),
        n_probs=read_n_probs(body),
        post_sampling_probs=body.post_sampling_probs,
        tell=read_notices(body, stream=body.stream, verbose=body.verbose),
    )


MAX_CHOICES = 128
"""Maximum number of answers to one request, over all its prompts; more are refused."""

MAX_PROMPT_PROBS = 1 << 17
"""Maximum number of probabilities that one request gets for its prompts. Each prompt token counts, and each of the
likeliest tokens in its place. A probability takes some hundred bytes. Workers refuse prompts that need more."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A parsed completion request, and how to write its `n` answers per prompt. Answer `i` is of prompt `i // n`."""

    model: str
    requests: tuple[GenerateRequest, ...]
    stream: bool
    prompts: tuple[Prompt, ...]
    usage: StreamUsageOptions = NO_USAGE
    echo: bool = False
    """Whether each answer begins with its prompt."""
    legacy_logprobs: bool = False
    """Whether probabilities have OpenAI's older shape (four lists); if not, the shape of chats, as in llama-server."""
    verbose: bool = False
    """Whether the answer has llama-server's `__verbose`: the prompt and settings that it was computed with."""


def read_completion(raw: bytes, ignored: Ignored | None = None) -> CompletionRequest:
    """Return the parsed body; parameters without effect are noted in `ignored`.

    Raises InvalidRequest or UnsupportedParameter, each naming the parameter by its path."""
    unread = (COMPLETION_IGNORED, COMPLETION_REFUSED)
    body = read_body(CompletionBody, read_object(raw), unread, ignored or Ignored())
    usage = read_stream_options(body.stream_options, stream=body.stream)
    prompts = read_prompts(body.prompt)
    _check(body, prompts)
    shared = add_hints(_request(body), body)
    if body.echo and body.logprobs is not None:
        most = MAX_PROMPT_PROBS // (1 + body.logprobs) // (len(prompts) * body.n)
        shared = replace(shared, prompt_probs=most, cache_prompt=False)
    requests = [one for prompt in prompts for one in repeat_request(_asking(shared, prompt, body), body.n)]
    legacy = body.logprobs is not None
    answers = share_prompt_chars(requests)
    return CompletionRequest(body.model, answers, body.stream, prompts, usage, body.echo, legacy, body.verbose)


def _check(body: CompletionBody, prompts: tuple[Prompt, ...]) -> None:
    """Check limits and conflicts that concern several parameters. Raises InvalidRequest or UnsupportedParameter."""
    if body.best_of and body.best_of != body.n:
        message = (
            f"`best_of` is {body.best_of} and `n` {body.n}; all answers are told. Send equal numbers, or `n` alone."
        )
        raise UnsupportedParameter(message, param="best_of")
    if body.echo and body.n_probs:
        message = "The probabilities of a prompt are told in the shape of `logprobs`; send that instead of `n_probs`."
        raise UnsupportedParameter(message, param="n_probs")
    if body.echo and body.logprobs is not None and body.suffix:
        message = (
            "A prompt with `suffix` has tokens that are no part of its text, so their probabilities can't be told. "
            "Leave out `suffix`, `echo` or `logprobs`."
        )
        raise UnsupportedParameter(message, param="suffix")
    if body.logprobs is not None and body.n_probs:
        message = "`logprobs` and `n_probs` ask for probabilities in different shapes. Send one of them."
        raise InvalidRequest(message, param="n_probs")
    if len(prompts) * body.n > MAX_CHOICES:
        count = len(prompts) * body.n
        message = f"`n` times the prompts are {count} answers; one request takes {MAX_CHOICES}. Send several requests."
        raise InvalidRequest(message, param="n")
    num_chars = body.n * sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if body.echo and num_chars > MAX_PROMPT_CHARS:
        message = f"`echo` would tell {num_chars} characters of prompts; one request is told {MAX_PROMPT_CHARS}. "
        raise InvalidRequest(message + "Ask for fewer answers at once, or leave it out.", param="echo")
    if body.suffix and not all(isinstance(prompt, str) for prompt in prompts):
        message = "`suffix` needs a `prompt` that is a text: what stands before the gap. Send strings."
        raise InvalidRequest(message, param="suffix")


def _request(body: CompletionBody) -> GenerateRequest:
    """Return a request without its prompt: the part that all answers share."""
    asked = (body.max_tokens, body.n_predict)
    lengths = {"max_tokens": body.max_tokens, "n_predict": body.n_predict}
    # For workers, -1 means the probability of the chosen token alone.
    n_probs = body.n_probs if body.logprobs is None else body.logprobs or -1
    notices = read_notices(body, stream=body.stream, verbose=body.verbose)
    return GenerateRequest(
        # A raw prompt gets a raw answer: no part of its text is split off as thought.
        thinking=Thinking(split=False),
        constraint=read_constraint(body),
        sampling=read_sampling(body),
        max_tokens=DEFAULT_MAX_TOKENS if asked == (None, None) else read_max_tokens(lengths),
        stop=read_stop(body.stop),
        adapters=read_lora(body),
        n_probs=n_probs,
        post_sampling_probs=body.post_sampling_probs,
        tell=notices,
    )


def _asking(shared: GenerateRequest, prompt: Prompt, body: CompletionBody) -> GenerateRequest:
    if body.suffix and isinstance(prompt, str):
        return replace(shared, infill=Infill(prefix=prompt, suffix=body.suffix))
    if body.echo and not isinstance(prompt, str):
        # A worker sends the text of a prompt of tokens only together with the settings.
        return replace(shared, prompt=prompt, tell=(*shared.tell, "settings", "prompt"))
    return replace(shared, prompt=prompt)
