"""Builds the handlers of llama-server's and vLLM's own routes for `gateway.app`."""

from __future__ import annotations

from collections.abc import Callable

from accounts.protocol.records import TeamLimits
from gateway.adapters.desired import DesiredAdapters
from gateway.adapters.registrar import AdapterRegistrar
from gateway.api.call_handlers import CallHandlers
from gateway.api.dialect import Handler
from gateway.api.intake.request_reader import RequestReader
from gateway.api.native.completion import CompletionDialect
from gateway.api.native.embedding import EmbeddingDialect
from gateway.api.native.lora import AdapterRoutes
from gateway.api.native.model_files import ModelFiles
from gateway.api.native.props import EnabledRoutes, ModelRoutes
from gateway.api.native.slots import LiveFleetInfo, SlotRoutes, refuse_slots
from gateway.api.native.texts import ChatReader, TextRoutes
from gateway.registry.desired_models import DesiredModels
from gateway.registry.libraries import Libraries
from gateway.registry.model_states import ModelStates
from gateway.registry.snapshot import FleetView


def native_handlers(
    calls: CallHandlers,
    reader: RequestReader,
    fleet: FleetView,
    desired_adapters: DesiredAdapters,
    desired_models: DesiredModels,
    states: ModelStates,
    libraries: Libraries,
    chat: ChatReader,
    enabled: EnabledRoutes,
    limits_of: Callable[[str], TeamLimits],
) -> dict[str, Handler]:
    """Return the handlers by their names in `gateway.api.routes`. `chat` reads the chat bodies of `/apply-template`,
    `limits_of` returns the limits of what a team stores."""
    queries, call_adapters = calls.queries, calls.pipeline.adapters
    info = LiveFleetInfo(queries, call_adapters)
    models = ModelRoutes(reader, queries, desired_models, states, enabled)
    files = ModelFiles(reader, libraries)
    slots = SlotRoutes(reader, queries, call_adapters, limits_of)
    texts = TextRoutes(reader, queries, chat, calls.media)
    adapters = AdapterRoutes(reader, fleet, queries, desired_adapters, AdapterRegistrar(queries, desired_adapters))
    return {
        "native_completion": calls.generate(CompletionDialect(info), takes_media=True),
        "infill": calls.generate(CompletionDialect(info, infill=True), job="infill", supersedes=True),
        "tokenize": texts.tokenize,
        "detokenize": texts.detokenize,
        "apply_template": texts.apply_template,
        "native_embedding": calls.pool(EmbeddingDialect(), takes_media=True),
        "props": models.show_props,
        "change_props": models.change_props,
        "download_model": files.download,
        "remove_model": files.remove,
        "load_model": models.load,
        "unload_model": models.unload,
        "slots": slots.show if enabled.slots else refuse_slots,
        "slot": slots.act,
        "adapters": adapters.show,
        "set_scales": adapters.set_scales,
        "load_adapter": adapters.load,
        "unload_adapter": adapters.unload,
    }
