"""`POST /v1/rerank`, also as `/rerank`, `/v1/reranking` and `/reranking`: documents by how well they fit a query.

Sources: Jina's rerank API and llama-server's (tools/server/README.md of llama.cpp); with `texts` in place of
`documents`, the form of Hugging Face's text-embeddings-inference, as llama-server has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag
from starlette.types import Scope

from gateway.api.body import read_object
from gateway.api.diagnostics import ignored_of
from gateway.api.openai.refused import POOLED_IGNORED, RERANK_REFUSED
from gateway.api.parameters.base import Body, Loose
from gateway.api.parameters.unread import read_body
from gateway.api.vectors import rows_of
from gateway.call import Call
from gateway.errors import InvalidRequest
from workers.protocol.json_parts import json_parts
from workers.protocol.pooled import PoolRequest, PoolResult

MAX_DOCUMENTS = 2048
MAX_TOP = 2**31 - 1


class DocumentBody(Loose):
    text: str


def _document_kind(value: Any) -> str:
    return "<object>" if isinstance(value, dict) else "<text>"


Document = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[DocumentBody, Tag("<object>")],
    Discriminator(_document_kind),
]


class RerankBody(Body):
    model: str = ""
    query: str
    documents: Annotated[list[Document], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    top_n: Annotated[int, Field(ge=1, le=MAX_TOP)] | None = None
    return_documents: bool = False
    texts: Annotated[list[str], Field(min_length=1, max_length=MAX_DOCUMENTS, fail_fast=True)] | None = None
    return_text: bool = False


@dataclass(frozen=True, slots=True)
class RerankRequest:
    model: str
    request: PoolRequest
    top_n: int | None
    with_texts: bool
    is_bare: bool
    """Whether a bare array is answered, the form of text-embeddings-inference."""


class RerankDialect:
    """Reranking: reader and writer."""

    def read(self, raw: bytes, scope: Scope) -> RerankRequest:
        body = read_body(RerankBody, read_object(raw), (POOLED_IGNORED, RERANK_REFUSED), ignored_of(scope))
        request = PoolRequest(inputs=_texts(body), kind="rank", query=body.query)
        bare = body.texts is not None
        return RerankRequest(body.model, request, body.top_n, body.return_text if bare else body.return_documents, bare)

    def parts(self, asked: RerankRequest, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the documents best first, of equals the earlier one; their texts, if told back, may be long."""
        scores = [row[0] for row in rows_of(result)]
        order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.top_n]
        entries = [self._entry(asked, index, scores[index]) for index in order]
        if asked.is_bare:
            return json_parts(entries)
        num_tokens = sum(result.num_tokens)
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        return json_parts({"object": "list", "model": call.alias, "results": entries, "usage": usage})

    def _entry(self, asked: RerankRequest, index: int, score: float) -> dict[str, Any]:
        entry: dict[str, Any] = {"index": index, "score" if asked.is_bare else "relevance_score": score}
        text = asked.request.inputs[index]
        if asked.with_texts:
            entry["text" if asked.is_bare else "document"] = text if asked.is_bare else {"text": text}
        return entry


def _texts(body: RerankBody) -> tuple[str, ...]:
    if (body.documents is None) == (body.texts is None):
        problem = "is missing" if body.texts is None else "and `texts` are two forms of one request"
        raise InvalidRequest(f"`documents` {problem}. Send an array of texts as `documents`.", param="documents")
    return tuple(one if isinstance(one, str) else one.text for one in body.documents or body.texts or ())
