"""Makes masks of GBNF grammars, by llama.cpp's grammar code.

llama.cpp checks every token of the vocabulary against its grammar, which takes 11 to 46 ms for 152,000 of them. So a
token that was drawn is checked alone, as llama-server does it. Where a whole mask is needed, the tokens of one byte are
checked first: tokens that begin with a byte that can't come are not checked at all.

A grammar can abort the process or keep it busy for ever: a caller's grammar runs in a process of its own only
(`workers.llama.sampling.grammar_forks`). Nothing here gives llama.cpp a token that the grammar refuses: it would throw.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.constraint.gbnf import check, names_tokens
from workers.constraint.mask import Bits, Unusable, broken
from workers.llama.native import gil_calls, native_log
from workers.llama.tokens.vocab import Vocab

ROOT = b"root"

_CANDIDATE = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
"""llama.cpp's struct `llama_token_data`, as a type of numpy arrays."""

Candidates = NDArray[np.void]

AT_ONCE = 4096
"""Maximum tokens that llama.cpp gets to check in one call. It decodes all of them before it checks any, and keeps lists
of those still possible: 150,000 tokens would take 100 MiB in every process that follows a grammar."""


class _Tables:
    """A vocabulary's tokens as candidates, by the first byte of their text."""

    def __init__(self, vocab: Vocab) -> None:
        pieces = [vocab.piece(token) for token in range(vocab.num_tokens)]
        texts = [token for token, piece in enumerate(pieces) if piece and token not in vocab.eog]
        self.every = _candidates(range(vocab.num_tokens))
        self.ends = _candidates(sorted(vocab.eog))
        by_byte: dict[int, list[int]] = {}
        for token in texts:
            by_byte.setdefault(pieces[token][0], []).append(token)
        self.by_byte = {byte: _candidates(tokens) for byte, tokens in by_byte.items()}
        singles = {pieces[token][0]: token for token in texts if len(pieces[token]) == 1}
        self.probes = _candidates(singles.values())
        self.probe_bytes = list(singles)
        self.unprobed = [byte for byte in self.by_byte if byte not in singles]
        self.texts = frozenset(texts)


class GbnfGrammars:
    """Compiles grammars for one vocabulary; safe to use from several threads."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab

    @functools.cached_property
    def _tables(self) -> _Tables:
        return _Tables(self._vocab)

    def compile(self, text: str) -> GbnfGrammar:
        """Compile a grammar. Raises Unusable with llama.cpp's reason."""
        check(text)
        log = native_log()
        log.clear()
        pointer = c.llama_sampler_init_grammar(self._vocab.pointer, text.encode(), ROOT)
        if not pointer:
            raise Unusable(f"llama.cpp can't read the grammar: {log.reason() or 'no reason given'}")
        return GbnfGrammar(pointer, self._vocab, self._tables, names_tokens(text))


class GbnfGrammar:
    """A compiled grammar that has read no text yet. Immutable: `mask` may be called from several threads."""

    def __init__(self, pointer: int, vocab: Vocab, tables: _Tables, names_tokens: bool) -> None:
        self._pointer = pointer
        self._vocab = vocab
        self._tables = tables
        self._names_tokens = names_tokens
        weakref.finalize(self, gil_calls().sampler_free, pointer).atexit = False

    def mask(self) -> GbnfMask:
        return GbnfMask(c.llama_sampler_clone(self._pointer), self._vocab, self._tables, self._names_tokens)

    def mask_after(self, begun: bytes) -> GbnfMask | None:
        """Return a mask for what follows `begun`; None: the grammar permits no answer that begins with `begun`."""
        mask = self.mask()
        for token in self._vocab.tokenize(begun.decode(), add_special=False, parse_special=True):
            if not mask.permits(token):
                return None
            mask.accept(token)
        return mask

    def refused_of(self, beginnings: Sequence[bytes]) -> bytes | None:
        """Return the first of `beginnings` that the grammar forbids as an answer's beginning; None: it permits all."""
        return next((begun for begun in beginnings if self.mask_after(begun) is None), None)


