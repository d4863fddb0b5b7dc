"""Makes a worker's context, as large as its settings ask, its model was trained for, and memory holds."""

from __future__ import annotations

import logging
import os

from workers.llama.context import Context
from workers.llama.gguf import GgufHeader
from workers.llama.model import Model, ModelTooLarge
from workers.llama.pooling import PooledContext, Pooling
from workers.protocol.catalog import LlamaSettings
from workers.service.memory import KvShape, free_bytes, outputs_too_large, plan_kv
from workers.settings import WorkerSettings

LEARNED_POSITIONS = "position_embd.weight"

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

logger = logging.getLogger(__name__)


def make_context(model: Model, settings: WorkerSettings, llama: LlamaSettings) -> tuple[Context, int]:
    """Return the context and the longest conversation it allows, tokens. Raises ModelError, ModelTooLarge.

    Without an explicit `kv_tokens` the cache shrinks until it fits, down to one conversation.
    """
    trained = model.facts.n_ctx_train
    asked = settings.ctx or trained
    if asked > trained:
        logger.warning("ctx %d is more than the %d tokens that the model was trained for", asked, trained)
    if LEARNED_POSITIONS in model.header.tensors:  # llama.cpp aborts at the first token beyond them
        asked = min(asked, trained)
    shape = kv_shape(model.header)
    token_bytes = shape.bytes_per_token(llama.cache_type_k, llama.cache_type_v) if shape else 0.0
    free = _free_for_cache(llama)
    if free is not None and settings.kv_tokens * token_bytes > free:
        raise ModelTooLarge(  # llama.cpp would find out slowly, and at the expense of everyone on this machine
            f"kv_tokens: {settings.kv_tokens:,} KV cells take {int(settings.kv_tokens * token_bytes) >> 20:,} MiB and "
            f"{free >> 20:,} MiB of memory are free; lower --kv-tokens"
        )
    plan = plan_kv(
        slots=settings.slots,
        n_ctx=asked,
        kv_tokens=settings.kv_tokens,
        bytes_per_token=token_bytes,
        free_bytes=free,
        workers=settings.workers_on_machine,
    )
    n_ctx, kv_tokens, reason = plan.n_ctx, plan.kv_tokens, plan.reason
    while True:
        try:
            context = Context(model, llama, slots=settings.slots, kv_tokens=kv_tokens)
            break
        except ModelTooLarge as error:
            if settings.kv_tokens or kv_tokens <= n_ctx:
                raise
            kv_tokens, reason = max(n_ctx, kv_tokens // 2), str(error)
    n_ctx = min(n_ctx, context.kv_tokens)
    if reason:
        logger.warning(
            "conversations of up to %d tokens over %d KV cells instead of %d tokens over %d cells: %s",
            *(n_ctx, context.kv_tokens, asked, settings.kv_tokens or settings.slots * asked, reason),
        )
    return context, n_ctx


def make_pooled_context(
    model: Model, settings: WorkerSettings, llama: LlamaSettings, pooling: Pooling
) -> PooledContext:
    """Return the context for pooled work. Raises ModelError, ModelTooLarge. Encoders keep no cache; a decoder's holds
    two of the longest inputs unless `kv_tokens` is set: one is read in parts while shorter ones pass it.
    """
    trained = model.facts.n_ctx_train
    n_ctx = settings.ctx or trained
    if n_ctx > trained:
        logger.warning("ctx %d is more than the %d tokens that the model was trained for", n_ctx, trained)
        n_ctx = trained if model.encoder_only else n_ctx
    shortage = outputs_too_large(n_vocab=model.vocab.num_tokens, n_ubatch=llama.n_ubatch, free_bytes=free_bytes())
    if shortage:
        raise ModelTooLarge(shortage)
    kv_tokens = 0
    if not model.encoder_only:
        shape = kv_shape(model.header)
        plan = plan_kv(
            slots=2,
            n_ctx=n_ctx,
            kv_tokens=settings.kv_tokens,
            bytes_per_token=shape.bytes_per_token(llama.cache_type_k, llama.cache_type_v) if shape else 0.0,
            free_bytes=_free_for_cache(llama),
            workers=settings.workers_on_machine,
        )
        n_ctx, kv_tokens = plan.n_ctx, plan.kv_tokens
        if plan.reason:
            logger.warning("inputs of up to %d tokens over %d KV cells: %s", n_ctx, kv_tokens, plan.reason)
    context = PooledContext(
        model, llama, pooling=pooling, n_ctx=n_ctx, kv_tokens=kv_tokens, num_sequences=settings.slots
    )
    logger.info("pooling %s, inputs of up to %d tokens", pooling.name.lower(), context.longest)
    return context


def _free_for_cache(llama: LlamaSettings) -> int | None:
    """Return the bytes free for the KV cache; None where it lies on a GPU, whose driver tells only by refusing."""
    on_gpu = llama.n_gpu_layers != 0 and any(os.path.exists(device) for device in GPU_DEVICES)
    return None if on_gpu else free_bytes()


def kv_shape(header: GgufHeader) -> KvShape | None:
    """Return the shape of one token in the KV cache; None where the header lacks it. Source: docs/gguf.md of ggml."""
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
