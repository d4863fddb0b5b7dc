"""Holds the llama.cpp context that turns inputs into vectors or scores, with its `llama_context` pointer, and the
tokeniser of these inputs, which makes the same tokens as llama-server.

One call of `compute` is one micro-batch: parts of many inputs, each under a sequence of its own. Encoders read a whole
input at once and have no KV cache; decoders can read an input over several calls. Everything but construction belongs
to one thread.

Sources: llama.h, llama-context.cpp and llama-graph.cpp (`build_pooling`) of llama.cpp; `tokenize_input_prompts` and
`format_prompt_rerank` in server-common.cpp for the tokens.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.chat.prompts import Tokenizer
from workers.llama.context import MAX_SEQUENCES, Batch, EmbeddingBatch, Tokens, compute_embeddings
from workers.llama.memory import Memory, kind_of
from workers.llama.model import Model
from workers.llama.model_params import fill_context
from workers.llama.native import DecodeFailed, ModelError, ModelTooLarge, NativeOwner, closed_on_error, native_log
from workers.llama.tokens.vocab import NO_TOKEN
from workers.models.spec import LlamaSettings
from workers.protocol.pieces import in_array, joined

Vectors = NDArray[np.float32]

AUTO = "auto"

GRAIN = 32
"""`n_ubatch` is a multiple of this, and of the number of sequences: with other sizes llama.cpp ends the process."""

_HEADS = ("cls.weight", "cls.output.weight")


class Pooling(Enum):
    """The ways to make one vector from the vectors of an input's tokens; the numbers are `llama_pooling_type`."""

    NONE = 0
    MEAN = 1
    CLS = 2
    LAST = 3
    RANK = 4


def is_pooled(model: Model, settings: LlamaSettings) -> bool:
    """Return whether a model serves vectors or scores, not text. If the settings leave that open, its kind decides.

    Raises ModelError if the model can't do what the settings want."""
    if settings.embeddings is False and model.encoder_only:
        raise ModelError(f"{model.path}: this model does not generate text; remove `embeddings: false`")
    if settings.embeddings is not None:
        return settings.embeddings
    return settings.pooling != AUTO or model.encoder_only or bool(_declared(model))


def pooling_of(model: Model, settings: LlamaSettings) -> Pooling:
    """Return the pooling that the settings name, else the one that the model file names. If neither names one: rank
    for a model with a ranking head, mean for other encoders, last for decoders.

    Raises ModelError for rank if the model has no ranking head."""
    has_head = any(name in model.header.tensors for name in _HEADS)
    declared = _declared(model)
    if settings.pooling != AUTO:
        pooling = Pooling[settings.pooling.upper()]
    elif declared is not None:
        pooling = declared
    elif has_head:
        pooling = Pooling.RANK
    else:
        pooling = Pooling.MEAN if model.encoder_only else Pooling.LAST
    if pooling is Pooling.RANK and not has_head:
        raise ModelError(f"{model.path}: has no ranking head (no tensor {_HEADS[0]}); set another `pooling`")
    return pooling


def n_ubatch_of(settings: LlamaSettings) -> int:
    """Return the rows of a micro-batch: the settings' number, or the next lower one that llama.cpp takes."""
    return settings.n_ubatch - settings.n_ubatch % GRAIN


def media_fault(model: Model, pooling: Pooling) -> str:
    """Return why pictures and sounds can't be part of a model's inputs; empty: they can."""
    if model.encoder_only:
        return "it reads an input in one piece, as all of its tokens see each other"
    if pooling is Pooling.RANK:
        return "it ranks texts"
    return ""


def _divisor(number: int, most: int) -> int:
    """Return the largest divisor of `number` up to `most`.

    If `number` is a multiple of `GRAIN`, the result is at least `GRAIN` or, if `most` is less, over half of `most`."""
    return next(divisor for divisor in range(min(number, most), 0, -1) if number % divisor == 0)


def _declared(model: Model) -> Pooling | None:
    number = model.header.number(f"{model.architecture}.pooling_type")
    return Pooling(number) if number in range(1, 5) else None


class PooledBatch(Batch):
    """The rows of one micro-batch. llama.cpp gives a result for every row."""

    def add_input(self, tokens: Tokens, position: int, sequence: int) -> int:
        """Add `tokens`, the part of an input that begins at `position` in it. Return the first of their row numbers."""
        start = self.num_tokens
        self.add_prompt(tokens, position, sequence, num_logits=1)
        self._logits_view[start : self.num_tokens] = 1
        return start


