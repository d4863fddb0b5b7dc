"""The composition root of a worker that does pooled work: embeddings, or ranking documents."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import msgspec

from workers.chat.prompts import Prompts
from workers.chat.renderer import Renderer
from workers.contexts import make_pooled_context
from workers.engine.pooled.engine import PooledEngine
from workers.engine.watchdog import Watchdog
from workers.footprint.devices import free_bytes as main_memory_free
from workers.footprint.kv_plan import free_for_cache
from workers.llama.devices import Devices
from workers.llama.model import Model, ModelError
from workers.llama.pooling import PooledContext, PooledInputs, Pooling, media_fault, n_ubatch_of, pooling_of
from workers.llama.tokens.tokenizer import GuardedTokenizer, TokenProcesses
from workers.metrics.worker import WorkerMetrics
from workers.models.spec import NO_PROJECTOR, ModelSpec
from workers.process.helper_process import Launch
from workers.protocol.heartbeat import ModelFacts
from workers.protocol.requests import Sampling
from workers.served_media import ServedMedia, open_media
from workers.served_text import open_renderer, text_routes
from workers.service.calls.call_record import CallRecords
from workers.service.calls.lanes import media_lane, prompt_lane, prompts_at_once
from workers.service.calls.pooled import Outcomes, PooledCalls
from workers.service.calls.pooled_inputs import PooledReader
from workers.service.calls.stream import EventHub
from workers.service.lifecycle import Lifecycle
from workers.service.routes.app import PoolRoutes
from workers.service.routes.slots import no_slots
from workers.service.routes.text import TextRoutes
from workers.service.server import Engine, Served, WorkerIdentity, metrics_of
from workers.settings import WorkerSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PooledWorker:
    """The opened parts of a worker that does pooled work. `wire` adds the parts that need an event loop."""

    spec: ModelSpec
    model: Model
    context: PooledContext
    watchdog: Watchdog
    inputs: PooledInputs
    prompts: Prompts
    renderer: Renderer | None
    """Renders messages; None: the model takes none."""
    pooling: Pooling
    media: ServedMedia | None
    """What reads pictures and sounds; None: the model reads text only."""

    def wire(self, worker: WorkerIdentity, life: Lifecycle, records: CallRecords) -> Served:
        """Make and connect the parts that need the event loop, such as engine and routes. Call it on that loop."""
        spec, context, media, outcomes = self.spec, self.context, self.media, Outcomes()
        engine = PooledEngine(
            context,
            slots=spec.slots,
            tell=outcomes.tell,
            on_crash=life.crashed_in_thread,
            watchdog=self.watchdog,
            encoder=None if media is None else media.encoder,
        )
        metrics = metrics_of(worker, engine, life, devices=Devices(main_memory_free).memory)
        lane, of_media = prompt_lane(), media_lane()
        reader = PooledReader(self.inputs, self.prompts, lane, of_media, longest=engine.n_ctx)
        calls = PooledCalls(outcomes, engine, reader, life, metrics, records, pooling=self.pooling, width=context.width)
        texts = text_routes(
            self.model,
            self.prompts,
            lane,
            of_media,
            self.renderer,
            Sampling(),
            name=spec.name,
            kind=calls.kind,
            slots=spec.slots,
            n_ctx=context.longest,
            inputs=("text",) if media is None else media.inputs,
        )
        facts = None if media is None else media.facts(self.model.facts)
        return pooled_service(worker, engine, calls, metrics, texts, context.width, facts)


def pooled_service(
    worker: WorkerIdentity,
    engine: Engine,
    calls: PooledCalls,
    metrics: WorkerMetrics,
    texts: TextRoutes,
    width: int,
    facts: ModelFacts | None = None,
) -> Served:
    """Return the parts that the server runs. Gateways hold event streams to this worker too, but get no events.

    `width`: how many numbers a vector has. Gateways reserve memory by it before they send work. `facts`: those of the
    model with its projector; None: it has none."""
    return Served(
        kind=calls.kind,
        engine=engine,
        calls=calls,
        hub=EventHub(worker.boot, lambda key: None, grace_s=worker.gateway_grace_s),
        metrics=metrics,
        routes=[*PoolRoutes(calls).routes(), *no_slots(), *texts.routes()],
        adverts=None,
        announced=lambda beat: msgspec.structs.replace(beat, width=width, facts=facts or beat.facts),
        retire=lambda: None,
        stay=lambda: None,
    )


def open_pooled_worker(
    opened: contextlib.ExitStack,
    model: Model,
    settings: WorkerSettings,
    spec: ModelSpec,
    watchdog: Watchdog,
    launch: Launch,
) -> PooledWorker:
    """Open the parts of a pooled worker, which `opened` closes. Messages are rendered where the model sees or hears:
    there they are how its makers put pictures into a text.

    Raises ModelError, ModelTooLarge, TemplateUnusable, TemplateFileUnusable."""
    pooling = pooling_of(model, spec.llama)
    processes = opened.enter_context(
        contextlib.closing(TokenProcesses(model.path, model.overrides, number=prompts_at_once(), launch=launch))
    )
    tokenizer = GuardedTokenizer(model.vocab, processes)
    inputs = PooledInputs(model, pooling, tokenizer)
    media = _open_media(opened, model, settings, spec, pooling)
    free = free_for_cache(spec.llama)
    context = opened.enter_context(
        make_pooled_context(model, spec, pooling, free_bytes=free, workers=settings.workers_on_machine)
    )
    if media is not None and not context.can_split:
        raise ModelError(f"{model.path}: reads inputs in one piece, without pictures or sounds; set `projector: none`")
    context.warm_up()
    renderer = None
    if media is not None and (spec.chat_template or model.chat_templates):
        renderer = opened.enter_context(open_renderer(model, spec.chat_template, prompts_at_once(), launch))
    prompts = Prompts(
        renderer,
        tokenizer,
        bos_text=model.bos_text,
        end_token=model.vocab.end_token,
        num_tokens=model.facts.n_vocab,
        defaults=spec,
        media=None if media is None else media.reader,
    )
    return PooledWorker(spec, model, context, watchdog, inputs, prompts, renderer, pooling, media)


def _open_media(
    opened: contextlib.ExitStack, model: Model, settings: WorkerSettings, spec: ModelSpec, pooling: Pooling
) -> ServedMedia | None:
    """Open what reads pictures and sounds; None: the model reads text only. Raises ModelError, ModelTooLarge."""
    if fault := media_fault(model, pooling):
        if spec.projector not in ("", NO_PROJECTOR):
            logger.warning("the model reads text only, and %s is not used: %s", spec.projector, fault)
        return None
    n_ubatch = n_ubatch_of(spec.llama)
    return open_media(opened, model, spec, n_ubatch=n_ubatch, max_bytes=settings.media_cache_mib << 20)
