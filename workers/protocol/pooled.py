"""Pooled work on the worker wire: embeddings, and documents ranked against a query.

`POST /v1/pool` with a `PoolRequest` answers `200` with a `PoolResult` when all of it is computed, or an error status
with a `Failure`. Nothing is remembered: repeating a request computes it anew. Closing the connection cancels it.
"""

from __future__ import annotations

from typing import Literal

import msgspec

POOL_PATH = "/v1/pool"

PoolKind = Literal["embed", "rank"]

PoolInput = str | tuple[int | str, ...]


class PoolRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Body of `POST /v1/pool`."""

    inputs: tuple[PoolInput, ...]
    """Texts or token ids, or both in turn, to embed, or documents (texts) to rank. Token ids are taken as they are."""
    kind: PoolKind = "embed"
    query: str | None = None
    """What the documents are ranked against; with `rank` only."""
    normalize: int = 2
    """llama-server's `embd_normalize`. -1: none, 0: largest value 32,760, 1: taxicab, 2: euclidean, above: p-norm.
    Scores and single tokens' vectors are never normalised."""
    tenant: str = ""
    request_id: str = ""
    """For the worker's log lines."""
    traceparent: str = ""
    """As in `Submit`."""
    tracestate: str = ""


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    """Body of the `200` to a `PoolRequest`: a matrix of float32, little-endian, row after row, in the inputs' order.

    Base64 in JSON: a fraction of the bytes and of the time that numbers in decimals take (docs/performance.md).
    """

    pooling: str
    """How a row came of its input: none, mean, cls, last or rank (a row is one score, higher fits better)."""
    width: int
    """Numbers in a row."""
    rows: tuple[int, ...]
    """Rows of each input: one, or with pooling none one per token."""
    num_tokens: tuple[int, ...]
    """Tokens of each input, by the worker's own tokenizer."""
    vectors: bytes


decode_request = msgspec.json.Decoder(PoolRequest).decode
decode_result = msgspec.json.Decoder(PoolResult).decode
encode = msgspec.json.Encoder().encode
