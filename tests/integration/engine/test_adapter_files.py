"""LoRA files, good and bad, before and behind llama.cpp's own reader."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest

from tests.integration.engine.conftest import DEMO
from tests.support import adapter_files
from tests.support.adapter_files import Weights, weights_for
from tests.support.lone_context import lone_context, same
from tests.support.process_limits import few_descriptors
from workers.engine.adapters.registry import MAX_SCALE
from workers.llama.adapters import Adapter, AdapterError, AdapterUnreadable, AppliedAdapters, inspect
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

PIRATE = DEMO.parent / "paddock-demo-pirate-lora.gguf"

TOKENS = [1, 40, 52, 60, 61, 47]

HEAD_BYTES = 3200
"""Of the pirate adapter: metadata and the list of its tensors."""


def test_scales_act_and_leave_no_trace(demo: Model) -> None:
    file = inspect(PIRATE, demo.header)
    assert (file.size, file.rank, file.name) == (PIRATE.stat().st_size, 8, "Paddock demo pirate")
    adapter = Adapter.load(demo, file)
    with lone_context(demo) as one:
        applied = AppliedAdapters(one.context.pointer)

        def logits(*uses: tuple[Adapter, float]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
            applied.apply(uses)
            one.memory.clear()
            return one.feed(0, TOKENS)

        plain, full, half, off = logits(), logits((adapter, 1.0)), logits((adapter, 0.5)), logits((adapter, 0.0))
        assert same(plain, off)
        assert same(plain, logits())
        assert same(full, logits((adapter, 1.0)))
        distance = [float(np.abs(each - plain).max()) for each in (full, half)]
        assert distance[0] > 1
        assert 0.1 < distance[1] < distance[0]
        assert applied.apply(())
        assert not applied.apply(())
        assert applied.apply(((adapter, 1.0),))
        assert not applied.apply(((adapter, 1.0),))
        with pytest.raises(ValueError, match="still computes"):
            adapter.close()
        applied.drop(adapter)
        adapter.close()
        assert same(plain, logits())


def test_two_adapters_add_up(demo: Model, tmp_path: Path) -> None:
    """One adapter twice under two names is the same as once with twice the scale, up to rounding."""
    path = adapter_files.sound(tmp_path / "one.gguf", demo.header)
    first, second = (Adapter.load(demo, inspect(path, demo.header)) for _ in range(2))
    with lone_context(demo) as one:
        applied = AppliedAdapters(one.context.pointer)
        applied.apply(((first, 0.5), (second, 0.5)))
        both = one.feed(0, TOKENS)
        applied.apply(((first, 1.0),))
        once = one.feed(1, TOKENS)
        applied.apply(())
        assert np.abs(both - once).max() < 0.05
        assert np.abs(one.feed(2, TOKENS) - once).max() > 0.5
    first.close()
    second.close()


def test_a_scale_beyond_reason_would_spoil_other_calls(stories: Model, tmp_path: Path) -> None:
    """Why `MAX_SCALE` is there: a cell that is not a number is multiplied by zero, not skipped."""
    path = adapter_files.sound(tmp_path / "one.gguf", stories.header)
    adapter = Adapter.load(stories, inspect(path, stories.header))
    with lone_context(stories, llama=LlamaSettings(n_threads=1, flash_attn="off")) as one:
        applied = AppliedAdapters(one.context.pointer)
        for scale, spoils in ((MAX_SCALE, False), (-MAX_SCALE, False), (1e20, True)):
            applied.apply(((adapter, scale),))
            one.feed(0, TOKENS)
            applied.apply(())
            assert bool(np.isnan(one.feed(1, TOKENS)).any()) is spoils
            one.memory.clear()
    adapter.close()


def _changed(weights: Weights, change: Callable[[Weights], object]) -> Weights:
    change(weights)
    return weights


A, B = "blk.0.attn_q.weight.lora_a", "blk.0.attn_q.weight.lora_b"


def _as(kind: type[np.generic]) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: weights[name].astype(kind) for name in (A, B)})


def _put(name: str, value: float) -> Callable[[Weights], object]:
    return lambda weights: weights[name].__setitem__((0, 0), value)


def _embedding(rank_a: int, rank_b: int, model: Model) -> Weights:
    columns, rows = model.header.tensors["token_embd.weight"].shape[:2]
    return {
        "token_embd.weight.lora_a": np.full((rows, rank_a), 0.01, np.float32),
        "token_embd.weight.lora_b": np.full((columns, rank_b), 0.01, np.float32),
    }


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w: w.pop(A), "one half of the pair is missing"),
        (lambda w: w.update({"blk.0.attn_q.weight": w.pop(A)}), "no part of a LoRA"),
        (lambda w: w.update({"blk.99.attn_q.weight.lora_a": w.pop(A)}), "missing|no such weight"),
        (lambda w: w.update({A: w[A][:, :-1]}), "do not fit the model's 192 x 192"),
        (lambda w: w.update({B: w[B][:, :-1]}), "do not fit"),
        (lambda w: w.update({A: np.stack([w[A]] * 3)}), "192 x 4 x 3"),
        (lambda w: w.update({A: w[A].T.copy()}), "do not fit"),
        (lambda w: w.update({A: w[A][:0], B: w[B][:, :0]}), "do not fit|truncated|damaged"),
        (_as(np.int8), "type 24 is not served"),
        (_as(np.float64), "type 28 is not served"),
        (_put(A, np.nan), "holds infinities or NaN"),
        (_put(B, -np.inf), "holds infinities or NaN"),
        (lambda w: w.clear(), "holds no weights"),
    ],
)
def test_weights_that_are_refused(demo: Model, tmp_path: Path, change: Callable[[Weights], object], says: str) -> None:
    path = adapter_files.write(tmp_path / "bad.gguf", _changed(weights_for(demo.header), change), alpha=4.0)
    with pytest.raises(AdapterError, match=says):
        inspect(path, demo.header)


@pytest.mark.parametrize(("kind", "bits"), [(np.float16, 0x7C00), (np.float32, 0x7F800000)])
def test_half_and_full_floats_are_looked_through(
    demo: Model, tmp_path: Path, kind: type[np.generic], bits: int
) -> None:
    weights = {name: values.astype(kind) for name, values in weights_for(demo.header).items()}
    assert inspect(adapter_files.write(tmp_path / "good.gguf", weights), demo.header).rank == 4
    word = weights[A].view(np.uint16 if kind is np.float16 else np.uint32)
    word[0, 0] = bits - 1
    inspect(adapter_files.write(tmp_path / "largest.gguf", weights), demo.header)
    word[0, 0] = bits
    with pytest.raises(AdapterError, match="infinities"):
        inspect(adapter_files.write(tmp_path / "infinite.gguf", weights), demo.header)


def test_quantised_weights_are_served(demo: Model, tmp_path: Path) -> None:
    path = tmp_path / "q8_0.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_string("general.type", "adapter")
    writer.add_string("adapter.type", "lora")
    quantised = gguf.GGMLQuantizationType.Q8_0
    for name, values in weights_for(demo.header, rank=32).items():
        writer.add_tensor(name, gguf.quants.quantize(values, quantised), raw_dtype=quantised)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    adapter = Adapter.load(demo, inspect(path, demo.header))
    with lone_context(demo) as one:
        plain = one.feed(0, TOKENS)
        applied = AppliedAdapters(one.context.pointer)
        applied.apply(((adapter, 1.0),))
        assert np.abs(one.feed(1, TOKENS) - plain).max() > 0.5
        applied.apply(())
    adapter.close()


def test_adapters_of_the_embedding(demo: Model, stories: Model, tmp_path: Path) -> None:
    """llama.cpp would abort in the first step: where the output is the same weight, and where the ranks differ."""
    tied = adapter_files.write(tmp_path / "tied.gguf", _embedding(4, 4, demo))
    with pytest.raises(AdapterError, match="output is the same weight"):
        inspect(tied, demo.header)
    uneven = adapter_files.write(tmp_path / "uneven.gguf", _embedding(4, 8, stories))
    with pytest.raises(AdapterError, match="do not fit"):
        inspect(uneven, stories.header)
    even = adapter_files.write(tmp_path / "even.gguf", _embedding(4, 4, stories))
    adapter = Adapter.load(stories, inspect(even, stories.header))
    with lone_context(stories) as one:
        applied = AppliedAdapters(one.context.pointer)
        applied.apply(((adapter, 1.0),))
        assert np.isfinite(one.feed(0, TOKENS)).all()
        applied.apply(())
    adapter.close()


def test_weights_of_the_model_that_no_lora_can_adapt(demo: Model, tmp_path: Path) -> None:
    """llama.cpp asserts that weights of type NVFP4 have no adapter, and looks for none beside a vector."""
    target = "blk.0.attn_q.weight"
    tensors = {**demo.header.tensors, target: replace(demo.header.tensors[target], kind=40)}
    path = adapter_files.sound(tmp_path / "sound.gguf", demo.header)
    with pytest.raises(AdapterError, match="NVFP4"):
        inspect(path, replace(demo.header, tensors=tensors))
    vector = {"output_norm.weight.lora_a": np.ones((4, 192)), "output_norm.weight.lora_b": np.ones((1, 4))}
    flat = {name: values.astype(np.float32) for name, values in vector.items()}
    with pytest.raises(AdapterError, match="is no matrix"):
        inspect(adapter_files.write(tmp_path / "vector.gguf", flat), demo.header)


@pytest.mark.parametrize(
    ("metadata", "says"),
    [
        (lambda writer: writer.add_float64("adapter.lora.alpha", 8.0), "adapter.lora.alpha"),
        (lambda writer: writer.add_string("adapter.lora.alpha", "8"), "adapter.lora.alpha"),
        (lambda writer: writer.add_float32("adapter.lora.alpha", float("nan")), "adapter.lora.alpha"),
        (lambda writer: writer.add_float32("adapter.lora.alpha", 1e30), "adapter.lora.alpha"),
        (lambda writer: writer.add_array("adapter.alora.invocation_tokens", [1, 2]), "activated LoRA"),
    ],
)
def test_metadata_that_is_refused(
    demo: Model, tmp_path: Path, metadata: Callable[[gguf.GGUFWriter], None], says: str
) -> None:
    path = adapter_files.write(tmp_path / "bad.gguf", weights_for(demo.header), metadata=metadata)
    with pytest.raises(AdapterError, match=says):
        inspect(path, demo.header)


def test_files_that_are_no_adapter_of_this_model(demo: Model, tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="not a LoRA adapter"):
        inspect(DEMO, demo.header)
    weights = weights_for(demo.header)
    with pytest.raises(AdapterError, match="architecture qwen2, and this one is llama"):
        inspect(adapter_files.write(tmp_path / "qwen2.gguf", weights, architecture="qwen2"), demo.header)
    with pytest.raises(AdapterError, match="not a LoRA adapter"):
        inspect(adapter_files.write(tmp_path / "ia3.gguf", weights, adapter_type="ia3"), demo.header)
    numbered = adapter_files.write(
        tmp_path / "number.gguf", weights, kind="", metadata=lambda writer: writer.add_uint32("general.type", 8)
    )
    with pytest.raises(AdapterError, match="not a LoRA adapter"):
        inspect(numbered, demo.header)
    with pytest.raises(AdapterError, match="can't be read"):
        inspect(tmp_path / "nothing.gguf", demo.header)
    with pytest.raises(AdapterError, match="is no file"):
        inspect(tmp_path, demo.header)
    with pytest.raises(AdapterError, match="raise adapters_mib"):
        inspect(PIRATE, demo.header, max_bytes=1000)


def test_an_adapter_of_another_model_of_the_same_kind(demo: Model, stories: Model, tmp_path: Path) -> None:
    path = adapter_files.sound(tmp_path / "stories.gguf", stories.header)
    with pytest.raises(AdapterError, match="made for this model"):
        inspect(path, demo.header)


def test_every_cut_is_noticed(demo: Model, tmp_path: Path) -> None:
    data = PIRATE.read_bytes()
    path = tmp_path / "cut.gguf"
    for length in (*range(0, 400, 7), *range(400, HEAD_BYTES, 131), *range(HEAD_BYTES, len(data), 9973), len(data) - 1):
        path.write_bytes(data[:length])
        with pytest.raises(AdapterError):
            inspect(path, demo.header)


def test_damaged_files_are_refused_or_harmless(demo: Model, tmp_path: Path) -> None:
    """What `inspect` lets through, llama.cpp refuses with a reason or computes with: nothing ends the process."""
    data = PIRATE.read_bytes()
    path = tmp_path / "damaged.gguf"
    outcomes = {"refused": 0, "refused by llama.cpp": 0, "served": 0}
    with lone_context(demo) as one:
        applied = AppliedAdapters(one.context.pointer)
        plain = one.feed(0, TOKENS)
        for seed in range(400):
            path.write_bytes(_damaged(data, random.Random(seed)))
            try:
                file = inspect(path, demo.header)
            except AdapterError:
                outcomes["refused"] += 1
                continue
            try:
                adapter = Adapter.load(demo, file)
            except AdapterError:
                outcomes["refused by llama.cpp"] += 1
                continue
            applied.apply(((adapter, 1.0),))
            one.memory.remove(1)
            assert np.isfinite(one.feed(1, TOKENS)).all()
            applied.drop(adapter)
            adapter.close()
            outcomes["served"] += 1
        assert same(one.feed(2, TOKENS), plain)
    assert min(outcomes.values()) > 0, outcomes


def test_a_file_that_changes_after_the_check_is_not_loaded(demo: Model, tmp_path: Path) -> None:
    path = tmp_path / "changing.gguf"
    path.write_bytes(PIRATE.read_bytes())
    file = inspect(path, demo.header)
    adapter_files.sound(tmp_path / "other.gguf", demo.header)
    os.replace(tmp_path / "other.gguf", path)
    with pytest.raises(AdapterError, match="changed since it was checked"):
        Adapter.load(demo, file)


def test_what_llama_cpp_says_of_a_file_does_not_tell_its_folder(demo: Model) -> None:
    file = inspect(PIRATE, demo.header)
    with few_descriptors(0), pytest.raises(AdapterUnreadable, match="failed to open") as caught:
        Adapter.load(demo, file)
    assert str(PIRATE.parent) not in str(caught.value)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    result = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        at, kind = rng.randrange(4, HEAD_BYTES), rng.random()
        if kind < 0.4:
            result[at] = rng.randrange(256)
        elif kind < 0.7:
            result[at] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            result[at : at + 8] = rng.choice((b"\xff" * 8, bytes(8), (2**63).to_bytes(8, "little")))
        elif kind < 0.9:
            del result[at : at + rng.choice((1, 4, 8, 16))]
        else:
            result[at:at] = bytes(rng.choice((1, 4, 8)))
    return bytes(result)
