"""The wire types for pooled work: embeddings, and documents ranked against a query.

`POST /v1/pool` with a `PoolRequest` answers `200` with a `PoolResult` when all of it is computed, or an error status
with a `Failure`. No results are kept: repeating a request computes it anew. Closing the connection cancels it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from workers.protocol.pieces import PieceDecoder
from workers.protocol.requests import Medium, Message

POOL_PATH = "/v1/pool"
FLOAT_BYTES = 4
"""Bytes of one number of a vector."""

PoolKind = Literal["embed", "rank"]


class PoolPrompt(msgspec.Struct, frozen=True, gc=False, kw_only=True, omit_defaults=True):
    """An input that is a text with pictures and sounds in it, or messages that the model's chat template renders."""

    text: str = ""
    media: tuple[int, ...] = ()
    """Places in `text` where the request's next media (`PoolRequest.media`) stand, as in `Message.media`."""
    messages: tuple[Message, ...] = ()
    """Messages to embed, in place of `text`. Their media have their places in them."""
    template_values: str = ""
    """Further variables for the chat template, as in `GenerateRequest.template_values`."""

    @property
    def num_media(self) -> int:
        """Return how many of the request's media stand in this input."""
        return len(self.media) + sum(len(message.media) for message in self.messages)


PoolInput = str | Sequence[int | str] | PoolPrompt


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/pool`."""

    inputs: tuple[PoolInput, ...]
    """What to embed: each input is a text, a list of token ids, texts or both, or a prompt with media or messages. With
    `rank`: the documents, as texts. Token ids are used as they are."""
    media: tuple[Medium, ...] = ()
    """Pictures and sounds, in the order in which they stand in the inputs."""
    kind: PoolKind = "embed"
    query: str | None = None
    """Text that the documents are ranked against; with `rank` only."""
    normalize: int = 2
    """llama-server's `embd_normalize`. -1: none, 0: largest value 32,760, 1: taxicab, 2: euclidean, above: p-norm.
    Scores, and the vectors of single tokens (pooling `none`), are never normalised."""
    cache_salt: str = ""
    """Narrows the sharing of encoded pictures and sounds to requests of the same team with the same salt."""
    tenant: str = ""
    request_id: str = ""
    """Id of the request, for the worker's log lines."""
    traceparent: str = ""
    """The gateway's span around the call, as in `Submit`; empty: the call is not traced."""
    tracestate: str = ""


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the `200` to a `PoolRequest`."""

    pooling: str
    """How an input became rows: none, mean, cls, last or rank (a row is one score; a higher one fits better)."""
    width: int
    """Number of floats in a row."""
    rows: tuple[int, ...]
    """Number of rows of each input: one, but if `pooling` is none, one for each token of the input."""
    num_tokens: tuple[int, ...]
    """Number of tokens of each input, by the worker's own tokenizer."""
    vectors: bytes
    """All rows, in the inputs' order, as little-endian float32. Base64 in JSON, which takes a fraction of the bytes and
    of the time of decimal numbers (docs/performance.md)."""


class ResultReader:
    """Decodes a `PoolResult` in pieces: decoding 32 MiB of vectors in one call takes 60 ms, in which no stream moves.

    Call `add` once per iteration of the event loop. The JSON around the vectors is kept and decoded at the end."""

    _BEGIN, _END = b'"vectors":"', b'"'
    """The JSON before and after the vectors. Within another JSON string the quotes would have backslashes."""
    _GROUP_CHARS, _GROUP_BYTES = 4, 3
    """Characters of a group of base64, and the bytes that they stand for; the last group may stand for fewer."""

    def __init__(self, hold: Callable[[int], None] = lambda num_bytes: None) -> None:
        """`hold` is called after each piece with the bytes of all vectors decoded so far. What it raises, `add` raises:
        so a caller can refuse vectors that take too much memory."""
        self._hold = hold
        self._before, self._behind = bytearray(), bytearray()
        self._vectors = bytearray()
        self._rest = b""
        """Characters of an unfinished base64 group at the end of the last piece."""
        self._has_begun = self._has_ended = False
        """Whether the beginning and the end of the vectors have been read."""

    def add(self, piece: bytes) -> None:
        """Read the next piece. Raises msgspec.DecodeError, and what `hold` raises."""
        if not self._has_begun:
            searched = max(0, len(self._before) - len(self._BEGIN))
            self._before += piece
            found = self._before.find(self._BEGIN, searched)
            if found < 0:
                return
            self._has_begun = True
            piece = bytes(self._before[found + len(self._BEGIN) :])
            del self._before[found + len(self._BEGIN) :]
        if not self._has_ended:
            end = piece.find(self._END)
            self._decode(piece if end < 0 else piece[:end])
            if end < 0:
                return
            self._has_ended = True
            piece = piece[end:]
        self._behind += piece

    def result(self) -> PoolResult:
        """Return the result, after all of its pieces were added. Raises msgspec.DecodeError."""
        if self._rest:
            raise msgspec.DecodeError("The vectors end within a group of base64")
        # A bytearray in place of bytes saves a copy; readers see no difference.
        return msgspec.structs.replace(decode_result(self._before + self._behind), vectors=self._vectors)

    def _decode(self, text: bytes) -> None:
        text = self._rest + text
        whole = len(text) - len(text) % self._GROUP_CHARS
        self._rest = text[whole:]
        if whole and len(self._vectors) % self._GROUP_BYTES:
            raise msgspec.DecodeError("The vectors go on behind their end")
        self._vectors += _decode_bytes(b'"%b"' % text[:whole])
        self._hold(len(self._vectors))


_decode_bytes = msgspec.json.Decoder(bytes).decode
decode_request = PieceDecoder(PoolRequest)
decode_result = msgspec.json.Decoder(PoolResult).decode
encode = msgspec.json.Encoder().encode
