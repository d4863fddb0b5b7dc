"""`LlamaSettings` as llama.cpp's parameters: where a model's weights and cache lie, and which device computes them.

Names and meanings are llama.cpp's own. Source: llama.h, and common/arg.cpp for the experts that stay in main memory.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.errors import ModelError
from workers.protocol.catalog import LlamaSettings

SPLIT_MODES = {"none": 0, "layer": 1, "row": 2, "tensor": 3}
LOAD_MODES = {(False, False): 0, (True, False): 1, (False, True): 2, (True, True): 3}
"""`llama_load_mode` by (use_mmap, use_mlock)."""

FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
CACHE_TYPES = {
    "f32": c.GGML_TYPE_F32,
    "f16": c.GGML_TYPE_F16,
    "bf16": 30,  # the bindings have no name for it
    "q8_0": c.GGML_TYPE_Q8_0,
    "q4_0": c.GGML_TYPE_Q4_0,
    "q4_1": c.GGML_TYPE_Q4_1,
    "q5_0": c.GGML_TYPE_Q5_0,
    "q5_1": c.GGML_TYPE_Q5_1,
    "iq4_nl": c.GGML_TYPE_IQ4_NL,
}

EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Pattern of the names of tensors that hold the experts of one layer."""


class BufferOverride(ctypes.Structure):
    """`llama_model_tensor_buft_override`: tensors whose name matches go into this type of buffer."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class ModelParams:
    """`llama_model_params`; keep this object until the model is loaded, as it holds what the pointers point to."""

    def __init__(self, settings: LlamaSettings) -> None:
        """Raise ModelError for more shares than llama.cpp can use devices."""
        params: Any = c.llama_model_default_params()
        params.n_gpu_layers = settings.n_gpu_layers
        params.split_mode = SPLIT_MODES[settings.split_mode]
        params.main_gpu = settings.main_gpu
        params.load_mode = LOAD_MODES[settings.use_mmap, settings.use_mlock]
        params.no_host = settings.no_host
        params.use_extra_bufts = settings.use_extra_bufts
        params.check_tensors = settings.check_tensors
        self._shares = _shares(settings)
        if settings.tensor_split:
            params.tensor_split = self._shares
        self._overrides = _overrides(settings)
        if len(self._overrides) > 1:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        self.native = params


def fill_context(params: Any, settings: LlamaSettings) -> None:
    """Set all fields of a `llama_context_params` that these settings decide, except its size."""
    params.n_ubatch = settings.n_ubatch
    params.n_threads = settings.n_threads or os.cpu_count() or 1
    params.n_threads_batch = settings.n_threads_batch or params.n_threads
    params.flash_attn_type = FLASH_ATTN[settings.flash_attn]
    params.type_k = CACHE_TYPES[settings.cache_type_k]
    params.type_v = CACHE_TYPES[settings.cache_type_v]
    params.swa_full = settings.swa_full
    params.offload_kqv = settings.offload_kqv
    params.op_offload = settings.op_offload
    params.no_perf = settings.no_perf


def _shares(settings: LlamaSettings) -> ctypes.Array[ctypes.c_float]:
    """Return the shares in an array as long as llama.cpp reads: one per device that it could use, present or not."""
    room: int = c.llama_max_devices()
    if len(settings.tensor_split) > room:
        raise ModelError(
            f"llama.tensor_split: {len(settings.tensor_split)} shares, but this llama.cpp uses at most {room} devices; "
            "give one share per GPU"
        )
    return (ctypes.c_float * room)(*settings.tensor_split)


def _overrides(settings: LlamaSettings) -> ctypes.Array[BufferOverride]:
    """Return the overrides for experts that stay in main memory; an entry without a pattern ends the list."""
    layers = [rf"\.{EXPERTS}"] if settings.cpu_moe else [rf"blk\.{n}\.{EXPERTS}" for n in range(settings.n_cpu_moe)]
    main_memory = c._lib.ggml_backend_cpu_buffer_type
    main_memory.restype = ctypes.c_void_p
    entries = [BufferOverride(pattern.encode(), main_memory()) for pattern in layers]
    return (BufferOverride * (len(entries) + 1))(*entries)
