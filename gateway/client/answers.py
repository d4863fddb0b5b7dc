"""Declares and decodes the answers to calls. Unknown fields of an answer are ignored; missing fields have defaults.

Sources: OpenAI's API reference, "Chat completion object", "chunk object" and "Embedding object"; llama-server's
`/completion`, `/embedding`, `/rerank` and `/tokenize`, its `timings`, `prompt_progress` and `reasoning_content`
(tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import base64
import struct
from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct, field


class Timings(Struct, frozen=True):
    """The timings of one answer: durations in milliseconds, rates in tokens per second."""

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
    draft_n: int = 0
    """Tokens that were computed as drafts, and (`draft_n_accepted`) those of them that the answer has."""
    draft_n_accepted: int = 0


class PromptProgress(Struct, frozen=True):
    """The progress of the prefill in tokens; sent if the call has `return_progress`."""

    total: int = 0
    cache: int = 0
    processed: int = 0
    time_ms: float = 0.0


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class CompletionTokensDetails(Struct, frozen=True):
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    """Tokens of the call's `prediction` that the answer has and that were computed as drafts of it. Like
    `rejected_prediction_tokens`, those computed in vain, only for calls with a `prediction`."""
    rejected_prediction_tokens: int | None = None


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
    """A message: an answer, or a turn of the conversation. The parameter `messages` accepts it unchanged."""

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
    """A whole answer of `chat.completions.create`, not streamed."""

    choices: tuple[Choice, ...]
    id: str = ""
    created: int = 0
    """Unix time in seconds at which the answer was made."""
    model: str = ""
    system_fingerprint: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None

    @property
    def text(self) -> str:
        """The content of the first choice; empty if that choice has no content, as with a tool call."""
        return (self.choices[0].message.content or "") if self.choices else ""


class FunctionDelta(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None
    """The next piece of the arguments' JSON text."""


class ToolCallDelta(Struct, frozen=True):
    index: int = 0
    id: str | None = None
    type: str | None = None
    function: FunctionDelta | None = None


class Delta(Struct, frozen=True):
    """The piece that a chunk adds to the answer of its choice."""

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
    """One event of a streamed answer. In the event that carries `usage`, `choices` is empty."""

    choices: tuple[ChunkChoice, ...] = ()
    id: str = ""
    created: int = 0
    model: str = ""
    usage: Usage | None = None
    timings: Timings | None = None
    prompt_progress: PromptProgress | None = None

    @property
    def text(self) -> str:
        """The text that this chunk adds to the content of the first choice."""
        return next((choice.delta.content or "" for choice in self.choices if choice.index == 0), "")

    @property
    def reasoning(self) -> str:
        """The text that this chunk adds to the reasoning of the first choice."""
        return next((choice.delta.reasoning_content or "" for choice in self.choices if choice.index == 0), "")


class StopType(Enum):
    """The reasons why an answer ended."""

    NONE = "none"
    """The answer has not ended."""
    EOS = "eos"
    LIMIT = "limit"
    """The answer reached `n_predict` or the end of the context."""
    WORD = "word"
    """The answer reached a stop string, which is in `stopping_word`."""
    OTHER = "other"
    """The server named a reason that this client does not know."""

    @classmethod
    def _missing_(cls, value: object) -> StopType:
        return cls.OTHER


