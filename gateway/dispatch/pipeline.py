"""Takes a call from its model's name to its answer: checks permission, finds a slot and a worker, and enforces limits.

call = pipeline.call(...)                           who asks for what, until when
async with pipeline.answer(call, request, answer_log) as answer:
    while not answer.ended:
        events = await answer.take()                a list of events; leaving the block cancels the call
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from msgspec.structs import replace

from gateway.adapters.choice import CallAdapters
from gateway.back_pressure import stopped, stopping
from gateway.call import Answer, Call, CallBounds, Cutoff, Principal
from gateway.catalog import KIND_OF, ModelNames, models_of_kind
from gateway.dispatch.call_state import Limits
from gateway.dispatch.dispatcher import Dispatcher
from gateway.registry.snapshot import FleetView
from gateway.routing.retries import Reason
from gateway.telemetry.answer_log import AnswerLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.prompts import UNWRITTEN, Heard, Prompts
from gateway.telemetry.request_log import RequestLog
from workers.models.catalog import Job
from workers.protocol.pooled import PoolRequest, PoolResult
from workers.protocol.requests import GenerateRequest

MAX_NAME_CHARS = 128
"""Maximum number of characters of an unknown model's name in the request's trace; the rest is cut off."""


class Pipeline:
    """Takes every call of this gateway process from its model's name to the end of its answer."""

    def __init__(
        self,
        names: ModelNames,
        fleet: FleetView,
        dispatcher: Dispatcher,
        adapters: CallAdapters,
        metrics: Metrics,
        limits: Limits,
        prompts: Prompts = UNWRITTEN,
    ) -> None:
        self._names = names
        self._fleet = fleet
        self._dispatcher = dispatcher
        self.adapters = adapters
        self._metrics = metrics
        self._prompts = prompts
        self._limits = limits
        self._under_way: set[Cutoff] = set()
        self._stopping = False

    @property
    def num_calls(self) -> int:
        return len(self._under_way)

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop_taking(self) -> None:
        """Refuse new calls from now on; calls under way go on."""
        self._stopping = True

    def cut_all(self) -> None:
        """End every call under way with an error that is sent to its client."""
        for cutoff in self._under_way:
            cutoff.cut(stopped())

    def call(
        self,
        principal: Principal,
        alias: str,
        request_log: RequestLog,
        job: Job | None = None,
        begin_by: float = 0.0,
        conversation: Callable[[], str] | None = None,
        *,
        held_bytes: int = 0,
        strict: bool = False,
    ) -> Call:
        """Make a call. `alias`: the model's name; empty: the default model. `job`: what the model is asked to do; None:
        the call only asks about the model. `conversation` returns the hash that chooses among several models of one
        name (`shares`). `begin_by` and `held_bytes` as in `Call`, `strict` as in `ModelNames.resolve_call`.

        Raises Stopping, ModelNotFound, Unavailable, PermissionDenied; NotSupported if the model can't do the job;
        InvalidRequest if `alias` is empty and several models could be meant.
        """
        if self._stopping:
            raise stopping()
        fleet = self._fleet.snapshot
        known = (fleet.models, fleet.adapters, fleet.workers)
        resolved = self._names.resolve_call(alias, principal, *known, job=job, strict=strict, complete=fleet.is_read)
        if resolved.stands_in:
            self._metrics.unknown_models.labels(resolved.model).inc()
            request_log.stands_in = resolved.name
            request_log.trace.add_event("unknown_model", model=alias[:MAX_NAME_CHARS], default=resolved.name)
        alias, model = resolved.name, resolved.model
        models: tuple[str, ...] = (model,)
        if self._names.is_chain(alias):
            models = self._names.chain(alias, conversation() if conversation is not None else "")
        request_log.alias, request_log.answer.model, request_log.asks_only = alias, models[0], job is None
        kind = None if job is None else KIND_OF[job]
        if kind is not None:
            models = models_of_kind(alias, kind, models, fleet.workers)
        call = Call(
            request_id=request_log.request_id,
            principal=principal,
            alias=alias,
            model=models[0],
            received_at=request_log.received_at,
            deadline=request_log.received_at + self._limits.request_timeout_s,
            queue_deadline=request_log.received_at + self._limits.queue_timeout_s,
            start_deadline=request_log.received_at + self._limits.start_timeout_s,
            begin_by=begin_by,
            adapter=alias if self._names.is_adapter(alias, fleet.models, fleet.adapters) else "",
            kind=kind,
            fallbacks=models[1:],
            held_bytes=held_bytes,
        )
        return self._served(call, request_log)

    def _served(self, call: Call, request_log: RequestLog) -> Call:
        """Return the call for the first model of its chain that has a worker; unchanged if none has."""
        workers = self._fleet.snapshot.workers
        standing_in = next((model for model in call.fallbacks if workers.get(model)), None)
        if standing_in is not None and not workers.get(call.model):
            self._metrics.fallbacks.labels(call.model, standing_in, Reason.NO_WORKER.value).inc()
            request_log.trace.add_event(
                "fallback", model=call.model, fallback=standing_in, reason=Reason.NO_WORKER.value
            )
            call = call.on_model(standing_in)
        request_log.answer.model = call.model
        return call

    @asynccontextmanager
    async def answer(self, call: Call, request: GenerateRequest, answer_log: AnswerLog) -> AsyncIterator[Answer]:
        """Place the call, retry it on other workers as long as that is safe, and yield its answer once it has begun.

        Raises PaddockError: no slot in time, refused by the worker, failed, cut off.
        """
        request = _bounded(request, call.principal.bounds, answer_log)
        with self._counted(call, request, answer_log) as (cutoff, heard):
            async with cutoff, self._dispatcher.answer(call, request, answer_log, cutoff) as answer:
                yield heard.of(answer)

    async def pool(self, call: Call, request: PoolRequest, answer_log: AnswerLog) -> PoolResult:
        """Return the result of pooled work, which is placed and retried like any call.

        Raises PaddockError.
        """
        with self._counted(call, request, answer_log) as (cutoff, _):
            async with cutoff:
                return await self._dispatcher.pool(call, request, answer_log)

    @contextmanager
    def _counted(
        self, call: Call, request: GenerateRequest | PoolRequest, answer_log: AnswerLog
    ) -> Iterator[tuple[Cutoff, Heard]]:
        """Count a call as under way during the block. Yield its Cutoff, and the object that logs its prompt."""
        limit = f"the limit of {self._limits.request_timeout_s:g} s for one request"
        cutoff, heard = Cutoff(call.deadline, limit), self._prompts.begins(call, answer_log, request)
        self._under_way.add(cutoff)
        try:
            yield cutoff, heard
        finally:
            self._under_way.discard(cutoff)
            heard.ends()


def _bounded(request: GenerateRequest, bounds: CallBounds, answer_log: AnswerLog) -> GenerateRequest:
    """Return the request within the limits of its key.

    A priority above the limit is lowered, not refused: clients send the same priority to every server, and prefer an
    answer that begins a little later to none. The header `x-paddock-priority` then has the lowered priority.
    """
    most_urgent = -bounds.min_priority
    if request.priority > most_urgent:
        answer_log.priority = bounds.min_priority
        request = replace(request, priority=most_urgent)
    if bounds.max_tokens is not None and (request.max_tokens is None or request.max_tokens > bounds.max_tokens):
        request = replace(request, max_tokens=bounds.max_tokens)
    return request
