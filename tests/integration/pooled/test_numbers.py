"""The numbers are right: against llama-server's, against the same work done otherwise, in any order and any cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.pooled.bench import PooledBench, running, settings
from tests.support.pooled_models import RANK_TEMPLATE, write_rank_decoder
from workers.engine.pooled.engine import PooledRequest
from workers.engine.pooled.jobs import Vectors
from workers.llama.model import Model
from workers.llama.pooling import Pooling
from workers.protocol.events import Failure

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "llama_server.json").read_text())
TEXTS: list[str] = RECORDED["texts"]

TOLERANCE = 2e-3
"""Of the largest number in a vector: other micro-batches are other sums, of KV cells in half precision."""

KERNELS_DIFFER = 1e-3
"""Of a vector's length, and of a score: the numbers were recorded on another processor, whose kernels add otherwise.

Tiles of integers (AMX) were off by 1e-4, an AMD EPYC with AVX-512 by 1.3e-4 in a length and 6e-4 in a score. Another
pooling is off by more than 1e-2.
"""


def close(a: Vectors, b: Vectors, tolerance: float = TOLERANCE) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() <= tolerance * np.abs(a).max())


@pytest.fixture
def shared_model(request: pytest.FixtureRequest, shared_models: Path) -> Iterator[Model]:
    """One that the numbers were recorded with and that is not the project's own."""
    with Model.load(shared_models / f"{request.param}-random.gguf", settings()) as model:
        yield model


def check_vectors(model: Model, case: str) -> None:
    _, pooling, normalize = case.split()
    with running(model, settings(pooling)) as bench:
        answers = [bench.vectors([text], int(normalize))[0] for text in TEXTS]
    for answer, recorded in zip(answers, RECORDED["embeddings"][case], strict=True):
        assert len(answer) == recorded["rows"]
        scale = recorded["norm"]
        assert answer[-1, :8] == pytest.approx(recorded["first"], abs=KERNELS_DIFFER * scale)
        assert float(np.linalg.norm(answer[-1].astype(np.float64))) == pytest.approx(scale, rel=KERNELS_DIFFER)


@pytest.mark.parametrize("case", [case for case in RECORDED["embeddings"] if case.startswith("demo")])
def test_vectors_are_llama_servers(demo: Model, case: str) -> None:
    check_vectors(demo, case)


@pytest.mark.parametrize("shared_model", ["bert-bge-small"], indirect=True)
@pytest.mark.parametrize("case", [case for case in RECORDED["embeddings"] if case.startswith("bert")])
def test_vectors_of_an_encoder_are_llama_servers(shared_model: Model, case: str) -> None:
    check_vectors(shared_model, case)


@pytest.mark.parametrize("shared_model", ["jina-reranker"], indirect=True)
def test_scores_are_llama_servers(shared_model: Model) -> None:
    with running(shared_model, settings()) as bench:
        pairs = [bench.inputs.of_pair(RECORDED["query"], document) for document in RECORDED["documents"]]
        scores = [float(vector[0, 0]) for vector in bench.vectors(pairs)]
    assert sum(map(len, pairs)) == RECORDED["rank_tokens"]
    assert scores == pytest.approx(RECORDED["scores"], abs=KERNELS_DIFFER)


@pytest.mark.parametrize("n_ubatch", [512, 64])
def test_scores_of_a_decoder_are_llama_servers(n_ubatch: int, tmp_path: Path) -> None:
    path = tmp_path / "rank-decoder.gguf"
    write_rank_decoder(path)
    with Model.load(path, settings()) as model, running(model, settings(n_ubatch=n_ubatch), n_ctx=1024) as bench:
        assert bench.context.pooling is Pooling.RANK
        pairs = [bench.inputs.of_pair(RECORDED["query"], document) for document in RECORDED["decoder_documents"]]
        scores = [float(vector[0, 0]) for vector in bench.vectors(pairs)]
        tricky = bench.inputs.of_pair("{document}", "{query}")
        template = RANK_TEMPLATE.format(query="{document}", document="{query}")
        assert list(tricky) == list(model.tokenize(template, add_special=False, parse_special=True))
    assert sum(map(len, pairs)) == RECORDED["decoder_rank_tokens"]
    assert scores == pytest.approx(RECORDED["decoder_scores"], abs=KERNELS_DIFFER)


