"""Plans how many KV cells a worker gets: the number asked for, or as many of slots x context as fit the memory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from workers.footprint.devices import GPU_DEVICES, free_bytes
from workers.llama.gguf import GgufHeader
from workers.models.spec import MAX_KV_TOKENS, LlamaSettings

MACHINE_SHARE = 0.8
"""Maximum share of a machine's free memory for the KV caches of all its workers, which start at the same time."""

WORKER_SHARE = 0.4
"""Maximum share of the free memory for one worker's KV cache: the model and its computations need memory too."""

BITS = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q5_1": 6.0, "q5_0": 5.5, "q4_1": 5.0, "q4_0": 4.5}
BITS["iq4_nl"] = 4.5
"""KV type -> bits per cached number, block scales included. Source: ggml-common.h of llama.cpp."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """The sizes of one token's keys and values in the KV cache of a model."""

    num_kv_heads: Sequence[int]
    """Number of KV heads of each layer."""
    key_length: int
    value_length: int

    def bytes_per_token(self, type_k: str, type_v: str) -> float:
        per_head = self.key_length * BITS[type_k] + self.value_length * BITS[type_v]
        return sum(self.num_kv_heads) * per_head / 8


@dataclass(frozen=True, slots=True)
class KvPlan:
    n_ctx: int
    kv_tokens: int
    reason: str
    """Why the plan has fewer cells or a shorter context than asked for; empty: it has what was asked for."""


def share(workers: int) -> float:
    """Return the share of a machine's free memory that the KV cache of one of its `workers` workers can have."""
    return min(WORKER_SHARE, MACHINE_SHARE / workers)


def plan_kv(
    *, slots: int, n_ctx: int, kv_tokens: int, bytes_per_token: float, free_bytes: int | None, workers: int
) -> KvPlan:
    """Return the plan. `kv_tokens` 0: slots x n_ctx cells, or as many as fit the worker's share of `free_bytes` (None:
    not known, so all fit). `workers`: number of workers that share the machine.

    Any other `kv_tokens` is not reduced to fit the memory: whether it fits shows when it is allocated."""
    wanted = min(kv_tokens or slots * n_ctx, MAX_KV_TOKENS)
    reason = ""
    if not kv_tokens and free_bytes is not None and bytes_per_token > 0:
        room = int(free_bytes * share(workers) / bytes_per_token)
        if room < wanted:
            wanted = max(room, 256)
            among = f" for {workers} workers" if workers > 1 else ""
            reason = (
                f"{free_bytes >> 20:,} MiB of memory are free{among} and a token takes "
                f"{bytes_per_token / 1024:,.0f} KiB"
            )
    if wanted < n_ctx and not reason:
        reason = f"all slots together have {wanted:,} cells"
    return KvPlan(min(n_ctx, wanted), wanted, reason)


def outputs_too_large(*, n_vocab: int, n_ubatch: int, free_bytes: int | None) -> str:
    """Return why a micro-batch that has an output for each token does not fit main memory; empty if it does.

    llama.cpp reserves memory for the logits of all outputs, needed or not (`output_reserve` in llama-context.cpp)."""
    needed = n_vocab * n_ubatch * 4
    if free_bytes is None or needed <= free_bytes:
        return ""
    return (
        f"llama.n_ubatch: a micro-batch of {n_ubatch:,} tokens takes {needed >> 20:,} MiB with this model's vocabulary "
        f"and {free_bytes >> 20:,} MiB of memory are free; lower n_ubatch"
    )


def kv_shape(header: GgufHeader) -> KvShape | None:
    """Return the model's KV shape; None if the header does not have it. Source: docs/gguf.md of ggml."""
    arch = header.text("general.architecture") or ""
    layers, heads = header.number(f"{arch}.block_count"), header.numbers(f"{arch}.attention.head_count")
    width = header.number(f"{arch}.embedding_length")
    if not layers or not heads or not width or not heads[0]:
        return None
    kv_heads = header.numbers(f"{arch}.attention.head_count_kv") or heads
    per_layer = kv_heads if len(kv_heads) == layers else [kv_heads[0]] * layers
    head_width = width // heads[0]
    return KvShape(
        per_layer,
        header.number(f"{arch}.attention.key_length") or head_width,
        header.number(f"{arch}.attention.value_length") or head_width,
    )


def free_for_cache(llama: LlamaSettings) -> int | None:
    """Return the bytes free for the KV cache; None: a GPU holds it, and only allocating shows what is free there."""
    on_gpu = llama.uses_devices and any(os.path.exists(device) for device in GPU_DEVICES)
    return None if on_gpu else free_bytes()
