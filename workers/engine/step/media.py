"""Reads pictures and sounds for running calls: has their embeddings made, and computes their cells.

A call waits for its embeddings without a slot. Only those of spans that are not in the cache are made. Cells of a span
have a `llama_decode` of their own within a step; where cells see each other, those of a whole span.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from workers.engine.cache.prefix_cache import PrefixCache
from workers.engine.encoder import MediaEncoder
from workers.engine.step.sequence import Sequence
from workers.engine.step.step_plan import Chunk
from workers.llama.context import Context, EmbeddingBatch
from workers.protocol.events import Failure


class MediaSpans:
    """The pictures and sounds of one engine's calls. Belongs to the engine's thread."""

    def __init__(self, encoder: MediaEncoder | None, context: Context, wake: Callable[[], None]) -> None:
        """`encoder` None: the model reads text only. `wake` has the engine's thread look again; any thread calls it."""
        self._encoder = encoder
        self._context = context
        self._batch: EmbeddingBatch | None = None if encoder is None else context.new_embedding_batch()
        self._wake = wake
        self._is_there = threading.Event()
        """Set when an encoding is over."""

    def want(self, sequence: Sequence, known: int) -> None:
        """Have the embeddings of spans made that end after the first `known` cells."""
        for number, span in enumerate(sequence.prompt.spans):
            if self._encoder is not None and span.end > known and number not in sequence.encodings:
                salt = sequence.request.asked.cache_salt
                sequence.encodings[number] = self._encoder.want(sequence.team, salt, span.cells, self._arrived)

    def may_enter(self, sequence: Sequence, cache: PrefixCache) -> bool:
        """Return whether all embeddings are there that a call needs now. If not, they are being made."""
        if not sequence.prompt.spans:
            return True
        if sequence.encoding or self.failure(sequence) is not None:
            return False
        self.want(sequence, cache.lookup(sequence).num_known)
        return not sequence.encoding

    def look(self, running: list[Sequence]) -> None:
        """Have embeddings made that running calls need after all, since what they found in the cache was lost."""
        for sequence in running:
            if sequence.prompt.spans and not sequence.decoding:
                # What is to be restored, or another call computes for this one, is not lost.
                known = sequence.restores[-1].end if sequence.restores else sequence.num_cells
                self.want(sequence, known if sequence.waits_for is None else max(known, sequence.waits_until))

    def failure(self, sequence: Sequence) -> Failure | None:
        """Return why embeddings of a call can't be had; None: they can."""
        return next((one.failure for one in sequence.encodings.values() if one.failure is not None), None)

    def unreadable(self, calls: Iterable[Sequence]) -> list[tuple[Sequence, Failure]]:
        """Return those calls whose embeddings can't be had, each with the reason."""
        return [(one, why) for one in calls if one.encodings and (why := self.failure(one)) is not None]

    def wait(self, seconds: float) -> None:
        """Wait until an encoding is over, for `seconds` at most."""
        self._is_there.wait(seconds)
        self._is_there.clear()

    def compute(self, chunk: Chunk[Sequence]) -> None:
        """Compute the next cells of a span by one `llama_decode`. Raises DecodeFailed."""
        sequence, batch = chunk.sequence, self._batch
        number = sequence.span
        span, rows = sequence.prompt.spans[number], sequence.encodings[number].rows
        if batch is None or rows is None:
            raise ValueError(f"call {sequence.key}: there are no embeddings of span {number}")
        first = sequence.num_cells - span.start
        part = slice(first, first + chunk.num_tokens)
        positions = span.cells.positions(sequence.prompt.position(span.start))
        sequence.num_cells += chunk.num_tokens
        batch.clear()
        sequence.row = batch.add(
            rows[part],
            positions[:, part],
            sequence.id,
            num_logits=int(sequence.num_prompt_left == 0),
            is_causal=span.cells.is_causal,
        )
        self._context.decode_embeddings(batch)

    def _arrived(self) -> None:
        self._is_there.set()
        self._wake()
