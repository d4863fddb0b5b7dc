"""Each setting by llama.cpp's name stands in the structure that llama.cpp is given."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
from llama_cpp import llama_cpp as c

from tests.support.vocabularies import DEMO
from workers.llama.context import Context
from workers.llama.devices import buffer_types
from workers.llama.model import Model
from workers.llama.model_params import EXPERTS, BufferOverride, ModelParams, fill_context
from workers.llama.native import ModelError
from workers.models.overrides import MetadataValue, TensorOverride
from workers.models.spec import LlamaSettings


def model_params(**settings: Any) -> Any:
    return ModelParams(LlamaSettings(**settings)).native


def context_params(**settings: Any) -> Any:
    params = c.llama_context_default_params()
    fill_context(params, LlamaSettings(n_threads=2, **settings))
    return params


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"n_gpu_layers": 7}, "n_gpu_layers", 7),
        ({"split_mode": "none"}, "split_mode", 0),
        ({"split_mode": "layer"}, "split_mode", 1),
        ({"split_mode": "row"}, "split_mode", 2),
        ({"split_mode": "tensor"}, "split_mode", 3),
        ({"split_mode": "row", "main_gpu": 2}, "main_gpu", 2),
        ({"use_mmap": False}, "load_mode", 0),
        ({"use_mmap": True, "use_mlock": True}, "load_mode", 3),
        ({"no_host": True}, "no_host", True),
        ({"use_extra_bufts": False}, "use_extra_bufts", False),
        ({"check_tensors": True}, "check_tensors", True),
    ],
)
def test_what_a_model_is_loaded_with(settings: dict[str, Any], field: str, value: object) -> None:
    assert getattr(model_params(**settings), field) == value


@pytest.mark.parametrize(
    ("settings", "field", "value"),
    [
        ({"n_ubatch": 64}, "n_ubatch", 64),
        ({}, "n_threads", 2),
        ({}, "n_threads_batch", 2),
        ({"n_threads_batch": 5}, "n_threads_batch", 5),
        ({"flash_attn": "off"}, "flash_attn_type", 0),
        ({"cache_type_k": "q8_0"}, "type_k", c.GGML_TYPE_Q8_0),
        ({"cache_type_v": "bf16"}, "type_v", 30),
        ({"swa_full": True}, "swa_full", True),
        ({"offload_kqv": False}, "offload_kqv", False),
        ({"op_offload": False}, "op_offload", False),
        ({"no_perf": False}, "no_perf", False),
        ({}, "rope_scaling_type", -1),
        ({"rope_scaling": "none"}, "rope_scaling_type", 0),
        ({"rope_scaling": "yarn"}, "rope_scaling_type", 2),
        ({"rope_scaling": "longrope"}, "rope_scaling_type", 3),
        ({"rope_freq_base": 5e5}, "rope_freq_base", 5e5),
        ({"rope_freq_scale": 0.25}, "rope_freq_scale", 0.25),
        ({"yarn_orig_ctx": 8192}, "yarn_orig_ctx", 8192),
        ({"yarn_ext_factor": 0.5}, "yarn_ext_factor", 0.5),
        ({"yarn_attn_factor": 2}, "yarn_attn_factor", 2),
        ({"yarn_beta_slow": 2}, "yarn_beta_slow", 2),
        ({"yarn_beta_fast": 64}, "yarn_beta_fast", 64),
    ],
)
def test_what_a_context_is_made_with(settings: dict[str, Any], field: str, value: object) -> None:
    assert getattr(context_params(**settings), field) == value


def test_shares_fill_llama_cpps_room_for_devices() -> None:
    params = ModelParams(LlamaSettings(tensor_split=(3, 1)))
    room = c.llama_max_devices()
    assert params.native.tensor_split[:room] == [3.0, 1.0, *[0.0] * (room - 2)]
    assert not model_params().tensor_split
    with pytest.raises(ModelError, match=f"17 shares, but this llama.cpp uses at most {room} devices"):
        ModelParams(LlamaSettings(tensor_split=(1.0,) * 17))


@pytest.mark.parametrize("name", ["rope_freq_base", "rope_freq_scale", "yarn_orig_ctx", "yarn_ext_factor"])
def test_what_is_left_out_is_llama_cpps_own(name: str) -> None:
    assert getattr(context_params(), name) == getattr(c.llama_context_default_params(), name)


def test_metadata_is_handed_on_with_its_types() -> None:
    values: dict[str, MetadataValue] = {
        "a.int": 7,
        "a.float": 0.5,
        "a.bool": True,
        "a.str": "ü" * 63,
        "k" * 127: 2**32 - 1,
    }
    params = ModelParams(LlamaSettings(override_kv=values))
    entries = params.native.kv_overrides
    assert [(entries[number].tag, entries[number].key.decode()) for number in range(5)] == [
        *zip((0, 1, 2, 3, 0), values, strict=True)
    ]
    assert (entries[0].value.val_i64, entries[1].value.val_f64, entries[2].value.val_bool) == (7, 0.5, True)
    assert entries[3].value.val_str.decode() == "ü" * 63
    assert entries[4].value.val_i64 == 2**32 - 1
    assert entries[5].key == b""
    assert not model_params().kv_overrides


def test_devices_are_chosen_by_name_or_number() -> None:
    """On a machine without any there is nothing to choose but none."""
    assert not model_params().devices
    params = ModelParams(LlamaSettings(devices=("none",)))
    assert ctypes.c_void_p.from_address(params.native.devices).value is None
    names = [name for name in buffer_types() if name != "CPU"]
    for wanted in ("Abacus0", 200):
        with pytest.raises(ModelError, match=f"there is no device {wanted} beside the processor; ") as caught:
            ModelParams(LlamaSettings(devices=(wanted,)))
        assert "choose among 0 (" in str(caught.value) if names else "write none" in str(caught.value)


def patterns(**settings: Any) -> list[str]:
    params = ModelParams(LlamaSettings(**settings))
    address = params.native.tensor_buft_overrides
    found = []
    while address:
        entry = BufferOverride.from_address(address)
        if not entry.pattern:
            break
        assert entry.buft
        found.append(entry.pattern.decode())
        address += ctypes.sizeof(BufferOverride)
    return found


def test_experts_stay_in_main_memory() -> None:
    assert patterns() == []
    assert patterns(n_cpu_moe=2) == [rf"blk\.0\.{EXPERTS}", rf"blk\.1\.{EXPERTS}"]
    [every] = patterns(cpu_moe=True)
    for name in ("blk.7.ffn_up_exps.weight", "blk.12.ffn_gate_up_exps.weight", "blk.0.ffn_down_chexps.weight"):
        assert re.search(every, name)
    assert not re.search(every, "blk.0.ffn_up.weight")


def test_patterns_of_the_settings_come_before_those_of_experts() -> None:
    first = (TensorOverride(pattern="ffn_up", buffer="CPU"), TensorOverride(pattern=r"blk\.1\.", buffer="CPU"))
    assert patterns(override_tensor=first, n_cpu_moe=1) == ["ffn_up", r"blk\.1\.", rf"blk\.0\.{EXPERTS}"]
    missing = (TensorOverride(pattern="x", buffer="Abacus0"),)
    with pytest.raises(ModelError, match=r"no type of buffer Abacus0 on the devices in use; choose among .*CPU"):
        patterns(override_tensor=missing)


@pytest.mark.parametrize(
    "settings",
    [
        LlamaSettings(n_threads=1, split_mode="none", no_host=True, use_extra_bufts=False, check_tensors=True),
        LlamaSettings(n_threads=1, split_mode="row", tensor_split=(1, 0), n_cpu_moe=1, use_mmap=False),
        LlamaSettings(n_threads=1, n_threads_batch=2, offload_kqv=False, op_offload=False, no_perf=False),
    ],
)
def test_llama_cpp_takes_them(settings: LlamaSettings) -> None:
    with Model.load(DEMO, settings) as model, Context(model, settings, slots=1, kv_tokens=64) as context:
        batch = context.new_batch()
        batch.add_token(1, 0, 0)
        context.decode(batch)
        c.llama_synchronize(context.pointer)
        times = c.llama_perf_context(context.pointer)
        assert (times.t_p_eval_ms + times.t_eval_ms > 0) is not settings.no_perf


def test_check_tensors_finds_what_is_no_number(tmp_path: Path) -> None:
    """The last tensor's data, which is of single floats, becomes NaN."""
    broken = tmp_path / "broken.gguf"
    data = DEMO.read_bytes()
    broken.write_bytes(data[:-4096] + b"\xff" * 4096)
    with Model.load(broken, LlamaSettings(n_threads=1)):
        pass
    with pytest.raises(ModelError, match="invalid data"):
        Model.load(broken, LlamaSettings(n_threads=1, check_tensors=True))
