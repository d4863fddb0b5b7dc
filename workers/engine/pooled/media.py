"""Pictures and sounds in the inputs of pooled work: has their embeddings made, and computes their cells.

An input waits for its embeddings without a sequence and without cells, while others are computed. A micro-batch has
tokens or cells of pictures and sounds, never both. Those of an input and of the next one of its call are made ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Protocol

from workers.engine.cache.prompt import Prompt
from workers.engine.encoder import Encoding, MediaEncoder
from workers.llama.context import EmbeddingBatch
from workers.llama.pooling import PooledContext
from workers.protocol.events import Failure

MADE_AHEAD = 2
"""Number of a call's next inputs whose embeddings are made: that which is computed, and the one after it."""


class Rows(Enum):
    """The kinds of rows that a micro-batch can have."""

    TOKENS = "tokens"
    CELLS = "cells"
    """Cells of pictures or sounds, each of which sees those before it. They can be computed in parts."""
    WHOLE = "whole"
    """Cells of pictures that see each other: those of one picture belong into one micro-batch."""


class MediaInput:
    """An input with pictures or sounds, and their embeddings as far as they are there."""

    __slots__ = ("_encodings", "prompt")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self._encodings: list[Encoding] = []

    @property
    def is_ready(self) -> bool:
        """Whether all embeddings are there."""
        return bool(self._encodings) and all(one.rows is not None for one in self._encodings)

    @property
    def failure(self) -> Failure | None:
        """Why embeddings can't be had; None: they can."""
        return next((one.failure for one in self._encodings if one.failure is not None), None)

    def want(self, encoder: MediaEncoder, team: str, salt: str, on_end: Callable[[], None]) -> None:
        """Have the embeddings made, unless they are there. `on_end` is called, on any thread, once each one is over."""
        if not self._encodings:
            self._encodings = [encoder.want(team, salt, span.cells, on_end) for span in self.prompt.spans]

    def run(self, cell: int) -> tuple[int, Rows]:
        """Return the end of the run of like cells that `cell` lies in, and their kind."""
        for span in self.prompt.spans:
            if cell < span.start:
                return span.start, Rows.TOKENS
            if cell < span.end:
                return span.end, Rows.CELLS if span.cells.is_causal else Rows.WHOLE
        return len(self.prompt), Rows.TOKENS

    def add_to(self, batch: EmbeddingBatch, start: int, end: int, sequence: int) -> int:
        """Add the embeddings of the cells [start, end), which lie in one span, to a batch. Return their first row."""
        number, span = next((n, span) for n, span in enumerate(self.prompt.spans) if start < span.end)
        rows = self._encodings[number].rows
        if rows is None:
            raise ValueError(f"there are no embeddings of span {number}")
        part = slice(start - span.start, end - span.start)
        positions = span.cells.positions(self.prompt.position(span.start))[:, part]
        num_rows, is_causal = end - start, span.cells.is_causal
        last = batch.add(rows[part], positions, sequence, num_logits=num_rows, is_causal=is_causal)
        return last - num_rows + 1

    def last_position(self, num_cells: int) -> int:
        """Return the highest position of the first `num_cells` cells; -1 of none."""
        positions = self.prompt.positions() if num_cells else None
        return num_cells - 1 if positions is None else positions.last(num_cells)


class MediaPart(Protocol):
    """A part of an input, within one run of its cells (`MediaInput.run`)."""

    @property
    def start(self) -> int:
        """Return the number of the first cell."""

    @property
    def end(self) -> int:
        """Return the number of the cell after the last."""


class PooledMedia:
    """The pictures and sounds of one engine's calls. Belongs to the engine's thread."""

    def __init__(self, encoder: MediaEncoder, context: PooledContext, wake: Callable[[], None]) -> None:
        """`wake` has the engine's thread look again; any thread calls it."""
        self._encoder = encoder
        self._context = context
        self._batch = context.new_embedding_batch()
        self._wake = wake

    def want(self, inputs: Mapping[int, MediaInput], team: str, salt: str) -> None:
        """Have the embeddings of a call's next inputs made. `inputs`: those with media that are left of it, in order.
        Others' embeddings are found within the same team and salt only."""
        for one in islice(inputs.values(), MADE_AHEAD):
            one.want(self._encoder, team, salt, self._wake)

    def compute(self, parts: Iterable[tuple[MediaInput, MediaPart, int]]) -> Sequence[int]:
        """Compute parts of spans, each under the sequence that it comes with. Return the first row of each part.

        Raises DecodeFailed."""
        batch = self._batch
        batch.clear()
        rows = [one.add_to(batch, part.start, part.end, sequence) for one, part, sequence in parts]
        self._context.compute_embeddings(batch)
        return rows
