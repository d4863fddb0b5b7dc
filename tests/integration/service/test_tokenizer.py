"""What well-known models' tokenizers make of difficult texts: the vectors in llama.cpp's sources, over the routes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import msgspec
import pytest
from starlette.applications import Starlette

from tests.contract.messages import MESSAGES
from tests.support.llama_source import files_of, skip_without_sources
from workers.chat.prompts import Prompts
from workers.llama.tokens.vocab import Vocab, VocabFile
from workers.protocol.queries import (
    DETOKENIZE_PATH,
    TOKENIZE_PATH,
    Detokenize,
    Props,
    Tokenize,
    decode_detokenized,
    decode_tokenized,
)
from workers.service.calls.lanes import media_lane, prompt_lane
from workers.service.routes.text import TextRoutes, Texts

VECTORS = {path.name.removesuffix(".gguf.inp"): path for path in files_of("models", "ggml-vocab-*.gguf.inp")}

SENTENCEPIECE, BYTE_PAIRS = 1, 2
"""`llama_vocab_type` of vocabularies that lose nothing of a text; the first puts a space before it."""

SEPARATOR = "\n__ggml_vocab_test__\n"


LARGE = frozenset(f"ggml-vocab-{name}" for name in ("gemma-4", "command-r", "llama-bpe", "qwen2", "qwen35"))
"""More than 100,000 tokens, which take a second each to load."""


def parametrized() -> list[object]:
    names = sorted(VECTORS) or ["none"]
    return [pytest.param(name, marks=pytest.mark.long if name in LARGE else ()) for name in names]


@pytest.fixture(params=parametrized())
def vectors(request: pytest.FixtureRequest) -> Path:
    skip_without_sources()
    return VECTORS[request.param]


@pytest.fixture
def vocab(vectors: Path) -> Iterator[Vocab]:
    with VocabFile.load(vectors.with_suffix("")) as file:
        yield file.vocab


def client_of(vocab: Vocab) -> httpx2.AsyncClient:
    props = MESSAGES["props.json"]
    assert isinstance(props, Props)
    prompts = Prompts(None, vocab, num_tokens=vocab.num_tokens)
    app = Starlette(routes=TextRoutes(Texts(vocab, prompts), props, prompt_lane(), media_lane()).routes())
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://worker")


async def tokens(client: httpx2.AsyncClient, text: str) -> tuple[int, ...]:
    asked = Tokenize(content=text, add_special=False, parse_special=False)
    answer = await client.post(TOKENIZE_PATH, content=msgspec.json.encode(asked))
    return decode_tokenized(answer.content).tokens


async def text_of(client: httpx2.AsyncClient, ids: tuple[int, ...]) -> str:
    answer = await client.post(DETOKENIZE_PATH, content=msgspec.json.encode(Detokenize(tokens=ids)))
    return decode_detokenized(answer.content).content


@pytest.fixture
def cases(vectors: Path) -> list[tuple[str, tuple[int, ...]]]:
    texts = vectors.read_bytes().decode().split(SEPARATOR)
    lines = vectors.with_suffix(".out").read_text(encoding="utf-8").splitlines()
    return [(text, tuple(map(int, line.split()))) for text, line in zip(texts, lines, strict=False)]


async def test_the_vectors_of_llama_cpp(vocab: Vocab, cases: list[tuple[str, tuple[int, ...]]]) -> None:
    assert len(cases) > 40
    async with client_of(vocab) as client:
        assert [await tokens(client, text) for text, _ in cases] == [ids for _, ids in cases]
        for text, ids in cases:
            back = await text_of(client, ids)
            if vocab.kind == BYTE_PAIRS:
                assert back == text
            elif vocab.kind == SENTENCEPIECE:
                assert back == (f" {text}" if text else "")
