"""OpenAI's embeddings, and documents by how well they fit a query: what is read and what is written."""

from __future__ import annotations

import base64
import json
import struct
from array import array
from hashlib import sha256
from typing import Any

import pytest

from gateway.api.openai.bodies import POOLED_IGNORED
from gateway.api.openai.pooled import EmbeddingsBody, EmbeddingsDialect, RerankDialect
from gateway.api.parameters.prompts import MARKER
from gateway.api.shapes import PART_BYTES
from gateway.call import Call, Principal
from gateway.errors import InvalidRequest, NotSupported, PaddockError
from tests.support.openai_schema import check, properties
from tests.support.sent_media import PNG, WAV, base64_of, data_url
from workers.protocol.pooled import PoolPrompt, PoolRequest, PoolResult
from workers.protocol.requests import Medium, Message

CALL = Call("r", Principal("k", "team", None, admin=False), "alias", "model", 0.0, 1.0, 1.0)


def matrix(*rows: tuple[float, ...], pooling: str = "mean") -> PoolResult:
    packed = b"".join(struct.pack(f"<{len(row)}f", *row) for row in rows)
    return PoolResult(
        pooling=pooling, width=len(rows[0]), rows=(1,) * len(rows), num_tokens=(3,) * len(rows), vectors=packed
    )


def asked(**parameters: Any) -> PoolRequest:
    return EmbeddingsDialect().read(json.dumps({"model": "m", **parameters}).encode(), {}).request


async def embedded(result: PoolResult, **parameters: Any) -> dict[str, Any]:
    dialect = EmbeddingsDialect()
    request = dialect.read(json.dumps({"model": "m", "input": "x", **parameters}).encode(), {})
    body: dict[str, Any] = json.loads(b"".join(dialect.parts(request, CALL, result)))
    return body


