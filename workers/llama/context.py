"""A llama.cpp context with one KV cache for all sequences: owner of the `llama_context` pointer.

Everything but construction belongs to one thread. The rows of a `llama_decode` lie in a `Batch`, which is laid out once
and refilled every step; those of pictures and sound in an `EmbeddingBatch`, since llama.cpp takes tokens or embeddings,
not both at once.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.memory import Memory, MemoryKind, kind_of
from workers.llama.model import Model
from workers.llama.model_params import fill_context
from workers.llama.native import (
    DecodeFailed,
    ModelError,
    ModelTooLarge,
    NativeOwner,
    closed_on_error,
    gil_calls,
    native_log,
)
from workers.llama.sampling.candidates import Logits
from workers.llama.sampling.top_k import TopK
from workers.models.spec import LlamaSettings

Tokens = NDArray[np.int32]

NO_NUMBER = -1
"""Stands for the likeliest token of a row of logits that are not numbers."""


class Batch:
    """A batch with room for `capacity` tokens, each of one sequence.

    Single tokens are written through ctypes arrays, runs of a prompt through numpy views of the same memory: each is
    the faster way for its case."""

    def __init__(self, capacity: int, num_sequences: int, n_positions: int, *, padding_token: int = 0) -> None:
        self.capacity = capacity
        self.padding_token = padding_token
        """Token of rows that belong to no call: they are added because some numbers of rows are computed faster."""
        self.num_tokens = 0
        self._token = (ctypes.c_int32 * capacity)()
        self._pos = (ctypes.c_int32 * capacity)()
        self._num_ids = (ctypes.c_int32 * capacity)(*([1] * capacity))
        self._ids = (ctypes.c_int32 * num_sequences)(*range(num_sequences))
        self._id_pointers = (ctypes.c_size_t * capacity)()
        self._logits = (ctypes.c_int8 * capacity)()
        base = ctypes.addressof(self._ids)
        self._id_address = [base + 4 * number for number in range(num_sequences)]
        self._token_view = np.frombuffer(memoryview(self._token), dtype=np.int32)
        self._pos_view = np.frombuffer(memoryview(self._pos), dtype=np.int32)
        self._id_view = np.frombuffer(memoryview(self._id_pointers), dtype=np.uintp)
        self._logits_view = np.frombuffer(memoryview(self._logits), dtype=np.int8)
        self._positions = np.arange(n_positions, dtype=np.int32)
        self.native: Any = c.llama_batch(
            n_tokens=0,
            token=ctypes.cast(self._token, ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=ctypes.cast(self._pos, ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=ctypes.cast(self._num_ids, ctypes.POINTER(ctypes.c_int32)),
            seq_id=ctypes.cast(self._id_pointers, ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=ctypes.cast(self._logits, ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        self.num_tokens = 0

    def add_token(self, token: int, position: int, sequence: int) -> int:
        """Add one token whose logits are wanted; return its row."""
        row = self.num_tokens
        self._token[row] = token
        self._pos[row] = position
        self._id_pointers[row] = self._id_address[sequence]
        self._logits[row] = 1
        self.num_tokens = row + 1
        return row

    def add_prompt(self, tokens: Tokens, position: int, sequence: int, *, num_logits: int) -> int:
        """Add a run of a prompt that starts at `position`; return the run's last row. Logits are computed for the last
        `num_logits` tokens of the run."""
        start, end = self.num_tokens, self.num_tokens + len(tokens)
        self._token_view[start:end] = tokens
        self._pos_view[start:end] = self._positions[position : position + len(tokens)]
        self._id_view[start:end] = self._id_address[sequence]
        self._logits_view[start:end] = 0
        self._logits_view[end - num_logits : end] = 1
        self.num_tokens = end
        return end - 1


class EmbeddingBatch:
    """A batch of embeddings with room for `capacity` rows, each of one sequence. Several conversations may share it."""

    def __init__(self, capacity: int, num_sequences: int, width: int, num_sections: int, n_ubatch: int) -> None:
        """`width`: numbers of a row; `num_sections`: parts of a position, 4 with M-RoPE, else 1."""
        self.capacity = capacity
        self.n_ubatch = n_ubatch
        self.num_rows = 0
        self.is_causal = True
        """Whether rows see only those before them."""
        self._sequences: set[int] = set()
        self._rows = np.empty((capacity, width), np.float32)  # memory is taken as rows are written
        self._positions = np.empty((num_sections, capacity), np.int32)
        self._flat_positions = np.empty(num_sections * capacity, np.int32)
        self._ids = np.arange(num_sequences, dtype=np.int32)
        self._num_ids = np.ones(capacity, np.int32)
        self._id_pointers = np.empty(capacity, np.uintp)
        self._logits = np.empty(capacity, np.int8)
        self.native: Any = c.llama_batch(
            n_tokens=0,
            token=None,
            embd=self._rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=self._flat_positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._num_ids.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._id_pointers.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._logits.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    def clear(self) -> None:
        self.num_rows = 0
        self.is_causal = True
        self._sequences.clear()

    def room(self, *, is_causal: bool) -> int:
        """Return how many rows can be added now: rows that see each other must fit one micro-batch, or llama.cpp ends
        the process, and they can't be in one batch with others."""
        if self.num_rows and is_causal is not self.is_causal:
            return 0
        return (self.capacity if is_causal else min(self.capacity, self.n_ubatch)) - self.num_rows

    def add(
        self, rows: Logits, positions: Tokens, sequence: int, *, num_logits: int = 0, is_causal: bool = True
    ) -> int:
        """Add embeddings (float32 [rows, width]) at `positions` (int32 [sections, rows]); return the last one's row.
        Logits are computed for the last `num_logits`. Raises ValueError if they do not fit the batch.

        Rows that see each other are one whole picture, and the only one of their sequence in the batch."""
        start, end = self.num_rows, self.num_rows + len(rows)
        if len(rows) > self.room(is_causal=is_causal):
            raise ValueError(f"{len(rows)} rows do not fit; there is room for {self.room(is_causal=is_causal)}")
        if not is_causal and sequence in self._sequences:
            raise ValueError(f"sequence {sequence} has a picture in the batch, which would see this one")
        self._rows[start:end] = rows
        self._positions[:, start:end] = positions
        self._id_pointers[start:end] = self._ids.ctypes.data + self._ids.itemsize * sequence
        self._logits[start:end] = 0
        self._logits[end - num_logits : end] = 1
        self._sequences.add(sequence)
        self.is_causal = is_causal
        self.num_rows = end
        return end - 1

    def finish(self) -> None:
        """Lay the positions out as llama.cpp reads them: those of one section after those of another."""
        flat = self._positions[:, : self.num_rows].reshape(-1)
        self._flat_positions[: len(flat)] = flat
        self.native.n_tokens = self.num_rows


