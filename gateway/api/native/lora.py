"""LoRA adapters of a model: llama-server's list and default scales, vLLM's loading and unloading by name.

Sources: "GET /lora-adapters" and "POST /lora-adapters" in tools/server/README.md of llama.cpp; "Dynamically serving
LoRA Adapters" in vLLM's documentation.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated
from urllib.parse import quote

import msgspec
from pydantic import Field
from starlette.types import Receive, Scope, Send

from gateway.api.answers import send_bytes, send_json
from gateway.api.native.query import named_model
from gateway.api.native.reception import Reception, validated
from gateway.api.parameters.base import Body
from gateway.api.parameters.lora import LoraBody, read_lora
from gateway.catalog.adapters import named
from gateway.errors import InvalidRequest, ModelNotFound, Unavailable
from gateway.inquiries import Inquiries
from gateway.registry.adapter_names import known_adapters
from gateway.registry.adapter_wishes import AdapterWishes
from workers.protocol.adapters import ADAPTERS_PATH, AdapterInfo, LoadAdapter, decode_info
from workers.protocol.catalog import NAME_PATTERN
from workers.protocol.heartbeat import Heartbeat

TEXT = b"text/plain; charset=utf-8"

SETTLE_S = 3.0
"""How long an answer waits until the fleet's heartbeats tell of what was done."""
LOOK_S = 0.05

MAX_PATH_CHARS = 4096


class LoadBody(Body):
    model: str = ""
    lora_name: Annotated[str, Field(pattern=NAME_PATTERN)]
    lora_path: Annotated[str, Field(min_length=1, max_length=MAX_PATH_CHARS)]


class UnloadBody(Body):
    model: str = ""
    lora_name: Annotated[str, Field(pattern=NAME_PATTERN)]


class AdaptersRoute:
    """`GET /lora-adapters` and `POST /lora-adapters`."""

    def __init__(self, reception: Reception, inquiries: Inquiries, wishes: AdapterWishes) -> None:
        self._reception = reception
        self._inquiries = inquiries
        self._wishes = wishes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            await self._set_scales(scope, receive, send)
            return
        caller = self._reception.caller(scope)
        call = self._reception.call(caller, {}, scope)
        files, scales = self._wishes.files(call.model), self._wishes.scales(call.model)
        names = known_adapters(self._inquiries.workers(call.model))
        adapters = [
            {
                "id": number,
                "name": name,
                "path": files[name].path if name in files else "",
                "scale": scales.get(name, 0.0),
                "task_name": "",
                "prompt_prefix": "",
            }
            for number, name in enumerate(names)
        ]
        await send_json(send, adapters, caller.trail)

    async def _set_scales(self, scope: Scope, receive: Receive, send: Send) -> None:
        """For every caller of the model who names no adapters, on all gateways within a second."""
        caller = self._reception.admin(scope, "set the scales of adapters for everybody")
        body = validated(LoraBody, {"lora": _array(await self._reception.raw(scope, receive))})
        call = self._reception.call(caller, {}, scope)
        known = known_adapters(self._inquiries.workers(call.model))
        scales = {named(use.name, known): use.scale for use in read_lora(body)}
        await self._wishes.set_scales(call.model, scales)
        await send_json(send, {"success": True}, caller.trail)


class LoadAdapterRoute:
    """`POST /v1/load_lora_adapter`: on every worker of the model, and on those that start later."""

    def __init__(self, reception: Reception, inquiries: Inquiries, wishes: AdapterWishes) -> None:
        self._reception = reception
        self._inquiries = inquiries
        self._wishes = wishes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._reception.admin(scope, "load adapters")
        document = await self._reception.document(scope, receive)
        call = self._reception.call(caller, document, scope)
        body = validated(LoadBody, document)
        asked = LoadAdapter(name=body.lora_name, path=body.lora_path)
        beats = _serving(self._inquiries, call.model)
        for beat in beats:
            await self._load(beat, asked)
        await self._wishes.remember(call.model, asked)
        await _settled(lambda: all(asked.name in beat.adapters for beat in _now(self._inquiries, call.model, beats)))
        message = f"Success: LoRA adapter '{asked.name}' added successfully."
        await send_bytes(send, message.encode(), TEXT, caller.trail)

    async def _load(self, beat: Heartbeat, asked: LoadAdapter) -> None:
        try:
            await self._inquiries.of_worker(beat, "POST", ADAPTERS_PATH, decode_info, asked)
        except InvalidRequest as error:
            error.param = "lora_path"  # the worker's name for it is another one
            raise


class UnloadAdapterRoute:
    """`POST /v1/unload_lora_adapter`: running calls keep it to their end."""

    def __init__(self, reception: Reception, inquiries: Inquiries, wishes: AdapterWishes) -> None:
        self._reception = reception
        self._inquiries = inquiries
        self._wishes = wishes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        caller = self._reception.admin(scope, "unload adapters")
        document = await self._reception.document(scope, receive)
        body = validated(UnloadBody, document)
        name = body.lora_name
        model = named_model(document, scope) or self._reception.adapter_model(name)
        try:
            call = self._reception.call(caller, {"model": model}, scope)
        except (InvalidRequest, ModelNotFound):
            if model:
                raise
            message = f"No model, or more than one, has an adapter `{name}`. Name the `model`."
            raise ModelNotFound(message, param="lora_name") from None
        beats = [beat for beat in _serving(self._inquiries, call.model) if name in beat.adapters]
        if not beats and name not in self._wishes.files(call.model):
            message = f"The model `{call.alias}` has no adapter `{name}`. See GET /lora-adapters."
            raise ModelNotFound(message, param="lora_name")
        await self._wishes.forget(call.model, name)
        for beat in beats:
            await self._unload(beat, name)
        await _settled(lambda: all(name not in beat.adapters for beat in _now(self._inquiries, call.model, beats)))
        await send_bytes(send, f"Success: LoRA adapter '{name}' removed successfully.".encode(), TEXT, caller.trail)

    async def _unload(self, beat: Heartbeat, name: str) -> AdapterInfo | None:
        try:
            return await self._inquiries.of_worker(beat, "DELETE", f"{ADAPTERS_PATH}/{quote(name)}", decode_info)
        except InvalidRequest:
            return None  # it has gone meanwhile


def _serving(inquiries: Inquiries, model: str) -> list[Heartbeat]:
    beats = [beat for beat in inquiries.workers(model) if not beat.draining]
    if not beats:
        raise Unavailable(f"No worker serves `{model}` at the moment. Start one, or send the request again later.")
    return beats


def _now(inquiries: Inquiries, model: str, before: list[Heartbeat]) -> list[Heartbeat]:
    """The same processes as they say of themselves now."""
    boots = {beat.boot for beat in before}
    return [beat for beat in inquiries.workers(model) if beat.boot in boots]


async def _settled(is_told: Callable[[], bool]) -> None:
    """Returns when the fleet shows it; a fleet that is slow to tell is not waited for."""
    deadline = time.monotonic() + SETTLE_S
    while not is_told() and time.monotonic() < deadline:  # noqa: ASYNC110 - other processes write what is waited for
        await asyncio.sleep(LOOK_S)


def _array(raw: bytes) -> list[object]:
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(document, list):
        raise InvalidRequest("The body must be an array of objects with `id` and `scale`.")
    return document
