"""Has llama.cpp lay a worker's model and contexts out without taking memory for them, in a process of its own.

    python -m workers.footprint.dry_run

It reads a `Question` from standard input and writes an `Answer` as its last line. The contexts are made by the code
that makes a worker's, so that what is predicted is what a worker would do: the same cells, sequences and outputs. It
takes no GPU and, but for a vocabulary and the states of recurrent layers, hardly any memory (docs/models.md).
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from pathlib import Path

import msgspec
from llama_cpp import llama_cpp as c
from llama_cpp import mtmd_cpp as m
from msgspec.structs import replace

from workers.contexts import load_draft, make_contexts, make_pooled_context
from workers.footprint.breakdown import context_bytes, projector_bytes
from workers.footprint.layers import layers_of, mapped_bytes
from workers.footprint.rehearsal import Answer, DryRun, Question, Refusal, Rehearsed
from workers.footprint.taken import anonymous_bytes
from workers.llama.context import PROMPT_LOGITS, Context
from workers.llama.gguf import read_header
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.llama.native import native_log
from workers.llama.pooling import PooledContext, is_pooled, pooling_of
from workers.llama.trial import without_devices
from workers.media.bounds import NUM_DECODERS
from workers.models.spec import NO_PROJECTOR, LlamaSettings, ModelSpec
from workers.process.limits import bound_cpu, bound_memory, keep_little
from workers.process.parent_death import end_with_parent
from workers.service.calls.lanes import prompts_at_once

CPU_S = 120
"""Maximum processor seconds. It takes one second, most of it for Python and the vocabulary."""

EXTRA_BYTES = 8 << 30
"""Maximum of memory that it may take: llama.cpp lists cells at 50 bytes each, and recurrent states are real."""

_STATES = re.compile(r"RS buffer size = +([\d.]+) MiB")


def _on_processor(llama: LlamaSettings) -> LlamaSettings:
    """Return the settings for a process that has the processor alone and takes no memory for weights."""
    return replace(
        without_devices(llama),
        control_vectors=llama.control_vectors,
        control_vector_layers=llama.control_vector_layers,
        numa="off",
        override_tensor=(),
    )


def rehearse(question: Question) -> DryRun:
    """Return what the worker would take. Raises ModelError, ModelTooLarge."""
    spec = replace(question.spec, llama=_on_processor(question.spec.llama))
    native_log()
    before = anonymous_bytes()
    with contextlib.ExitStack() as opened:
        model = opened.enter_context(Model.load(Path(spec.path or ""), spec.llama, allocate=False))
        loaded = anonymous_bytes()
        draft = None
        if (wanted := spec.speculation.draft) is not None and not is_pooled(model, spec.llama):
            longest = spec.ctx or model.facts.n_ctx_train
            draft = opened.enter_context(load_draft(wanted, model, spec.llama, n_ctx=longest, allocate=False))
        drafts_vocabulary = anonymous_bytes() - loaded
        context, beside = _contexts(opened, model, draft, spec, question)
        made = [one for one in (context, beside) if one is not None]
        told = [_rehearsed(one, spec.llama) for one in made]
        in_memory = _state_bytes() + sum(_output_bytes(one, one.num_sequences) for one in made)
        structures = anonymous_bytes() - loaded - drafts_vocabulary - in_memory
        header = model.header
        generates = not isinstance(context, PooledContext)
        layers = layers_of(header, question.spec.llama, cells=told[0].cells, makes_logits=generates)
        maps = question.spec.llama.use_mmap
        adapters = sorted(spec.adapters, key=lambda one: not one.pinned)
        return DryRun(
            kind="chat" if generates else "pooled",
            model=told[0],
            layers=layers,
            vocabulary=loaded - before + drafts_vocabulary,
            structures=max(0, structures),
            mapped=mapped_bytes(header) if maps else 0,
            n_vocab=model.facts.n_vocab,
            helpers=prompts_at_once(),
            decoders=NUM_DECODERS if _sees_or_hears(question.spec) else 0,
            draft=told[1] if len(told) > 1 else None,
            draft_mapped=mapped_bytes(draft.header) if draft is not None and maps else 0,
            projector=_projector_bytes(question.spec),
            adapters=tuple(read_header(Path(one.path or "").expanduser()).tensor_bytes for one in adapters),
            num_pinned=sum(one.pinned for one in adapters),
        )


def _contexts(
    opened: contextlib.ExitStack, model: Model, draft: Model | None, spec: ModelSpec, question: Question
) -> tuple[Context | PooledContext, Context | None]:
    free, workers = question.free_bytes, question.workers
    if is_pooled(model, spec.llama):
        pooling = pooling_of(model, spec.llama)
        return opened.enter_context(make_pooled_context(model, spec, pooling, free_bytes=free, workers=workers)), None
    (context, beside), _ = make_contexts(model, spec, draft, free_bytes=free, workers=workers)
    opened.enter_context(context)
    if beside is not None:
        opened.enter_context(beside)
    return context, beside


def _rehearsed(context: Context | PooledContext, llama: LlamaSettings) -> Rehearsed:
    kinds = context_bytes(context.pointer).values()
    mask = context.n_ubatch * context.kv_tokens * 4
    return Rehearsed(
        weights=sum(one.weights for one in kinds),
        cells=sum(one.cells for one in kinds),
        compute=sum(one.compute for one in kinds),
        outputs=_output_bytes(context, _most_outputs(context)),
        scratch=_scratch_bytes(context, llama),
        inputs=context.n_ubatch * context.model.n_embd_inp * 4 + mask,
        num_cells=context.kv_tokens,
    )


def _most_outputs(context: Context | PooledContext) -> int:
    """Return how many rows of the largest step have results: llama.cpp takes memory for them when it comes."""
    return context.n_ubatch if isinstance(context, PooledContext) else context.num_sequences + PROMPT_LOGITS


def _output_bytes(context: Context | PooledContext, num_rows: int) -> int:
    """Return the bytes of the buffer for results. Source: `output_reserve` in llama-context.cpp."""
    width = c.llama_model_n_embd_out(context.model.pointer) if isinstance(context, PooledContext) else 0
    return num_rows * (context.model.facts.n_vocab + width) * 4


def _scratch_bytes(context: Context | PooledContext, llama: LlamaSettings) -> int:
    """Return the bytes that the processor takes to convert the larger factor of its largest product: the rows of a
    step, or without flash attention the weights of all cells for all heads. Source: `ggml_graph_plan` in ggml-cpu.c."""
    header = context.model.header
    widest = max((tensor.shape[0] for tensor in header.tensors.values() if tensor.shape[1] > 1), default=0)
    rows = context.n_ubatch * widest * 2
    if llama.flash_attn != "off" or llama.cache_type_v == "f32":
        return rows
    heads = header.numbers(f"{context.model.architecture}.attention.head_count")
    return max(rows, context.n_ubatch * context.kv_tokens * max(heads, default=0) * 2)


def _state_bytes() -> int:
    """Return the bytes of the recurrent states of the context that was made last, by llama.cpp's log: of all that a
    context takes they alone are real even without memory."""
    return int(sum(map(float, native_log().found(_STATES))) * 2**20)


def _sees_or_hears(spec: ModelSpec) -> bool:
    return spec.projector not in ("", NO_PROJECTOR)


def _projector_bytes(spec: ModelSpec) -> int:
    if not _sees_or_hears(spec):
        return 0
    params = m.mtmd_context_params_default()
    params.use_gpu, params.warmup = False, False
    params.image_min_tokens, params.image_max_tokens = spec.image_min_tokens or -1, spec.image_max_tokens or -1
    return projector_bytes(Path(spec.projector).expanduser(), params)


def answer(question: Question) -> Answer:
    """Return what the worker would take, or why it could not be started."""
    try:
        return Answer(found=rehearse(question))
    except ModelTooLarge as error:
        return Answer(refused=Refusal(reason=str(error), is_too_large=True))
    except ModelError as error:
        return Answer(refused=Refusal(reason=str(error)))


def main() -> None:
    """Answer the question that standard input brings."""
    end_with_parent()
    keep_little()
    bound_memory(EXTRA_BYTES)
    bound_cpu(CPU_S)
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    os.dup2(sys.stdout.fileno(), sys.stderr.fileno())  # what ggml asserts on is told there
    told = msgspec.json.encode(answer(question))
    sys.stdout.buffer.write(b"\n" + told + b"\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
