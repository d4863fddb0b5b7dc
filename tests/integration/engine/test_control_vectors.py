"""Control vectors act on every call of a model, and a file that is not for it is refused by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engine.conftest import DEMO
from tests.integration.engine.listener import running
from tests.support.control_vector_files import write_control_vector
from tests.support.lone_context import Logits, lone_context, same
from tests.support.pooled_models import write_bert, write_two_way_llama
from tests.support.small_models import N_EMBD, WORDS
from workers.chat_worker import kv_identity
from workers.llama.model import Model, ModelError
from workers.llama.pooling import PooledContext, Pooling
from workers.models.spec import ControlVectorSpec, LlamaSettings, ModelSpec
from workers.settings import WorkerSettings

TOKENS = WORDS[:40]
TEXT = "Once upon a time there was a little horse. It lived in a paddock with its friends, and one day"


def steered(*files: tuple[Path, float], layers: Sequence[int] = ()) -> LlamaSettings:
    specs = tuple(ControlVectorSpec(path=str(path), scale=scale) for path, scale in files)
    return LlamaSettings(n_threads=1, control_vectors=specs, control_vector_layers=tuple(layers))


def logits(path: Path, llama: LlamaSettings) -> Logits:
    with lone_context(path, llama=llama) as lone:
        lone.context.warm_up()
        return lone.feed(0, TOKENS)


@pytest.fixture(scope="module")
def shape() -> tuple[int, list[int]]:
    """The demo model's width, and the layers that a vector can have directions for."""
    with Model.load(DEMO, LlamaSettings(n_threads=1)) as model:
        layers = {int(found[1]) for name in model.header.tensors if (found := re.match(r"blk\.(\d+)\.", name))}
        return model.n_embd, sorted(layers)[1:]


@pytest.fixture
def calm(tmp_path: Path, shape: tuple[int, list[int]]) -> Path:
    return write_control_vector(tmp_path / "calm.gguf", *shape, gain=0.1)


def test_logits_change_with_the_scale_and_not_with_a_scale_of_0(calm: Path) -> None:
    plain = logits(DEMO, LlamaSettings(n_threads=1))
    assert same(logits(DEMO, steered((calm, 0.0))), plain)
    told = [logits(DEMO, steered((calm, scale))) for scale in (1.0, 2.0, -1.0)]
    assert len({one.tobytes() for one in [plain, *told]}) == 4
    further = [float(np.abs(one - plain).max()) for one in told]
    assert further[1] > further[0] > 0


def test_several_are_added_up(calm: Path, tmp_path: Path, shape: tuple[int, list[int]]) -> None:
    """Half a vector twice is the whole one; what cancels out is no direction at all."""
    assert same(logits(DEMO, steered((calm, 0.5), (calm, 0.5))), logits(DEMO, steered((calm, 1.0))))
    other = write_control_vector(tmp_path / "other.gguf", *shape, seed=2, gain=0.1)
    both = logits(DEMO, steered((calm, 1.0), (other, 1.0)))
    assert not same(both, logits(DEMO, steered((calm, 1.0))))
    with pytest.raises(ModelError, match="or their sum is 0"):
        logits(DEMO, steered((calm, 1.0), (calm, -1.0)))


def test_layers_are_chosen_from_the_first_to_the_last(calm: Path, tmp_path: Path, shape: tuple[int, list[int]]) -> None:
    width, layers = shape
    only_last = write_control_vector(tmp_path / "last.gguf", width, layers[-1:], gain=0.1)
    by_file = logits(DEMO, steered((only_last, 1.0)))
    assert same(logits(DEMO, steered((only_last, 1.0), layers=layers[-1:] * 2)), by_file)
    assert not same(logits(DEMO, steered((calm, 1.0), layers=layers[-1:] * 2)), logits(DEMO, steered((calm, 1.0))))
    with pytest.raises(ModelError, match=f"control_vector_layers: {layers[-1] + 1} is beyond the model's layers"):
        logits(DEMO, steered((calm, 1.0), layers=(1, layers[-1] + 1)))
    with pytest.raises(ModelError, match=r"there is no direction for the layers 1 to 1"):
        logits(DEMO, steered((only_last, 1.0), layers=(1, 1)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"n_embd": 48}, r"wrong.gguf: direction.1 has 48 numbers and the model's layers are \d+ wide; use a vector"),
        ({"layers": (1, 200)}, "wrong.gguf: direction.200 is for a layer that the model lacks"),
        ({"layers": (0, 1)}, "wrong.gguf: tensor 'direction.0' is no direction of single floats"),
        ({"dtype": np.float16}, "wrong.gguf: tensor 'direction.1' is no direction of single floats"),
        ({"name": "blk"}, "wrong.gguf: tensor 'blk.1' is no direction of single floats"),
        ({"layers": ()}, "wrong.gguf: holds no directions"),
        ({"gain": np.inf}, "wrong.gguf: holds infinities or NaN"),
        ({"gain": 1e-38}, "they change nothing: llama.cpp has no place for them in models of architecture llama, or"),
        ({"gain": 9e37}, "with them the model computes no numbers; lower `scale`"),
    ],
)
def test_a_file_for_another_model_is_refused_by_name(
    tmp_path: Path, shape: tuple[int, list[int]], changes: dict[str, Any], said: str
) -> None:
    made: dict[str, Any] = {"n_embd": shape[0], "layers": shape[1]} | changes
    wrong = write_control_vector(tmp_path / "wrong.gguf", **made)
    with pytest.raises(ModelError, match=said) as caught:
        logits(DEMO, steered((wrong, 1.0)))
    assert str(caught.value).startswith("llama.control_vectors: ")


