"""The `llama` settings of a catalog: what contradicts itself is told with its place and the remedy."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from workers.models.catalog import CatalogError, convert
from workers.models.spec import LlamaSettings


def catalog(llama: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"models": [{"name": "m", "path": "m.gguf", "llama": llama, **fields}]}


@pytest.mark.parametrize(
    ("llama", "message"),
    [
        ({"main_gpu": 1}, "`main_gpu` chooses one GPU, but with a `split_mode` of layer all are used"),
        ({"main_gpu": 1, "split_mode": "tensor"}, "set `split_mode` to none, or remove `main_gpu`"),
        ({"main_gpu": -1, "split_mode": "none"}, "main_gpu"),
        ({"split_mode": "rows"}, "split_mode"),
        ({"tensor_split": [1, 1], "split_mode": "none"}, "`tensor_split` has no use with a `split_mode` of none"),
        ({"tensor_split": [2, -1]}, r"tensor_split\[1\]"),
        ({"tensor_split": [math.nan]}, "tensor_split"),
        ({"tensor_split": [math.inf]}, "tensor_split"),
        ({"tensor_split": [0, 0]}, "at least one share must be above 0"),
        ({"tensor_split": [1] * 17}, "tensor_split"),
        ({"cpu_moe": True, "n_cpu_moe": 3}, "remove one of the two"),
        ({"n_cpu_moe": -1}, "n_cpu_moe"),
        ({"rope_scaling": "long"}, "rope_scaling"),
        ({"rope_freq_base": 0.5}, "must be above 1, or 0 for the model's own"),
        ({"rope_freq_base": math.inf}, "rope_freq_base"),
        ({"rope_freq_scale": 1e-6}, "the least is 0.00001, and 0 is the model's own"),
        ({"rope_freq_scale": 65}, "rope_freq_scale"),
        ({"rope_freq_scale": 0.25, "rope_scaling": "none"}, "no effect with a `rope_scaling` of none; remove one"),
        (
            {"yarn_orig_ctx": 4096, "rope_scaling": "linear"},
            "`yarn_orig_ctx` is for YaRN, and `rope_scaling` is linear",
        ),
        ({"yarn_ext_factor": -0.5}, "`yarn_ext_factor` is -0.5; below 0 there is only -1, the model's own"),
        ({"yarn_ext_factor": 1.5}, "yarn_ext_factor"),
        ({"yarn_attn_factor": 1, "rope_scaling": "yarn"}, "`yarn_attn_factor` has no effect while YaRN extrapolates"),
        ({"yarn_beta_slow": 8, "yarn_beta_fast": 8}, "`yarn_beta_slow` must be below `yarn_beta_fast`"),
        ({"yarn_orig_ctx": 2**24 + 1}, "yarn_orig_ctx"),
        ({"override_kv": {"general.architecture": "llama"}}, "general.architecture can't be overridden"),
        ({"override_kv": {"split.count": 2}}, "split.count can't be overridden: it says of which files"),
        ({"override_kv": {"tokenizer.chat_template": "x"}}, "set the model's `chat_template` instead"),
        ({"override_kv": {"tokenizer.ggml.model": "gpt2"}}, "tokenizer.ggml.model can't be overridden"),
        ({"override_kv": {"a.b": "ü" * 64}}, "the text of a.b may have 127 bytes and no NUL; shorten it"),
        ({"override_kv": {"a.b": "x\0"}}, "the text of a.b may have 127 bytes and no NUL"),
        ({"override_kv": {"a.b": -1}}, "override_kv"),
        ({"override_kv": {"a.b": 2**32}}, "override_kv"),
        ({"override_kv": {"a.b": -0.5}}, "override_kv"),
        ({"override_kv": {"a.b": math.nan}}, "override_kv"),
        ({"override_kv": {"a.b": [1]}}, "override_kv"),
        ({"override_kv": {"a b": 1}}, "override_kv"),
        ({"override_kv": {"k" * 128: 1}}, "override_kv"),
        ({"override_kv": {f"k{number}": 1 for number in range(65)}}, "override_kv"),
        ({"override_tensor": [{"pattern": "x" * 257, "buffer": "CPU"}]}, r"override_tensor\[0\].pattern"),
        ({"override_tensor": [{"pattern": "x"}]}, "`buffer` is missing"),
        ({"devices": ["none", "CUDA0"]}, "`devices`: none stands alone"),
        ({"devices": ["none"], "split_mode": "tensor"}, "a `split_mode` of tensor needs devices"),
        ({"devices": [0, 0]}, "`devices` names a device twice"),
        ({"devices": ["CUDA0"], "tensor_split": [1, 1]}, "names 1 devices, and other settings speak of 2"),
        ({"numa": "mirror"}, "numa"),
        ({"cpus": "0-"}, "cpus"),
        ({"cpus": "3-1"}, "3-1 ends before it begins; write the lower core first"),
        ({"cpus": "0-3,2"}, "`cpus` names core 2 twice"),
        ({"cpus": "0-1", "n_threads": 3}, "`n_threads` is 3, and `cpus` names 2 cores"),
        ({"cpus": "0-1", "numa": "isolate"}, "set `numa` to numactl, which keeps to `cpus`"),
        ({"control_vectors": [{"path": "v.gguf", "scale": 17}]}, r"control_vectors\[0\].scale"),
        ({"control_vector_layers": [1, 2]}, "`control_vector_layers` has no use without `control_vectors`"),
        ({"control_vectors": [{"path": "v"}], "control_vector_layers": [3]}, "is the first and the last layer"),
        ({"control_vectors": [{"path": "v"}], "control_vector_layers": [3, 2]}, "is the first and the last layer"),
        ({"control_vectors": [{"path": "v"}], "control_vector_layers": [0, 2]}, "control_vector_layers"),
        ({"offload_kqv": 1}, "offload_kqv"),
        ({"gpu_layers": 3}, "gpu_layers"),
    ],
)
def test_a_contradiction_is_refused_with_its_place(llama: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        convert(catalog(llama, gpus=16), "file.yaml")
    assert str(caught.value).startswith("file.yaml: ")
    assert "models[0] (m): llama" in str(caught.value)


def test_a_worker_gets_as_many_gpus_as_its_settings_speak_of() -> None:
    for llama in ({"tensor_split": [3, 1]}, {"main_gpu": 1, "split_mode": "row"}):
        with pytest.raises(CatalogError, match="speaks of 2 GPUs and each worker gets 1; raise `gpus`"):
            convert(catalog(llama), "file.yaml")
        [model] = convert(catalog(llama, gpus=2), "file.yaml").models
        assert model.gpus == 2


def test_each_worker_needs_a_core_and_each_thread_too() -> None:
    for llama, said in (
        ({"cpus": "0-1"}, "`cpus` names 2 cores for 3 workers, each of which needs one"),
        ({"cpus": "0-6", "n_threads_batch": 3}, "gives each of 3 workers 2 cores, and 3 threads would share them"),
    ):
        with pytest.raises(CatalogError, match=said):
            convert(catalog(llama, workers=3), "file.yaml")
    assert convert(catalog({"cpus": "0-2"}, workers=3), "file.yaml")


def test_what_a_worker_is_told_is_what_the_catalog_says() -> None:
    """Whole numbers, fractions, truth and text keep their types on the way to a worker."""
    values = {"a": 1, "b": 1.0, "c": True, "d": "1"}
    [model] = convert(catalog({"override_kv": values, "devices": ["CUDA1", 0]}), "file.yaml").models
    told = msgspec.json.decode(msgspec.json.encode(model.llama), type=LlamaSettings)
    assert [(value, type(value)) for value in told.override_kv.values()] == [
        (1, int),
        (1.0, float),
        (True, bool),
        ("1", str),
    ]
    assert told == model.llama


def test_a_flag_is_checked_as_a_catalog_is() -> None:
    with pytest.raises(ValueError, match="main_gpu"):
        LlamaSettings(main_gpu=1)
