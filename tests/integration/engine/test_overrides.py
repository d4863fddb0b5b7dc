"""Positions, metadata and places of tensors that the settings change: llama.cpp computes otherwise, everything that
reads the model sees the same one, and what llama.cpp would ignore or die of ends the start.
"""

from __future__ import annotations

import contextlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.engine.conftest import DEMO
from tests.support.lone_context import Logits, lone_context, same
from tests.support.pooled_models import write_bert, write_two_way_llama
from tests.support.small_models import HEAD, N_CTX, WORDS, write_small_model
from workers.constraint import forks
from workers.constraint.forks import Forks
from workers.contexts import make_pooled_context
from workers.engine.disk.fingerprint import context_facts
from workers.footprint.kv_plan import kv_shape
from workers.llama.gguf import read_header
from workers.llama.model import Model, ModelError
from workers.llama.pooling import Pooling, pooling_of
from workers.llama.tokens.tokenizer import GuardedTokenizer, TokenProcesses
from workers.llama.trial import tried
from workers.models.overrides import TensorOverride
from workers.models.spec import LlamaSettings, ModelSpec

TOKENS = WORDS[:60]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the architecture `llama`, with a base of 10,000."""
    return write_small_model(tmp_path_factory.mktemp("overrides"), "attention")


def one_thread(**settings: Any) -> LlamaSettings:
    return LlamaSettings(n_threads=1, **settings)


def logits(path: Path, **settings: Any) -> Logits:
    with lone_context(path, llama=one_thread(**settings)) as lone:
        return lone.feed(0, TOKENS)


def refused(path: Path, **settings: Any) -> str:
    with pytest.raises(ModelError) as caught:
        Model.load(path, one_thread(**settings))
    return str(caught.value)


ROPE: list[dict[str, Any]] = [
    {"rope_freq_base": 5e5},
    {"rope_freq_scale": 0.25},
    {"rope_scaling": "linear", "rope_freq_scale": 0.5},
    {"rope_scaling": "yarn", "rope_freq_scale": 0.25},
    {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_orig_ctx": 64},
    {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_ext_factor": 0.5},
    {
        "rope_scaling": "yarn",
        "rope_freq_scale": 0.25,
        "yarn_beta_slow": 8,
        "yarn_beta_fast": 500,
        "yarn_orig_ctx": 4096,
    },
    {"rope_scaling": "yarn", "rope_freq_scale": 0.25, "yarn_beta_fast": 500, "yarn_orig_ctx": 4096},
    {"yarn_attn_factor": 2},
]


def test_positions_are_computed_as_the_settings_say(path: Path) -> None:
    """Each setting makes other logits, none of them makes what is no number; defaults are the model's own."""
    plain = logits(path)
    assert same(logits(path, rope_scaling="auto", rope_freq_base=10_000, rope_freq_scale=1), plain)
    told = [logits(path, **settings) for settings in ROPE]
    assert len({one.tobytes() for one in [plain, *told]}) == 1 + len(ROPE)
    assert all(np.isfinite(one).all() for one in told)


def test_bounds_make_numbers(path: Path) -> None:
    """What is at the end of every range is nonsense, and no crash."""
    for settings in (
        {"rope_freq_base": 1.001},
        {"rope_freq_base": 1e12, "rope_freq_scale": 1e-5},
        {"rope_scaling": "yarn", "rope_freq_scale": 64, "yarn_beta_slow": 0, "yarn_beta_fast": 4096},
        {"rope_scaling": "yarn", "rope_freq_scale": 1e-5, "yarn_orig_ctx": 2**24, "yarn_ext_factor": 1},
        {"rope_freq_base": 1.001, "rope_scaling": "yarn", "yarn_orig_ctx": 1},
        {"yarn_attn_factor": 0},
        {"yarn_attn_factor": 64},
    ):
        assert np.isfinite(logits(path, **settings)).all(), settings


def test_what_llama_cpp_would_not_notice_is_refused(path: Path, small_models: dict[str, Path]) -> None:
    assert "rope_scaling: the model has no factors for longrope; set yarn or linear" in refused(
        path, rope_scaling="longrope"
    )
    for name in ("attention-alibi", "attention-learned", "recurrent"):
        for setting in ({"rope_scaling": "yarn"}, {"rope_freq_base": 5e5}, {"yarn_orig_ctx": 64}):
            said = refused(small_models[name], **setting)
            assert f"llama.{next(iter(setting))}: this model has no rotary positions; remove it" in said


