"""Reads small parameters that several dialects have: hints, adapters, notices, probabilities, `n`, stop strings.

Sources: tools/server/README.md of llama.cpp. `priority` is vLLM's, where the lower number is the more urgent one;
`cache_salt`, `min_tokens`, `stop_token_ids` and `skip_special_tokens` are vLLM's as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec.structs import replace
from pydantic import Discriminator, Field, Tag

from gateway.api.parameters.base import Also, Body, Loose, text_or_parts
from gateway.errors import InvalidRequest
from workers.protocol.requests import MAX_PROMPT_CHARS, AdapterUse, GenerateRequest, Notice, Speculation

MAX_TOKENS = 2**31 - 1
MAX_SALT_CHARS = 256
MAX_PRIORITY = 100
MAX_SLOT = 65_535
MAX_INDENT = 1024
MAX_STOP_TOKENS = 128
MAX_DRAFT = 65_535
MAX_STOPS = 128

Token = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
AnswerTokens = Annotated[int, Field(ge=-1, le=MAX_TOKENS)]
"""Maximum number of tokens of an answer; -1: no bound."""
LENGTHS = ("max_new_tokens", "num_predict")
"""Synonyms of the maximum number of answer tokens: the names in Hugging Face's programs and in Ollama."""


def _text_or_flag(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<flag>"


class HintsBody(Body):
    """Holds the hints: parameters for caching, slot, priority, context and the end of the answer."""

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
    speculation: Annotated[
        Annotated[Literal["auto"], Tag("<text>")] | Annotated[bool, Tag("<flag>")], Discriminator(_text_or_flag)
    ] = "auto"
    draft_n_max: Annotated[int, Field(ge=-1, le=MAX_DRAFT, alias="speculative.n_max")] = -1
    draft_n_min: Annotated[int, Field(ge=0, le=MAX_DRAFT, alias="speculative.n_min")] = 0
    draft_p_min: Annotated[float, Field(ge=0, le=1, alias="speculative.p_min")] = 0.0


def add_hints(request: GenerateRequest, body: HintsBody) -> GenerateRequest:
    """Return the request with the hints of `body`. Raises InvalidRequest if `min_tokens` is above `max_tokens`."""
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
        speculation=Speculation(
            enabled=body.speculation is not False,
            n_max=body.draft_n_max,
            n_min=body.draft_n_min,
            p_min=body.draft_p_min,
        ),
    )


MAX_PREDICTION_CHARS = 1 << 18
"""Maximum characters of a `prediction` that are used; tokenising more would cost more than it can save."""


class PredictionPart(Loose):
    type: Literal["text"]
    text: str


class Prediction(Loose):
    """The text that a caller expects the answer to have, as in OpenAI's API reference, "Predicted Outputs"."""

    type: Literal["content"]
    content: Annotated[
        Annotated[str, Tag("<text>")]
        | Annotated[list[PredictionPart], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<parts>")],
        Discriminator(text_or_parts),
    ]

    @property
    def text(self) -> str:
        parts = (self.content,) if isinstance(self.content, str) else (part.text for part in self.content)
        return "".join(parts)[:MAX_PREDICTION_CHARS]


def add_prediction(request: GenerateRequest, prediction: Prediction | None) -> GenerateRequest:
    """Return the request with the text that the caller expects as its answer."""
    if prediction is None:
        return request
    return replace(request, speculation=replace(request.speculation, prediction=prediction.text))


MAX_ADAPTERS = 64
MAX_NAME_CHARS = 128
MAX_NUMBER = 65_535
MAX_SCALE = 16


def _id_kind(value: Any) -> str:
    return "<name>" if isinstance(value, str) else "<number>"


class LoraUse(Body):
    id: Annotated[
        Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS), Tag("<name>")]
        | Annotated[int, Field(ge=0, le=MAX_NUMBER), Tag("<number>")],
        Discriminator(_id_kind),
    ]
    scale: Annotated[float, Field(ge=-MAX_SCALE, le=MAX_SCALE)] = 1.0


class LoraBody(Body):
    """Holds the LoRA adapters of one request. As in llama-server, adapters that `lora` does not list are off.

    An adapter is named by its name or by its number in the list of its model's adapters (`GET /lora-adapters`), which
    `gateway.adapters.choice` resolves."""

    lora: Annotated[list[LoraUse], Field(max_length=MAX_ADAPTERS, fail_fast=True)] | None = None


