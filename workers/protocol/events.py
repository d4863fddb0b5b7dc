"""The canonical events of a call, as workers send them and the gateway uses them, and a call's failures as data.

Each event travels as a JSON array whose first element is its tag (msgspec `array_like`), so that one engine step of
many calls is one short line. A call's events are, in order: one `Started`, any number of `Text`, `Reasoning`,
`Logprobs` and `ToolCallDelta`, then exactly one `Finished` or `Failed`. A call that is cancelled emits nothing more.
`Settings`, `Progress`, `Tokens` and `TimingsSoFar` come only for calls that ask for them in `GenerateRequest.tell`,
`PromptLogprobs` only for calls with `GenerateRequest.prompt_probs`.

The gateway translates the code of each failure once, where the failure enters the gateway:

code               HTTP status   may be retried on another worker before the first token
-----------------  -----------   --------------------------------------------------------
invalid_request    400           no
context_overflow   400           no
unsupported        400           no   (the model or this version cannot do what is asked)
unauthorized       401           no   (wrong shared secret)
busy               429           yes  (every slot and the waiting room are taken)
draining           503           yes
worker_lost        502           yes  (written by the gateway, when the worker is gone)
storage_full       503           no   (files to be kept exceed the team's bound, that of all teams, or the disk)
overrun            503           yes  (events were dropped because the gateway read them too late)
out_of_memory      503           yes  (the worker could not get the memory; nothing is wrong with the call)
unavailable        503           yes  (a helper process, folder or connection that the call needs can't be had now)
internal           500           yes
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

import msgspec

from workers.protocol.requests import Sampling


class FailureCode(StrEnum):
    INVALID_REQUEST = "invalid_request"
    CONTEXT_OVERFLOW = "context_overflow"
    UNSUPPORTED = "unsupported"
    UNAUTHORIZED = "unauthorized"
    BUSY = "busy"
    DRAINING = "draining"
    WORKER_LOST = "worker_lost"
    STORAGE_FULL = "storage_full"
    OVERRUN = "overrun"
    OUT_OF_MEMORY = "out_of_memory"
    UNAVAILABLE = "unavailable"
    INTERNAL = "internal"


RETRYABLE = frozenset(
    {
        FailureCode.BUSY,
        FailureCode.DRAINING,
        FailureCode.WORKER_LOST,
        FailureCode.OVERRUN,
        FailureCode.OUT_OF_MEMORY,
        FailureCode.UNAVAILABLE,
        FailureCode.INTERNAL,
    }
)

HTTP_STATUS = {
    FailureCode.INVALID_REQUEST: 400,
    FailureCode.CONTEXT_OVERFLOW: 400,
    FailureCode.UNSUPPORTED: 400,
    FailureCode.UNAUTHORIZED: 401,
    FailureCode.BUSY: 429,
    FailureCode.DRAINING: 503,
    FailureCode.WORKER_LOST: 502,
    FailureCode.STORAGE_FULL: 503,
    FailureCode.OVERRUN: 503,
    FailureCode.OUT_OF_MEMORY: 503,
    FailureCode.UNAVAILABLE: 503,
    FailureCode.INTERNAL: 500,
}


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a call failed. `message` names the thing, the limit and the remedy; `param` the field at fault, if any."""

    code: FailureCode
    message: str
    param: str | None = None
    num_prompt_tokens: int = 0
    """Number of the prompt's tokens; like `n_ctx`, set for `context_overflow` only."""
    n_ctx: int = 0
    """Size of the context in tokens; prompt and answer must fit into it."""
    remedy: str = ""
    """The end of a `context_overflow`'s message, without numbers: each dialect words the numbers in its own way."""


def context_overflow(num_prompt_tokens: int, n_ctx: int, *, is_whole: bool = True) -> Failure:
    """Return the failure of a prompt that is too long. `is_whole` False: counting stopped at `num_prompt_tokens`."""
    counted = "" if is_whole else "counting stopped at that number; "
    remedy = f"{counted}shorten it or serve the model with a larger --ctx"
    message = f"the prompt has {num_prompt_tokens} tokens, the context {n_ctx}, answer included; {remedy}"
    return Failure(FailureCode.CONTEXT_OVERFLOW, message, "messages", num_prompt_tokens, n_ctx, remedy)


class CallFailed(Exception):
    """Raised inside a process to carry a `Failure` to the place that answers for the call."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TOOL_CALLS = "tool_calls"


class Timings(msgspec.Struct, frozen=True, omit_defaults=True):
    """Exact token counts and times of one call, by llama-server's names. Times are measured on the engine thread."""

    cache_n: int
    """Prompt tokens that were already in the KV cache."""
    prompt_n: int
    """Prompt tokens that were computed."""
    prompt_ms: float
    predicted_n: int
    predicted_ms: float
    draft_n: int = 0
    """Tokens that were computed as drafts of the answer, and (`draft_n_accepted`) those of them that were drawn."""
    draft_n_accepted: int = 0


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts by the worker's own tokenizer. `cached_tokens` are part of `prompt_tokens`."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    accepted_prediction_tokens: int = 0
    """Tokens of drafts from the caller's `prediction` that were drawn, and (`rejected_prediction_tokens`) those that
    were computed in vain. Only the first are part of `completion_tokens`."""
    rejected_prediction_tokens: int = 0
    media_tokens: int = 0
    """Tokens of the prompt's pictures and sounds; they are part of `prompt_tokens`."""

    def __add__(self, other: Usage) -> Usage:
        """Return the sum of both. Every sum of usage is made here."""
        return Usage(
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
            self.cached_tokens + other.cached_tokens,
            self.accepted_prediction_tokens + other.accepted_prediction_tokens,
            self.rejected_prediction_tokens + other.rejected_prediction_tokens,
            self.media_tokens + other.media_tokens,
        )

    @property
    def of_prompt(self) -> Usage:
        """The prompt's part of the usage, which counts once however many answers the prompt gets."""
        return Usage(self.prompt_tokens, 0, self.cached_tokens, media_tokens=self.media_tokens)

    @property
    def of_answer(self) -> Usage:
        """The answer's part of the usage, which counts for each answer to a prompt."""
        return Usage(0, self.completion_tokens, 0, self.accepted_prediction_tokens, self.rejected_prediction_tokens)