def test_learned_positions_are_no_rotary_ones(tmp_path: Path) -> None:
    """llama.cpp counts BERT among the rotary ones, and its graph has none."""
    write_bert(path := tmp_path / "bert.gguf")
    assert "llama.rope_freq_scale: this model has no rotary positions" in refused(path, rope_freq_scale=0.5)


def test_an_encoder_reads_further_if_its_positions_are_scaled(tmp_path: Path) -> None:
    write_two_way_llama(path := tmp_path / "encoder.gguf")
    for more, longest in (({}, 256), ({"rope_scaling": "yarn", "rope_freq_scale": 0.5}, 512)):
        llama = one_thread(override_kv={"llama.context_length": 256}, **more)
        spec = ModelSpec(name="m", path=f"{path}", ctx=512, slots=2, llama=llama)
        with (
            Model.load(path, llama) as model,
            make_pooled_context(model, spec, Pooling.MEAN, free_bytes=None, workers=1) as context,
        ):
            assert context.longest == longest
            context.warm_up()


def test_metadata_is_what_the_settings_say(path: Path) -> None:
    """By the file's key or by the context's setting, the base of positions is the same; Helm's whole number as well."""
    wanted = logits(path, rope_freq_base=5e5)
    assert same(logits(path, override_kv={"llama.rope.freq_base": 5e5}), wanted)
    assert same(logits(path, override_kv={"llama.rope.freq_base": 500_000}), wanted)
    # This key is not in the file, so that only llama.cpp says that it reads a float.
    assert same(logits(path, override_kv={"llama.rope.scaling.factor": 4}), logits(path, rope_freq_scale=0.25))


def test_all_who_read_the_header_see_the_override(path: Path) -> None:
    llama = one_thread(override_kv={"llama.context_length": 512, "general.name": "another"})
    with Model.load(path, llama) as model:
        assert (model.facts.n_ctx_train, model.name) == (512, "another")
        assert model.header.number("llama.context_length") == 512
        assert read_header(path).number("llama.context_length") == N_CTX
        assert model.overrides == llama.override_kv
        assert kv_shape(model.header) == kv_shape(read_header(path))


def test_an_encoders_pooling_is_the_overridden_one(tmp_path: Path) -> None:
    write_bert(path := tmp_path / "bert.gguf")
    for llama, pooling in (
        (one_thread(), Pooling.CLS),
        (one_thread(override_kv={"bert.pooling_type": 1}), Pooling.MEAN),
    ):
        with Model.load(path, llama) as model:
            assert pooling_of(model, llama) is pooling


def test_the_side_of_long_factors_goes_by_the_overridden_context(path: Path) -> None:
    key = "llama.rope.scaling.original_context_length"
    with Model.load(path, one_thread(override_kv={key: 2048})) as model:
        tensor = next(iter(model.header.tensors.values()))
        header = replace(model.header, tensors={"rope_factors_long.weight": tensor})
        facts = [context_facts(header, one_thread(), build="", n_ctx=n_ctx)["long_rope"] for n_ctx in (2048, 4096)]
    assert facts == [False, True]


def test_processes_with_the_vocabulary_see_the_override_too(path: Path) -> None:
    """Long texts are tokenised in one, grammars followed in another."""
    llama = one_thread(override_kv={"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": 700})
    text = "Once upon a time there was a horse. " * 200
    with Model.load(path, llama) as model, contextlib.closing(TokenProcesses(path, model.overrides, number=1)) as long:
        tokenizer = GuardedTokenizer(model.vocab, long)
        tokens = list(tokenizer.tokenize(text, add_special=True, parse_special=False))
        assert tokens == model.vocab.tokenize(text, add_special=True, parse_special=False)
        assert tokens[0] == model.vocab.bos
        assert (model.vocab.eos, 700 in model.vocab.eog) == (700, True)
        assert may_end_by(path, 700, model.overrides)
    with Model.load(path, one_thread()) as model:
        assert 700 not in model.vocab.eog
        assert not may_end_by(path, 700, {})


