"""Opens the contexts of workers: of one that generates text, with as many KV cells as fit, beside a smaller model that
drafts for it; and of one that makes vectors and scores."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path

from workers.engine.speculation.draft_model import DraftModel
from workers.footprint.devices import free_bytes as main_memory_free
from workers.footprint.kv_plan import free_for_cache, kv_shape, outputs_too_large, plan_kv
from workers.llama.context import Context
from workers.llama.memory import MemoryKind
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.llama.model_params import LEARNED_POSITIONS
from workers.llama.native import closed_on_error
from workers.llama.pooling import PooledContext, Pooling
from workers.models.generation import DraftSpec
from workers.models.spec import LlamaSettings, ModelSpec

SHARED = (
    *("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "split_mode", "main_gpu", "tensor_split", "devices"),
    *("offload_kqv", "op_offload", "no_host", "use_extra_bufts", "use_mmap", "use_mlock", "no_perf", "numa", "cpus"),
    *("flash_attn", "cache_type_k", "cache_type_v"),
)
"""Settings that a draft model has from its model. Others, such as those of positions, are about the model itself."""

DRAFT_UBATCH = 128
"""Maximum micro-batch of a draft model. Its compute buffer grows with that, and is taken from the first conversation on
that it reads: with 512 it is a third of what a small model and its draft take."""

REMEDY = "take a smaller model of the same family, or leave `speculation.draft` out"


def draft_settings(llama: LlamaSettings, draft: DraftSpec) -> LlamaSettings:
    """Return the settings of a draft model beside a model with the settings `llama`. All its cells are kept, also those
    behind a sliding window: its memory must be one that can drop the last tokens."""
    shared = {name: getattr(llama, name) for name in SHARED} | {"n_ubatch": min(llama.n_ubatch, DRAFT_UBATCH)}
    return LlamaSettings(**shared, n_gpu_layers=draft.n_gpu_layers, swa_full=True)


def load_draft(draft: DraftSpec, model: Model, llama: LlamaSettings, *, n_ctx: int, allocate: bool = True) -> Model:
    """Load the draft model of `model`, whose settings are `llama`. `n_ctx`: maximum tokens of a conversation.
    `allocate`: as `Model.load` has it.

    Raises ModelError if it can't draft for this model, ModelTooLarge."""
    loaded = Model.load(Path(draft.path or ""), draft_settings(llama, draft), allocate=allocate)
    with closed_on_error(loaded):
        if fault := loaded.vocab.difference(model.vocab):
            raise ModelError(f"{loaded.path}: {fault}: it can't draft for {model.path.name}; {REMEDY}")
        if LEARNED_POSITIONS in loaded.header.tensors and loaded.facts.n_ctx_train < n_ctx:
            raise ModelError(
                f"{loaded.path}: it has learned {loaded.facts.n_ctx_train:,} positions, and conversations may have "
                f"{n_ctx:,} tokens; {REMEDY}"
            )
    return loaded


logger = logging.getLogger(__name__)

Contexts = tuple[Context, Context | None]
"""A model's context, and that of its draft model, if it has one."""


def open_contexts(
    opened: contextlib.ExitStack, model: Model, spec: ModelSpec, *, workers: int
) -> tuple[Context, int, DraftModel | None]:
    """Open the context, and the draft model with its own; return them and the maximum tokens of a conversation.
    `workers`: number of workers that share the machine. Raises ModelError, ModelTooLarge."""
    wanted, draft = spec.speculation.draft, None
    if wanted is not None:
        longest = spec.ctx or model.facts.n_ctx_train
        draft = opened.enter_context(load_draft(wanted, model, spec.llama, n_ctx=longest))
    free = free_for_cache(spec.llama)
    (context, beside), n_ctx = make_contexts(model, spec, draft, free_bytes=free, workers=workers)
    opened.enter_context(context)
    if spec.speculation.rollback and not context.memory.most_cut:
        logger.warning("speculation.rollback: llama.cpp can't take this model's memory back, so nothing is drafted")
    if draft is None or beside is None:
        return context, n_ctx, None
    opened.enter_context(beside)
    for path, one in ((model.path, context), (draft.path, beside)):
        if one.memory.kind is not MemoryKind.ATTENTION:
            raise ModelError(
                f"{path}: speculation.draft: a memory of this kind ({one.memory.kind.value}) can't drop its last "
                "tokens, so that drafts can't be used; leave `speculation.draft` out"
            )
    beside.warm_up()
    return context, n_ctx, DraftModel(beside, num_tokens=model.vocab.num_tokens, ends=model.vocab.eog)


