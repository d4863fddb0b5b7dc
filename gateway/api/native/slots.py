"""Answers `GET /slots` and `POST /slots/{id_slot}?action=save|restore|erase`.

A model's slots are numbered over all its workers, which are ordered by their ids. The content of a slot belongs to a
team: other teams see only whether a call runs in the slot. Each worker has its own files: restore a file in a slot of
the worker that saved it, or let the workers share a folder.

Source of the names: tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec.structs import replace
from pydantic import Field
from starlette.types import Receive, Scope, Send

from accounts.protocol.records import NO_TEAM_LIMITS, TeamLimits
from gateway.adapters.choice import CallAdapters
from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.request_reader import RequestReader, validated
from gateway.api.operations.health import SharedQuery
from gateway.api.parameters.base import quote
from gateway.api.parameters.options import MAX_SALT_CHARS, LoraBody, read_lora
from gateway.api.request_headers import query_of
from gateway.back_pressure import no_worker, slots_busy
from gateway.call import Call, Principal
from gateway.errors import InvalidRequest, NotSupported
from gateway.relay.relay import WorkerQueries
from gateway.routing.placement import find_slot, first_slot_numbers, slot_number
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.queries import (
    SLOTS_PATH,
    SlotAction,
    SlotErased,
    SlotInfo,
    SlotRestored,
    SlotSaved,
    decode_slot_infos,
)
from workers.protocol.requests import AdapterUse

MAX_FILENAME_CHARS = 1024

_ANSWERS: dict[str, Callable[[bytes], SlotSaved | SlotRestored | SlotErased]] = {
    "save": msgspec.json.Decoder(SlotSaved).decode,
    "restore": msgspec.json.Decoder(SlotRestored).decode,
    "erase": msgspec.json.Decoder(SlotErased).decode,
}


class ActionBody(LoraBody):
    model: str = ""
    filename: Annotated[str, Field(max_length=MAX_FILENAME_CHARS)] = ""
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARS)] = ""


NO_BOUND = -1
"""llama-server's `n_remain` of an answer without a maximum length."""

FRESH_S = 0.1
"""Seconds for which an answer about a model's slots is reused: each query goes to the engines of all its workers."""

SlotsByWorker = list[tuple[Heartbeat, list[SlotInfo]]]


class SlotQueries:
    """Asks the workers of models for their slots. Callers that ask within `FRESH_S` share an answer."""

    def __init__(self, queries: WorkerQueries) -> None:
        self._queries = queries
        self._by_model: dict[str, SharedQuery[SlotsByWorker]] = {}

    async def ask(self, model: str) -> SlotsByWorker:
        """Return the slots of each worker of the model. Raises PaddockError."""
        if model not in self._by_model:
            ask = partial(self._queries.ask_each, model, "GET", SLOTS_PATH, decode_slot_infos)
            self._by_model[model] = SharedQuery(ask, FRESH_S)
        return await self._by_model[model].ask()


