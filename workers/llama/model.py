"""Loads a model and owns its `llama_model` pointer; turns `LlamaSettings` into llama.cpp's parameters; reports the
memory of the devices.

Names and meanings are llama.cpp's own. Sources: llama.h, ggml-backend.h, and common/arg.cpp for the experts that stay
in main memory.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llama_cpp import llama_cpp as c

from workers.llama.gguf import GgufHeader, read_header
from workers.llama.native import ModelError, ModelTooLarge, NativeOwner, native_log
from workers.llama.tokens.vocab import Vocab
from workers.models.spec import LlamaSettings
from workers.protocol.heartbeat import DeviceMemory, ModelFacts

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

TRANSLATED = frozenset({"split_mode", "tensor_split", "n_batch", "n_threads", "n_threads_batch", "embeddings"})
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
        """Raise ModelError if `tensor_split` has more shares than llama.cpp can use devices."""
        params: Any = c.llama_model_default_params()
        _hand_on(settings, params)
        params.split_mode = SPLIT_MODES[settings.split_mode]
        params.load_mode = LOAD_MODES[settings.use_mmap, settings.use_mlock]
        self._shares = _shares(settings)
        if settings.tensor_split:
            params.tensor_split = self._shares
        self._overrides = _overrides(settings)
        if len(self._overrides) > 1:
            params.tensor_buft_overrides = ctypes.addressof(self._overrides)
        self.native = params


def fill_context(params: Any, settings: LlamaSettings) -> None:
    """Set the fields of a `llama_context_params` that the settings alone decide: not its sizes (`n_ctx`, `n_batch`)."""
    _hand_on(settings, params)
    params.n_threads = settings.n_threads or os.cpu_count() or 1
    params.n_threads_batch = settings.n_threads_batch or params.n_threads
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
    """Return the overrides that keep experts' tensors in main memory; an entry without a pattern ends the list."""
    layers = [rf"\.{EXPERTS}"] if settings.cpu_moe else [rf"blk\.{n}\.{EXPERTS}" for n in range(settings.n_cpu_moe)]
    main_memory = c._lib.ggml_backend_cpu_buffer_type
    main_memory.restype = ctypes.c_void_p
    entries = [BufferOverride(pattern.encode(), main_memory()) for pattern in layers]
    return (BufferOverride * (len(entries) + 1))(*entries)


_CPU = 0  # ggml_backend_dev_type in ggml-backend.h