def may_end_by(path: Path, token: int, overrides: Any) -> bool:
    """Whether an answer that may be empty can end by this token."""
    with contextlib.closing(Forks(path, overrides)) as processes:
        processes.start()
        fork = processes.fork()
        assert fork is not None
        fork.ask(forks.COMPILE, b'["gbnf", "root ::= \\"a\\"?"]')
        assert fork.take(30.0) is not None
        fork.ask(forks.ALLOWED)
        answer = fork.take(30.0)
        assert answer is not None
        bits = np.unpackbits(np.frombuffer(answer[1], np.uint8), bitorder="little")
        fork.close()
        return bool(bits[token])


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("llama.kontext_length", 64, "llama.cpp does not read llama.kontext_length of this model; check its spelling"),
        ("qwen2.context_length", 64, "llama.cpp does not read qwen2.context_length of this model"),
        ("llama.context_length", "64", 'llama.context_length must be a whole number, and "64" is a text; write it'),
        ("llama.context_length", 64.5, "llama.context_length must be a whole number, and 64.5 is a number with a"),
        ("llama.context_length", 0, "llama.context_length is 0 and may be 1 to 16,777,216 tokens; correct it"),
        ("llama.context_length", 2**25, "may be 1 to 16,777,216 tokens"),
        ("llama.rope.scaling.factor", "4", "llama.rope.scaling.factor must be a number with a fraction"),
        ("tokenizer.ggml.tokens", "x", "tokenizer.ggml.tokens is a list, and llama.cpp overrides single values only"),
        ("tokenizer.ggml.eos_token_id", 10**6, "is 1000000, and the vocabulary has tokens 0 to "),
        ("tokenizer.ggml.pre", "nonsense", "can't load the model with this tokenizer.ggml.pre .*unknown pre-tokenizer"),
        ("llama.block_count", 1, "can't load the model with this llama.block_count .*wrong number of tensors"),
        ("llama.rope.dimension_count", HEAD - 1, "can't load the model with this llama.rope.dimension_count"),
        # llama.cpp ends its process over these.
        ("llama.block_count", 2**32 - 1, "llama.cpp ends its process over this .GGML_ASSERT.*n_layer_all"),
        ("llama.rope.scaling.type", "foo", "llama.cpp ends its process over this .GGML_ASSERT.*rope_scaling_type"),
        ("llama.expert_count", 4, "llama.cpp ends its process over this"),
    ],
)
def test_metadata_that_can_not_be_meant_ends_the_start_with_its_key(
    path: Path, key: str, value: int | float | str, said: str
) -> None:
    message = refused(path, override_kv={key: value})
    assert message.startswith(f"{path}: llama.override_kv: ")
    assert re.search(said, message), message


def test_a_model_that_is_damaged_anyway_is_not_the_settings_fault(path: Path, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    strange.write_bytes(path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0zebra", 1))
    said = refused(strange, override_kv={"general.name": "x"})
    assert "override_kv" not in said
    assert "zebra" in said


def moved(*patterns: str) -> tuple[TensorOverride, ...]:
    return tuple(TensorOverride(pattern=pattern, buffer="CPU") for pattern in patterns)


def test_tensors_that_lie_elsewhere_say_the_same(path: Path) -> None:
    plain = logits(path)
    assert same(logits(path, override_tensor=moved(r"blk\.[0-1]\.ffn_(up|down)", "token_embd")), plain)
    both = {"override_tensor": moved("ffn"), "override_kv": {"llama.rope.freq_base": 5e5}}
    assert same(logits(path, **both), logits(path, rope_freq_base=5e5))


@pytest.mark.parametrize(
    ("patterns", "said"),
    [
        (["ffn", "ffn_["], r"override_tensor\[1\]: 'ffn_\[' is no regular expression \(.*\); write one as ECMAScript"),
        (["("], r"override_tensor\[0\]: '\(' is no regular expression"),
        (["((((a{99}){99}){99}){99})"], "is no regular expression .*exceeds limit"),
        (["nothing"], "override_tensor: no pattern fits the name of a tensor, such as blk.0.ffn_down.weight"),
    ],
)
def test_patterns_that_can_not_be_meant_end_the_start(path: Path, patterns: list[str], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        Model.load(path, one_thread(override_tensor=moved(*patterns)))


def test_a_pattern_that_takes_for_ever_is_ended(path: Path) -> None:
    with pytest.raises(ModelError, match=r"override_tensor: llama.cpp takes more than 1 s to read the model so; write"):
        tried(read_header(path), one_thread(override_tensor=moved("((.*)*)*!")), cpu_s=1)


def test_without_devices_the_model_says_the_same(path: Path) -> None:
    assert same(logits(path, devices=("none",)), logits(path, n_gpu_layers=0))


def test_numa_changes_no_number() -> None:
    assert same(logits(DEMO, numa="numactl"), logits(DEMO))