class CompletionResponse(Struct, frozen=True, kw_only=True):
    """A whole answer of `complete`, not streamed. Fields that `response_fields` does not name have their defaults."""

    content: str = ""
    tokens: tuple[int, ...] = ()
    """Ids of the answer's tokens, if the call has `return_tokens`."""
    index: int = 0
    """Number of the prompt or completion, from 0, if the call has several."""
    id_slot: int = -1
    stop: bool = True
    stop_type: StopType = StopType.NONE
    stopping_word: str = ""
    model: str = ""
    prompt: Any = None
    """The prompt as the model received it."""
    generation_settings: dict[str, Any] = field(default_factory=dict)
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    """Number of tokens of the prompt."""
    tokens_cached: int = 0
    has_new_line: bool = False
    truncated: bool = False
    """Whether the context was exceeded, so that tokens were dropped."""
    timings: Timings | None = None
    completion_probabilities: tuple[TokenLogprob, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields of the answer that this class does not declare, such as nested ones that `response_fields` names."""


class CompletionChunk(CompletionResponse, frozen=True, kw_only=True):
    """One event of a streamed answer, with the next piece of `content`. In the last event, `stop` is true and all
    fields are set except the text."""

    stop: bool = False
    prompt_progress: PromptProgress | None = None


_KNOWN = frozenset(CompletionResponse.__struct_fields__) - {"extra"}
_document = msgspec.json.Decoder(dict[str, Any]).decode
_documents = msgspec.json.Decoder(dict[str, Any] | list[dict[str, Any]]).decode

read_chunk = msgspec.json.Decoder(CompletionChunk).decode


def read_completion(body: bytes) -> CompletionResponse:
    """Return the one answer in a body. Raises msgspec.MsgspecError, also if the body is a list of answers."""
    return _completion(_document(body))


def read_completion_text(body: bytes) -> str:
    """Return the text of the answer in a body. Raises msgspec.MsgspecError."""
    return read_completion(body).content


def read_completions(body: bytes) -> tuple[CompletionResponse, ...]:
    """Return the answers in a body, which has one answer or a list. Raises msgspec.MsgspecError."""
    found = _documents(body)
    return tuple(_completion(one) for one in (found if isinstance(found, list) else [found]))


def _completion(document: dict[str, Any]) -> CompletionResponse:
    extra = {name: value for name, value in document.items() if name not in _KNOWN}
    return msgspec.convert({**document, "extra": extra}, CompletionResponse)


FLOAT_BYTES = 4


class Embedding(Struct, frozen=True):
    embedding: tuple[float, ...] | str
    """The vector; with `encoding_format="base64"` a text: little-endian 32-bit floats in base64."""
    index: int = 0

    @property
    def vector(self) -> tuple[float, ...]:
        """The vector as numbers, whichever encoding the call asked for."""
        if not isinstance(self.embedding, str):
            return self.embedding
        raw = base64.b64decode(self.embedding)
        return struct.unpack(f"<{len(raw) // FLOAT_BYTES}f", raw)


class EmbeddingsResponse(Struct, frozen=True):
    data: tuple[Embedding, ...]
    model: str = ""
    usage: Usage | None = None


class TextEmbedding(Struct, frozen=True):
    """An answer of `embed`: one vector, or one per token if the model does not pool."""

    embedding: tuple[tuple[float, ...], ...]
    index: int = 0

    @property
    def vector(self) -> tuple[float, ...]:
        """The first vector; if the model pools, it is the only one, that of the whole text."""
        return self.embedding[0] if self.embedding else ()


class RerankResult(Struct, frozen=True):
    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: Any = None
    """The document, if the call asked the server to return it."""


class RerankResponse(Struct, frozen=True):
    results: tuple[RerankResult, ...]
    """Results, best first."""
    model: str = ""
    usage: Usage | None = None


class TranscriptionUsage(Struct, frozen=True):
    input_tokens: int = 0
    """Tokens of the instruction, and those in place of the sound."""
    output_tokens: int = 0
    total_tokens: int = 0


class Transcription(Struct, frozen=True):
    """The text of what is said in a sound."""

    text: str
    usage: TranscriptionUsage = TranscriptionUsage()


class TokenizeResponse(Struct, frozen=True):
    tokens: tuple[int, ...]
    pieces: tuple[str | bytes, ...] | None = None
    """Text of each token, if the call asked for it; bytes if the token alone is no valid UTF-8."""


class _Piece(Struct, frozen=True):
    id: int
    piece: str | tuple[int, ...]


class _Tokens(Struct, frozen=True):
    tokens: tuple[int | _Piece, ...]


class _Content(Struct, frozen=True):
    content: str


class _Prompt(Struct, frozen=True):
    prompt: str


_tokens = msgspec.json.Decoder(_Tokens).decode
_content = msgspec.json.Decoder(_Content).decode
_prompt = msgspec.json.Decoder(_Prompt).decode

read_embeddings = msgspec.json.Decoder(EmbeddingsResponse).decode
read_text_embeddings = msgspec.json.Decoder(tuple[TextEmbedding, ...]).decode
read_ranks = msgspec.json.Decoder(RerankResponse).decode
read_transcription = msgspec.json.Decoder(Transcription).decode


def read_tokens(body: bytes) -> TokenizeResponse:
    """Return the token ids in a body. Raises msgspec.MsgspecError."""
    found = _tokens(body).tokens
    pieces = tuple(_piece(one.piece) for one in found if isinstance(one, _Piece))
    ids = tuple(one.id if isinstance(one, _Piece) else one for one in found)
    return TokenizeResponse(ids, pieces if len(pieces) == len(ids) and pieces else None)


def read_content(body: bytes) -> str:
    """Return the text in a body. Raises msgspec.MsgspecError."""
    return _content(body).content


def read_prompt(body: bytes) -> str:
    """Return the prompt in a body. Raises msgspec.MsgspecError."""
    return _prompt(body).prompt


def _piece(piece: str | tuple[int, ...]) -> str | bytes:
    return piece if isinstance(piece, str) else bytes(piece)