def some_inputs(model: Model, num: int, longest: int) -> list[list[int]]:
    rng = random.Random(num)
    n_vocab = model.vocab.num_tokens
    return [[rng.randrange(300 % n_vocab, n_vocab) for _ in range(rng.randint(1, longest))] for _ in range(num)]


def test_many_at_once_are_as_one_at_a_time_and_in_order(bert: Model) -> None:
    inputs = some_inputs(bert, 60, 100)
    with running(bert, settings()) as bench:
        together = bench.vectors(inputs)
        alone = [bench.vectors([one])[0] for one in inputs]
        reverse = bench.vectors(inputs[::-1])
    for number, vector in enumerate(together):
        assert close(vector, alone[number])
        assert close(reverse[-1 - number], alone[number])
    assert len({vector.tobytes() for vector in alone}) == 60


@pytest.mark.parametrize("pooling", ["last", "mean", "cls", "none"])
def test_a_decoder_reads_long_inputs_in_parts(demo: Model, pooling: str) -> None:
    inputs = some_inputs(demo, 12, 300)
    with running(demo, settings(pooling)) as bench:
        whole = [bench.vectors([one])[0] for one in inputs]
    with running(demo, settings(pooling, n_ubatch=64)) as bench:
        assert bench.context.can_split
        parts = bench.vectors(inputs)
    for a, b, tokens in zip(whole, parts, inputs, strict=True):
        assert len(a) == (len(tokens) if pooling == "none" else 1)
        assert close(a, b, 2e-2)
        cosine = np.sum(a * b, axis=1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
        assert cosine.min() > 0.9995


def test_pooled_vectors_come_of_the_tokens_own(demo: Model) -> None:
    [tokens] = some_inputs(demo, 1, 40)
    rows: dict[str, Vectors] = {}
    for pooling in ("none", "mean", "last", "cls"):
        with running(demo, settings(pooling)) as bench:
            rows[pooling] = bench.vectors([tokens], -1)[0]
    assert close(rows["mean"], rows["none"].mean(axis=0, keepdims=True))
    assert close(rows["last"], rows["none"][-1:])
    assert close(rows["cls"], rows["none"][:1])


def test_an_encoder_sees_what_follows_and_a_decoder_does_not(bert: Model, demo: Model) -> None:
    for model, sees in ((bert, True), (demo, False)):
        with running(model, settings("none")) as bench:
            one, other = bench.vectors([[300, 301, 302], [300, 301, 303]])
        assert close(one[:2], other[:2], 1e-6) is not sees


def test_single_tokens_vectors_and_scores_are_not_normalised(demo: Model, reranker: Model) -> None:
    for model, pooling in ((demo, "none"), (reranker, "rank")):
        with running(model, settings(pooling)) as bench:
            assert bench.vectors([[300, 301]], 2)[0].tolist() == bench.vectors([[300, 301]], -1)[0].tolist()


def test_values_that_are_not_numbers_fail_their_call_only(demo: Model) -> None:
    with running(demo, settings("mean"), start=False) as bench:
        key = bench.submit([[300], [301]])
        spoil(bench)
        bench.engine.start()
        outcome = bench.outcome(key)
        assert isinstance(outcome, Failure)
        assert "input 0" in outcome.message
        assert np.isfinite(bench.vectors([[300]])[0]).all()


def spoil(bench: PooledBench) -> None:
    """The first vector that is read holds an infinity."""
    read = bench.context.vector
    reads: list[int] = []

    def vector(sequence: int) -> Vectors:
        reads.append(sequence)
        return read(sequence) * np.float32(np.inf if len(reads) == 1 else 1)

    bench.context.vector = vector  # type: ignore[method-assign]


def test_the_request_carries_llama_servers_default() -> None:
    assert PooledRequest(1, [[1]]).normalize == 2
