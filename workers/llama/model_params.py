"""Turns `LlamaSettings` into llama.cpp's parameters of models and contexts.

The metadata of `override_kv` is put in place of a model file's both for llama.cpp and in the header that the worker
reads itself, so that both see the same model. Names and meanings are llama.cpp's own. Sources: llama.h, common/arg.cpp
for tensors that go into other buffers, and `GGUFMeta` in llama-model-loader.cpp for overrides.
"""

from __future__ import annotations

import ctypes
import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.devices import buffer_types, chosen_devices
from workers.llama.gguf import GgufHeader
from workers.llama.native import ModelError, native_log
from workers.models.overrides import MetadataValue
from workers.models.spec import MAX_CTX, YARN, LlamaSettings, is_given
from workers.process.limits import num_cores

logger = logging.getLogger(__name__)

Overrides = Mapping[str, MetadataValue]

_INT, _FLOAT, _BOOL, _STR = range(4)
"""`llama_model_kv_override_type`."""

_TAGS = {bool: _BOOL, int: _INT, float: _FLOAT, str: _STR}
_FIELDS = ("val_i64", "val_f64", "val_bool", "val_str")
_WORDS = ("a whole number", "a number with a fraction", "true or false", "a text")

_GGUF_FLOATS, _GGUF_BOOL, _GGUF_STRING, _GGUF_ARRAY = (6, 12), 7, 8, 9

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

ROPE_SCALING = {"auto": -1, "none": 0, "linear": 1, "yarn": 2, "longrope": 3}

NUMA = {"distribute": 1, "isolate": 2, "numactl": 3}
"""`ggml_numa_strategy` in ggml-cpu.h."""

NODES = Path("/sys/devices/system/node")

TRANSLATED = frozenset(
    {"split_mode", "tensor_split", "devices", "n_batch", "n_threads", "n_threads_batch", "embeddings"}
)
"""Settings that are not copied to llama.cpp's parameters unchanged: words that stand for numbers, numbers whose 0 is
replaced, and settings that decide a parameter only together with other facts."""

EXPERTS = r"ffn_(up|down|gate|gate_up)_(ch|)exps"
"""Pattern of the names of tensors that hold the experts of one layer."""


class BufferOverride(ctypes.Structure):
    """`llama_model_tensor_buft_override`: tensors whose name matches go into this type of buffer."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class ModelParams:
    """`llama_model_params`; keep this object until the model is loaded, as it holds what the pointers point to."""

    def __init__(self, settings: LlamaSettings) -> None:
        """Raise ModelError if `tensor_split` has more shares than llama.cpp can use devices, and for a device or a type
        of buffer that is not there."""
        params: Any = c.llama_model_default_params()
        _hand_on(settings, params)
        params.split_mode = SPLIT_MODES[settings.split_mode]
        params.load_mode = LOAD_MODES[settings.use_mmap, settings.use_mlock]
        self._shares = _shares(settings)
        if settings.tensor_split:
            params.tensor_split = self._shares
        self._devices = chosen_devices(settings.devices)
        if self._devices is not None:
            params.devices = ctypes.addressof(self._devices)
        self._metadata = native_overrides(settings.override_kv)
        if self._metadata is not None:
            params.kv_overrides = self._metadata
        self._overrides = _overrides(settings)
        if len(self._overrides) > 1:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        self.native = params
        self._progress: Any = None

    def tell(self, on_progress: Callable[[float], None]) -> None:
        """Have llama.cpp call `on_progress` with the share of the weights that is loaded, after each tensor, on the
        thread that loads. It must not raise: loading would end."""

        def goes_on(share: float, _: object) -> bool:
            on_progress(share)
            return True

        self._progress = self.native.progress_callback = c.llama_progress_callback(goes_on)


def fill_context(params: Any, settings: LlamaSettings) -> None:
    """Set the fields of a `llama_context_params` that the settings alone decide: not its sizes (`n_ctx`, `n_batch`)."""
    _hand_on(settings, params)
    params.n_threads = settings.n_threads or num_cores()
    params.n_threads_batch = settings.n_threads_batch or params.n_threads
    params.rope_scaling_type = ROPE_SCALING[settings.rope_scaling]
    params.flash_attn_type = FLASH_ATTN[settings.flash_attn]
    params.type_k = CACHE_TYPES[settings.cache_type_k]
    params.type_v = CACHE_TYPES[settings.cache_type_v]


def _hand_on(settings: LlamaSettings, params: Any) -> None:
    """Copy each setting to llama.cpp's parameter of the same name, unless the setting is listed in `TRANSLATED`."""
    for name, _ in params._fields_:
        if name in LlamaSettings.__struct_fields__ and name not in TRANSLATED:
            setattr(params, name, getattr(settings, name))


def _shares(settings: LlamaSettings) -> ctypes.Array[ctypes.c_float]:
    """Return `tensor_split`, filled with zeros to the length that llama.cpp reads: a share per possible device."""
    room: int = c.llama_max_devices()
    if len(settings.tensor_split) > room:
        raise ModelError(
            f"llama.tensor_split: {len(settings.tensor_split)} shares, but this llama.cpp uses at most {room} devices; "
            "give one share per GPU"
        )
    return (ctypes.c_float * room)(*settings.tensor_split)


