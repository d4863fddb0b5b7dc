"""`POST /v1/embeddings`.

Source: OpenAI's API reference, "Create embeddings"; `embd_normalize` is llama-server's (tools/server/README.md of
llama.cpp).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field
from starlette.types import Scope

from gateway.api.body import read_object
from gateway.api.diagnostics import ignored_of
from gateway.api.openai.refused import POOLED_IGNORED
from gateway.api.parameters.base import Body
from gateway.api.parameters.pool_inputs import FORMS, MAX_INPUTS, read_pool_inputs
from gateway.api.parameters.unread import read_body
from gateway.api.vectors import PART_BYTES, base64_of, rows_of, shortened
from gateway.call import Call
from gateway.errors import InvalidRequest
from workers.protocol.pooled import PoolRequest, PoolResult

MAX_TOKEN = 2**31 - 1
MAX_NORM = 1024

_encode = msgspec.json.Encoder().encode


class EmbeddingsBody(Body):
    model: str = ""
    input: Annotated[Any, Field(description=f"{FORMS}, up to {MAX_INPUTS}")]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    embd_normalize: Annotated[int, Field(ge=-1, le=MAX_NORM)] = 2


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    model: str
    request: PoolRequest
    as_base64: bool
    width: int | None
    """Numbers wanted of each vector; None: all."""


class EmbeddingsDialect:
    """OpenAI's embeddings: reader and writer."""

    def read(self, raw: bytes, scope: Scope) -> EmbeddingsRequest:
        body = read_body(EmbeddingsBody, read_object(raw), (POOLED_IGNORED, {}), ignored_of(scope))
        if body.dimensions is not None and body.embd_normalize != 2:
            message = (
                "`dimensions` gives shortened vectors length 1 again; `embd_normalize` asks for another. Send one."
            )
            raise InvalidRequest(message, param="dimensions")
        request = PoolRequest(inputs=read_pool_inputs(body.input, "input"), kind="embed", normalize=body.embd_normalize)
        return EmbeddingsRequest(body.model, request, body.encoding_format == "base64", body.dimensions)

    def parts(self, asked: EmbeddingsRequest, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield a list of one object per input. Raises InvalidRequest before the first part."""
        if result.pooling == "none":
            message = (
                f"The model `{call.alias}` makes a vector of each token (pooling none), which this answer has no place "
                "for. Ask it through POST /embeddings."
            )
            raise InvalidRequest(message, param="model")
        if asked.width is not None and asked.width > result.width:
            message = f"`dimensions` is {asked.width}; the model's vectors have {result.width}. Send at most that."
            raise InvalidRequest(message, param="dimensions")
        part = bytearray(b'{"object":"list","model":' + _encode(call.alias) + b',"data":[')
        for index, row in enumerate(rows_of(result)):
            if len(part) >= PART_BYTES:
                yield bytes(part)
                part.clear()
            part += (b"," if index else b"") + self._entry(asked, row, index)
        num_tokens = sum(result.num_tokens)
        usage = _encode({"prompt_tokens": num_tokens, "total_tokens": num_tokens})
        yield bytes(part) + b'],"usage":' + usage + b"}"

    def _entry(self, asked: EmbeddingsRequest, row: Any, index: int) -> bytes:
        if asked.width is not None:
            row = shortened(row, asked.width)
        vector = base64_of(row) if asked.as_base64 else row.tolist()
        return _encode({"object": "embedding", "index": index, "embedding": vector})