class PooledContext(NativeOwner):
    """A llama.cpp context that computes vectors or scores. Close it before the model that it belongs to."""

    def __init__(
        self, model: Model, settings: LlamaSettings, *, pooling: Pooling, n_ctx: int, kv_tokens: int, num_sequences: int
    ) -> None:
        """Allocate the compute buffers, and for decoders the KV cache. Raises ModelError, ModelTooLarge.

        `n_ctx`: maximum tokens of an input; a smaller micro-batch can lower it. `kv_tokens`: KV cells that all inputs
        in progress share; encoders need none. `num_sequences`: maximum inputs at a time, if each has its own memory."""
        log = native_log()
        log.clear()
        self.model = model
        self.pooling = pooling
        kind = kind_of(model.pointer, swa_full=settings.swa_full)
        params = c.llama_context_default_params()
        fill_context(params, settings)
        n_ubatch = n_ubatch_of(settings)
        params.n_ctx = max(kv_tokens, n_ctx, n_ubatch)
        many = MAX_SEQUENCES if model.encoder_only or kind.by_range else num_sequences
        params.n_seq_max = _divisor(n_ubatch, many)
        params.kv_unified = True
        params.n_batch = params.n_ubatch = n_ubatch
        params.embeddings = True
        params.pooling_type = pooling.value
        self.pointer: int = c.llama_init_from_model(model.pointer, params) or 0
        if not self.pointer:
            raise _refusal(model, params.n_ctx, log.reason())
        if model.control is not None:
            with closed_on_error(self):
                model.control.apply(self.pointer)
        encodes = not c.llama_model_has_decoder(model.pointer) or not c.llama_get_memory(self.pointer)
        self.memory = None if encodes else Memory(self.pointer, kind)
        """The KV cache; None: nothing is kept between two calls of `compute`."""
        self.can_split = not encodes and bool(c.llama_get_causal_attn(self.pointer))
        """Whether an input can be read over several calls of `compute`."""
        self.num_sequences: int = params.n_seq_max
        self.n_ubatch: int = c.llama_n_ubatch(self.pointer)
        self.n_ctx = n_ctx
        self.kv_tokens: int = c.llama_n_ctx(self.pointer) if self.memory else 0
        self.longest = n_ctx if self.can_split else min(n_ctx, self.n_ubatch)
        """Maximum tokens of one input."""
        self.width: int = 1 if pooling is Pooling.RANK else c.llama_model_n_embd_out(model.pointer)
        """Numbers in one vector. 1 for rank: only the first score of a ranking head says how relevant a text is."""
        self._compute = c.llama_encode if encodes else c.llama_decode
        self._calls = _Bound()
        self._queues = bool(c.llama_supports_gpu_offload())

    def new_batch(self) -> PooledBatch:
        return PooledBatch(self.n_ubatch, self.num_sequences, max(self.n_ctx, 1))

    def compute(self, batch: PooledBatch) -> None:
        """Compute the batch; releases the interpreter lock meanwhile. Raises DecodeFailed."""
        batch.native.n_tokens = batch.num_tokens
        self._end(self._compute(self.pointer, batch.native), f"{batch.num_tokens} tokens")

    def new_embedding_batch(self) -> EmbeddingBatch:
        model = self.model
        return EmbeddingBatch(
            self.n_ubatch, self.num_sequences, model.n_embd_inp, model.num_position_sections, self.n_ubatch
        )

    def compute_embeddings(self, batch: EmbeddingBatch) -> None:
        """Compute embeddings of pictures or sounds as `compute` does tokens; every row must be marked for a result."""
        self._end(compute_embeddings(self.pointer, batch), f"{batch.num_rows} embeddings")

    def _end(self, status: int, what: str) -> None:
        """Wait for the results. Raises DecodeFailed for a status other than 0."""
        if status:
            reason = native_log().reason() or "computation failed"
            raise DecodeFailed(f"{self._compute.__name__} of {what} returned {status}: {reason}")
        if self._queues:
            c.llama_synchronize(self.pointer)

    def vector(self, sequence: int) -> Vectors:
        """Return a copy of the pooled vector that the last batch gave for a sequence: float32 [1, width]."""
        address = self._calls.seq(self.pointer, sequence)
        if not address:
            raise DecodeFailed(f"llama.cpp has no pooled vector of sequence {sequence}")
        return self._copy(address, 1)

    def rows(self, start: int, end: int) -> Vectors:
        """Return a copy of the vectors of the last batch's rows, without pooling: float32 [end - start, width]."""
        address = self._calls.row(self.pointer, start)
        if not address:
            raise DecodeFailed(f"llama.cpp has no vector of row {start}")
        return self._copy(address, end - start)

    def warm_up(self) -> None:
        """Compute one token, so that the first call does not wait for the first use of weights and buffers.

        Raises ModelError for control vectors that change nothing."""
        c.llama_set_warmup(self.pointer, True)
        self._first_vector()
        c.llama_set_warmup(self.pointer, False)
        if self.model.control is not None:
            self.model.control.require_effect(self.pointer, self.model.architecture, self._first_vector)

    def _first_vector(self) -> Vectors:
        """Return the result for one token, computed anew; leave the cache, if there is one, empty."""
        batch = PooledBatch(1, 1, 1)
        batch.add_input(np.array([max(self.model.vocab.bos, 0)], dtype=np.int32), 0, 0)
        self.compute(batch)
        if self.memory is not None:
            self.memory.clear()
        return self.rows(0, 1) if self.pooling is Pooling.NONE else self.vector(0)

    def close(self) -> None:
        """Free the buffers. Calling it again does nothing."""
        if self.pointer:
            c.llama_free(self.pointer)
            self.pointer = 0

    def _copy(self, address: int, num_rows: int) -> Vectors:
        values = (ctypes.c_float * (num_rows * self.width)).from_address(address)
        vectors: Vectors = np.frombuffer(memoryview(values), dtype=np.float32).reshape(num_rows, self.width).copy()
        return vectors