class SlotRoutes:
    """Handles `GET /slots` and `POST /slots/{id_slot}`."""

    def __init__(
        self,
        reader: RequestReader,
        queries: WorkerQueries,
        adapters: CallAdapters,
        limits_of: Callable[[str], TeamLimits],
    ) -> None:
        """`limits_of` returns the limits of what a team stores."""
        self._reader = reader
        self._queries = queries
        self._slots = SlotQueries(queries)
        self._adapters = adapters
        self._limits_of = limits_of

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        call = self._reader.call(principal, {}, scope)
        found = await self._slots.ask(call.model)
        if query_of(scope).get("fail_on_no_slot") and all(info.is_processing for _, infos in found for info in infos):
            raise slots_busy(call.alias)
        first = dict(
            zip((beat.boot for beat, _ in found), first_slot_numbers([beat for beat, _ in found]), strict=True)
        )
        slots = [slot_object(first[beat.boot], beat, info, principal) for beat, infos in found for info in infos]
        await send_json(send, slots, request_log_of(scope))

    async def act(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Save, restore or erase the conversation in a slot."""
        document = await self._reader.document(principal, scope, receive)
        call = self._reader.call(principal, document, scope)
        action = _read_action(query_of(scope).get("action", ""))
        body = validated(ActionBody, document, request_log_of(scope).ignored)
        del document  # its memory is not counted any more, and the worker can take long
        if action != "erase" and not body.filename:
            raise InvalidRequest("`filename` is missing. Send a name for the file.", param="filename")
        number = _read_number(scope["path_params"]["id_slot"])
        beat, slot = _find_slot(number, self._queries.workers(call.model), call.alias)
        limits = self._limits_of(principal.team) if action == "save" else NO_TEAM_LIMITS
        asked = SlotAction(
            action=action,
            tenant=principal.team,
            filename=body.filename,
            salt=body.cache_salt,
            adapters=self._adapters.of(call, read_lora(body)),
            max_files=limits.saved_slots,
            max_bytes=limits.saved_slot_bytes,
        )
        found = await self._queries.ask_worker(beat, "POST", f"{SLOTS_PATH}/{slot}", _ANSWERS[action], asked)
        await send_json(send, replace(found, id_slot=number), request_log_of(scope))


async def refuse_slots(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse to list slots; the handler of `GET /slots` if the operator has switched it off. Raises NotSupported."""
    raise NotSupported("This gateway does not list slots. An operator can switch it on: PADDOCK_SLOTS_ENDPOINT.")


def _find_slot(number: int, beats: list[Heartbeat], model: str) -> tuple[Heartbeat, int]:
    """Return the worker that has slot `number`, and the slot's number there. Raises InvalidRequest, NoWorker."""
    if not beats:
        raise no_worker(model)
    found = find_slot(number, beats)
    if found is None:
        num_slots = sum(beat.slots for beat in beats)
        raise InvalidRequest(f"There is no slot {number} of `{model}`. Send 0 to {num_slots - 1}.", param="id_slot")
    return found


def slot_object(first: int, beat: Heartbeat, info: SlotInfo, principal: Principal) -> dict[str, Any]:
    """Return the fields of a slot that a key may see: those about its content only for the slot's team and admins."""
    document: dict[str, Any] = {
        "id": first + info.id,
        "n_ctx": info.n_ctx,
        "speculative": False,
        "is_processing": info.is_processing,
        "model": beat.model,
        "worker": beat.worker,
    }
    if not (principal.admin or info.tenant == principal.team):
        return document
    document["n_prompt_tokens"] = info.n_prompt_tokens
    # An idle slot has no answer: the numbers of the last answer say nothing of the next one.
    decoded, left = (info.n_decoded, info.n_remain) if info.is_processing else (0, NO_BOUND)
    document["next_token"] = [{"has_next_token": info.is_processing, "n_decoded": decoded, "n_remain": left}]
    return document | ({"id_task": info.request_id} if info.request_id else {})


def _read_action(name: str) -> Literal["save", "restore", "erase"]:
    match name:
        case "save" | "restore" | "erase":
            return name
    raise InvalidRequest(f"`action` is {quote(name)}. Send `save`, `restore` or `erase`.", param="action")


def _read_number(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise InvalidRequest(f"{quote(text)} is no slot. Send its number, as `GET /slots` tells it.", param="id_slot")
    return int(text)


class LiveFleetInfo:
    """Looks up a completion's slot number and adapters in the fleet as it is now. Implements `FleetInfo`."""

    def __init__(self, queries: WorkerQueries, adapters: CallAdapters) -> None:
        self._queries = queries
        self._adapters = adapters

    def number_slot(self, model: str, worker: str, slot: int) -> int:
        """Return the slot's number over all workers of the model; -1: the worker is gone."""
        return slot_number(worker, slot, self._queries.workers(model))

    def adapters(self, call: Call, asked: tuple[AdapterUse, ...]) -> tuple[AdapterUse, ...]:
        """Return the adapters that the call is computed with. Raises InvalidRequest, PermissionDenied."""
        return self._adapters.of(call, asked)
