"""Reads and answers `POST /v1/embeddings` and `POST /v1/rerank`, which sorts documents by how well they fit a query.

Sources: OpenAI's API reference, "Create embeddings", with llama-server's `embd_normalize`; for `messages` vLLM's
`EmbeddingChatRequest`; Jina's rerank API and llama-server's (tools/server/README.md of llama.cpp). A rerank with
`texts` in place of `documents` is answered in the form of Hugging Face's text-embeddings-inference, as by llama-server.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Discriminator, Field, Tag
from starlette.types import Scope

from gateway.api.http.diagnostics import ignored_of
from gateway.api.intake.body import read_object
from gateway.api.intake.intake import attachments_of
from gateway.api.media.attachments import Attachments
from gateway.api.openai.bodies import POOLED_IGNORED, RERANK_REFUSED
from gateway.api.parameters.base import Body, Loose
from gateway.api.parameters.messages import MAX_MESSAGES, MessageBody, read_messages
from gateway.api.parameters.options import MAX_SALT_CHARS
from gateway.api.parameters.pool_inputs import INPUT_FORMS, MAX_INPUTS, read_pool_inputs
from gateway.api.parameters.thinking import TemplateKwargs, template_values_of
from gateway.api.parameters.unsupported import read_body
from gateway.api.shapes import PART_BYTES, base64_of, rows_of, shortened
from gateway.call import Call
from gateway.errors import InvalidRequest, NotSupported
from workers.protocol.framing import json_parts
from workers.protocol.pooled import PoolInput, PoolKind, PoolPrompt, PoolRequest, PoolResult
from workers.protocol.requests import Medium

MAX_TOKEN = 2**31 - 1
MAX_NORM = 1024

_encode = msgspec.json.Encoder().encode


class EmbeddingsBody(Body):
    model: str = ""
    input: Annotated[Any, Field(description=f"{INPUT_FORMS}, up to {MAX_INPUTS}")] = None
    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_generation_prompt: bool = False
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1, le=MAX_TOKEN)] | None = None
    embd_normalize: Annotated[int, Field(ge=-1, le=MAX_NORM)] = 2


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    model: str
    request: PoolRequest
    as_base64: bool
    width: int | None
    """How many numbers of each vector are wanted (`dimensions`); None: all."""


class EmbeddingsDialect:
    """Reads requests for embeddings and writes the vectors, in OpenAI's form."""

    kind: PoolKind = "embed"

    def read(self, raw: bytes, scope: Scope) -> EmbeddingsRequest:
        body = read_body(EmbeddingsBody, read_object(raw), (POOLED_IGNORED, {}), ignored_of(scope))
        if body.dimensions is not None and body.embd_normalize != 2:
            message = (
                "`dimensions` gives shortened vectors length 1 again; `embd_normalize` asks for another. Send one."
            )
            raise InvalidRequest(message, param="dimensions")
        inputs, media = _inputs_of(body, attachments_of(scope))
        request = PoolRequest(
            inputs=inputs, media=media, kind="embed", normalize=body.embd_normalize, cache_salt=body.cache_salt
        )
        return EmbeddingsRequest(body.model, request, body.encoding_format == "base64", body.dimensions)

    def parts(self, asked: EmbeddingsRequest, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the answer's JSON, with one object per input, in parts. Raises InvalidRequest before the first part."""
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


def _inputs_of(body: EmbeddingsBody, attachments: Attachments) -> tuple[tuple[PoolInput, ...], tuple[Medium, ...]]:
    """Return the inputs, or the messages as the only one, and their media. Raises InvalidRequest, NotSupported."""
    if body.messages is None:
        return read_pool_inputs(body.input, "input", attachments)
    if body.input is not None:
        raise InvalidRequest("`input` and `messages` are two forms of one request. Send one of them.", param="messages")
    messages, media = read_messages(body.messages, attachments)
    values = template_values_of(
        body.chat_template_kwargs,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
    )
    return (PoolPrompt(messages=messages, template_values=values),), media


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
    """Whether the answer is a bare array, as in text-embeddings-inference."""


class RerankDialect:
    """Reads requests for reranking and writes the scores."""

    kind: PoolKind = "rank"

    def read(self, raw: bytes, scope: Scope) -> RerankRequest:
        document = read_object(raw)
        _refuse_media(document)
        body = read_body(RerankBody, document, (POOLED_IGNORED, RERANK_REFUSED), ignored_of(scope))
        request = PoolRequest(inputs=_texts(body), kind="rank", query=body.query)
        bare = body.texts is not None
        return RerankRequest(body.model, request, body.top_n, body.return_text if bare else body.return_documents, bare)

    def parts(self, asked: RerankRequest, call: Call, result: PoolResult) -> Iterator[bytes]:
        """Yield the answer's JSON in parts: the documents, best first; those with equal scores in the order sent."""
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


UNRANKED = ("content", "image", "image_url", "multimodal_data", "audio", "input_audio", "video")
"""Fields that documents and queries have in other servers' APIs where they are more than texts."""


def _refuse_media(document: dict[str, Any]) -> None:
    """Raise NotSupported for a query or documents that are more than texts: ranked by these alone, they would seem to
    be ranked by all."""
    for name in ("query", "documents", "texts"):
        given = document.get(name)
        several = given if isinstance(given, list) else [given]
        for n, one in enumerate(several):
            field = next((field for field in UNRANKED if one.get(field)), None) if isinstance(one, dict) else None
            if field is not None:
                path = f"{name}.{n}.{field}" if isinstance(given, list) else f"{name}.{field}"
                message = (
                    f"`{path}`: documents are ranked by their texts only, without pictures or sounds. Send texts, or "
                )
                raise NotSupported(message + "compare the vectors that POST /v1/embeddings makes.", param=path)


def _texts(body: RerankBody) -> tuple[str, ...]:
    if (body.documents is None) == (body.texts is None):
        problem = "is missing" if body.texts is None else "and `texts` are two forms of one request"
        raise InvalidRequest(f"`documents` {problem}. Send an array of texts as `documents`.", param="documents")
    return tuple(one if isinstance(one, str) else one.text for one in body.documents or body.texts or ())