class _Bound:
    """llama.cpp's functions for reading a result. They take a microsecond, so they keep the interpreter lock."""

    def __init__(self) -> None:
        library = ctypes.PyDLL(c._lib._name)
        self.seq: Any = library.llama_get_embeddings_seq
        self.row: Any = library.llama_get_embeddings_ith
        for function in (self.seq, self.row):
            function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int32], ctypes.c_void_p


def _refusal(model: Model, n_ctx: int, reason: str) -> ModelError:
    if "alloc" in reason.lower() or "out of memory" in reason.lower():
        return ModelTooLarge(f"{model.path}: no memory for inputs of {n_ctx:,} tokens ({reason}); lower --ctx")
    return ModelError(
        f"{model.path}: llama.cpp makes no context ({reason or 'no reason given'}); check the `llama` settings"
    )


_PLACEHOLDER = re.compile(r"\{(query|document)\}")


class PooledInputs:
    """Tokenises inputs on any thread, until its model is closed. Returns arrays: lists take ten times the memory."""

    def __init__(self, model: Model, pooling: Pooling, tokenizer: Tokenizer) -> None:
        """Raise ModelError for a ranking model whose file does not say how to separate query and document."""
        self._tokenizer = tokenizer
        vocab = model.vocab.pointer
        template = c.llama_model_chat_template(model.pointer, b"rerank")
        self._template: str | None = template.decode("utf-8", "replace") if template else None
        separator = c.llama_vocab_sep(vocab)
        end = model.vocab.eos if model.vocab.eos != NO_TOKEN else separator
        ends = [end] if c.llama_vocab_get_add_eos(vocab) else []
        separators = [separator] if c.llama_vocab_get_add_sep(vocab) else []
        self._before = [model.vocab.bos] if c.llama_vocab_get_add_bos(vocab) else []
        self._between = ends + separators
        self._after = ends
        if pooling is Pooling.RANK and self._template is None and not self._between:
            raise ModelError(
                f"{model.path}: can't rank: its vocabulary adds no end or separator token and it has no `rerank` "
                "template; give a reranker's file"
            )

    def of_text(self, text: str, *, add_special: bool = True) -> Sequence[int]:
        """Return the tokens of a text for embedding, with the begin and end tokens that the model wants.

        Names of control tokens in the text become those tokens. `add_special` False: no begin and end tokens, for a
        text that follows others in one input. Raises CallFailed."""
        return in_array(self._tokenizer.tokenize(text, add_special=add_special, parse_special=True))

    def of_pair(self, query: str, document: str) -> Sequence[int]:
        """Return the tokens of query and document for ranking, in the model's form for pairs. Raises CallFailed."""
        if self._template is not None:
            texts = {"query": query, "document": document}
            text = _PLACEHOLDER.sub(lambda match: texts[match[1]], self._template)
            return in_array(self._tokenizer.tokenize(text, add_special=False, parse_special=True))
        return joined(self._before, self._plain(query), self._between, self._plain(document), self._after)

    def _plain(self, text: str) -> Sequence[int]:
        return self._tokenizer.tokenize(text, add_special=False, parse_special=False)
