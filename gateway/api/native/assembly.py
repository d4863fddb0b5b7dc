"""Builds this folder's handlers for `gateway.app`."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.adapters.desired import AdapterWishes
from gateway.adapters.registrar import AdapterRegistrar
from gateway.api.dialect import Handler
from gateway.api.generation import Generation, Pooled
from gateway.api.http.streaming import Pings
from gateway.api.intake.intake import Intake
from gateway.api.native.completion import CompletionDialect
from gateway.api.native.embedding import EmbeddingDialect
from gateway.api.native.lora import AdaptersRoute, LoadAdapterRoute, UnloadAdapterRoute
from gateway.api.native.props import LoadingRoute, Offered, PropsRoute
from gateway.api.native.reception import Reception
from gateway.api.native.slots import FleetPlace, SlotLooks, SlotRoute, SlotsRoute, refuse_slots
from gateway.api.native.texts import ApplyTemplateRoute, ChatReader, DetokenizeRoute, TokenizeRoute
from gateway.api.resumable import Resumable
from gateway.dispatch.pipeline import Pipeline
from gateway.registry.model_wishes import ModelWishes
from gateway.registry.snapshot import FleetView
from gateway.relay.relay import WorkerQueries

Answers = tuple[Pipeline, Intake, Pings, Resumable]
"""The arguments of `Generation` beside its dialect."""


def native_handlers(
    answers: Answers,
    fleet: FleetView,
    queries: WorkerQueries,
    wishes: AdapterWishes,
    model_wishes: ModelWishes,
    chat: ChatReader,
    offered: Offered,
) -> Mapping[str, Handler]:
    """Return the handlers, named as in `gateway.api.routes`. `chat` reads chat bodies."""
    pipeline, intake, *_ = answers
    reception = Reception(pipeline, fleet, intake)
    place = FleetPlace(queries, pipeline.adapters)
    registrar = AdapterRegistrar(queries, wishes)
    props, adapters = PropsRoute(reception, queries, offered), AdaptersRoute(reception, queries, wishes)
    return {
        "native_completion": Generation(CompletionDialect(place), *answers),
        "infill": Generation(CompletionDialect(place, infill=True), *answers, job="infill", supersedes=True),
        "tokenize": TokenizeRoute(reception, queries),
        "detokenize": DetokenizeRoute(reception, queries),
        "apply_template": ApplyTemplateRoute(reception, queries, chat),
        "native_embedding": Pooled(EmbeddingDialect(), pipeline, intake),
        "props": props.show,
        "change_props": props.change,
        "slots": SlotsRoute(reception, SlotLooks(queries)) if offered.slots else refuse_slots,
        "slot": SlotRoute(reception, queries, pipeline.adapters),
        "adapters": adapters.show,
        "set_scales": adapters.set_scales,
        "load_model": LoadingRoute(reception, queries, model_wishes, load=True),
        "unload_model": LoadingRoute(reception, queries, model_wishes, load=False),
        "load_adapter": LoadAdapterRoute(reception, registrar),
        "unload_adapter": UnloadAdapterRoute(reception, registrar),
    }
