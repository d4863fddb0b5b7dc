"""Builds this folder's routes for `gateway.app`."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp

from gateway.access.keys import Keys
from gateway.adapter_registrar import AdapterRegistrar
from gateway.api.generation import Generation
from gateway.api.intake import Intake
from gateway.api.native.completion import CompletionDialect
from gateway.api.native.embedding import EmbeddingDialect
from gateway.api.native.fleet_place import FleetPlace
from gateway.api.native.loading import LoadingRoute
from gateway.api.native.lora import AdaptersRoute, LoadAdapterRoute, UnloadAdapterRoute
from gateway.api.native.props import Offered, PropsRoute
from gateway.api.native.reception import Reception
from gateway.api.native.slots import NoSlots, SlotLooks, SlotRoute, SlotsRoute
from gateway.api.native.texts import ApplyTemplateRoute, ChatReader, DetokenizeRoute, TokenizeRoute
from gateway.api.pooled import Pooled
from gateway.api.resumable import Resumable
from gateway.api.streaming import Pings
from gateway.inquiries import Inquiries
from gateway.pipeline import Fleet, Pipeline
from gateway.registry.adapter_wishes import AdapterWishes
from gateway.registry.model_wishes import ModelWishes

Answers = tuple[Keys, Pipeline, Intake, Pings, Resumable]
"""The arguments of `Generation` beside its dialect."""


def native_apps(
    answers: Answers,
    fleet: Fleet,
    inquiries: Inquiries,
    wishes: AdapterWishes,
    model_wishes: ModelWishes,
    chat: ChatReader,
    offered: Offered,
) -> Mapping[str, ASGIApp]:
    """Return the apps, named as in `gateway.api.routes`. `chat` reads chat bodies."""
    keys, pipeline, intake, *_ = answers
    reception = Reception(keys, pipeline, fleet, intake)
    place = FleetPlace(inquiries, pipeline)
    registrar = AdapterRegistrar(inquiries, wishes)
    return {
        "native_completion": Generation(CompletionDialect(place), *answers),
        "infill": Generation(CompletionDialect(place, infill=True), *answers, job="infill", supersedes=True),
        "tokenize": TokenizeRoute(reception, inquiries),
        "detokenize": DetokenizeRoute(reception, inquiries),
        "apply_template": ApplyTemplateRoute(reception, inquiries, chat),
        "native_embedding": Pooled(EmbeddingDialect(), keys, pipeline, intake),
        "props": PropsRoute(reception, inquiries, offered),
        "slots": SlotsRoute(reception, SlotLooks(inquiries)) if offered.slots else NoSlots(reception),
        "slot": SlotRoute(reception, inquiries, pipeline),
        "adapters": AdaptersRoute(reception, inquiries, wishes),
        "load_model": LoadingRoute(reception, inquiries, model_wishes, load=True),
        "unload_model": LoadingRoute(reception, inquiries, model_wishes, load=False),
        "load_adapter": LoadAdapterRoute(reception, registrar),
        "unload_adapter": UnloadAdapterRoute(reception, registrar),
    }
