"""The composition root of a worker that does pooled work: embeddings, or ranking documents."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass

import msgspec

from workers.chat.prompts import Prompts
from workers.engine.pooled.engine import PooledEngine
from workers.engine.watchdog import Watchdog
from workers.llama.devices import Devices
from workers.llama.model import Model, ModelTooLarge
from workers.llama.pooling import PooledContext, PooledInputs, Pooling, pooling_of
from workers.llama.tokens.tokenizer import GuardedTokenizer, TokenProcesses
from workers.metrics.worker import WorkerMetrics
from workers.models.memory_plan import free_bytes, free_for_cache, kv_shape, outputs_too_large, plan_kv
from workers.models.spec import ModelSpec
from workers.protocol.requests import Sampling
from workers.served_text import text_routes
from workers.service.calls.call_record import CallRecords
from workers.service.calls.lanes import prompt_lane, prompts_at_once
from workers.service.calls.pooled import Outcomes, PooledCalls
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
    tokenizer: GuardedTokenizer
    inputs: PooledInputs
    pooling: Pooling

    def wire(self, worker: WorkerIdentity, life: Lifecycle, records: CallRecords) -> Served:
        """Make and connect the parts that need the event loop, such as engine and routes. Call it on that loop."""
        spec, context, outcomes = self.spec, self.context, Outcomes()
        engine = PooledEngine(
            context,
            slots=spec.slots,
            tell=outcomes.tell,
            on_crash=life.crashed_in_thread,
            watchdog=self.watchdog,
        )
        metrics = metrics_of(worker, engine, life, devices=Devices(free_bytes).memory)
        lane = prompt_lane()
        calls = PooledCalls(
            outcomes,
            engine,
            self.inputs,
            life,
            metrics,
            records,
            lane,
            pooling=self.pooling,
            width=context.width,
            longest=engine.n_ctx,
        )
        texts = text_routes(
            self.model,
            Prompts(None, self.tokenizer, num_tokens=self.model.facts.n_vocab),
            lane,
            lane,
            None,
            Sampling(),
            name=spec.name,
            kind=calls.kind,
            slots=spec.slots,
            n_ctx=context.longest,
        )
        return pooled_service(worker, engine, calls, metrics, texts, context.width)


def pooled_service(
    worker: WorkerIdentity, engine: Engine, calls: PooledCalls, metrics: WorkerMetrics, texts: TextRoutes, width: int
) -> Served:
    """Return the parts that the server runs. Gateways hold event streams to this worker too, but get no events.

    `width`: how many numbers a vector has. Gateways reserve memory by it before they send work."""
    return Served(
        kind=calls.kind,
        engine=engine,
        calls=calls,
        hub=EventHub(worker.boot, lambda key: None, grace_s=worker.gateway_grace_s),
        metrics=metrics,
        routes=[*PoolRoutes(calls).routes(), *no_slots(), *texts.routes()],
        adverts=None,
        announced=lambda beat: msgspec.structs.replace(beat, width=width),
        retire=lambda: None,
    )


def open_pooled_worker(
    opened: contextlib.ExitStack, model: Model, settings: WorkerSettings, spec: ModelSpec, watchdog: Watchdog
) -> PooledWorker:
    """Open the parts of a pooled worker, which `opened` closes. Raises ModelError, ModelTooLarge."""
    pooling = pooling_of(model, spec.llama)
    processes = opened.enter_context(
        contextlib.closing(TokenProcesses(model.path, model.overrides, number=prompts_at_once()))
    )
    tokenizer = GuardedTokenizer(model.vocab, processes)
    inputs = PooledInputs(model, pooling, tokenizer)
    context = opened.enter_context(make_pooled_context(model, spec, pooling, workers=settings.workers_on_machine))
    context.warm_up()
    return PooledWorker(spec, model, context, watchdog, tokenizer, inputs, pooling)


def make_pooled_context(model: Model, spec: ModelSpec, pooling: Pooling, *, workers: int) -> PooledContext:
    """Make the context for pooled work. Raises ModelError, ModelTooLarge. Encoders have no KV cache. A decoder's cache
    has room for two of the longest inputs, unless `kv_tokens` is set: others are read between parts of a long one."""
    llama, trained = spec.llama, model.facts.n_ctx_train
    n_ctx = spec.ctx or trained
    if n_ctx > trained:
        logger.warning("ctx %d is more than the %d tokens that the model was trained for", n_ctx, trained)
        n_ctx = trained if model.encoder_only and not llama.scales_positions else n_ctx
    shortage = outputs_too_large(n_vocab=model.vocab.num_tokens, n_ubatch=llama.n_ubatch, free_bytes=free_bytes())
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
            free_bytes=free_for_cache(llama),
            workers=workers,
        )
        n_ctx, kv_tokens = plan.n_ctx, plan.kv_tokens
        if plan.reason:
            logger.warning("inputs of up to %d tokens over %d KV cells: %s", n_ctx, kv_tokens, plan.reason)
    context = PooledContext(model, llama, pooling=pooling, n_ctx=n_ctx, kv_tokens=kv_tokens, num_sequences=spec.slots)
    logger.info("pooling %s, inputs of up to %d tokens", pooling.name.lower(), context.longest)
    return context
