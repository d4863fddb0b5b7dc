"""The composition root of one worker process: model, context, engine, service. `run` is its whole life."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from workers.black_box import BlackBox, describe, take
from workers.chat.answers import Answers
from workers.chat.families import FamilyUnknown, family_of
from workers.chat.prompts import Prompts
from workers.chat.template import TemplateUnusable
from workers.constraint.compiler import Compiler
from workers.constraint.tool_calls import CallForms
from workers.constraint.trial import Trial
from workers.disk_cache import kv_identity, open_slot_files, open_tier
from workers.engine.adapters import AdapterShelf
from workers.engine.disk_folder import CacheFolderUnusable
from workers.engine.engine import Engine
from workers.engine.pooled import PooledEngine
from workers.engine.watchdog import Watchdog
from workers.isolation import isolate
from workers.llama.context import Context
from workers.llama.errors import AdapterError
from workers.llama.gguf import GgufHeader
from workers.llama.grammar import GbnfGrammars
from workers.llama.inputs import PooledInputs
from workers.llama.model import Model, ModelError, ModelTooLarge
from workers.llama.pooling import PooledContext, Pooling, is_pooled, pooling_of
from workers.protocol.catalog import NAME_PATTERN, AdapterSpec, DefaultSampling, LlamaSettings
from workers.protocol.exits import Exit
from workers.protocol.failures import CallFailed
from workers.protocol.requests import Sampling
from workers.served_text import TemplateFileUnusable, infill_prompts, open_renderer, text_routes
from workers.service import logs
from workers.service.adapters import AdapterRoutes
from workers.service.memory import KvShape, free_bytes, outputs_too_large, plan_kv
from workers.service.pooled import PooledDesk, TextRefused
from workers.service.server import Emit, OnCrash, Place, PortTaken, WorkerServer, listen
from workers.service.slots import SlotKeeper, SlotRoutes
from workers.settings import WorkerSettings

SWITCH_INTERVAL_S = 0.0005
"""How long the event loop may keep the interpreter lock from the engine's thread; figures: docs/performance.md."""

LEARNED_POSITIONS = "position_embd.weight"

GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")

logger = logging.getLogger(__name__)

T = TypeVar("T")


class SettingUnusable(ValueError):
    """A setting that only the worker can judge; the message names it and the remedy."""


def main(settings: WorkerSettings) -> int:
    """`run` for a process that does nothing else."""
    isolate(core_dumps=settings.core_dumps)
    return run(settings)


def run(settings: WorkerSettings) -> int:
    """Serves until a signal, or until it can't; returns the exit code (`workers.protocol.exits`)."""
    logs.configure(settings.log_level, settings.log_format)
    try:
        return _run(settings)
    except (SettingUnusable, FamilyUnknown, TemplateFileUnusable) as error:
        return _complain(error, Exit.USAGE)
    except PortTaken as error:
        return _complain(error, Exit.PORT_TAKEN)
    except ModelTooLarge as error:
        return _complain(error, Exit.NO_MEMORY)
    except (ModelError, AdapterError, TemplateUnusable) as error:
        return _complain(error, Exit.BAD_MODEL)
    except CacheFolderUnusable as error:
        return _complain(error, Exit.USAGE)


