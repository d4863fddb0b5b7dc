"""Pooled work on every kind of memory: whole inputs or parts of them, alone or together, it is the same vector."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.integration.pooled.bench import running, settings
from tests.support.pooled_models import write_t5, write_t5_encoder, write_two_way_llama
from tests.support.small_models import SMALL_MODELS, WORDS, write_small_model
from workers.engine.pooled.jobs import Vectors
from workers.llama.context import Context
from workers.llama.model import Model
from workers.llama.native import ModelError
from workers.llama.pooling import Pooling, is_pooled, pooling_of

INPUTS = [WORDS[:150], WORDS[150:153], WORDS[200:275], WORDS[20:90], WORDS[1:2]]


def likeness(a: Vectors, b: Vectors) -> float:
    """The smallest cosine of rows that belong together."""
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float((np.sum(a * b, axis=1) / lengths).min())


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("name", SMALL_MODELS)
def test_parts_and_company_change_nothing(name: str, pooling: str, tmp_path: Path) -> None:
    with Model.load(write_small_model(tmp_path, name), settings()) as model:
        with running(model, settings(pooling)) as bench:
            alone = [bench.vectors([one])[0] for one in INPUTS]
        with running(model, settings(pooling, n_ubatch=32), slots=3) as bench:
            assert bench.context.can_split
            together = bench.vectors(INPUTS)
            reverse = bench.vectors(INPUTS[::-1])[::-1]
    for number, vector in enumerate(alone):
        assert likeness(vector, together[number]) > 0.999
        assert likeness(vector, reverse[number]) > 0.999
    assert likeness(alone[0], alone[2]) < 0.99


def test_attention_both_ways_over_a_cache(tmp_path: Path) -> None:
    path = tmp_path / "two-way.gguf"
    write_two_way_llama(path)
    with Model.load(path, settings()) as model:
        assert is_pooled(model, settings())
        assert pooling_of(model, settings()) is Pooling.MEAN
        with running(model, settings("none", n_ubatch=200), n_ctx=200, kv_tokens=200) as bench:
            assert bench.context.memory is not None
            assert (bench.context.can_split, bench.context.longest) == (False, 192)  # a multiple of 32
            alone = [bench.vectors([one])[0] for one in INPUTS]
            together = bench.vectors(INPUTS * 3)
            shorter = bench.vectors([INPUTS[0][:100]])[0]
    for number, vectors in enumerate(together):
        assert likeness(vectors, alone[number % len(INPUTS)]) > 0.999
    assert likeness(shorter[:1], alone[0][:1]) < 0.99, "the first token saw what follows"


def test_the_encoder_of_a_t5(tmp_path: Path) -> None:
    path = tmp_path / "t5-encoder.gguf"
    write_t5_encoder(path)
    with Model.load(path, settings()) as model:
        assert is_pooled(model, settings())
        with running(model, settings()) as bench:
            assert bench.context.memory is None
            alone = [bench.vectors([one])[0] for one in INPUTS]
            together = bench.vectors(INPUTS)
    for number, vector in enumerate(together):
        assert likeness(vector, alone[number]) > 0.999
    assert likeness(alone[0], alone[2]) < 0.99


def test_an_encoder_with_a_decoder_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t5.gguf"
    write_t5(path)
    with pytest.raises(ModelError, match="decoder-only or an encoder-only"):
        Model.load(path, settings())


def test_a_model_of_text_needs_a_memory(bert: Model) -> None:
    with pytest.raises(ModelError, match="does not generate text"):
        Context(bert, settings(), slots=1, kv_tokens=256)
