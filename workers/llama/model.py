"""Loads a model and owns its `llama_model` pointer."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType

from llama_cpp import llama_cpp as c
from msgspec.structs import replace

from workers.llama.control_vectors import ControlVector, read_control_vectors
from workers.llama.gguf import GgufHeader, read_header
from workers.llama.header_cache import HeaderCache
from workers.llama.model_params import (
    ModelParams,
    Overrides,
    check_rope,
    check_token_ids,
    fitted_overrides,
    overridden,
    start_numa,
)
from workers.llama.native import ModelError, ModelTooLarge, NativeOwner, closed_on_error, native_log
from workers.llama.tokens.vocab import Vocab
from workers.llama.trial import tried
from workers.models.spec import LlamaSettings
from workers.protocol.heartbeat import ModelFacts

__all__ = ["Model", "ModelError", "ModelTooLarge"]

RERANK = "rerank"
"""Name of a model's template for ranking. It is not written in Jinja; `workers.llama.pooling` reads it."""

_ENCODERS = ("gemma-embedding",)
"""Architectures with attention in both directions, whatever their file says."""

_MROPE = (c.LLAMA_ROPE_TYPE_MROPE, c.LLAMA_ROPE_TYPE_IMROPE)

_NO_MEMORY = re.compile(r"alloc|out of memory", re.IGNORECASE)


class Model(NativeOwner):
    """A model's weights and vocabulary. Any thread may tokenise. Close all contexts made from it first."""

    def __init__(
        self, pointer: int, header: GgufHeader, loaded_at: float, overrides: Overrides = MappingProxyType({})
    ) -> None:
        """`header`: with the overrides in place of the file's metadata."""
        self.pointer = pointer
        self.header = header
        self.overrides = overrides
        """Metadata that llama.cpp has read in place of the file's; whoever else loads the file needs it too."""
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
        self.control: ControlVector | None = None
        """What every context of the model adds to its layers."""
        self.facts = ModelFacts(
            n_ctx_train=c.llama_model_n_ctx_train(pointer),
            n_params=c.llama_model_n_params(pointer),
            size=c.llama_model_size(pointer),
            n_vocab=self.vocab.num_tokens,
        )

    @classmethod
    def load(
        cls,
        path: Path,
        settings: LlamaSettings,
        *,
        allocate: bool = True,
        on_progress: Callable[[float], None] | None = None,
        headers: HeaderCache | None = None,
    ) -> Model:
        """Load the weights; takes as long as reading the file, and a second more where metadata or tensors are
        overridden. Raises ModelError, ModelTooLarge.

        `allocate`: False loads the vocabulary only, and takes no memory for weights and KV cells, so that nothing can
        be computed; settings must not map the file then. `headers`: where the file's header may be kept."""
        loaded_at = time.time()
        header = read_header(path) if headers is None else headers.read(path)
        _check_kind(path, header)
        log = native_log()
        start_numa(settings.numa)
        settings = replace(settings, override_kv=fitted_overrides(header, settings.override_kv))
        params = ModelParams(settings)
        if settings.override_kv or settings.override_tensor:
            settings = replace(settings, override_kv=tried(header, settings))
            params = ModelParams(settings)
        params.native.no_alloc = not allocate
        if on_progress is not None:
            params.tell(on_progress)
        log.clear()
        pointer = c.llama_model_load_from_file(os.fsencode(path), params.native)
        if not pointer:
            raise _refusal(path, log.reason())
        has_vocab = c.llama_vocab_type(c.llama_model_get_vocab(pointer)) != 0
        if not has_vocab or (c.llama_model_has_decoder(pointer) and c.llama_model_has_encoder(pointer)):
            c.llama_model_free(pointer)
            raise ModelError(f"{path}: not a model that works by itself; give a decoder-only or an encoder-only one")
        model = cls(pointer, overridden(header, settings.override_kv), loaded_at, settings.override_kv)
        with closed_on_error(model):
            model._check(settings)
        return model

    def _check(self, settings: LlamaSettings) -> None:
        """Read the control vectors, and raise ModelError for settings that do not fit the model."""
        check_token_ids(self.header, self.overrides, self.facts.n_vocab)
        check_rope(self.pointer, self.header, settings)
        self.control = read_control_vectors(
            settings.control_vectors,
            settings.control_vector_layers,
            n_embd=self.n_embd,
            n_layer=c.llama_model_n_layer(self.pointer),
        )

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


def _check_kind(path: Path, header: GgufHeader) -> None:
    """Raise ModelError for a file that belongs to a model and is none."""
    if header.text("general.type") == "adapter":
        raise ModelError(
            f"{path}: a LoRA adapter and no model; name it among the `adapters` of its model in a catalog, or give "
            '--adapters \'[{"name": ..., "path": ...}]\' beside --model'
        )
    if header.text("general.architecture") == "clip":
        raise ModelError(f"{path}: a projector and no model; give it as --projector beside its --model")


def _refusal(path: Path, reason: str) -> ModelError:
    if _NO_MEMORY.search(reason):
        return ModelTooLarge(f"{path}: does not fit the memory ({reason}); serve a smaller model or quantisation")
    return ModelError(
        f"{path}: llama.cpp can't load it ({reason or 'no reason given'}); check that it supports this model"
    )