def compute_embeddings(context: int, batch: EmbeddingBatch) -> int:
    """Compute a batch with the `llama_context *` given. Return the status of `llama_decode`: 0 if all went well.

    llama.cpp builds its graph anew where rows that see each other follow others, and after them."""
    batch.finish()
    if not batch.is_causal:
        c.llama_set_causal_attn(context, False)
    try:
        return int(c.llama_decode(context, batch.native))
    finally:
        if not batch.is_causal:
            c.llama_set_causal_attn(context, True)


MAX_SEQUENCES = 256
"""Maximum sequences of a context: llama.cpp's own bound."""

_REASONS = {1: "no free cells in the KV cache", 2: "aborted", -1: "invalid batch"}

PROMPT_LOGITS = 32
"""How many prompt tokens can get logits in one step, besides one row per sequence. Memory is reserved for them all."""


class Context(NativeOwner):
    """A context for `slots` calls over `kv_tokens` shared cells. Close it before its model."""

    def __init__(self, model: Model, settings: LlamaSettings, *, slots: int, kv_tokens: int, rollback: int = 0) -> None:
        """Allocate the KV cache and the compute buffers. `rollback`: number of tokens by which recurrent layers can go
        back, at the cost of as many states more of each sequence. Raises ModelError, ModelTooLarge."""
        # A GPU only queues the work; `sample`, which keeps the interpreter lock, would wait for it and stop the loop.
        self._queues = bool(c.llama_supports_gpu_offload())
        self.on_gpu = self._queues and settings.uses_devices
        log = native_log()
        log.clear()
        params = c.llama_context_default_params()
        fill_context(params, settings)
        params.n_ctx = kv_tokens
        kind = kind_of(model.pointer, swa_full=settings.swa_full)
        params.n_seq_max = min(slots + (max(slots, 8) + 1 if kind.by_range else 1), MAX_SEQUENCES)
        params.kv_unified = True
        # With a window, rows of several sequences would have to be as many of each (`Memory.window`).
        params.n_rs_seq = rollback if kind is MemoryKind.HYBRID and not c.llama_model_n_swa(model.pointer) else 0
        # A step never has more rows than this.
        params.n_batch = max(settings.n_batch, settings.n_ubatch + slots)
        # Rows with logits: one per sequence, and some of a prompt. llama.cpp aborts if this is less than `n_seq_max`.
        params.n_outputs_max = params.n_seq_max + PROMPT_LOGITS
        self.pointer: int = c.llama_init_from_model(model.pointer, params) or 0
        if not self.pointer:
            raise _refusal(model, kv_tokens, log.reason())
        if not c.llama_get_memory(self.pointer):
            self.close()
            raise ModelError(f"{model.path}: this model does not generate text; give one that does")
        if model.control is not None:
            with closed_on_error(self):
                model.control.apply(self.pointer)
        self.model = model
        # 0 for architectures whose recurrent layers llama.cpp can't take back.
        rollback = int(c.llama_n_rs_seq(self.pointer))
        self.memory = Memory(self.pointer, kind, cache_type_k=settings.cache_type_k, rollback=rollback)
        self.slots = slots
        # Besides the slots' sequences there are some for idle prefixes, and one to move cells through.
        self.num_sequences: int = c.llama_n_seq_max(self.pointer)
        self.kv_tokens: int = c.llama_n_ctx(self.pointer)
        self.n_batch: int = c.llama_n_batch(self.pointer)
        self.n_ubatch: int = c.llama_n_ubatch(self.pointer)
        self._decode = c.llama_decode
        types = {settings.cache_type_k, settings.cache_type_v}
        self.attends_in_tiles = not self.on_gpu and settings.flash_attn != "off" and types in ({"f16"}, {"f32"})
        """Whether attention takes 64 rows at once, and far longer for fewer (ggml_compute_forward_flash_attn_ext_f16 in
        ggml-cpu/ops.cpp of llama.cpp)."""
        self._sample = gil_calls().sampler_sample
        self._logits = gil_calls().logits_ith
        self._num_logits = model.vocab.num_tokens
        self._rows: Logits = np.empty((0, self._num_logits), np.float32)
        """Logits of the first rows of a batch, in llama.cpp's own memory at `_rows_at`; empty: not looked up yet."""
        self._rows_at = 0
        self._row_numbers = np.arange(self.n_batch)
        self._top_k = TopK(self._num_logits)

    def new_batch(self) -> Batch:
        return Batch(self.n_batch, self.num_sequences, self.kv_tokens, padding_token=max(self.model.vocab.bos, 0))

    def decode(self, batch: Batch) -> None:
        """Compute the batch to its end; releases the interpreter lock meanwhile. Raises DecodeFailed."""
        batch.native.n_tokens = batch.num_tokens
        status = self._decode(self.pointer, batch.native)
        if status:
            raise _failure(f"{batch.num_tokens} tokens", status)
        if self._queues:
            c.llama_synchronize(self.pointer)

    def new_embedding_batch(self) -> EmbeddingBatch:
        model = self.model
        return EmbeddingBatch(
            self.n_batch, self.num_sequences, model.n_embd_inp, model.num_position_sections, self.n_ubatch
        )

    def decode_embeddings(self, batch: EmbeddingBatch) -> None:
        """Compute a batch of embeddings as `decode` does one of tokens. Raises DecodeFailed."""
        status = compute_embeddings(self.pointer, batch)
        if status:
            raise _failure(f"{batch.num_rows} embeddings", status)
        if self._queues:
            c.llama_synchronize(self.pointer)

    def sample(self, chain: int, row: int) -> int:
        """Draw a token from the logits of row `row` with the sampler chain at `chain`. The chain accepts the token."""
        return self._sample(chain, self.pointer, row)

    def sample_top(self, chain: int, row: int, k: int) -> int:
        """Draw a token as `sample` does, with a chain that begins with top-k: quicker, as `TopK` says."""
        token = self._top_k.draw(chain, self._row(row), k)
        return self._sample(chain, self.pointer, row) if token is None else token

    def likeliest(self, row: int) -> int:
        """Return the token with the highest logit in batch row `row`: ten times as quick as a greedy chain."""
        return int(self._row(row).argmax())

    def surest(self, row: int, num_tokens: int) -> tuple[int, float]:
        """Return the likeliest of the first `num_tokens` tokens in batch row `row` and its probability among all; a
        probability of 0 if the logits are not numbers. Takes 0.14 ms for a vocabulary of 150,000 tokens."""
        logits = self._row(row)
        token = int(logits[:num_tokens].argmax())
        highest = float(logits[token])
        if not math.isfinite(highest):
            return token, 0.0
        return token, 1.0 / float(np.exp(logits - highest).sum())

    def _row(self, row: int) -> Logits:
        """Return the logits of a batch row, valid until the next decode."""
        address = self._logits(self.pointer, row)
        if address is None:
            raise ValueError(f"batch row {row} has no logits")
        logits: Any = (ctypes.c_float * self._num_logits).from_address(address)
        return np.frombuffer(logits, np.float32)

    def likeliest_of(self, num_rows: int) -> list[int]:
        """Return the token with the highest logit for each of the batch's first rows, all of which must have logits;
        `NO_NUMBER` for a row whose highest logit is not a number.

        One call costs less than `likeliest` and `is_number` for every row: after a `llama_decode` the processor's
        caches are cold, so that each function that is called costs some microseconds."""
        rows = self._first_rows(num_rows)
        if num_rows == 1:
            token = int(rows[0].argmax())
            return [NO_NUMBER if math.isnan(rows[0, token]) else token]
        tokens = rows.argmax(axis=1)  # the first NaN of a row counts as its highest number
        highest = rows[self._row_numbers[:num_rows], tokens]
        found: list[int] = tokens.tolist()
        if np.isnan(highest).any():
            found = [NO_NUMBER if math.isnan(rows[row, token]) else token for row, token in enumerate(found)]
        return found

    def _first_rows(self, num_rows: int) -> Logits:
        """Return the logits of the batch's first rows, valid until the next decode. llama.cpp keeps rows in the batch's
        order, and has memory for at least one row per sequence: a view of that is made anew only if it has moved."""
        address = self._logits(self.pointer, 0)
        if address is None:
            raise ValueError("the batch's first row has no logits")
        if address != self._rows_at or num_rows > len(self._rows):
            num_known = max(num_rows, self.num_sequences)
            memory: Any = (ctypes.c_float * (num_known * self._num_logits)).from_address(address)
            self._rows = np.frombuffer(memory, np.float32).reshape(num_known, self._num_logits)
            self._rows_at = address
        return self._rows[:num_rows]

    def is_number(self, row: int, token: int) -> bool:
        """Return whether a token's logit in a batch row is a number. A NaN in a KV cell makes the whole row NaN."""
        address = self._logits(self.pointer, row)
        return address is not None and not math.isnan(ctypes.c_float.from_address(address + 4 * token).value)

    def warm_up(self) -> None:
        """Compute one token on a GPU, whose first call would wait for kernels to be loaded and buffers to be made. On a
        CPU nothing is gained by it: loading has read the weights already.

        Raises ModelError for control vectors that change nothing."""
        if self.on_gpu:
            c.llama_set_warmup(self.pointer, True)
            self._first_logits()
            c.llama_set_warmup(self.pointer, False)
        if self.model.control is not None:
            self.model.control.require_effect(self.pointer, self.model.architecture, self._first_logits)

    def _first_logits(self) -> Logits:
        """Return the logits after one token, computed anew; leave the cache empty."""
        batch = Batch(1, 1, 1)
        batch.add_token(max(self.model.vocab.bos, 0), 0, 0)
        self.decode(batch)
        self.memory.clear()
        return self._row(0).copy()

    def close(self) -> None:
        """Free the KV cache and the buffers. Calling it again does nothing."""
        if self.pointer:
            c.llama_free(self.pointer)
            self.pointer = 0


def _failure(what: str, status: int) -> DecodeFailed:
    reason = native_log().reason() or _REASONS.get(status, "computation failed")
    return DecodeFailed(f"llama_decode of {what} returned {status}: {reason}")


def _refusal(model: Model, kv_tokens: int, reason: str) -> ModelError:
    if "alloc" in reason.lower() or "out of memory" in reason.lower():
        return ModelTooLarge(
            f"{model.path}: no memory for a KV cache of {kv_tokens:,} tokens ({reason}); lower --kv-tokens or --ctx"
        )
    return ModelError(
        f"{model.path}: llama.cpp makes no context ({reason or 'no reason given'}); check the `llama` settings"
    )
