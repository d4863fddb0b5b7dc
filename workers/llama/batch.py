"""The rows of one `llama_decode`: memory that is laid out once and refilled every step."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

Tokens = NDArray[np.int32]


class Batch:
    """A batch with room for `capacity` tokens, each of one sequence.

    Single tokens are written through ctypes arrays, runs of a prompt through numpy views of the same memory: each is
    the faster way for its case.
    """

    def __init__(self, capacity: int, num_sequences: int, n_positions: int, *, padding_token: int = 0) -> None:
        self.capacity = capacity
        self.padding_token = padding_token
        """Token of the rows whose result is not used."""
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
        """Add a run of a prompt that starts at `position`, the logits of whose last `num_logits` tokens are wanted;
        return the last row.
        """
        start, end = self.num_tokens, self.num_tokens + len(tokens)
        self._token_view[start:end] = tokens
        self._pos_view[start:end] = self._positions[position : position + len(tokens)]
        self._id_view[start:end] = self._id_address[sequence]
        self._logits_view[start:end] = 0
        self._logits_view[end - num_logits : end] = 1
        self.num_tokens = end
        return end - 1
