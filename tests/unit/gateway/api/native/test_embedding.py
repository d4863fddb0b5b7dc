"""llama-server's own embeddings: what is read, and how vectors are written."""

from __future__ import annotations

import json
import struct
from array import array
from typing import Any

import pytest
from starlette.types import Scope

from gateway.api.native.embedding import EmbeddingDialect, EmbeddingRequest
from gateway.call import Call, Principal
from gateway.errors import InvalidRequest
from workers.protocol.pooled import PoolResult

SCOPE: Scope = {"type": "http", "query_string": b"model=e"}
CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)


def read(**body: Any) -> EmbeddingRequest:
    return EmbeddingDialect().read(json.dumps(body).encode(), SCOPE)


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ({"content": "a"}, ("a",)),
        ({"input": ["a", "b"]}, ("a", "b")),
        ({"content": [1, 2]}, (array("i", [1, 2]),)),
        ({"content": [[1, 2], "a"]}, (array("i", [1, 2]), "a")),
        ({"content": [1, "a"]}, ((1, "a"),)),
        ({"content": ""}, ("",)),
    ],
)
def test_every_form_of_input(body: dict[str, Any], inputs: tuple[Any, ...]) -> None:
    asked = read(**body)
    assert (asked.model, asked.request.inputs, asked.request.normalize) == ("e", inputs, 2)


@pytest.mark.parametrize(
    "body",
    [{}, {"content": [1, None]}, {"content": "a", "encoding_format": "base64"}, {"content": "", "embd_normalize": -2}],
)
def test_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        read(**body)


def test_one_vector_per_input_or_one_per_token() -> None:
    numbers = [0.5, 1.0, -2.0, 4.0, 8.0, 0.25]
    result = PoolResult(pooling="none", width=2, rows=(1, 2), num_tokens=(1, 2), vectors=struct.pack("<6f", *numbers))
    written = json.loads(b"".join(EmbeddingDialect().parts(read(content="a"), CALL, result)))
    assert written == [{"index": 0, "embedding": [[0.5, 1.0]]}, {"index": 1, "embedding": [[-2.0, 4.0], [8.0, 0.25]]}]