def make_contexts(
    model: Model, spec: ModelSpec, draft: Model | None, *, free_bytes: int | None, workers: int
) -> tuple[Contexts, int]:
    """Make the context, and the draft model's, which has as many cells; return them and the maximum tokens of a
    conversation. Raises ModelError, ModelTooLarge.

    `free_bytes`: memory that is free for the KV cache; None: not known. `workers`: number of workers that share the
    machine.

    Unless `kv_tokens` is set, a KV cache that is too large is halved until it fits, down to one conversation's size."""
    llama, trained = spec.llama, model.facts.n_ctx_train
    asked = spec.ctx or trained
    if asked > trained:
        logger.warning("ctx %d is more than the %d tokens that the model was trained for", asked, trained)
    if LEARNED_POSITIONS in model.header.tensors:  # llama.cpp aborts at the first token beyond them
        asked = min(asked, trained)
    token_bytes = sum(_token_bytes(one, llama) for one in (model, draft) if one is not None)
    if free_bytes is not None and spec.kv_tokens * token_bytes > free_bytes:
        raise ModelTooLarge(  # llama.cpp would find out slowly, and at the expense of everyone on this machine
            f"kv_tokens: {spec.kv_tokens:,} KV cells take {int(spec.kv_tokens * token_bytes) >> 20:,} MiB and "
            f"{free_bytes >> 20:,} MiB of memory are free; lower --kv-tokens"
        )
    plan = plan_kv(
        slots=spec.slots,
        n_ctx=asked,
        kv_tokens=spec.kv_tokens,
        bytes_per_token=token_bytes,
        free_bytes=free_bytes,
        workers=workers,
    )
    n_ctx, kv_tokens, reason = plan.n_ctx, plan.kv_tokens, plan.reason
    while True:
        try:
            made = _contexts(model, spec, draft, kv_tokens)
            break
        except ModelTooLarge as error:
            if spec.kv_tokens or kv_tokens <= n_ctx:
                raise
            kv_tokens, reason = max(n_ctx, kv_tokens // 2), str(error)
    n_ctx = min(n_ctx, made[0].kv_tokens)
    if reason:
        logger.warning(
            "conversations of up to %d tokens over %d KV cells instead of %d tokens over %d cells: %s",
            *(n_ctx, made[0].kv_tokens, asked, spec.kv_tokens or spec.slots * asked, reason),
        )
    return made, n_ctx


def _token_bytes(model: Model, llama: LlamaSettings) -> float:
    shape = kv_shape(model.header)
    return shape.bytes_per_token(llama.cache_type_k, llama.cache_type_v) if shape else 0.0


def _contexts(model: Model, spec: ModelSpec, draft: Model | None, kv_tokens: int) -> Contexts:
    """Make the contexts with so many cells. Raises ModelError, ModelTooLarge."""
    rollback = spec.speculation.rollback if spec.speculation.ngram else 0
    context = Context(model, spec.llama, slots=spec.slots, kv_tokens=kv_tokens, rollback=rollback)
    wanted = spec.speculation.draft
    if draft is None or wanted is None:
        return context, None
    with closed_on_error(context):
        settings = draft_settings(spec.llama, wanted)
        return context, Context(draft, settings, slots=spec.slots, kv_tokens=context.kv_tokens)


def make_pooled_context(
    model: Model, spec: ModelSpec, pooling: Pooling, *, free_bytes: int | None, workers: int
) -> PooledContext:
    """Make the context for pooled work. Raises ModelError, ModelTooLarge. Encoders have no KV cache. A decoder's cache
    has room for two of the longest inputs, unless `kv_tokens` is set: others are read between parts of a long one.
    `free_bytes` and `workers`: as `plan_kv` has them."""
    llama, trained = spec.llama, model.facts.n_ctx_train
    n_ctx = spec.ctx or trained
    if n_ctx > trained:
        logger.warning("ctx %d is more than the %d tokens that the model was trained for", n_ctx, trained)
        n_ctx = trained if model.encoder_only and not llama.scales_positions else n_ctx
    shortage = outputs_too_large(n_vocab=model.vocab.num_tokens, n_ubatch=llama.n_ubatch, free_bytes=main_memory_free())
    if shortage:
        raise ModelTooLarge(shortage)
    kv_tokens = 0
    if not model.encoder_only:
        shape = kv_shape(model.header)
        plan = plan_kv(
            slots=2,
            n_ctx=n_ctx,
            kv_tokens=spec.kv_tokens,
            bytes_per_token=shape.bytes_per_token(llama.cache_type_k, llama.cache_type_v) if shape else 0.0,
            free_bytes=free_bytes,
            workers=workers,
        )
        n_ctx, kv_tokens = plan.n_ctx, plan.kv_tokens
        if plan.reason:
            logger.warning("inputs of up to %d tokens over %d KV cells: %s", n_ctx, kv_tokens, plan.reason)
    context = PooledContext(model, llama, pooling=pooling, n_ctx=n_ctx, kv_tokens=kv_tokens, num_sequences=spec.slots)
    logger.info("pooling %s, inputs of up to %d tokens", pooling.name.lower(), context.longest)
    return context