async def ranked(result: PoolResult, **parameters: Any) -> Any:
    dialect = RerankDialect()
    request = dialect.read(json.dumps({"model": "m", "query": "q", **parameters}).encode(), {})
    return json.loads(b"".join(dialect.parts(request, CALL, result)))


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], (array("i", [1, 2]),)),
        ([[1], [2, 3]], (array("i", [1]), array("i", [2, 3]))),
        (["a", [1]], ("a", array("i", [1]))),
        ("", ("",)),
        (["a", ""], ("a", "")),
        ([1, "a", 2], ((1, "a", 2),)),
        ([[1, "a"], "b"], ((1, "a"), "b")),
        ({"prompt_string": "a"}, ("a",)),
        ({"content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]}, ("a b",)),
        (["a", {"prompt_string": "b"}, {"content": [{"type": "text", "text": "c"}]}], ("a", "b", "c")),
    ],
)
def test_forms_of_an_input(given: Any, inputs: tuple[Any, ...]) -> None:
    assert asked(input=given) == PoolRequest(inputs=inputs)


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": {}}, "input"),
        ({"input": ["a", None]}, "input.1"),
        ({"input": [1, {"prompt_string": "a"}]}, "input.1"),
        ({"input": {"content": "a"}}, "input"),
        ({"input": {"content": [{"type": "unknown"}]}}, "input.content.0"),
        ({"input": {"prompt_string": 1}}, "input.prompt_string"),
        ({"input": [[]]}, "input.0"),
        ({"input": [[1, -1]]}, "input.0.1"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 2, "embd_normalize": 1}, "dimensions"),
        ({"input": "a", "embd_normalize": -2}, "embd_normalize"),
    ],
)
def test_a_wrong_input_is_named(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        asked(**parameters)
    assert caught.value.param == param
    assert f"`{param}`" in caught.value.message


async def test_embeddings_as_numbers_and_as_base64() -> None:
    result = matrix((0.5, -0.25), (1.0, 0.0))
    body = await embedded(result)
    assert [(one["index"], one["embedding"]) for one in body["data"]] == [(0, [0.5, -0.25]), (1, [1.0, 0.0])]
    assert (body["model"], body["usage"]) == ("alias", {"prompt_tokens": 6, "total_tokens": 6})
    check("CreateEmbeddingResponse", body)
    body = await embedded(result, encoding_format="base64")
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert struct.unpack("<2f", raw) == (0.5, -0.25)


async def test_shortened_vectors_have_length_1_again() -> None:
    body = await embedded(matrix((3.0, 4.0, 12.0), (0.0, 0.0, 1.0)), dimensions=2)
    assert body["data"][0]["embedding"] == pytest.approx([0.6, 0.8])
    assert body["data"][1]["embedding"] == [0.0, 0.0], "nothing can be made of nothing"
    with pytest.raises(InvalidRequest, match="vectors have 3"):
        await embedded(matrix((3.0, 4.0, 12.0)), dimensions=4)


async def test_a_vector_per_token_has_no_place() -> None:
    with pytest.raises(InvalidRequest, match="POST /embeddings"):
        await embedded(matrix((1.0,), (2.0,), pooling="none"))


async def test_many_rows_stay_in_order() -> None:
    rows = [(float(number),) * 64 for number in range(3 * PART_BYTES // 256)]
    body = await embedded(matrix(*rows))
    assert [one["embedding"][0] for one in body["data"]] == [row[0] for row in rows]


async def test_documents_come_best_first() -> None:
    result = matrix((-1.5,), (2.0,), (2.0,), (0.5,), pooling="rank")
    documents = ["a", {"text": "b", "title": "t"}, "c", "d"]
    body = await ranked(result, documents=documents)
    assert [(one["index"], one["relevance_score"]) for one in body["results"]] == [
        (1, 2.0),
        (2, 2.0),
        (3, 0.5),
        (0, -1.5),
    ]
    assert "document" not in body["results"][0]
    assert (body["object"], body["usage"]["total_tokens"]) == ("list", 12)
    body = await ranked(result, documents=documents, top_n=2, return_documents=True)
    assert [one["document"] for one in body["results"]] == [{"text": "b"}, {"text": "c"}]


async def test_the_bare_form() -> None:
    result = matrix((-1.5,), (2.0,), pooling="rank")
    assert await ranked(result, texts=["a", "b"], return_text=True, raw_scores=True) == [
        {"index": 1, "score": 2.0, "text": "b"},
        {"index": 0, "score": -1.5, "text": "a"},
    ]


@pytest.mark.parametrize("form", ["documents", "texts"])
async def test_long_documents_are_told_back_in_parts(form: str) -> None:
    """Written at once, 8 MiB of lines held the event loop for 53 ms."""
    texts = ["\n" * 40_000] * 100
    result = matrix(*[(float(-number),) for number in range(100)], pooling="rank")
    dialect = RerankDialect()
    asked = {"query": "q", form: texts, "return_documents": True, "return_text": True}
    parts = list(dialect.parts(dialect.read(json.dumps(asked).encode(), {}), CALL, result))
    assert max(map(len, parts)) < 1 << 20 < sum(map(len, parts))
    body = json.loads(b"".join(parts))
    entries = body if form == "texts" else [one["document"] for one in body["results"]]
    assert [one["text"] for one in entries] == texts


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({}, "documents"),
        ({"documents": []}, "documents"),
        ({"documents": ["a"], "texts": ["a"]}, "documents"),
        ({"documents": [1]}, "documents.0"),
        ({"documents": [{}]}, "documents.0.text"),
        ({"documents": ["a"], "top_n": 0}, "top_n"),
        ({"documents": ["a"], "query": None}, "query"),
        ({"documents": ["a"], "raw_scores": False}, "raw_scores"),
    ],
)
def test_a_wrong_request_to_rank_is_named(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(PaddockError) as caught:
        RerankDialect().read(json.dumps({"query": "q", **parameters}).encode(), {})
    assert caught.value.param == param


@pytest.mark.parametrize("dialect", [EmbeddingsDialect(), RerankDialect()])
def test_unknown_parameters_are_left_out(dialect: EmbeddingsDialect | RerankDialect) -> None:
    known = {"model": "m", "input": "x"} if isinstance(dialect, EmbeddingsDialect) else {"query": "q", "texts": ["a"]}
    assert dialect.read(json.dumps(known | {"surprise": 1}).encode(), {}) == dialect.read(
        json.dumps(known).encode(), {}
    )


def test_every_parameter_of_openai_is_read_or_ignored() -> None:
    assert properties("CreateEmbeddingRequest") <= set(EmbeddingsBody.model_fields) | {*POOLED_IGNORED}


IMAGE = {"type": "image_url", "image_url": {"url": data_url(PNG)}}
SOUND = {"type": "input_audio", "input_audio": {"data": base64_of(WAV), "format": "wav"}}


def seen(data: bytes, param: str) -> Medium:
    return Medium("sound" if data == WAV else "picture", data, param, sha256(data).digest())


def test_inputs_have_media_at_their_markers_or_among_their_parts() -> None:
    marked = {"prompt_string": f"a{MARKER}b{MARKER}", "multimodal_data": [base64_of(PNG), base64_of(WAV)]}
    parts = {"content": [{"type": "text", "text": "see "}, IMAGE, {"type": "text", "text": "!"}, SOUND]}
    request = asked(input=["plain", marked, parts, [1, 2], f"no {MARKER}"])
    assert request.inputs == (
        "plain",
        PoolPrompt(text="ab", media=(1, 2)),
        PoolPrompt(text="see !", media=(4, 5)),
        array("i", [1, 2]),
        f"no {MARKER}",
    )
    assert request.media == (
        seen(PNG, "input.1.multimodal_data.0"),
        seen(WAV, "input.1.multimodal_data.1"),
        seen(PNG, "input.2.content.1"),
        seen(WAV, "input.2.content.3"),
    )
    alone = asked(input={"content": [IMAGE]}, cache_salt="salt")
    assert (alone.inputs, alone.cache_salt) == ((PoolPrompt(text="", media=(0,)),), "salt")


def test_documents_among_the_parts_are_texts() -> None:
    note = {"type": "file", "file": {"file_data": data_url(b"a note", "text/plain"), "filename": "a.txt"}}
    assert asked(input={"content": [{"type": "text", "text": "read "}, note]}).inputs == ("read a note",)


def test_messages_are_one_input() -> None:
    parts = [{"type": "text", "text": "What is it?"}, IMAGE]
    request = asked(
        messages=[{"role": "system", "content": "Represent it."}, {"role": "user", "content": parts}],
        chat_template_kwargs={"enable_thinking": False},
        add_generation_prompt=True,
    )
    [one] = request.inputs
    assert isinstance(one, PoolPrompt)
    assert one.messages == (Message("system", "Represent it."), Message("user", "What is it?", media=(11,)))
    assert json.loads(one.template_values) == {
        "enable_thinking": False,
        "add_generation_prompt": True,
        "continue_final_message": False,
    }
    assert request.media == (seen(PNG, "messages.1.content.1"),)
    assert one.num_media == 1


@pytest.mark.parametrize(
    ("parameters", "param", "error"),
    [
        ({"input": {"prompt_string": MARKER, "multimodal_data": ["eA==", "eA=="]}}, "input.multimodal_data", None),
        ({"input": ["a", {"prompt_string": MARKER, "multimodal_data": ["eA=="]}]}, "input.1.multimodal_data.0", None),
        ({"input": {"content": [{"type": "image_url"}]}}, "input.content.0.image_url", None),
        ({"input": {"content": [{"type": "video_url", "video_url": "x"}]}}, "input.content.0", NotSupported),
        ({"input": [{"content": [IMAGE] * 17}] * 2}, "input.1.content.15", None),
        ({"input": "a", "messages": [{"role": "user", "content": "b"}]}, "messages", None),
        ({"messages": []}, "messages", None),
        ({"messages": [{"role": "user"}]}, "messages.0.content", None),
    ],
)
def test_wrong_media_are_named(parameters: dict[str, Any], param: str, error: type[PaddockError] | None) -> None:
    with pytest.raises(error or InvalidRequest) as caught:
        asked(**parameters)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"documents": ["a", {"text": "b", "image": data_url(PNG)}]}, "documents.1.image"),
        ({"documents": [{"content": [IMAGE]}]}, "documents.0.content"),
        ({"documents": [{"prompt_string": MARKER, "multimodal_data": ["AA"]}]}, "documents.0.multimodal_data"),
        ({"texts": [{"image_url": data_url(PNG)}]}, "texts.0.image_url"),
        ({"documents": ["a"], "query": {"content": [IMAGE]}}, "query.content"),
    ],
)
def test_documents_with_pictures_are_not_ranked(parameters: dict[str, Any], param: str) -> None:
    with pytest.raises(NotSupported, match="ranked by their texts only") as caught:
        RerankDialect().read(json.dumps({"query": "q", **parameters}).encode(), {})
    assert caught.value.param == param
