"""LoRA files for tests: sound ones for any model, and ways to spoil them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from workers.llama.gguf import GgufHeader

Weights = dict[str, Any]
"""Tensor name -> array, outermost dimension first as numpy has it."""

TARGETS = ("attn_q.weight", "attn_v.weight", "ffn_down.weight")


def weights_for(
    base: GgufHeader, *, rank: int = 4, seed: int = 1, size: float = 0.3, targets: tuple[str, ...] = TARGETS
) -> Weights:
    """A random pair for every weight of the model whose name ends like one of `targets`."""
    rng = np.random.default_rng(seed)
    weights: Weights = {}
    for name, tensor in base.tensors.items():
        if name.endswith(targets):
            columns, rows = tensor.shape[:2]
            weights[f"{name}.lora_a"] = (rng.standard_normal((rank, columns)) / np.sqrt(columns)).astype(np.float32)
            weights[f"{name}.lora_b"] = (rng.standard_normal((rows, rank)) * size).astype(np.float32)
    return weights


def write(
    path: Path,
    weights: Mapping[str, Any],
    *,
    architecture: str = "llama",
    alpha: float | None = None,
    metadata: Callable[[gguf.GGUFWriter], None] | None = None,
    kind: str = "adapter",
    adapter_type: str = "lora",
) -> Path:
    """One file; `metadata` may add values of its own (and of the wrong type)."""
    writer = gguf.GGUFWriter(path, architecture)
    if kind:
        writer.add_string("general.type", kind)
    if adapter_type:
        writer.add_string("adapter.type", adapter_type)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if metadata is not None:
        metadata(writer)
    for name, values in weights.items():
        writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sound(path: Path, base: GgufHeader, *, rank: int = 4, seed: int = 1, size: float = 0.3) -> Path:
    """An adapter that llama.cpp takes and that changes what the model says."""
    return write(path, weights_for(base, rank=rank, seed=seed, size=size), alpha=float(rank))
