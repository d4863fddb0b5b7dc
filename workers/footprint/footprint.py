"""Describes the memory of a worker by device and by part. Nothing here computes or measures it."""

from __future__ import annotations

import msgspec


class Share(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Bytes that a worker takes of one memory, by what they are for."""

    weights: int = 0
    """The model's tensors, and those of its adapters, its projector and its draft model."""
    cells: int = 0
    """KV cache and recurrent states."""
    compute: int = 0
    """Buffers in which llama.cpp computes, and those for its results."""
    other: int = 0
    """All else: Python, the vocabulary, helper processes; on a GPU what its driver takes for a process."""

    @property
    def total(self) -> int:
        return self.weights + self.cells + self.compute + self.other

    def __add__(self, more: Share) -> Share:
        return Share(
            weights=self.weights + more.weights,
            cells=self.cells + more.cells,
            compute=self.compute + more.compute,
            other=self.other + more.other,
        )


class Footprint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Memory of one worker: in main memory, and on each of the GPUs that it is given, in their order."""

    host: Share
    gpus: tuple[Share, ...] = ()
    mapped: int = 0
    """Bytes of `host.weights` that are pages of the model's file: workers of the same file share them."""
    num_cells: int = 0
    """KV cells that the worker would make now."""
    growth: int = 0
    """Bytes of main memory that the worker may take later: cached prompts, embeddings of media, further adapters."""

    @property
    def total(self) -> int:
        """Bytes in main memory and on all GPUs."""
        return self.host.total + sum(share.total for share in self.gpus)
