"""The composition root of a worker that generates text: opens its parts as the settings say, and connects them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from workers import secret_file
from workers.chat.answers import Answers, family_of
from workers.chat.prompts import Prompts
from workers.chat.renderer import Renderer
from workers.constraint.compiler import Compiler
from workers.constraint.forks import Forks
from workers.constraint.gbnf import Trial
from workers.constraint.moving_mask import ForkedGrammars
from workers.constraint.tool_calls import CallForms
from workers.contexts import open_contexts
from workers.engine.adapters.registry import AdapterRegistry
from workers.engine.disk.conversation_file import ConversationFiles, SaveBounds
from workers.engine.disk.fingerprint import KvIdentity, ModelHashes
from workers.engine.disk.folder import CacheFolder, CacheFolderUnusable
from workers.engine.disk.sealed import CacheKeys
from workers.engine.disk.tier import DiskTier
from workers.engine.engine import Engine
from workers.engine.speculation.draft_model import DraftModel
from workers.engine.step.speculator import DraftSources
from workers.engine.watchdog import Watchdog
from workers.footprint.devices import free_bytes
from workers.llama.context import Context
from workers.llama.devices import Devices
from workers.llama.model import Model
from workers.llama.tokens.tokenizer import GuardedTokenizer, TokenProcesses
from workers.models.spec import NO_PROJECTOR, AdapterSpec, ModelSpec
from workers.process.helper_process import Launch
from workers.protocol.events import CallFailed
from workers.protocol.pooled import POOL_PATH
from workers.served_media import ServedMedia, open_media
from workers.served_text import infill_prompts, open_renderer, text_routes
from workers.service.calls.call_record import CallRecords
from workers.service.calls.delivery import Delivery
from workers.service.calls.generate import GenerateCalls
from workers.service.calls.lanes import FairLane, media_lane, prompt_lane, prompts_at_once
from workers.service.calls.live_calls import LiveCalls
from workers.service.calls.pooled import no_pooled_work
from workers.service.calls.stream import EventHub, Mailbox
from workers.service.lifecycle import Lifecycle
from workers.service.registration.prefix_adverts import PrefixAdverts
from workers.service.routes.adapters import AdapterRoutes
from workers.service.routes.app import CallRoutes
from workers.service.routes.bodies import refusing
from workers.service.routes.slots import SlotKeeper, SlotRoutes
from workers.service.routes.text import TextRoutes
from workers.service.server import Served, WorkerIdentity, metrics_of
from workers.settings import SettingUnusable, WorkerSettings

HASHES_FILE = "model-hashes.json"
"""File in the state folder that keeps the SHA-256 of model files, so that each file is hashed only once."""


def kv_identity(settings: WorkerSettings, model: Model, spec: ModelSpec, *, n_ctx: int) -> KvIdentity:
    """Return the identity of the KV that a context computes. KV on disk is used only if its identity is the same.

    `n_ctx`: number of KV cells in the context."""
    hashes = ModelHashes(settings.state_dir / HASHES_FILE)
    control = "" if model.control is None else model.control.digest()
    return KvIdentity(
        model.header,
        spec.llama,
        hashes,
        n_ctx=n_ctx,
        loaded_at=model.loaded_at,
        control=control,
        projector=None if spec.projector in ("", NO_PROJECTOR) else Path(spec.projector).expanduser(),
        image_tokens=(spec.image_min_tokens, spec.image_max_tokens),
    )


def open_tier(settings: WorkerSettings, identity: KvIdentity) -> DiskTier | None:
    """Open the disk tier and start its thread; return None where no `cache_dir` is set. Close it after the engine.

    Raises CacheFolderUnusable."""
    if settings.cache_dir is None:
        return None
    try:
        folder = CacheFolder(settings.cache_dir)
    except CacheFolderUnusable as error:
        raise CacheFolderUnusable(f"cache_dir: {error}") from None
    return DiskTier(
        folder, cache_keys(settings), max_bytes=settings.cache_disk_mib << 20, identify=identity.fingerprint
    )


def open_slot_files(settings: WorkerSettings) -> ConversationFiles | None:
    """Open the folder of saved slots; return None where no `slot_save_dir` is set. Raises CacheFolderUnusable."""
    if settings.slot_save_dir is None:
        return None
    bounds = SaveBounds(
        settings.slot_saves_per_team, settings.slot_save_mib_per_team << 20, settings.slot_save_mib << 20
    )
    try:
        return ConversationFiles(settings.slot_save_dir, cache_keys(settings), bounds)
    except CacheFolderUnusable as error:
        raise CacheFolderUnusable(f"slot_save_dir: {error}") from None


def cache_keys(settings: WorkerSettings) -> CacheKeys:
    """Return the keys that name and seal cache files. They are derived from the setting `cache_secret`; if it is empty,
    from a secret that is made once and kept in the state folder.

    They are not derived from the workers' secret: whoever learned that could write files that are parsed in C++, and
    all files would be unreadable once it changes. Raises CacheFolderUnusable where no secret can be made."""
    path = settings.state_dir / secret_file.CACHE_SECRET
    try:
        return CacheKeys(settings.cache_secret or secret_file.made_once(path))
    except OSError as error:
        raise CacheFolderUnusable(f"{path}: {error.strerror}; give --cache-secret, or another --state-dir") from None


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChatWorker:
    """The opened parts of a worker that generates text. `wire` adds the parts that need an event loop."""

    settings: WorkerSettings
    spec: ModelSpec
    model: Model
    context: Context
    n_ctx: int
    prompts: Prompts
    renderer: Renderer
    answers: Answers
    constraints: Compiler
    adapters: AdapterRegistry
    watchdog: Watchdog
    identity: KvIdentity
    """Fingerprint of model, llama.cpp and settings: KV on disk is used only if it was saved under the same one."""
    tier: DiskTier | None
    slot_files: ConversationFiles | None
    draft_model: DraftModel | None
    media: ServedMedia | None
    """What reads pictures and sounds; None: the model reads text only."""

    def wire(self, worker: WorkerIdentity, life: Lifecycle, records: CallRecords) -> Served:
        """Make the mailbox, engine, calls and routes, and connect them. Call it on the event loop that serves them."""
        mailbox = Mailbox(asyncio.get_running_loop(), life.crashed)
        engine = self._engine(mailbox, life)
        metrics = metrics_of(worker, engine, life, lambda: self.constraints.counts, Devices(free_bytes).memory)
        live = LiveCalls(engine, records)
        hub = EventHub(worker.boot, live.give_up, grace_s=worker.gateway_grace_s)
        lane, media, adverts = prompt_lane(), media_lane(), PrefixAdverts(engine.cache_report)
        facts = None if self.media is None else self.media.facts(self.model.facts)
        adapter_routes = AdapterRoutes(self.adapters, self.settings.adapters_dir)
        self.constraints.warm_up_once(lambda: engine.load().slots_busy + engine.load().waiting == 0)
        calls = GenerateCalls(
            Delivery(mailbox, engine, live, hub, metrics, life.shortage),
            engine,
            live,
            hub,
            self.prompts,
            life,
            lane,
            media,
            defaults=self.spec.sampling.sampling(),
            constraints=self.constraints,
            answers=self.answers,
            adverts=adverts,
            adapter_hashes=adapter_routes.hashes,
        )
        return Served(
            kind="generate",
            engine=engine,
            calls=calls,
            hub=hub,
            metrics=metrics,
            routes=[
                *CallRoutes(calls, worker.boot).routes(),
                refusing(POOL_PATH, no_pooled_work()),
                *adapter_routes.routes(),
                *self._slot_routes(engine).routes(),
                *self._text_routes(lane, media).routes(),
            ],
            adverts=adverts,
            announced=lambda beat: adapter_routes.announced(
                replace(beat, infill=self.prompts.can_infill, facts=facts or beat.facts)
            ),
            retire=engine.retire,
            stay=engine.stay,
        )

    def _engine(self, mailbox: Mailbox, life: Lifecycle) -> Engine:
        return Engine(
            self.model,
            self.context,
            slots=self.spec.slots,
            n_ctx=self.n_ctx,
            emit=mailbox.put,
            on_crash=life.crashed_in_thread,
            ram_bytes=self.settings.cache_ram_mib << 20,
            adapters=self.adapters,
            watchdog=self.watchdog,
            disk=self.tier,
            speculation=DraftSources(self.spec.speculation, self.draft_model),
            encoder=None if self.media is None else self.media.encoder,
        )

    def _slot_routes(self, engine: Engine) -> SlotRoutes:
        return SlotRoutes(
            SlotKeeper(
                engine.slot_contents,
                self.slot_files,
                self.adapters,
                self.identity.fingerprint,
                n_ctx=self.n_ctx,
                max_bytes=self.settings.cache_ram_mib << 20,
            )
        )

    def _text_routes(self, lane: FairLane, media: FairLane) -> TextRoutes:
        return text_routes(
            self.model,
            self.prompts,
            lane,
            media,
            self.renderer,
            self.spec.sampling.sampling(),
            name=self.spec.name,
            slots=self.spec.slots,
            n_ctx=self.n_ctx,
            inputs=("text",) if self.media is None else self.media.inputs,
        )


def open_chat_worker(
    opened: contextlib.ExitStack,
    model: Model,
    settings: WorkerSettings,
    spec: ModelSpec,
    watchdog: Watchdog,
    launch: Launch,
) -> ChatWorker:
    """Open the parts, in the order in which they need each other. `opened` closes them all.

    Raises ModelError, ModelTooLarge, AdapterError, TemplateUnusable, TemplateFileUnusable, FamilyUnknown,
    CacheFolderUnusable, SettingUnusable."""
    aside = opened.enter_context(ThreadPoolExecutor(2, thread_name_prefix="paddock-start"))
    rendering = _begun(opened, aside, partial(open_renderer, model, spec.chat_template, prompts_at_once(), launch))
    reading = aside.submit(lambda: model.vocab.eog)
    n_ubatch = min(spec.llama.n_ubatch, spec.llama.n_batch)
    media = open_media(opened, model, spec, n_ubatch=n_ubatch, max_bytes=settings.media_cache_mib << 20)
    context, n_ctx, draft_model = open_contexts(opened, model, spec, workers=settings.workers_on_machine)
    context.warm_up()
    renderer = rendering.result()
    reading.result()
    answers = Answers(family_of("\n".join(renderer.sources.values()), spec.tool_family), model.vocab, spec)
    logger.info("answers are read as those of the family %s", answers.family.name)
    if fault := answers.closing_fault(spec.thinking_budget_message):
        raise SettingUnusable(f"thinking_budget_message {fault}")
    long_texts = opened.enter_context(
        contextlib.closing(TokenProcesses(model.path, model.overrides, number=prompts_at_once(), launch=launch))
    )
    prompts = _prompts(model, spec, renderer, GuardedTokenizer(model.vocab, long_texts), media, n_ctx=n_ctx)
    identity = kv_identity(settings, model, spec, n_ctx=context.kv_tokens)
    adapters = _registry(opened, model, context, settings)
    processes = opened.enter_context(contextlib.closing(Forks(model.path, model.overrides, launch=launch)))
    tier, slot_files = open_tier(settings, identity), open_slot_files(settings)
    for one in (tier, slot_files):
        if one is not None:
            opened.callback(one.close)
    forms = CallForms(answers.family.syntax, answers.controls, open_objects=spec.open_objects)
    forked = ForkedGrammars(processes, model.vocab)
    constraints = Compiler(model.vocab, forked, Trial(processes), forms, forked)
    opened.callback(constraints.close)
    _register_adapters(adapters, spec.adapters)
    return ChatWorker(
        settings,
        spec,
        model,
        context,
        n_ctx,
        prompts,
        renderer,
        answers,
        constraints,
        adapters,
        watchdog,
        identity,
        tier,
        slot_files,
        draft_model,
        media,
    )


def _begun(opened: contextlib.ExitStack, aside: Executor, make: Callable[[], Renderer]) -> Future[Renderer]:
    """Begin to open a renderer on a thread of `aside`, so that its process tries the templates while this one makes the
    contexts; `opened` closes it. Raises RuntimeError if there is no memory for the thread."""
    making = aside.submit(make)

    def close() -> None:
        if making.exception() is None:
            making.result().close()

    opened.callback(close)
    return making


def _prompts(
    model: Model,
    spec: ModelSpec,
    renderer: Renderer,
    tokenizer: GuardedTokenizer,
    media: ServedMedia | None,
    *,
    n_ctx: int,
) -> Prompts:
    return Prompts(
        renderer,
        tokenizer,
        bos_text=model.bos_text,
        end_token=model.vocab.end_token,
        num_tokens=model.facts.n_vocab,
        n_ctx=n_ctx,
        shared=spec.shared_prompts,
        infill=infill_prompts(model.vocab, spec.llama, n_ctx=n_ctx),
        defaults=spec,
        media=None if media is None else media.reader,
    )


def _registry(
    opened: contextlib.ExitStack, model: Model, context: Context, settings: WorkerSettings
) -> AdapterRegistry:
    most, most_bytes = settings.max_adapters, settings.adapters_mib << 20
    registry = AdapterRegistry(model, context, max_adapters=most, max_bytes=most_bytes)
    return opened.enter_context(contextlib.closing(registry))


def _register_adapters(registry: AdapterRegistry, adapters: Iterable[AdapterSpec]) -> None:
    """Load the adapters that the settings list. Raises AdapterError, SettingUnusable."""
    for adapter in adapters:
        try:
            path = Path(adapter.path or "").expanduser()
            info = registry.register(adapter.name, path, pinned=adapter.pinned, fixed=True)
        except CallFailed as failed:
            raise SettingUnusable(f"adapters: {adapter.name}: {failed.failure.message}") from None
        logger.info("adapter %s: rank %d, %d bytes", info.name, info.rank, info.size)
