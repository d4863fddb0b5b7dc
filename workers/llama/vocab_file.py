"""The vocabulary of a GGUF file without its weights."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from llama_cpp import llama_cpp as c

from workers.llama.errors import ModelError
from workers.llama.native import native_log
from workers.llama.vocab import Vocab

MAX_TEXT = 256


class VocabFile:
    """The vocabulary of a file; `vocab` is valid until `close`."""

    def __init__(self, pointer: int) -> None:
        self._pointer = pointer
        self.vocab = Vocab(c.llama_model_get_vocab(pointer))

    @classmethod
    def load(cls, path: Path) -> VocabFile:
        """Load a file's vocabulary; takes some tenths of a second for 150,000 tokens. Raises ModelError."""
        log = native_log()
        params = c.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        pointer = c.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelError(f"{path}: llama.cpp can't read its vocabulary ({log.reason() or 'no reason given'})")
        return cls(pointer)

    def text_of(self, key: str) -> str:
        """Return the text of a metadata key; empty: there is none, or it is no text."""
        buffer = ctypes.create_string_buffer(MAX_TEXT)
        count = c.llama_model_meta_val_str(self._pointer, key.encode(), buffer, MAX_TEXT)
        return buffer.value.decode("utf-8", "replace") if count > 0 else ""

    def close(self) -> None:
        if self._pointer:
            c.llama_model_free(self._pointer)
            self._pointer = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
