"""The `llama` settings of a catalog: what contradicts itself is told with its place and the remedy."""

from __future__ import annotations

import math
from typing import Any

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
        ({"offload_kqv": 1}, "offload_kqv"),
        ({"gpu_layers": 3}, "gpu_layers"),
    ],
)
def test_a_contradiction_is_refused_with_its_place(llama: dict[str, Any], message: str) -> None:
    with pytest.raises(CatalogError, match=message) as caught:
        convert(catalog(llama, gpus=16), "file.yaml")
    assert str(caught.value).startswith("file.yaml: ")
    assert "models[0].llama" in str(caught.value)


def test_a_worker_gets_as_many_gpus_as_its_settings_speak_of() -> None:
    for llama in ({"tensor_split": [3, 1]}, {"main_gpu": 1, "split_mode": "row"}):
        with pytest.raises(CatalogError, match="speaks of 2 GPUs and each worker gets 1; raise `gpus`"):
            convert(catalog(llama), "file.yaml")
        [model] = convert(catalog(llama, gpus=2), "file.yaml").models
        assert model.gpus == 2


def test_a_flag_is_checked_as_a_catalog_is() -> None:
    with pytest.raises(ValueError, match="main_gpu"):
        LlamaSettings(main_gpu=1)
