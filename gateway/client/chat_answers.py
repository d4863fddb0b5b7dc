"""The answers of `chat.completions.create`. Unknown fields of a server are ignored; missing ones have defaults.

Source: OpenAI's API reference, "Chat completion object" and "chunk object"; `timings`, `prompt_progress` and
`reasoning_content` are llama-server's (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from msgspec import Struct


class Timings(Struct, frozen=True):
    """The durations and rates of one answer: milliseconds, and tokens per second."""

    cache_n: int = 0
    """Prompt tokens taken from a cache."""
    prompt_n: int = 0
    """Prompt tokens computed."""
    prompt_ms: float = 0.0
    prompt_per_token_ms: float | None = None
    prompt_per_second: float | None = None
    predicted_n: int = 0
    predicted_ms: float = 0.0
    predicted_per_token_ms: float | None = None
    predicted_per_second: float | None = None


class PromptProgress(Struct, frozen=True):
    """The progress of the prefill in tokens; sent where `return_progress` was asked for."""

    total: int = 0
    cache: int = 0
    processed: int = 0
    time_ms: float = 0.0


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int | None = None


class Usage(Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None
    completion_tokens_details: CompletionTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens taken from a cache."""
        details = self.prompt_tokens_details
        return (details.cached_tokens or 0) if details else 0


class TopToken(Struct, frozen=True):
    """One of the likeliest tokens at a position. With `post_sampling_probs` it has `prob` instead of `logprob`."""

    token: str = ""
    id: int | None = None
    bytes: tuple[int, ...] | None = None
    logprob: float | None = None
    prob: float | None = None


class TokenLogprob(Struct, frozen=True):
    """A token of the answer. With `post_sampling_probs` it has `prob` and `top_probs` instead of `logprob` and
    `top_logprobs`."""

    token: str = ""
    id: int | None = None
    bytes: tuple[int, ...] | None = None
    logprob: float | None = None
    prob: float | None = None
    top_logprobs: tuple[TopToken, ...] | None = None
    top_probs: tuple[TopToken, ...] | None = None


class Logprobs(Struct, frozen=True):
    content: tuple[TokenLogprob, ...] | None = None


class FunctionCall(Struct, frozen=True):
    name: str
    arguments: str
    """The arguments as JSON text."""


class ToolCall(Struct, frozen=True):
    id: str
    type: str
    function: FunctionCall


class Message(Struct, frozen=True, omit_defaults=True):
    """An answer, or a turn of the conversation; the parameter `messages` takes it as it is."""

    role: str
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None


class Choice(Struct, frozen=True):
    message: Message
    index: int = 0
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class ChatCompletion(Struct, frozen=True):
    """A whole answer."""

    choices: tuple[Choice, ...]
    id: str = ""
    created: int = 0
    """Unix time, seconds."""
    model: str = ""
    system_fingerprint: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """The content of the first choice; empty where it is a tool call."""
        return (self.choices[0].message.content or "") if self.choices else ""


class FunctionDelta(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None
    """The next piece of the JSON text."""


class ToolCallDelta(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(Struct, frozen=True):
    """The piece of an answer that a chunk adds to its choice."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: tuple[ToolCallDelta, ...] | None = None


class ChunkChoice(Struct, frozen=True):
    delta: Delta
    index: int = 0
    finish_reason: str | None = None
    logprobs: Logprobs | None = None


class ChatChunk(Struct, frozen=True):
    """One event of a streamed answer; `choices` is empty in the one that carries `usage`."""

    choices: tuple[ChunkChoice, ...] = ()
    id: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None

    @property
    def text(self) -> str:
        """The text that it adds to the content of the first choice."""
        return next((choice.delta.content or "" for choice in self.choices if choice.index == 0), "")

    @property
    def reasoning(self) -> str:
        """The text that it adds to the reasoning of the first choice."""
        return next((choice.delta.reasoning_content or "" for choice in self.choices if choice.index == 0), "")
