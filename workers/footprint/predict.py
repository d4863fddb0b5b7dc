"""Predicts a worker's footprint from what a dry run has told of it, for main memory alone or for GPUs beside it. Pure.

llama.cpp's own parts are exact. The rest, of processes, is what they were measured to take (docs/models.md).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from workers.footprint.footprint import Footprint, Share
from workers.footprint.rehearsal import DryRun, Rehearsed
from workers.models.spec import ModelSpec

MIB = 1 << 20

CHAT_BYTES = int(84.5 * MIB)
"""A worker that generates text, and the process that loads its vocabulary once more."""

POOLED_BYTES = int(82.7 * MIB)
"""The same of a worker for vectors and scores."""

RENDERER_BYTES = 17 * MIB
"""A process that renders chat templates."""

TOKENIZER_BYTES = int(1.9 * MIB)
"""A process that tokenises long texts: a fork, which shares the vocabulary."""

DECODER_BYTES = int(21.7 * MIB)
"""A process that decodes pictures and sounds."""

CONSTRAINT_BYTES = 375
"""What a token of the vocabulary takes where answers are held to a schema."""

GPU_PROCESS_BYTES = 480 * MIB
"""What a GPU's driver takes for a process that computes on it. It is no measurement of this project's."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The settings of workers that let them take more memory as they work."""

    cache_ram_bytes: int = 0
    media_cache_bytes: int = 0
    max_adapters: int = 8
    adapters_bytes: int = 0
    """Maximum of adapters in memory; 0: no bound."""


def predict(run: DryRun, spec: ModelSpec, *, bounds: Bounds | None = None, gpus: Sequence[int] = ()) -> Footprint:
    """Return the footprint. `gpus`: the free bytes of each GPU that the worker is given, by which llama.cpp divides the
    layers; empty: the processor has all."""
    bounds = bounds or Bounds()
    loaded, later = _adapters(run, bounds)
    growth = bounds.cache_ram_bytes * (run.kind == "chat") + later
    growth += bounds.media_cache_bytes if run.projector else 0
    other = _other_bytes(run)
    used = gpus if spec.llama.uses_devices else ()
    if not used:
        return _on_processor(run, loaded, other=other, growth=growth)
    return _on_gpus(run, spec, loaded, used, other=other, growth=growth)


def _adapters(run: DryRun, bounds: Bounds) -> tuple[int, int]:
    """Return the bytes of the adapters that are loaded at the start, and of those that calls may have loaded."""
    pinned, others = run.adapters[: run.num_pinned], sorted(run.adapters[run.num_pinned :], reverse=True)
    at_start = sum(pinned)
    later = sum(others[: max(0, bounds.max_adapters - len(pinned))])
    return at_start, min(later, max(0, bounds.adapters_bytes - at_start)) if bounds.adapters_bytes else later


def _other_bytes(run: DryRun) -> int:
    base = POOLED_BYTES + run.helpers * TOKENIZER_BYTES
    if run.kind == "chat":
        base = CHAT_BYTES + run.helpers * (RENDERER_BYTES + TOKENIZER_BYTES) + run.n_vocab * CONSTRAINT_BYTES
    base += run.decoders * DECODER_BYTES
    # The vocabulary is loaded a second time, by the process that tokenises.
    return base + 2 * run.vocabulary + run.structures


def _on_processor(run: DryRun, adapters: int, *, other: int, growth: int) -> Footprint:
    model, draft = run.model, run.draft or Rehearsed(weights=0, cells=0, compute=0, outputs=0, num_cells=0)
    host = Share(
        weights=model.weights + draft.weights + adapters + run.projector,
        cells=model.cells + draft.cells,
        compute=sum(one.compute + one.outputs + one.scratch for one in (model, draft)),
        other=other,
    )
    return Footprint(host=host, mapped=run.mapped + run.draft_mapped, num_cells=model.num_cells, growth=growth)