def test_a_file_that_is_damaged_or_missing_is_refused(tmp_path: Path, calm: Path) -> None:
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(calm.read_bytes()[:-64])
    for path, said in ((cut, "cut.gguf: truncated"), (tmp_path / "gone.gguf", "gone.gguf: there is no such file")):
        with pytest.raises(ModelError, match=said):
            logits(DEMO, steered((path, 1.0)))


def test_an_architecture_without_a_place_for_them_is_told(tmp_path: Path, small_models: dict[str, Path]) -> None:
    write_bert(tmp_path / "bert.gguf")
    vector = write_control_vector(tmp_path / "v.gguf", N_EMBD, [1])
    with Model.load(tmp_path / "bert.gguf", llama := steered((vector, 1.0))) as model:
        for pooling in (Pooling.CLS, Pooling.NONE):
            with (
                PooledContext(model, llama, pooling=pooling, n_ctx=64, kv_tokens=0, num_sequences=2) as context,
                pytest.raises(ModelError, match="no place for them in models of architecture bert"),
            ):
                context.warm_up()
    # Of those that generate text, every kind of memory has one.
    for name in ("attention", "window", "hybrid"):
        assert not same(logits(small_models[name], steered((vector, 1.0))), logits(small_models[name], steered()))


def test_vectors_of_texts_change_too(tmp_path: Path) -> None:
    """A decoder's tensors that make vectors: its cache is as empty after the trial as before."""
    write_two_way_llama(path := tmp_path / "pooled.gguf")
    vector = write_control_vector(tmp_path / "v.gguf", N_EMBD, [1])
    made = []
    for llama in (steered(), steered((vector, 1.0))):
        with (
            Model.load(path, llama) as model,
            PooledContext(model, llama, pooling=Pooling.MEAN, n_ctx=64, kv_tokens=128, num_sequences=2) as context,
        ):
            context.warm_up()
            batch = context.new_batch()
            batch.add_input(np.array(TOKENS, np.int32), 0, 0)
            context.compute(batch)
            made.append(context.vector(0))
    assert not np.array_equal(made[0], made[1])


def test_the_engine_answers_with_them_from_a_warm_cache_too(tmp_path: Path, shape: tuple[int, list[int]]) -> None:
    """The same prompt a second time comes from the cache, which holds what was computed with the vector."""
    strong = write_control_vector(tmp_path / "strong.gguf", *shape, gain=64.0)
    texts = {}
    for name, llama in {"plain": steered(), "strong": steered((strong, 1.0))}.items():
        with Model.load(DEMO, llama) as model, running(model, slots=2, n_ctx=256, kv_tokens=512, llama=llama) as bench:
            keys = [bench.submit(bench.request(TEXT, 12, ignore_eos=True)) for _ in range(2)]
            bench.wait(*keys)
            texts[name] = [bench.heard.text(key) for key in keys]
    assert texts["strong"][0] == texts["strong"][1]
    assert texts["plain"][0] == texts["plain"][1] != texts["strong"][0]


def test_kv_on_disk_is_of_one_vector_wherever_its_file_lies(
    calm: Path, tmp_path: Path, shape: tuple[int, list[int]]
) -> None:
    settings = WorkerSettings(worker_secret="hush", state_dir=tmp_path / "state")

    def identity(llama: LlamaSettings) -> bytes | None:
        with Model.load(DEMO, llama) as model:
            return kv_identity(settings, model, ModelSpec(name="m", path="m", llama=llama), n_ctx=512).fingerprint()

    moved = tmp_path / "moved.gguf"
    moved.write_bytes(calm.read_bytes())
    other = write_control_vector(tmp_path / "other.gguf", *shape, seed=2, gain=0.1)
    whole = identity(steered((calm, 1.0)))
    assert whole == identity(steered((moved, 1.0))) == identity(steered((calm, 1.0), layers=(1, shape[1][-1])))
    assert identity(steered((calm, 0.0))) == identity(steered())
    others = [
        identity(steered()),
        identity(steered((other, 1.0))),
        identity(steered((calm, 0.5))),
        identity(steered((calm, 1.0), layers=(2, 3))),
    ]
    assert len({whole, *others}) == 5
