"""The answers of `complete` and `infill`, whole and streamed.

Source: llama-server's `/completion` (tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
from msgspec import Struct, field

from gateway.client.chat_answers import PromptProgress, Timings, TokenLogprob


class StopType(Enum):
    """The reasons why an answer ended."""

    NONE = "none"
    """It has not ended."""
    EOS = "eos"
    LIMIT = "limit"
    """It reached `n_predict` or the end of the context."""
    WORD = "word"
    """It reached a stop string; `stopping_word` is the one."""
    OTHER = "other"
    """A reason that this client does not know."""

    @classmethod
    def _missing_(cls, value: object) -> StopType:
        return cls.OTHER


class CompletionResponse(Struct, frozen=True, kw_only=True):
    """A whole answer. Fields that `response_fields` left out have their defaults."""

    content: str = ""
    tokens: tuple[int, ...] = ()
    """Ids of the answer's tokens, where `return_tokens` was asked for."""
    index: int = 0
    """Number of the prompt or completion among several."""
    id_slot: int = -1
    stop: bool = True
    stop_type: StopType = StopType.NONE
    stopping_word: str = ""
    model: str = ""
    prompt: Any = None
    """The prompt as the model read it."""
    generation_settings: dict[str, Any] = field(default_factory=dict)
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    """Tokens of the prompt."""
    tokens_cached: int = 0
    has_new_line: bool = False
    truncated: bool = False
    """Whether the context was exceeded."""
    timings: Timings | None = None
    completion_probabilities: tuple[TokenLogprob, ...] | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Fields that are not named here, such as the ones that `response_fields` lifted out of others."""


class CompletionChunk(CompletionResponse, frozen=True, kw_only=True):
    """One event of a streamed answer: the next `content`. The last one has `stop` and all fields but the text."""

    stop: bool = False
    prompt_progress: PromptProgress | None = None


_KNOWN = frozenset(CompletionResponse.__struct_fields__) - {"extra"}
_document = msgspec.json.Decoder(dict[str, Any]).decode
_documents = msgspec.json.Decoder(dict[str, Any] | list[dict[str, Any]]).decode

read_chunk = msgspec.json.Decoder(CompletionChunk).decode


def read_completion(body: bytes) -> CompletionResponse:
    """Return the answer in a body. Raises msgspec.MsgspecError, also for a list, as several completions give."""
    return _completion(_document(body))


def read_completion_text(body: bytes) -> str:
    """Return the text of the answer in a body. Raises msgspec.MsgspecError."""
    return read_completion(body).content


def read_completions(body: bytes) -> tuple[CompletionResponse, ...]:
    """Return the answers in a body, one or a list of them. Raises msgspec.MsgspecError."""
    found = _documents(body)
    return tuple(_completion(one) for one in (found if isinstance(found, list) else [found]))


def _completion(document: dict[str, Any]) -> CompletionResponse:
    extra = {name: value for name, value in document.items() if name not in _KNOWN}
    return msgspec.convert({**document, "extra": extra}, CompletionResponse)