def _on_gpus(run: DryRun, spec: ModelSpec, adapters: int, gpus: Sequence[int], *, other: int, growth: int) -> Footprint:
    llama, places = spec.llama, layer_places(spec, len(run.layers) - 2, gpus)
    weights, cells = [0] * len(gpus), [0] * len(gpus)
    host_weights, host_cells = run.layers[0].host, 0
    spread = _shares(spec, gpus)
    for layer, place in zip(run.layers[1:], places, strict=True):
        host_weights += layer.host
        if place is None:
            host_weights, host_cells = host_weights + layer.weights, host_cells + layer.cells
            continue
        by_rows = llama.split_mode in ("row", "tensor")
        for number, share in enumerate(spread):
            weights[number] += int(layer.weights * (share if by_rows else number == place))
        if llama.offload_kqv:
            cells[place] += layer.cells
        else:
            host_cells += layer.cells
    used = [number for number, taken in enumerate(weights) if taken]
    shares = [
        Share(
            weights=weights[number],
            cells=cells[number],
            compute=run.model.compute if number in used else 0,
            other=GPU_PROCESS_BYTES,
        )
        for number in range(len(gpus))
    ]
    stays = None in places or not llama.offload_kqv
    host = Share(
        weights=host_weights,
        cells=host_cells,
        compute=run.model.outputs + (run.model.compute if stays else run.model.inputs),
        other=other,
    )
    shares, host = _with_companions(run, spec, adapters, spread, shares, host)
    # Of a file that is copied to GPUs, only what stays in main memory stays mapped.
    mapped = min(host_weights, run.mapped)
    return Footprint(host=host, gpus=tuple(shares), mapped=mapped, num_cells=run.model.num_cells, growth=growth)


def _with_companions(
    run: DryRun, spec: ModelSpec, adapters: int, spread: Sequence[float], shares: list[Share], host: Share
) -> tuple[list[Share], Share]:
    """Return the shares with what goes beside the model: adapters where its layers are, the projector on the first GPU,
    the draft model spread as the model is."""
    draft = run.draft
    on_gpu = draft is not None and spec.speculation.draft is not None and spec.speculation.draft.n_gpu_layers != 0
    with_projector = spec.projector_on_gpu
    told = [
        share
        + Share(
            weights=int(adapters * part)
            + (run.projector if number == 0 and with_projector else 0)
            + (int(draft.weights * part) if on_gpu and draft else 0),
            cells=int(draft.cells * part) if on_gpu and draft else 0,
            compute=draft.compute if on_gpu and draft and part else 0,
        )
        for number, (share, part) in enumerate(zip(shares, spread, strict=True))
    ]
    host += Share(weights=0 if with_projector else run.projector)
    if draft is not None:
        host += Share(compute=draft.outputs + (draft.inputs if on_gpu else draft.compute))
        host += Share(weights=0 if on_gpu else draft.weights, cells=0 if on_gpu else draft.cells)
    return told, host


def _shares(spec: ModelSpec, gpus: Sequence[int]) -> list[float]:
    """Return the part of the model that each GPU gets: as the settings say, else by free memory."""
    if spec.llama.split_mode == "none":
        return [float(number == spec.llama.main_gpu) for number in range(len(gpus))]
    given = [*spec.llama.tensor_split, *[0.0] * len(gpus)][: len(gpus)] if spec.llama.tensor_split else list(gpus)
    whole = sum(given)
    return [one / whole for one in given] if whole > 0 else [1 / len(gpus)] * len(gpus)


def layer_places(spec: ModelSpec, num_layers: int, gpus: Sequence[int]) -> list[int | None]:
    """Return the number of the GPU that gets each layer, and at the end what stands after them; None: main memory.
    Source: `load_tensors` in llama-model.cpp of llama.cpp."""
    asked = spec.llama.n_gpu_layers
    on_gpus = min(num_layers + 1 if asked < 0 else asked, num_layers + 1)
    first = num_layers + 1 - on_gpus
    bounds = list(accumulate(_shares(spec, gpus)))
    return [
        None if layer < first else min(bisect_right(bounds, (layer - first) / on_gpus), len(gpus) - 1)
        for layer in range(num_layers + 1)
    ]
