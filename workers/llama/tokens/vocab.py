"""A model's vocabulary, or that of a GGUF file without its weights: text to tokens and back. Immutable, so every thread
may use it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from llama_cpp import llama_cpp as c

from workers.llama.model_params import Overrides, native_overrides
from workers.llama.native import ModelError, NativeOwner, gil_calls, native_log

NO_TOKEN = -1

MAX_MORE_TOKENS, FIRST_COMPARED = 128, 5
"""`MAX_MORE_TOKENS`: by how many tokens vocabularies that count as alike may differ in size, as some models are padded.
`FIRST_COMPARED`: first token whose text must be alike; those before are control tokens, which models of one family name
in different ways. Both are llama.cpp's own bounds (common/speculative.cpp)."""


def encoded(text: str) -> bytes:
    """Return the text as UTF-8; half a character (a lone surrogate) becomes a question mark."""
    return text.encode("utf-8", "replace")


_BETWEEN = b"\xff\xfe"
"""Bytes that separate the texts of two tokens in `_all_pieces`; no UTF-8 text contains them."""

_ASKED_AT_ONCE = 512
"""Number of tokens about which llama.cpp is asked without handing over the interpreter's lock."""


class Vocab:
    """A vocabulary, usable until its model is closed; `pointer` is a `llama_vocab *`."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self.num_tokens: int = c.llama_vocab_n_tokens(pointer)
        self._pieces: list[bytes | None] = [None] * self.num_tokens
        self._special_pieces: dict[int, bytes] = {}
        self.bos: int = c.llama_vocab_bos(pointer)
        self.eos: int = c.llama_vocab_eos(pointer)
        self.adds_bos: bool = c.llama_vocab_get_add_bos(pointer)
        self.end_token: int | None = self.eos if c.llama_vocab_get_add_eos(pointer) else None
        """Token that `tokenize` adds at the end of a text with special tokens; None: it adds none."""
        self.kind: int = c.llama_vocab_type(pointer)
        """`llama_vocab_type`: 1 sentencepiece, 2 byte pairs, ..."""
        self.suppressed = self._read_suppressed()

    @functools.cached_property
    def eog(self) -> frozenset[int]:
        """Tokens that end a generation. llama.cpp is asked for each token, 60 ns apiece, in runs between which other
        threads can run."""
        is_eog, ends = gil_calls().is_eog, set[int]()
        for start in range(0, self.num_tokens, _ASKED_AT_ONCE):
            tokens = range(start, min(start + _ASKED_AT_ONCE, self.num_tokens))
            ends.update(itertools.compress(tokens, map(is_eog, itertools.repeat(self.pointer), tokens)))
        return frozenset(ends)

    def tokenize(self, text: str, *, add_special: bool, parse_special: bool, most: int | None = None) -> list[int]:
        """Return all tokens of a text, even if more than `most`. `add_special`: add the begin and end tokens that the
        model wants; `parse_special`: read names of control tokens in the text as those tokens.

        llama.cpp can need 320 bytes of stack for each character, and time that grows with the square of a run of
        characters of one kind, so callers' texts go through `workers.llama.tokens.tokenizer`."""
        return self.token_array(encoded(text), add_special=add_special, parse_special=parse_special).tolist()

    def token_array(self, data: bytes, *, add_special: bool, parse_special: bool) -> memoryview:
        """Return the tokens of UTF-8 text as `tokenize` does, in an array of this machine's int32."""
        room = len(data) + 8
        while True:
            tokens = (ctypes.c_int32 * room)()
            count: int = c.llama_tokenize(self.pointer, data, len(data), tokens, room, add_special, parse_special)
            if count >= 0:
                return memoryview(tokens).cast("B").cast("i")[:count]
            room = -count

    def piece(self, token: int) -> bytes:
        """Return the bytes that the token adds to a text, perhaps a part of a character; empty for control tokens."""
        known = self._pieces[token]
        if known is None:
            known = self._pieces[token] = self._render(token, special=False)
        return known

    def special_piece(self, token: int) -> bytes:
        """Return the bytes of a token as `piece` does; for a control token, its name as written in a template."""
        piece = self.piece(token)
        if piece:
            return piece
        known = self._special_pieces.get(token)
        if known is None:
            known = self._special_pieces[token] = self._render(token, special=True)
        return known

    def num_met_by(self, text: bytes) -> int:
        """Return about how many tokens contain `text` or end with its start: DRY stores these for every breaker."""
        beginnings = (text[:length] + _BETWEEN for length in range(1, len(text)))
        return self._all_pieces.count(text) + sum(map(self._all_pieces.count, beginnings))

    @functools.cached_property
    def _all_pieces(self) -> bytes:
        return b"".join(self.piece(token) + _BETWEEN for token in range(self.num_tokens))

    def text(self, token: int) -> str:
        """Return the token as it is written in a template, control tokens included; empty for `NO_TOKEN`."""
        return "" if token == NO_TOKEN else self._render(token, special=True).decode("utf-8", "replace")

    def join(self, tokens: Iterable[int]) -> bytes:
        """Return the text of tokens, control tokens written out, as llama-server's `/detokenize` does."""
        return b"".join(map(self.special_piece, tokens))

    def difference(self, other: Vocab) -> str:
        """Return how this vocabulary differs from another one, so that no text has the same tokens in both; empty: it
        does not. Takes half a second for 150,000 tokens."""
        if self.kind != other.kind:
            return f"its vocabulary is of another kind ({self.kind} instead of {other.kind})"
        if abs(self.num_tokens - other.num_tokens) > MAX_MORE_TOKENS:
            return f"its vocabulary has {self.num_tokens:,} tokens instead of {other.num_tokens:,}"
        if (self.bos, self.adds_bos, self.eos) != (other.bos, other.adds_bos, other.eos):
            return "its texts begin or end with other tokens"
        for token in range(FIRST_COMPARED, min(self.num_tokens, other.num_tokens)):
            if self.special_piece(token) != other.special_piece(token):
                return f"token {token} of its vocabulary is {self.text(token)!r} instead of {other.text(token)!r}"
        return ""

    def infill_tokens(self) -> dict[str, int]:
        """Return the fill-in-the-middle tokens that the model has, by the names pre, suf, mid, rep, sep."""
        pointer = self.pointer
        tokens = {
            "pre": c.llama_vocab_fim_pre(pointer),
            "suf": c.llama_vocab_fim_suf(pointer),
            "mid": c.llama_vocab_fim_mid(pointer),
            "rep": c.llama_vocab_fim_rep(pointer),
            "sep": c.llama_vocab_fim_sep(pointer),
        }
        return {name: token for name, token in tokens.items() if token != NO_TOKEN}

    def _render(self, token: int, *, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = gil_calls().token_to_piece(self.pointer, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def _read_suppressed(self) -> Sequence[int]:
        count = ctypes.c_int32()
        tokens = c.llama_vocab_get_suppress_tokens(self.pointer, ctypes.byref(count))
        return tuple(tokens[: count.value]) if count.value > 0 else ()


MAX_TEXT = 256


class VocabFile(NativeOwner):
    """The vocabulary of a file; `vocab` is valid until `close`."""

    def __init__(self, pointer: int, overrides: Overrides) -> None:
        """`pointer`: a `llama_model *` that this object frees. `overrides`: metadata in place of the file's."""
        self._pointer = pointer
        self._overrides = overrides
        self.vocab = Vocab(c.llama_model_get_vocab(pointer))

    @classmethod
    def load(cls, path: Path, overrides: Overrides | None = None) -> VocabFile:
        """Load a file's vocabulary, with `overrides` in place of the file's metadata; takes some tenths of a second for
        150,000 tokens. Raises ModelError."""
        log = native_log()
        metadata = native_overrides(overrides or {})
        params = c.llama_model_default_params()
        params.vocab_only = True
        params.n_gpu_layers = 0
        if metadata is not None:
            params.kv_overrides = metadata
        pointer = c.llama_model_load_from_file(os.fsencode(path), params)
        if not pointer:
            raise ModelError(f"{path}: llama.cpp can't read its vocabulary ({log.reason() or 'no reason given'})")
        return cls(pointer, overrides or {})

    def text_of(self, key: str) -> str:
        """Return the text of a metadata key; empty: there is none, or it is no text."""
        if isinstance(override := self._overrides.get(key), str):
            return override
        buffer = ctypes.create_string_buffer(MAX_TEXT)
        count = c.llama_model_meta_val_str(self._pointer, key.encode(), buffer, MAX_TEXT)
        return buffer.value.decode("utf-8", "replace") if count > 0 else ""

    def close(self) -> None:
        if self._pointer:
            c.llama_model_free(self._pointer)
            self._pointer = 0
