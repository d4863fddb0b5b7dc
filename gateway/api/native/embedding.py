"""Reads and answers `POST /embedding` and `/embeddings` in llama-server's form: a vector per token for pooling `none`.

Source: `handle_embeddings_impl` in tools/server/server-context.cpp of llama.cpp.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from pydantic import Field
from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.intake.body import read_object
from gateway.api.intake.intake import attachments_of
from gateway.api.media.attachments import Attachments
from gateway.api.parameters.base import Body
from gateway.api.parameters.options import MAX_SALT_CHARS
from gateway.api.parameters.pool_inputs import read_pool_inputs
from gateway.api.parameters.unsupported import read_body
from gateway.api.request_headers import named_model
from gateway.api.shapes import PART_BYTES
from gateway.call import Call
from gateway.errors import InvalidRequest
from workers.protocol.pooled import FLOAT_BYTES, PoolInput, PoolKind, PoolRequest, PoolResult
from workers.protocol.requests import Medium

MAX_NORM = 1024

_encode = msgspec.json.Encoder().encode


class EmbeddingBody(Body):
    model: str = ""
    content: Any = None
    input: Any = None
    embd_normalize: Annotated[int, Field(ge=-1, le=MAX_NORM)] = 2
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    encoding_format: str = "float"


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    model: str
    request: PoolRequest


class EmbeddingDialect:
    """Reads requests for embeddings and writes the vectors, in llama-server's form."""

    kind: PoolKind = "embed"

    def read(self, raw: bytes, scope: Scope) -> EmbeddingRequest:
        """Return the parsed body. Raises InvalidRequest, NotSupported."""
        document = read_object(raw)
        document["model"] = named_model(document, scope)
        body = read_body(EmbeddingBody, document, ({}, {}), ignored_of(scope))
        inputs, media = read_inputs(body, attachments_of(scope))
        request = PoolRequest(inputs=inputs, media=media, normalize=body.embd_normalize, cache_salt=body.cache_salt)
        return EmbeddingRequest(body.model, request)

    def parts(self, asked: EmbeddingRequest, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the JSON in parts: an array of one object per input, each with a list of one or more vectors."""
        part = bytearray(b"[")
        size, start = result.width * FLOAT_BYTES, 0
        for index, num_rows in enumerate(result.rows):
            part += b'%b{"index":%d,"embedding":[' % (b"," if index else b"", index)
            for row in range(num_rows):
                if len(part) >= PART_BYTES:
                    yield bytes(part)
                    part.clear()
                part += (b"," if row else b"") + _encode(floats(result.vectors[start : start + size]))
                start += size
            part += b"]}"
        yield bytes(part) + b"]"


def read_inputs(body: EmbeddingBody, attachments: Attachments) -> tuple[tuple[PoolInput, ...], tuple[Medium, ...]]:
    """Return the inputs, from `input` or else `content`, and their media. Raises InvalidRequest, NotSupported."""
    if body.encoding_format != "float":
        message = "`encoding_format` is not `float`; this route answers in numbers. Ask `/v1/embeddings` for others."
        raise InvalidRequest(message, param="encoding_format")
    name = "content" if body.input is None else "input"
    given = body.content if body.input is None else body.input
    return read_pool_inputs(given, name, attachments)


def floats(raw: bytes) -> list[float]:
    """Return the numbers in `raw`, a row of 32-bit little-endian floats."""
    numbers = array("f", raw)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