def _run(settings: WorkerSettings) -> int:
    path = _checked(settings)
    llama = _parsed("llama", settings.llama, LlamaSettings)
    sampling = _parsed("sampling", settings.sampling, DefaultSampling).sampling()
    adapters = _parsed("adapters", settings.adapters, list[AdapterSpec])
    shared = _parsed("shared_prompts", settings.shared_prompts, list[str])
    loaded_at = time.time()
    with _listen(settings) as sock, Model.load(path, llama) as model, contextlib.ExitStack() as opened:
        place = _place(settings, path, model)
        if is_pooled(model, llama):
            return _run_pooled(place, sock, model, settings, llama)
        renderer = opened.enter_context(open_renderer(model, settings.chat_template))
        answers = Answers(family_of("\n".join(renderer.sources.values()), settings.tool_family), model.vocab)
        logger.info("answers are read as those of the family %s", answers.family.name)
        context, n_ctx = make_context(model, settings, llama)
        prompts = Prompts(
            renderer,
            model,
            bos_text=model.bos_text,
            num_tokens=model.facts.n_vocab,
            shared=shared,
            infill=infill_prompts(model.vocab, llama, n_ctx=n_ctx),
        )
        identity = kv_identity(settings, model.header, llama, n_ctx=context.kv_tokens, loaded_at=loaded_at)
        with (
            context,
            contextlib.closing(_shelf(model, context, settings)) as shelf,
            contextlib.closing(Trial(path)) as trial,
            _black_box(settings) as black_box,
            Watchdog(settings.step_timeout_s, black_box) as watchdog,
            contextlib.ExitStack() as closing,
        ):
            disk = open_tier(settings, identity)
            if disk is not None:
                closing.callback(disk.close)
            slot_files = open_slot_files(settings)
            if slot_files is not None:
                closing.callback(slot_files.close)
            slots = SlotRoutes()
            constraints = Compiler(
                model.vocab, GbnfGrammars(model.vocab), trial, CallForms(answers.family.syntax, answers.controls)
            )
            constraints.warm_up()
            context.warm_up()
            _load_adapters(shelf, adapters)

            def build_engine(emit: Emit, on_crash: OnCrash) -> Engine:
                engine = Engine(
                    model,
                    context,
                    slots=settings.slots,
                    n_ctx=n_ctx,
                    emit=emit,
                    on_crash=on_crash,
                    ram_bytes=settings.cache_ram_mib << 20,
                    adapters=shelf,
                    watchdog=watchdog,
                    disk=disk,
                )
                slots.connect(
                    SlotKeeper(
                        engine.at_rest,
                        slot_files,
                        shelf,
                        identity.fingerprint,
                        n_ctx=n_ctx,
                        max_bytes=settings.cache_ram_mib << 20,
                    )
                )
                return engine

            async def serve() -> Exit:
                routes = AdapterRoutes(shelf, settings.adapters_dir)
                texts = text_routes(
                    model, prompts, renderer, sampling, name=place.model, slots=settings.slots, n_ctx=n_ctx
                )
                return await WorkerServer(
                    place,
                    sock,
                    prompts,
                    sampling,
                    build_engine,
                    constraints=constraints,
                    answers=answers,
                    adapters=routes,
                    slots=slots,
                    texts=texts,
                ).run()

            return _on_loop(serve)


def _run_pooled(
    place: Place, sock: socket.socket, model: Model, settings: WorkerSettings, llama: LlamaSettings
) -> Exit:
    pooling = pooling_of(model, llama)
    inputs = PooledInputs(model, pooling)
    prompts = Prompts(None, model, num_tokens=model.facts.n_vocab)
    with (
        make_pooled_context(model, settings, llama, pooling) as context,
        _black_box(settings) as black_box,
        Watchdog(settings.step_timeout_s, black_box) as watchdog,
    ):
        context.warm_up()

        async def serve() -> Exit:
            desk = PooledDesk(inputs, pooling=pooling, width=context.width)

            def build_engine(emit: Emit, on_crash: OnCrash) -> TextRefused:
                return desk.connect(
                    PooledEngine(context, slots=settings.slots, tell=desk.tell, on_crash=on_crash, watchdog=watchdog)
                )

            texts = text_routes(
                model,
                prompts,
                None,
                Sampling(),
                name=place.model,
                kind=desk.kind,
                slots=settings.slots,
                n_ctx=context.longest,
            )
            return await WorkerServer(place, sock, prompts, Sampling(), build_engine, pool=desk, texts=texts).run()

        return _on_loop(serve)


def _shelf(model: Model, context: Context, settings: WorkerSettings) -> AdapterShelf:
    max_bytes = settings.adapters_mib << 20
    return AdapterShelf(model, context, max_adapters=settings.max_adapters, max_bytes=max_bytes)


