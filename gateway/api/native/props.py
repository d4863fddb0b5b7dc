"""Answers `/props` (what a model is and how it is served), `/models/load` and `/models/unload`.

Sources: `get_res_props` in tools/server/server-context.cpp of llama.cpp; "Using multiple models" in its
tools/server/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader
from gateway.api.parameters.prompts import MARKER
from gateway.api.shapes import default_settings
from gateway.call import Principal
from gateway.errors import InvalidRequest, NotSupported
from gateway.registry.desired_models import DesiredModels
from gateway.registry.model_states import ModelStates
from gateway.relay.relay import WorkerQueries
from workers.protocol.queries import PROPS_PATH, Props, decode_props

TOOL_TEMPLATE = "tool_use"
MODALITIES = {"vision": "image", "video": "video", "audio": "audio"}


@dataclass(frozen=True, slots=True)
class EnabledRoutes:
    """Which of the routes that an operator can switch off are served."""

    slots: bool = True
    metrics: bool = True


class ModelRoutes:
    """Handles `/props`, `/models/load` and `/models/unload`."""

    def __init__(
        self,
        reader: RequestReader,
        queries: WorkerQueries,
        desired: DesiredModels,
        states: ModelStates,
        enabled: EnabledRoutes,
    ) -> None:
        self._reader = reader
        self._queries = queries
        self._desired = desired
        self._states = states
        self._enabled = enabled

    async def show_props(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._reader.call(principal, {}, scope)
        found = await self._queries.ask_any(call.model, "GET", PROPS_PATH, decode_props)
        num_slots = sum(beat.slots for beat in self._queries.workers(call.model))
        await send_json(send, props_object(found, call.alias, num_slots, self._enabled), request_log_of(scope))

    async def change_props(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Raise NotSupported if the body names a property: as in llama-server, none can be changed yet."""
        document = await self._reader.document(principal, scope, receive)
        self._reader.call(principal, document, scope)
        names = sorted(name for name in document if name != "model")
        if names:
            raise NotSupported(
                f"`{names[0][:100]}` can't be changed while a model runs. Set `sampling` and what else there is in the "
                "catalog, and restart the model's workers."
            )
        await send_json(send, {"success": True}, request_log_of(scope))

    async def load(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a model's workers started."""
        await self._set_loaded(True, principal, scope, receive, send)

    async def unload(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have a model's workers drained and stopped."""
        await self._set_loaded(False, principal, scope, receive, send)

    async def _set_loaded(self, load: bool, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask the supervisors to start or stop workers, and answer at once; `GET /models` shows the progress."""
        document = await self._reader.document(principal, scope, receive)
        call = self._reader.call(principal, document, scope, strict=True)
        runs = any(not beat.draining for beat in self._queries.workers(call.model))
        # Supervisors act with a delay: a caller who undoes a load or unload before they act must not get this error.
        is_there = runs or (not load and self._states.sleeps(call.model))
        if is_there == load and await self._desired.is_unloaded(call.model) != load:
            state = "loaded already" if runs else "not loaded"
            raise InvalidRequest(f"The model `{call.alias}` is {state}.", param="model")
        if self._states.is_on_demand(call.model):
            await (self._desired.ask_for if load else self._desired.send_away)(call.model)
        elif await self._desired.is_supervised(call.model):
            await self._desired.want(call.model, load)
        else:
            verb = "start" if load else "stop"
            raise NotSupported(
                f"No supervisor keeps workers of `{call.alias}`, so the gateway can't {verb} them. Give the model "
                f"`workers` or `residency` in the catalog of `paddock up` or `paddock supervisor`, or {verb} them "
                "yourself.",
                param="model",
            )
        await send_json(send, {"success": True}, request_log_of(scope))


def props_object(found: Props, name: str, num_slots: int, enabled: EnabledRoutes) -> dict[str, Any]:
    """Return the body of `/props`. `num_slots`: number of slots of all the model's workers."""
    document = {
        "default_generation_settings": {"params": default_settings(found.sampling), "n_ctx": found.n_ctx},
        "total_slots": num_slots,
        "model_alias": name,
        "model_ftype": found.ftype,
        "model_path": found.model_file,
        "media_marker": MARKER,
        "modalities": {kind: word in found.input_modalities for kind, word in MODALITIES.items()},
        "endpoint_slots": enabled.slots,
        "endpoint_props": False,
        "endpoint_metrics": enabled.metrics,
        "ui": False,
        "ui_settings": {},
        "chat_template": found.chat_templates.get("default", ""),
        "chat_template_caps": found.chat_template_caps,
        "bos_token": found.bos_token,
        "eos_token": found.eos_token,
        "build_info": found.build_info,
        "is_sleeping": False,
        "cors_proxy_enabled": False,
    }
    tools = found.chat_templates.get(TOOL_TEMPLATE)
    return document | ({"chat_template_tool_use": tools} if tools else {})
