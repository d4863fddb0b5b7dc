"""A loaded model: owner of the `llama_model` pointer."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import TracebackType
from typing import Self

from llama_cpp import llama_cpp as c

from workers.llama.errors import ModelError, ModelTooLarge
from workers.llama.gguf import GgufHeader, read_header
from workers.llama.native import native_log
from workers.llama.placement import ModelParams
from workers.llama.tokens.vocab import Vocab
from workers.models.spec import LlamaSettings
from workers.protocol.heartbeat import ModelFacts

__all__ = ["Model", "ModelError", "ModelTooLarge"]

RERANK = "rerank"
"""Name of the template for ranking, which is not Jinja: `workers.llama.pooling` reads it."""

_ENCODERS = ("gemma-embedding",)
"""Architectures with attention in both directions, whatever their file says."""

_NO_MEMORY = re.compile(r"alloc|out of memory", re.IGNORECASE)


class Model:
    """A model's weights and vocabulary. Any thread may tokenise; close it after every context made from it."""

    def __init__(self, pointer: int, header: GgufHeader) -> None:
        self.pointer = pointer
        self.header = header
        self.path = header.path
        self.vocab = Vocab(c.llama_model_get_vocab(pointer))
        self.name = header.text("general.name") or header.path.stem
        self.architecture = header.text("general.architecture") or ""
        self.encoder_only = _is_encoder(pointer, header, self.architecture)
        """Whether it reads text and generates none: a model for pooled work only."""
        template = c.llama_model_chat_template(pointer, None)
        self.chat_template: str | None = template.decode("utf-8", "replace") if template else None
        self.bos_text = self.vocab.text(self.vocab.bos)
        self.eos_text = self.vocab.text(self.vocab.eos)
        self.ftype: str = (c.llama_ftype_name(c.llama_model_ftype(pointer)) or b"").decode()
        """llama.cpp's name for the quantisation of the weights."""
        self.n_embd: int = c.llama_model_n_embd(pointer)
        self.facts = ModelFacts(
            n_ctx_train=c.llama_model_n_ctx_train(pointer),
            n_params=c.llama_model_n_params(pointer),
            size=c.llama_model_size(pointer),
            n_vocab=self.vocab.num_tokens,
        )

    @classmethod
    def load(cls, path: Path, settings: LlamaSettings) -> Model:
        """Load the weights; takes as long as reading the file. Raises ModelError, ModelTooLarge."""
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
        return cls(pointer, header)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> list[int]:
        """Return the tokens of a text, as `Vocab.tokenize` does."""
        return self.vocab.tokenize(text, add_special=add_special, parse_special=parse_special)

    @property
    def chat_templates(self) -> dict[str, str]:
        """Return the Jinja sources by name; the one without a name is `default`."""
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