def read_lora(body: LoraBody) -> tuple[AdapterUse, ...]:
    """Return the adapters with their scales. Raises InvalidRequest for an adapter that is named twice."""
    uses = tuple(AdapterUse(str(use.id), use.scale) for use in body.lora or ())
    names = [use.name for use in uses]
    for n, name in enumerate(names):
        if name in names[:n]:
            message = f"`lora.{n}.id` is {name!r}, which an entry before it has too. Send each adapter once."
            raise InvalidRequest(message, param=f"lora.{n}.id")
    return uses


class ProgressBody(Body):
    return_progress: bool = False
    timings_per_token: bool = False


class NoticesBody(ProgressBody):
    return_tokens: bool = False


def read_notices(body: NoticesBody, *, stream: bool, verbose: bool = False) -> tuple[Notice, ...]:
    """Return what the caller wants besides the answer (`GenerateRequest.tell`). `verbose`: the settings, too."""
    notices: list[Notice] = ["settings"] if verbose else []
    notices += read_progress_notices(body, stream=stream)
    if body.return_tokens:
        notices.append("tokens")
    return tuple(notices)


def read_progress_notices(body: ProgressBody, *, stream: bool) -> tuple[Notice, ...]:
    """Return which of progress and timings the caller wants; neither if the answer is sent whole."""
    wanted: list[tuple[bool, Notice]] = [(body.return_progress, "progress"), (body.timings_per_token, "timings")]
    return tuple(notice for is_wanted, notice in wanted if is_wanted and stream)


def share_prompt_chars(requests: Sequence[GenerateRequest]) -> tuple[GenerateRequest, ...]:
    """Give each of one client's `requests` an equal part of MAX_PROMPT_CHARS, the limit on prompt text sent back."""
    most = MAX_PROMPT_CHARS // max(1, len(requests))
    return tuple(replace(one, max_prompt_chars=most) if "settings" in one.tell else one for one in requests)


MAX_N_PROBS = 100
MAX_TOP_LOGPROBS = 20


class TokenProbsBody(Body):
    """Holds llama-server's parameters for token probabilities."""

    n_probs: Annotated[int, Field(ge=0, le=MAX_N_PROBS)] = 0
    post_sampling_probs: bool = False


class ProbsBody(TokenProbsBody):
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None


def read_n_probs(body: ProbsBody) -> int:
    """Return `GenerateRequest.n_probs`: likeliest tokens to report per token; -1: only the chosen one; 0: nothing.

    Raises InvalidRequest."""
    if body.top_logprobs and not body.logprobs:
        message = f"`top_logprobs` is {body.top_logprobs}; it needs `logprobs: true`. Send both or neither."
        raise InvalidRequest(message, param="top_logprobs")
    if not body.logprobs:
        return body.n_probs
    wanted = body.n_probs if body.top_logprobs is None else body.top_logprobs
    return wanted or -1


MAX_ANSWERS = 32
MAX_SEED = 2**32 - 1


def repeat_request(request: GenerateRequest, n: int) -> tuple[GenerateRequest, ...]:
    """Return the request `n` times. As in llama-server, a seed grows by 1 from each request to the next."""
    seed = request.sampling.seed
    if seed is None:
        return (request,) * n
    return tuple(
        replace(request, sampling=replace(request.sampling, seed=(seed + number) & MAX_SEED)) for number in range(n)
    )


MAX_STOP_CHARS = 512
MAX_ALL_STOP_CHARS = 8192
"""Maximum characters of all stop strings of a request; more are refused. A worker builds a search tree of them."""

Stop = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(max_length=MAX_STOPS, fail_fast=True), Tag("<parts>")],
    Discriminator(text_or_parts),
]


def read_stop(stop: str | list[str] | None, name: str = "stop") -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else stop or []
    for n, text in enumerate(stops):
        if not 0 < len(text) <= MAX_STOP_CHARS:
            path = name if isinstance(stop, str) else f"{name}.{n}"
            message = f"`{path}` has {len(text)} characters. A stop string has 1 to {MAX_STOP_CHARS}."
            raise InvalidRequest(message, param=path)
    if (num_chars := sum(map(len, stops))) > MAX_ALL_STOP_CHARS:
        message = (
            f"`{name}` has {num_chars} characters in all. All stop strings together have at most {MAX_ALL_STOP_CHARS}."
        )
        raise InvalidRequest(message, param=name)
    return tuple(stops)
