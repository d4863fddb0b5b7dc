"""Answers routes for LoRA adapters: llama-server's list and default scales, vLLM's loading and unloading by name.

Sources: "GET /lora-adapters" and "POST /lora-adapters" in tools/server/README.md of llama.cpp; "Dynamically serving
LoRA Adapters" in vLLM's documentation.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from pydantic import Field
from starlette.types import Receive, Scope, Send

from gateway.adapters.choice import find_adapter, visible_adapters
from gateway.adapters.desired import DesiredAdapters
from gateway.adapters.names import NOTHING, known_adapters
from gateway.adapters.registrar import AdapterRegistrar
from gateway.api.http.answers import send_bytes, send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.body import decode_json
from gateway.api.intake.request_reader import RequestReader, validated
from gateway.api.parameters.base import Body
from gateway.api.parameters.options import LoraBody, read_lora
from gateway.api.request_headers import named_model
from gateway.call import Principal
from gateway.errors import InvalidRequest, ModelNotFound
from gateway.registry.snapshot import FleetView
from gateway.relay.relay import WorkerQueries
from workers.protocol.queries import MAX_WAIT_S, LoadAdapter
from workers.protocol.requests import NAME_PATTERN

TEXT = b"text/plain; charset=utf-8"

UNLOAD_S = 30.0
"""Default of `timeout_s`: seconds that the answer waits for calls that still use the adapter."""

MAX_PATH_CHARS = 4096


class LoadBody(Body):
    model: str = ""
    lora_name: Annotated[str, Field(pattern=NAME_PATTERN)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]
    pinned: bool = False


class UnloadBody(Body):
    model: str = ""
    lora_name: Annotated[str, Field(pattern=NAME_PATTERN)]
    timeout_s: Annotated[float, Field(ge=0, le=MAX_WAIT_S)] = UNLOAD_S


class AdapterRoutes:
    """Handles `/lora-adapters`, `/v1/load_lora_adapter` and `/v1/unload_lora_adapter`."""

    def __init__(
        self,
        reader: RequestReader,
        fleet: FleetView,
        queries: WorkerQueries,
        desired: DesiredAdapters,
        registrar: AdapterRegistrar,
    ) -> None:
        self._reader = reader
        self._fleet = fleet
        self._queries = queries
        self._desired = desired
        self._registrar = registrar

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._reader.call(principal, {}, scope)
        records, scales = self._desired.records(call.model), self._desired.scales(call.model)
        known, admin = self._known(call.model), principal.admin
        shown = frozenset(visible_adapters(known, principal))
        adapters = [
            {
                "id": number,
                "name": name,
                "path": records[name].path if admin and name in records else "",
                "scale": scales.get(name, 0.0),
                "task_name": "",
                "prompt_prefix": "",
            }
            for number, name in enumerate(known)
            if name in shown
        ]
        await send_json(send, adapters, request_log_of(scope))

    async def set_scales(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Set a model's default scales, for calls that name no adapters. All gateways use them within a second."""
        asked = {"lora": await self._reader.intake.small(principal, scope, receive, _array)}
        body = validated(LoraBody, asked, request_log_of(scope).ignored)
        call = self._reader.call(principal, {}, scope, strict=bool(named_model({}, scope)))
        known = self._known(call.model)
        scales = {find_adapter(use.name, known, principal): use.scale for use in read_lora(body)}
        await self._desired.set_scales(call.model, scales)
        await send_json(send, {"success": True}, request_log_of(scope))

    async def load(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Have every worker of the model load an adapter, including workers that start later."""
        document = await self._reader.document(principal, scope, receive)
        call = self._reader.call(principal, document, scope, strict=True)
        body = validated(LoadBody, document, request_log_of(scope).ignored)
        asked = LoadAdapter(name=body.lora_name, path=body.lora_path, pinned=body.pinned)
        await self._registrar.register(call.model, asked)
        message = f"Success: LoRA adapter '{asked.name}' added successfully."
        await send_bytes(send, message.encode(), TEXT, request_log_of(scope))

    async def unload(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Unload an adapter. Calls under way keep it until they end; the answer waits for them up to `timeout_s`."""
        document = await self._reader.document(principal, scope, receive)
        body = validated(UnloadBody, document, request_log_of(scope).ignored)
        name = body.lora_name
        # If no model is named, the only model with an adapter of this name is meant.
        model = named_model(document, scope) or self._fleet.snapshot.adapters.get(name, "")
        try:
            call = self._reader.call(principal, {"model": model}, scope, strict=True)
        except (InvalidRequest, ModelNotFound):
            if model:
                raise
            message = f"No model, or more than one, has an adapter `{name}`. Name the `model`."
            raise ModelNotFound(message, param="lora_name") from None
        if not self._registrar.knows(call.model, name):
            message = f"The model `{call.alias}` has no adapter `{name}`. See GET /lora-adapters."
            raise ModelNotFound(message, param="lora_name")
        left = await self._registrar.remove(call.model, name, body.timeout_s)
        message = f"Success: LoRA adapter '{name}' removed successfully."
        if left:
            message += f" {left} calls that began before still use it, and keep it until they end."
        await send_bytes(send, message.encode(), TEXT, request_log_of(scope), status=202 if left else 200)

    def _known(self, model: str) -> list[str]:
        return known_adapters(self._queries.workers(model), self._desired.contents().get(model, NOTHING))


def _array(raw: bytes) -> list[object]:
    try:
        document = decode_json(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(document, list):
        raise InvalidRequest("The body must be an array of objects with `id` and `scale`.")
    return document
