"""Declares what the helper process of `dry_run` is asked and answers, for both ends, without llama.cpp."""

from __future__ import annotations

from typing import Literal

import msgspec

from workers.models.spec import ModelSpec


class Rehearsed(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bytes that llama.cpp would take for one model and its context, if the processor held all of it."""

    weights: int
    """Bytes of the tensors as they lie in memory, those that are repacked for the processor included."""
    cells: int
    compute: int
    outputs: int = 0
    """Buffer for the results of the largest step."""
    scratch: int = 0
    """What the processor takes beside, to convert what it multiplies: llama.cpp does not count it."""
    inputs: int = 0
    """What of `compute` is for a step's inputs, which main memory holds whatever computes."""
    num_cells: int = 0


class LayerBytes(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bytes of one layer, or of what stands before or after the layers."""

    weights: int = 0
    """Tensors that go where the layer goes."""
    host: int = 0
    """Tensors that stay in main memory, whatever has the layer."""
    cells: int = 0


class DryRun(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The bytes of a worker by part, as the parts tell them without taking them."""

    kind: Literal["chat", "pooled"]
    model: Rehearsed
    layers: tuple[LayerBytes, ...]
    """Where the bytes of the model's weights and cells lie, in llama.cpp's order of layers."""
    vocabulary: int
    """Bytes that the vocabulary takes in a process that has loaded it."""
    structures: int
    """Bytes of all else that the model and its contexts take, such as graphs and lists of cells."""
    mapped: int = 0
    """Bytes of the model's tensors that are pages of its file, if it is mapped."""
    n_vocab: int = 0
    helpers: int = 0
    """How many prompts the worker makes at once: it has as many processes for each step of that."""
    decoders: int = 0
    """How many processes decode pictures and sounds."""
    draft: Rehearsed | None = None
    draft_mapped: int = 0
    projector: int = 0
    """Weights and compute buffers of the projector."""
    adapters: tuple[int, ...] = ()
    """Bytes of each adapter's tensors, those of pinned ones first."""
    num_pinned: int = 0


class Question(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The worker whose memory is to be predicted."""

    spec: ModelSpec
    """With the files of everything on this machine."""
    free_bytes: int | None
    """Memory that is free for the KV cache; None: a GPU has it."""
    workers: int = 1
    """Workers that share the machine."""


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """The worker could not be started, and why: one line with the remedy."""

    reason: str
    is_too_large: bool = False


class Answer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Exactly one of the two."""

    found: DryRun | None = None
    refused: Refusal | None = None
