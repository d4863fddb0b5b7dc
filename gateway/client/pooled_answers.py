"""The answers of calls about texts and tokens: embeddings, ranks, token ids.

Sources: OpenAI's API reference, "Embedding object"; llama-server's `/embedding`, `/rerank` and `/tokenize`
(tools/server/README.md of llama.cpp).
"""

from __future__ import annotations

import base64
import struct
from typing import Any

import msgspec
from msgspec import Struct

from gateway.client.chat_answers import Usage

FLOAT_BYTES = 4


class Embedding(Struct, frozen=True):
    embedding: tuple[float, ...] | str
    """The vector; for `encoding_format="base64"` text of little-endian 32-bit floats."""
    index: int = 0

    @property
    def vector(self) -> tuple[float, ...]:
        """The numbers of the vector, whichever the encoding."""
        if not isinstance(self.embedding, str):
            return self.embedding
        raw = base64.b64decode(self.embedding)
        return struct.unpack(f"<{len(raw) // FLOAT_BYTES}f", raw)


class EmbeddingsResponse(Struct, frozen=True):
    data: tuple[Embedding, ...]
    model: str = ""
    usage: Usage | None = None


class TextEmbedding(Struct, frozen=True):
    """An answer of `embed`: one vector, or one per token where the model pools nothing."""

    embedding: tuple[tuple[float, ...], ...]
    index: int = 0

    @property
    def vector(self) -> tuple[float, ...]:
        """The first vector: that of the text, where the model pools."""
        return self.embedding[0] if self.embedding else ()


class RerankResult(Struct, frozen=True):
    index: int
    """Index of the document in the request."""
    relevance_score: float
    document: Any = None
    """The document as the server returns it, if it was asked to."""


class RerankResponse(Struct, frozen=True):
    results: tuple[RerankResult, ...]
    """Results, best first."""
    model: str = ""
    usage: Usage | None = None


class TokenizeResponse(Struct, frozen=True):
    tokens: tuple[int, ...]
    pieces: tuple[str | bytes, ...] | None = None
    """Text of each token, where asked for; bytes where a token alone is no valid UTF-8."""


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
