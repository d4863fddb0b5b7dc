"""Opens the parts of a worker that generates text, in the order in which they need each other."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workers.chat.answers import Answers
from workers.chat.families import family_of
from workers.chat.prompts import Prompts
from workers.constraint.compiler import Compiler
from workers.constraint.forked_grammars import ForkedGrammars
from workers.constraint.forks import Forks
from workers.constraint.tool_calls import CallForms
from workers.constraint.trial import Trial
from workers.contexts import make_context
from workers.disk_cache import kv_identity, open_slot_files, open_tier
from workers.engine.adapters import AdapterShelf
from workers.engine.conversation_file import ConversationFiles
from workers.engine.disk import DiskTier
from workers.engine.engine import Engine
from workers.engine.fingerprint import KvIdentity
from workers.engine.watchdog import Watchdog
from workers.llama.context import Context
from workers.llama.devices import Devices
from workers.llama.model import Model
from workers.llama.tokenizer import GuardedTokenizer, TokenProcesses
from workers.protocol.catalog import AdapterSpec
from workers.protocol.failures import CallFailed
from workers.served_text import infill_prompts, open_renderer, text_routes
from workers.service.adapters import AdapterRoutes
from workers.service.lanes import prompt_lane, prompts_at_once
from workers.service.memory import free_bytes
from workers.service.server import Emit, OnCrash
from workers.service.services import Services
from workers.service.slots import SlotKeeper, SlotRoutes
from workers.wishes import SettingUnusable, Wishes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Storage:
    """The places where KV outlives the process: the disk tier and the saved slots, if they are configured."""

    identity: KvIdentity
    tier: DiskTier | None
    slot_files: ConversationFiles | None


@dataclass(frozen=True, slots=True)
class GeneratingParts:
    wishes: Wishes
    model: Model
    context: Context
    n_ctx: int
    shelf: AdapterShelf
    watchdog: Watchdog
    storage: Storage
    offered: Services

    def services(self) -> Services:
        return self.offered

    def engine(self, services: Services, emit: Emit, on_crash: OnCrash) -> Engine:
        """Return a new engine. Connects the slots' routes and the book of prefix hashes to it."""
        settings, storage = self.wishes.settings, self.storage
        ram_bytes = settings.cache_ram_mib << 20
        engine = Engine(
            self.model,
            self.context,
            slots=settings.slots,
            n_ctx=self.n_ctx,
            emit=emit,
            on_crash=on_crash,
            ram_bytes=ram_bytes,
            adapters=self.shelf,
            watchdog=self.watchdog,
            disk=storage.tier,
        )
        keeper = SlotKeeper(
            engine.at_rest,
            storage.slot_files,
            self.shelf,
            storage.identity.fingerprint,
            n_ctx=self.n_ctx,
            max_bytes=ram_bytes,
        )
        services.slots.connect(keeper)
        services.heads.connect(engine.census)
        return engine


def generating_parts(
    opened: contextlib.ExitStack, model: Model, wishes: Wishes, watchdog: Watchdog, name: str
) -> GeneratingParts:
    """Open the parts. Whatever is opened closes with `opened`. `name`: the pool that the worker is in.

    Raises ModelError, ModelTooLarge, AdapterError, TemplateUnusable, FamilyUnknown, CacheFolderUnusable,
    SettingUnusable.
    """
    settings, loaded_at = wishes.settings, time.time()
    renderer = opened.enter_context(open_renderer(model, settings.chat_template, prompts_at_once()))
    answers = Answers(family_of("\n".join(renderer.sources.values()), settings.tool_family), model.vocab, wishes.chat)
    logger.info("answers are read as those of the family %s", answers.family.name)
    if fault := answers.closing_fault(wishes.chat.message):
        raise SettingUnusable(f"thinking_budget_message {fault}")
    context, n_ctx = make_context(model, settings, wishes.llama)
    opened.enter_context(context)
    long_texts = opened.enter_context(contextlib.closing(TokenProcesses(wishes.path, number=prompts_at_once())))
    prompts = Prompts(
        renderer,
        GuardedTokenizer(model.vocab, long_texts),
        bos_text=model.bos_text,
        num_tokens=model.facts.n_vocab,
        n_ctx=n_ctx,
        shared=wishes.shared_prompts,
        infill=infill_prompts(model.vocab, wishes.llama, n_ctx=n_ctx),
        defaults=wishes.chat,
    )
    identity = kv_identity(settings, model.header, wishes.llama, n_ctx=context.kv_tokens, loaded_at=loaded_at)
    shelf = opened.enter_context(contextlib.closing(_shelf(model, context, wishes)))
    processes = opened.enter_context(contextlib.closing(Forks(wishes.path)))
    storage = _storage(opened, wishes, identity)
    forms = CallForms(answers.family.syntax, answers.controls, open_objects=settings.open_objects)
    forked = ForkedGrammars(processes, model.vocab)
    constraints = Compiler(model.vocab, forked, Trial(processes), forms, forked)
    constraints.warm_up()
    context.warm_up()
    _register_adapters(shelf, wishes.adapters)
    lane = prompt_lane()
    offered = Services(
        prompts=prompts,
        lane=lane,
        defaults=wishes.sampling,
        constraints=constraints,
        answers=answers,
        adapters=AdapterRoutes(shelf, settings.adapters_dir),
        slots=SlotRoutes(),
        devices=Devices(free_bytes).memory,
        texts=text_routes(
            model, prompts, lane, renderer, wishes.sampling, name=name, slots=settings.slots, n_ctx=n_ctx
        ),
    )
    return GeneratingParts(wishes, model, context, n_ctx, shelf, watchdog, storage, offered)


def _storage(opened: contextlib.ExitStack, wishes: Wishes, identity: KvIdentity) -> Storage:
    tier, slot_files = open_tier(wishes.settings, identity), open_slot_files(wishes.settings)
    for one in (tier, slot_files):
        if one is not None:
            opened.callback(one.close)
    return Storage(identity, tier, slot_files)


def _shelf(model: Model, context: Context, wishes: Wishes) -> AdapterShelf:
    settings = wishes.settings
    return AdapterShelf(model, context, max_adapters=settings.max_adapters, max_bytes=settings.adapters_mib << 20)


def _register_adapters(shelf: AdapterShelf, adapters: Iterable[AdapterSpec]) -> None:
    """Load the adapters that the settings list. Raises AdapterError, SettingUnusable."""
    for adapter in adapters:
        try:
            path = Path(adapter.path).expanduser()
            info = shelf.register(adapter.name, path, pinned=adapter.pinned, fixed=True)
        except CallFailed as failed:
            raise SettingUnusable(f"adapters: {adapter.name}: {failed.failure.message}") from None
        logger.info("adapter %s: rank %d, %d bytes", info.name, info.rank, info.size)