NO_USAGE = Usage(0, 0, 0)


class Started(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """The call got a slot and its prefill begins. If the call fails before its first token, the gateway may still retry
    it on another worker, unless the caller asked for `Progress`: then the answer begins with this event."""

    call: int
    slot: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_media_tokens: int = 0

    @property
    def usage(self) -> Usage:
        """The tokens of the prompt."""
        return Usage(self.num_prompt_tokens, 0, self.num_cached_tokens, media_tokens=self.num_media_tokens)


class Text(msgspec.Struct, frozen=True, array_like=True, tag="t"):
    """The next piece of the answer's text, in whole characters. `num_tokens`: number of tokens that it was made of."""

    call: int
    text: str
    num_tokens: int = 1


class Reasoning(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """The next piece of the model's thought, without the tags around the thought; otherwise like `Text`."""

    call: int
    text: str
    num_tokens: int = 1


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    token: int
    piece: bytes
    """The token's bytes, which may begin or end within a character. Base64 in JSON."""
    logprob: float
    """Natural logarithm of the probability; with `post_sampling_probs` the probability itself."""


TokenProbs = tuple[TokenLogprob, tuple[TokenLogprob, ...]]
"""A token, and the most likely tokens in its place, best first."""


class Logprobs(msgspec.Struct, frozen=True, array_like=True, tag="p"):
    """A token's log probability. It is sent before the `Text` that the token is part of; if no text follows, before
    `Finished` or `Failed`."""

    call: int
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
    """The most likely tokens in the chosen one's place, best first."""


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True, tag="q"):
    """Log probabilities of the prompt's next tokens, each given the tokens before it. All are sent before any text.

    The first token of a prompt follows nothing, so its `logprob` is 0 and no other tokens are listed in its place."""

    call: int
    tokens: tuple[TokenProbs, ...]


class ToolCallDelta(msgspec.Struct, frozen=True, array_like=True, tag="c"):
    """The next piece of tool call number `index`. `id` and `name` are in a tool call's first delta and empty later."""

    call: int
    index: int
    id: str
    name: str
    arguments: str
    num_tokens: int = 1


class Settings(msgspec.Struct, frozen=True):
    """The settings that the call runs with. Gateways make this event from `Accepted` and insert it after `Started`."""

    call: int
    prompt: str
    """This and `sampling` are as in `workers.protocol.requests.Accepted`."""
    sampling: Sampling


class Progress(msgspec.Struct, frozen=True, array_like=True, tag="g"):
    """The prefill's progress in tokens; llama-server's `prompt_progress`."""

    call: int
    total: int
    cache: int
    """Tokens of `total` that were in the cache."""
    processed: int
    """Tokens that are in the KV cache now, those of `cache` included."""
    time_ms: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag="i"):
    """The next tokens of the answer. Sent before the `Text` made of them; if there is none, before the call's end."""

    call: int
    tokens: tuple[int, ...]


class TimingsSoFar(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """The call's timings up to the next `Text`. Sent just before that `Text`."""

    call: int
    timings: Timings


class Finished(msgspec.Struct, frozen=True, array_like=True, tag="f"):
    call: int
    reason: FinishReason
    usage: Usage
    timings: Timings
    stop: str | None = None
    """The stop string that ended the answer, if any."""
    truncated: bool = False
    """Whether the context was full, so that its older half was dropped (`context_shift`) or the answer ended."""
    num_preempted: int = 0
    """How often the call lost its slot and its KV cells to other calls and had to wait for them again."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="x"):
    call: int
    failure: Failure


WireEvent = (
    Started
    | Progress
    | Text
    | Reasoning
    | Logprobs
    | PromptLogprobs
    | Tokens
    | TimingsSoFar
    | ToolCallDelta
    | Finished
    | Failed
)

CallEvent = WireEvent | Settings

OUTPUT = (Text, Reasoning, ToolCallDelta)
"""The events that tell what came of the answer's tokens."""


def num_generated(events: Iterable[CallEvent]) -> int:
    """Return how many tokens of the answer the events tell of."""
    return sum([event.num_tokens for event in events if isinstance(event, OUTPUT)])


decode_step = msgspec.json.Decoder(list[WireEvent]).decode
"""Decodes the data of an SSE event of the default type: the events of one engine step."""

decode_alive = msgspec.json.Decoder(list[int]).decode
"""Decodes the data of an `alive` SSE event: the numbers of this gateway's calls that the worker still knows."""

_encoder = msgspec.json.Encoder()


def encode_step(events: list[CallEvent]) -> bytes:
    return _encoder.encode(events)


def encode_alive(calls: list[int]) -> bytes:
    return _encoder.encode(calls)