class GbnfMask:
    """The tokens that may come next in one answer, by a grammar; a `TokenMask` (`workers.engine.request`)."""

    __slots__ = (
        "__weakref__",
        "_one",
        "_one_array",
        "_permitted",
        "_pointer",
        "_tables",
        "_takes_all",
        "_vocab",
        "eog",
    )

    def __init__(self, pointer: int, vocab: Vocab, tables: _Tables, takes_all: bool) -> None:
        self._pointer = pointer
        self._vocab = vocab
        self._tables = tables
        self._takes_all = takes_all
        self.eog = vocab.eog
        self._permitted: int | None = None
        """The token that was checked last, if the grammar permits it."""
        self._one = _candidates([0])
        self._one_array = _array(self._one)
        weakref.finalize(self, gil_calls().sampler_free, pointer).atexit = False

    @property
    def is_done(self) -> bool:
        if not self.eog or not self.permits(next(iter(self.eog))):
            return False
        if not self._takes_all and self._open_bytes():
            return False  # a token of one byte may come: no need to check all others
        return self._open().size == len(self.eog)

    def forced(self) -> Sequence[int]:
        """Return nothing: llama.cpp does not tell which text is the only one."""
        return ()

    def permits(self, token: int) -> bool:
        if not self._takes_all and token not in self._tables.texts and token not in self.eog:
            return False
        self._one["id"], self._one["logit"] = token, 0.0
        _apply_held()(self._pointer, self._one_array)
        passes = bool(self._one["logit"][0] == 0.0)
        self._permitted = token if passes else None
        return passes

    def allowed(self) -> Bits:
        tokens = self._open()
        if not tokens.size:
            raise broken("no token of this model can follow")
        flags = np.zeros((self._vocab.num_tokens + 31) // 32 * 32, dtype=np.bool_)
        flags[tokens] = True
        return np.packbits(flags, bitorder="little").view(np.uint32)

    def accept(self, token: int) -> None:
        if token != self._permitted and not self.permits(token):
            raise broken(f"the grammar does not allow token {token} here")
        if token in self.eog:
            return
        self._permitted = None
        gil_calls().sampler_accept(self._pointer, token)

    def _open(self) -> NDArray[np.int32]:
        """Return the ids of the tokens that may come next."""
        tables = self._tables
        if self._takes_all:
            return self._passing(tables.every.copy())
        groups = [tables.by_byte[byte] for byte in (*self._open_bytes(), *tables.unprobed)]
        return self._passing(np.concatenate([tables.ends, *groups]))

    def _open_bytes(self) -> list[int]:
        """Return which bytes may come next. Only bytes that are a whole token by themselves are tried."""
        probes = self._tables.probes.copy()
        self._apply(probes)
        passes = probes["logit"] == 0.0
        return [byte for byte, open_ in zip(self._tables.probe_bytes, passes, strict=True) if open_]

    def _passing(self, candidates: Candidates) -> NDArray[np.int32]:
        for start in range(0, len(candidates), AT_ONCE):
            self._apply(candidates[start : start + AT_ONCE])
        ids: NDArray[np.int32] = candidates["id"][candidates["logit"] == 0.0]
        return ids

    def _apply(self, candidates: Candidates) -> None:
        c.llama_sampler_apply(self._pointer, ctypes.byref(_array(candidates)))


def _candidates(tokens: Any) -> Candidates:
    ids = np.fromiter(tokens, dtype=np.int32)
    candidates = np.zeros(len(ids), dtype=_CANDIDATE)
    candidates["id"] = ids
    return candidates


def _array(candidates: Candidates) -> Any:
    """Return a `llama_token_data_array` that points to the memory of `candidates`."""
    array = c.llama_token_data_array()
    array.data = ctypes.cast(candidates.ctypes.data, ctypes.POINTER(c.llama_token_data))
    array.size, array.selected, array.sorted = len(candidates), -1, False
    return array


@functools.cache
def _apply_held() -> Callable[[int, Any], None]:
    """Return a `llama_sampler_apply` that keeps the interpreter lock. Use it to check one token, not many."""
    function = ctypes.PyDLL(c._lib._name).llama_sampler_apply
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    function.restype = None

    def apply(pointer: int, array: Any) -> None:
        function(pointer, ctypes.addressof(array))

    return apply