def _load_adapters(shelf: AdapterShelf, adapters: list[AdapterSpec]) -> None:
    """Raises AdapterError, SettingUnusable."""
    for adapter in adapters:
        try:
            info = shelf.load(adapter.name, Path(adapter.path).expanduser(), pinned=adapter.pinned)
        except CallFailed as failed:
            raise SettingUnusable(f"adapters: {adapter.name}: {failed.failure.message}") from None
        logger.info("adapter %s: rank %d, %d bytes", info.name, info.rank, info.size)


def _on_loop(serve: Callable[[], Coroutine[None, None, Exit]]) -> Exit:
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.freeze()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(serve())


def make_context(model: Model, settings: WorkerSettings, llama: LlamaSettings) -> tuple[Context, int]:
    """The context and the longest conversation it allows. Raises ModelError, ModelTooLarge.

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
    """Raises ModelError, ModelTooLarge. Encoders keep no cache; a decoder's holds two of the longest inputs, unless
    `kv_tokens` says how much: one is read in parts while shorter ones pass it.
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
    """Bytes; None where a GPU's memory holds the cache, whose driver says how much is free only by refusing."""
    on_gpu = llama.n_gpu_layers != 0 and any(os.path.exists(device) for device in GPU_DEVICES)
    return None if on_gpu else free_bytes()


def kv_shape(header: GgufHeader) -> KvShape | None:
    """What one token takes in the cache; None where the header does not say. Source: docs/gguf.md of ggml."""
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


def _checked(settings: WorkerSettings) -> Path:
    """The model's file. Raises SettingUnusable for what is unset and has no default."""
    if settings.model is None:
        raise SettingUnusable("model is unset: a worker serves one GGUF file; give --model FILE.gguf")
    if not settings.redis_url:
        raise SettingUnusable("redis_url is unset: gateways find a worker through Redis; give --redis-url")
    if not settings.worker_secret:
        raise SettingUnusable(
            "worker_secret is unset: give gateways and workers the same PADDOCK_WORKER_SECRET, or use `paddock up`"
        )
    name = settings.alias or settings.model.stem
    if not re.fullmatch(NAME_PATTERN, name):
        raise SettingUnusable(
            f"alias: {name!r} can't be a model's name: use at most 128 letters, digits and . _ : / @ + -, with --alias"
        )
    return settings.model.expanduser()


def _black_box(settings: WorkerSettings) -> BlackBox:
    """Where the engine keeps what it runs. Tells what a worker that died in this place left there."""
    path = settings.black_box
    try:
        left = take(path) if path else None
        if left:
            logger.error("the worker that was here before died while running %s", describe(left))
        return BlackBox(path)
    except OSError as error:
        raise SettingUnusable(
            f"black_box: can't write {path}: {error.strerror}; name a file in a folder of your own, or leave it out"
        ) from None


def _place(settings: WorkerSettings, path: Path, model: Model) -> Place:
    return Place(
        worker=settings.worker_id or f"{socket.gethostname()}-{os.getpid()}",
        model=settings.alias or path.stem,
        address=settings.worker_address.rstrip("/"),
        secret=settings.worker_secret,
        redis_url=settings.redis_url,
        facts=model.facts,
        version=_version(),
        drain_s=settings.worker_drain_s,
        gateway_grace_s=settings.gateway_grace_s,
    )


def _listen(settings: WorkerSettings) -> socket.socket:
    try:
        return listen(settings.worker_host, settings.worker_port)
    except PortTaken:
        raise
    except OSError as error:
        raise SettingUnusable(f"worker_host: cannot listen on {settings.worker_host}: {error.strerror}") from None


def _parsed(name: str, text: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise SettingUnusable(f"{name}: {error}; give a JSON object as docs/catalog.md describes it") from None


def _version() -> str:
    try:
        return version("paddock")
    except PackageNotFoundError:
        return "unknown"


def _complain(error: Exception, code: Exit) -> int:
    print(f"paddock: {error}", file=sys.stderr)
    return code