def _overrides(settings: LlamaSettings) -> ctypes.Array[BufferOverride]:
    """Return which tensors go into which type of buffer, the settings' own patterns before those of the experts, which
    stay in main memory. The first pattern that fits wins, and an entry without a pattern ends the list.

    Raises ModelError for a type of buffer that is not there."""
    layers = [rf"\.{EXPERTS}"] if settings.cpu_moe else [rf"blk\.{n}\.{EXPERTS}" for n in range(settings.n_cpu_moe)]
    main_memory = c._lib.ggml_backend_cpu_buffer_type
    main_memory.restype = ctypes.c_void_p
    types = buffer_types(settings.devices) if settings.override_tensor else {}
    if missing := next((one.buffer for one in settings.override_tensor if one.buffer not in types), None):
        raise ModelError(
            f"llama.override_tensor: there is no type of buffer {missing} on the devices in use; choose among "
            f"{', '.join(sorted(types))}"
        )
    entries = [BufferOverride(one.pattern.encode(), types[one.buffer]) for one in settings.override_tensor]
    entries += [BufferOverride(pattern.encode(), main_memory()) for pattern in layers]
    return (BufferOverride * (len(entries) + 1))(*entries)


@functools.cache
def start_numa(strategy: str) -> None:
    """Have llama.cpp place its threads and the model's pages by NUMA nodes, once for the whole process."""
    if strategy == "off":
        return
    native_log()  # starts the backend
    if len(list(NODES.glob("node[0-9]*"))) < 2:
        logger.warning("numa: this machine has one NUMA node, so %s changes nothing", strategy)
    c.llama_numa_init(NUMA[strategy])


LEARNED_POSITIONS = "position_embd.weight"
"""Name of the tensor of a model that learned a vector for each position, in place of rotary ones."""

_NO_ROPE = -1
_ROPE = ("rope_freq_base", "rope_freq_scale")


def check_rope(model: int, header: GgufHeader, settings: LlamaSettings) -> None:
    """Raise ModelError if the settings are about rotary positions and the model, a `llama_model *`, has none of that
    kind: llama.cpp would take no notice of them."""
    given = [name for name in _ROPE if getattr(settings, name)] + [name for name in YARN if is_given(settings, name)]
    if settings.rope_scaling != "auto":
        given.insert(0, "rope_scaling")
    if given and (c.llama_model_rope_type(model) == _NO_ROPE or LEARNED_POSITIONS in header.tensors):
        raise ModelError(f"{header.path}: llama.{given[0]}: this model has no rotary positions; remove it")
    if settings.rope_scaling == "longrope" and not any("rope_factors_long" in name for name in header.tensors):
        raise ModelError(
            f"{header.path}: llama.rope_scaling: the model has no factors for longrope; set yarn or linear, or remove "
            "it"
        )


def native_overrides(values: Overrides) -> ctypes.Array[Any] | None:
    """Return the overrides as llama.cpp takes them, an entry without a key ending the list; None: there are none. Keep
    the array until the model is loaded."""
    if not values:
        return None
    entries: Any = (c.llama_model_kv_override * (len(values) + 1))()
    for entry, (key, value) in zip(entries, values.items(), strict=False):
        tag = _TAGS[type(value)]
        entry.tag, entry.key = tag, key.encode()
        setattr(entry.value, _FIELDS[tag], value.encode() if isinstance(value, str) else value)
    return entries  # type: ignore[no-any-return]


def fitted_overrides(header: GgufHeader, values: Overrides) -> Overrides:
    """Return the overrides with whole numbers as floats where the file has a float: Helm writes 10000.0 as 10000.

    Raises ModelError for a value of another type than the file's, which llama.cpp would leave out with a warning."""
    arch = header.text("general.architecture") or ""
    fitted: dict[str, MetadataValue] = {}
    for key, given in values.items():
        kind = header.types.get(key)
        value = float(given) if kind in _GGUF_FLOATS and type(given) is int else given
        if kind == _GGUF_ARRAY:
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is a list, and llama.cpp overrides single values only; "
                "remove it"
            )
        if kind is not None and _TAGS[type(value)] != (wanted := _tag_of(kind)):
            raise wrong_type(header, key, value, wanted)
        if key == f"{arch}.context_length" and not 0 < value <= MAX_CTX:  # type: ignore[operator]
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is {value} and may be 1 to {MAX_CTX:,} tokens; correct it"
            )
        fitted[key] = value
    return fitted


def wrong_type(header: GgufHeader, key: str, value: MetadataValue, wanted: int) -> ModelError:
    """Return the error for a value whose type is not the one, by its tag, that llama.cpp reads under this key."""
    return ModelError(
        f"{header.path}: llama.override_kv: {key} must be {_WORDS[wanted]}, and {json.dumps(value)} is "
        f"{_WORDS[_TAGS[type(value)]]}; write it as the other"
    )


def _tag_of(kind: int) -> int:
    if kind in _GGUF_FLOATS:
        return _FLOAT
    return {_GGUF_BOOL: _BOOL, _GGUF_STRING: _STR}.get(kind, _INT)


def overridden(header: GgufHeader, values: Overrides) -> GgufHeader:
    """Return the header with the overrides in place of the file's values."""
    return replace(header, metadata={**header.metadata, **values}) if values else header


def check_token_ids(header: GgufHeader, values: Overrides, num_tokens: int) -> None:
    """Raise ModelError for a special token that the vocabulary has not: llama.cpp would take its own instead."""
    for key, value in values.items():
        if key.startswith("tokenizer.ggml.") and key.endswith("_id") and type(value) is int and value >= num_tokens:
            raise ModelError(
                f"{header.path}: llama.override_kv: {key} is {value}, and the vocabulary has tokens 0 to "
                f"{num_tokens - 1}; name one of them"
            )