class Devices:
    """Asks the devices for their memory at each call: some microseconds on a CPU, a call of the driver on a GPU. Any
    thread may use it.

    ggml knows only the total of the main memory and reports all of it as free (ggml-cpu.cpp), so `main_memory` reports
    what is free."""

    def __init__(self, main_memory: Callable[[], int | None]) -> None:
        """`main_memory` returns the free bytes of main memory; None: not known."""
        self._main_memory = main_memory
        native_log()  # starts the backend
        self._count = _bound("ggml_backend_dev_count", ctypes.c_size_t)
        self._get = _bound("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
        self._name = _bound("ggml_backend_dev_name", ctypes.c_char_p, ctypes.c_void_p)
        self._type = _bound("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
        sizes = (ctypes.POINTER(ctypes.c_size_t), ctypes.POINTER(ctypes.c_size_t))
        self._memory = _bound("ggml_backend_dev_memory", None, ctypes.c_void_p, *sizes)

    def memory(self) -> tuple[DeviceMemory, ...]:
        """Return the memory of each device, without devices that have none, such as some accelerators of the CPU."""
        found = (self._memory_of(self._get(number)) for number in range(self._count()))
        return tuple(one for one in found if one.total)

    def _memory_of(self, device: int) -> DeviceMemory:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._memory(device, ctypes.byref(free), ctypes.byref(total))
        num_free = free.value
        if self._type(device) == _CPU:
            num_free = min(num_free, self._main_memory() or num_free)
        return DeviceMemory(self._name(device).decode("utf-8", "replace"), total.value, num_free)


def _bound(name: str, result: Any, *arguments: Any) -> Any:
    """Return a function of ggml that the Python bindings do not offer."""
    function = getattr(c._lib, name)
    function.restype, function.argtypes = result, list(arguments)
    return function


__all__ = ["Model", "ModelError", "ModelTooLarge"]

RERANK = "rerank"
"""Name of a model's template for ranking. It is not written in Jinja; `workers.llama.pooling` reads it."""

_ENCODERS = ("gemma-embedding",)
"""Architectures with attention in both directions, whatever their file says."""

_MROPE = (c.LLAMA_ROPE_TYPE_MROPE, c.LLAMA_ROPE_TYPE_IMROPE)

_NO_MEMORY = re.compile(r"alloc|out of memory", re.IGNORECASE)


class Model(NativeOwner):
    """A model's weights and vocabulary. Any thread may tokenise. Close all contexts made from it first."""

    def __init__(self, pointer: int, header: GgufHeader, loaded_at: float) -> None:
        self.pointer = pointer
        self.header = header
        self.loaded_at = loaded_at
        """time.time() just before the file was read: the weights are those that the file held at that time."""
        self.path = header.path
        self.vocab = Vocab(c.llama_model_get_vocab(pointer))
        self.name = header.text("general.name") or header.path.stem
        self.architecture = header.text("general.architecture") or ""
        self.encoder_only = _is_encoder(pointer, header, self.architecture)
        """Whether the model reads text and generates none: it is for pooled work only."""
        template = c.llama_model_chat_template(pointer, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self.bos_text = self.vocab.text(self.vocab.bos)
        self.eos_text = self.vocab.text(self.vocab.eos)
        self.ftype: str = (c.llama_ftype_name(c.llama_model_ftype(pointer)) or b"").decode()
        """llama.cpp's name for the quantisation of the weights."""
        self.n_embd: int = c.llama_model_n_embd(pointer)
        self.n_embd_inp: int = c.llama_model_n_embd_inp(pointer)
        """Numbers of an embedding that stands for a token: more than `n_embd` where layers get some of their own."""
        self.num_position_sections = 4 if c.llama_model_rope_type(pointer) in _MROPE else 1
        """Parts of an embedding's position: 4 with M-RoPE."""
        self.facts = ModelFacts(
            n_ctx_train=c.llama_model_n_ctx_train(pointer),
            n_params=c.llama_model_n_params(pointer),
            size=c.llama_model_size(pointer),
            n_vocab=self.vocab.num_tokens,
        )

    @classmethod
    def load(cls, path: Path, settings: LlamaSettings) -> Model:
        """Load the weights; takes as long as reading the file. Raises ModelError, ModelTooLarge."""
        loaded_at = time.time()
        header = read_header(path)
        log = native_log()
        log.clear()
        params = ModelParams(settings)
        pointer = c.llama_model_load_from_file(os.fsencode(path), params.native)
        if not pointer:
            raise _refusal(path, log.reason())
        has_vocab = c.llama_vocab_type(c.llama_model_get_vocab(pointer)) != 0
        if not has_vocab or (c.llama_model_has_decoder(pointer) and c.llama_model_has_encoder(pointer)):
            c.llama_model_free(pointer)
            raise ModelError(f"{path}: not a model that works by itself; give a decoder-only or an encoder-only one")
        return cls(pointer, header, loaded_at)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> list[int]:
        """Return the tokens of a text, as `Vocab.tokenize` does."""
        return self.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return the Jinja chat templates of the file by name; the one that has no name there is `default` here."""
        prefix = "tokenizer.chat_template"
        named = {
            key.removeprefix(f"{prefix}."): self.header.text(key)
            for key in self.header.metadata
            if key.startswith(f"{prefix}.")
        }
        named["default"] = self.chat_template or named.get("default")
        return {name: source for name, source in named.items() if source and name != RERANK}

    def piece(self, token: int) -> bytes:
        return self.vocab.piece(token)

    def is_eog(self, token: int) -> bool:
        return token in self.vocab.eog

    def close(self) -> None:
        """Free the weights. Calling it again does nothing."""
        if self.pointer:
            c.llama_model_free(self.pointer)
            self.pointer = 0


def _is_encoder(pointer: int, header: GgufHeader, architecture: str) -> bool:
    if c.llama_model_is_diffusion(pointer):
        return False
    both_ways = header.metadata.get(f"{architecture}.attention.causal") is False or architecture in _ENCODERS
    return both_ways or not c.llama_model_has_decoder(pointer)


def _refusal(path: Path, reason: str) -> ModelError:
    if _NO_MEMORY.search(reason):
        return ModelTooLarge(f"{path}: does not fit the memory ({reason}); serve a smaller model or quantisation")
    return ModelError(
        f"{path}: llama.cpp can't load it ({reason or 'no reason given'}); check that it supports this model"
    )
