"""A context driven by hand: tokens in, logits out, no engine."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from llama_cpp import llama_cpp as c
from numpy.typing import NDArray

from workers.llama.context import Context
from workers.llama.model import Model
from workers.models.spec import LlamaSettings

Logits = NDArray[np.float32]


class LoneContext:
    """One thread, so equal calls on equal cells give equal bits."""

    def __init__(self, model: Model, context: Context) -> None:
        self.model = model
        self.context = context
        self.memory = context.memory
        self._batch = context.new_batch()

    def feed(self, sequence: int, tokens: Sequence[int], position: int = 0) -> Logits:
        """Compute a run of tokens at once -> the logits of the last."""
        self._batch.clear()
        row = self._batch.add_prompt(np.asarray(tokens, dtype=np.int32), position, sequence, num_logits=1)
        self.context.decode(self._batch)
        return self._logits(row)

    def feed_long(self, sequence: int, tokens: Sequence[int], chunk: int = 50) -> Logits:
        """A text in steps of `chunk` tokens -> the logits of the last."""
        for position in range(0, len(tokens), chunk):
            logits = self.feed(sequence, tokens[position : position + chunk], position)
        return logits

    def step(self, *rows: tuple[int, int, int]) -> list[Logits]:
        """One token each of several sequences, as (sequence, token, position) -> their logits."""
        self._batch.clear()
        places = [self._batch.add_token(token, position, sequence) for sequence, token, position in rows]
        self.context.decode(self._batch)
        return [self._logits(place) for place in places]

    def positions(self, sequence: int) -> tuple[int, int]:
        return self.memory.first_position(sequence), self.memory.last_position(sequence)

    def _logits(self, row: int) -> Logits:
        pointer = c.llama_get_logits_ith(self.context.pointer, row)
        return np.array(np.ctypeslib.as_array(pointer, (self.model.vocab.num_tokens,)), dtype=np.float32)


@contextmanager
def lone_context(
    model: Model | Path, *, slots: int = 4, kv_tokens: int = 512, llama: LlamaSettings | None = None
) -> Iterator[LoneContext]:
    settings = llama or LlamaSettings(n_threads=1)
    if isinstance(model, Path):
        with (
            Model.load(model, settings) as loaded,
            lone_context(loaded, slots=slots, kv_tokens=kv_tokens, llama=settings) as one,
        ):
            yield one
        return
    with Context(model, settings, slots=slots, kv_tokens=kv_tokens) as context:
        yield LoneContext(model, context)


def same(left: Logits, right: Logits) -> bool:
    """Bit by bit."""
    return left.tobytes() == right.tobytes()


def cells_by_position(state: bytes) -> dict[int, bytes]:
    """A saved attention state (one stream, values not transposed) -> position -> keys and values of its cell.

    Cells are saved in the order in which they lie in the cache; this is what is left when that does not count.
    Layout: llama_kv_cache::state_write of llama.cpp.
    """
    count = struct.unpack_from("<I", state, 12)[0]
    offset = 16
    positions: list[int] = []
    for _ in range(count):
        position, num_sequences = struct.unpack_from("<iI", state, offset)
        assert num_sequences == 1
        positions.append(position)
        offset += 12
    transposed, num_layers = struct.unpack_from("<II", state, offset)
    assert not transposed
    assert num_layers > 0
    offset += 8
    cells = dict.fromkeys(positions, b"")
    while offset < len(state):
        row_size = struct.unpack_from("<Q", state, offset + 4)[0]
        offset += 12
        for position in positions:
            cells[position] += state[offset : offset + row_size]
            offset += row_size
    assert offset == len(state)
    return cells
