"""Makes calls: finds the model that a name stands for, checks that the caller may use it, and sets the deadlines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.adapters.choice import adapters_of
from gateway.back_pressure import stopping
from gateway.call import Call, Principal
from gateway.catalog.call_names import CallNames
from gateway.catalog.jobs import KIND_OF, models_of_kind
from gateway.catalog.live import LiveCatalog
from gateway.dispatch.call_state import Limits
from gateway.registry.snapshot import FleetView
from gateway.routing.retries import Reason
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import UNMETERED, Meter, RequestLog
from workers.models.catalog import Job
from workers.protocol.requests import AdapterUse

MAX_NAME_CHARS = 128
"""Maximum number of characters of an unknown model's name in the request's trace; the rest is cut off."""


BeginMeter = Callable[[Call, RequestLog], Meter]
"""Returns the meter of a call that begins."""


def unmetered(call: Call, request_log: RequestLog) -> Meter:
    """Return the meter of a call whose usage nobody records."""
    return UNMETERED


Dearest = Callable[[str, Sequence[str], float], str]
"""Returns that of a model's adapters which has the highest price at a unix time."""


def _first(model: str, adapters: Sequence[str], at: float) -> str:
    """Return the first adapter: the default of `CallResolver`, where nothing has a price."""
    return adapters[0]


class CallResolver:
    """Makes every call of this gateway process from the model name in the request, until `stop_taking` is called."""

    def __init__(
        self,
        catalog: LiveCatalog,
        fleet: FleetView,
        metrics: Metrics,
        limits: Limits,
        begin_meter: BeginMeter = unmetered,
        dearest: Dearest = _first,
    ) -> None:
        """`begin_meter` is called for each call that is to be placed for work. `dearest` returns the adapter by which a
        call with several is priced."""
        self._dearest = dearest
        self._begin_meter = begin_meter
        self._catalog = catalog
        self._fleet = fleet
        self._metrics = metrics
        self._limits = limits
        self._stopping = False

    @property
    def stopping(self) -> bool:
        return self._stopping

    def stop_taking(self) -> None:
        """Refuse new calls from now on; calls under way go on."""
        self._stopping = True

    def begin(self, principal: Principal, request_log: RequestLog, job: Job | None = None, model: str = "") -> None:
        """Begin a call before its body is read: `resolve` uses the catalog as it is now, and so does the reading of
        the body, for the parameters that the catalog sets. `job` as in `resolve`. `model`: the name that counts if the
        body has none."""
        fleet = self._fleet.snapshot
        known = (fleet.models, fleet.adapters, fleet.workers)
        request_log.ignored.names = CallNames(self._catalog.names, principal, *known, job, fleet.is_read, model)

    def resolve(
        self,
        principal: Principal,
        alias: str,
        request_log: RequestLog,
        job: Job | None = None,
        begin_by: float = 0.0,
        conversation: Callable[[], str] | None = None,
        *,
        adapters: Sequence[AdapterUse] = (),
        held_bytes: int = 0,
        strict: bool = False,
        autoload: bool | None = None,
    ) -> Call:
        """Return a new call. `alias`: the model's name; empty: the default. `job`: what the model is asked to do; None:
        the call only asks about it. `conversation` returns a hash that picks one of the models that share the name.
        `adapters`: those named beside the model. `strict`: as in `ModelNames.resolve_call`; the others as in `Call`.

        Raises Stopping, ModelNotFound, Unavailable, PermissionDenied; NotSupported if the model can't do the job;
        InvalidRequest if `alias` is empty and several models could be meant."""
        if self._stopping:
            raise stopping()
        begun, request_log.ignored.names = request_log.ignored.names, None
        names = self._catalog.names if begun is None else begun.catalog
        fleet = self._fleet.snapshot
        known = (fleet.models, fleet.adapters, fleet.workers)
        resolved = names.resolve_call(alias, principal, *known, job=job, strict=strict, complete=fleet.is_read)
        if resolved.stands_in:
            self._metrics.unknown_models.labels(resolved.model).inc()
            request_log.stands_in = resolved.name
            request_log.trace.add_event("unknown_model", model=alias[:MAX_NAME_CHARS], default=resolved.name)
        alias = resolved.name
        models: tuple[str, ...] = (resolved.model,)
        if names.is_chain(alias):
            models = names.chain(alias, conversation() if conversation is not None else "")
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
            adapter=alias if names.is_adapter(alias, fleet.models, fleet.adapters) else "",
            kind=kind,
            fallbacks=models[1:],
            held_bytes=held_bytes,
            autoload=autoload,
        )
        call = self._served(call, request_log)
        request_log.adapter = call.adapter or self._priced_adapter(call.model, adapters)
        if job is not None:
            request_log.meter = self._begin_meter(call, request_log)
        return call

    def _priced_adapter(self, model: str, asked: Sequence[AdapterUse]) -> str:
        """Return the adapter that a call is recorded and priced by: of several the dearest."""
        named = adapters_of(asked, tuple(self._fleet.snapshot.contents.get(model, ()))) if asked else []
        return self._dearest(model, named, time.time()) if len(named) > 1 else next(iter(named), "")

    def _served(self, call: Call, request_log: RequestLog) -> Call:
        """Return the call. If its model has no worker, move it to the first of its fallbacks that has one."""
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
