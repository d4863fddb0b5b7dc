"""Puts this room's routes together for `gateway.app`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import ASGIApp

from gateway.api.dialect import Dialect
from gateway.api.native.completion import CompletionDialect
from gateway.api.native.completion_request import CompletionRequest
from gateway.api.native.embedding import EmbeddingDialect
from gateway.api.native.loading import LoadingRoute
from gateway.api.native.lora import AdaptersRoute, LoadAdapterRoute, UnloadAdapterRoute
from gateway.api.native.props import PropsRoute
from gateway.api.native.reception import Reception
from gateway.api.native.slots import SlotNumbers, SlotRoute, SlotsRoute
from gateway.api.native.texts import ApplyTemplateRoute, ChatReader, DetokenizeRoute, TokenizeRoute
from gateway.inquiries import Inquiries
from gateway.registry.adapter_wishes import AdapterWishes
from gateway.registry.model_wishes import ModelWishes


def native_apps(
    reception: Reception,
    inquiries: Inquiries,
    wishes: AdapterWishes,
    model_wishes: ModelWishes,
    generation: Callable[[Dialect[CompletionRequest]], ASGIApp],
    pooled: Callable[[EmbeddingDialect], ASGIApp],
    chat: ChatReader,
) -> Mapping[str, ASGIApp]:
    """Named as in `gateway.api.routes`. `generation` and `pooled` make apps of dialects, `chat` reads chat bodies."""
    numbers = SlotNumbers(inquiries)
    return {
        "native_completion": generation(CompletionDialect(numbers.number)),
        "infill": generation(CompletionDialect(numbers.number, infill=True)),
        "tokenize": TokenizeRoute(reception, inquiries),
        "detokenize": DetokenizeRoute(reception, inquiries),
        "apply_template": ApplyTemplateRoute(reception, inquiries, chat),
        "native_embedding": pooled(EmbeddingDialect()),
        "props": PropsRoute(reception, inquiries),
        "slots": SlotsRoute(reception, inquiries),
        "slot": SlotRoute(reception, inquiries),
        "adapters": AdaptersRoute(reception, inquiries, wishes),
        "load_model": LoadingRoute(reception, inquiries, model_wishes, load=True),
        "unload_model": LoadingRoute(reception, inquiries, model_wishes, load=False),
        "load_adapter": LoadAdapterRoute(reception, inquiries, wishes),
        "unload_adapter": UnloadAdapterRoute(reception, inquiries, wishes),
    }
