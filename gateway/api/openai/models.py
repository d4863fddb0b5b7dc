"""Answers `GET /v1/models`, `/v1/models/{id}`, `/models`: OpenAI's model cards, with more fields of llama-server's.

Source of `status`: "Using multiple models" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

import time
from collections.abc import Container, Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.operations.health import FRESH_S, SharedQuery
from gateway.call import Principal
from gateway.catalog.live import LiveCatalog
from gateway.catalog.names import ModelNames
from gateway.limits.cost import Prices
from gateway.registry.desired_models import DesiredModels
from gateway.registry.libraries import Downloads
from gateway.registry.model_states import ModelStates, effective
from gateway.registry.snapshot import FleetView
from workers.models.prices import Rates
from workers.protocol.heartbeat import Heartbeat, WorkerKind
from workers.protocol.residency import Download, ModelState

OWNER = "paddock"

OUTPUT: dict[WorkerKind, str] = {"generate": "text", "embed": "embeddings", "rank": "scores"}

STAGE = "text_model"
"""The only stage of loading whose progress supervisors tell, by llama-server's name for it."""


class Models:
    """Lists the models that a key may use."""

    def __init__(
        self,
        catalog: LiveCatalog,
        fleet: FleetView,
        desired: DesiredModels,
        states: ModelStates,
        prices: Prices,
        downloads: SharedQuery[Downloads | None],
    ) -> None:
        """`downloads` asks for those of all machines."""
        self._downloads = downloads
        self._prices = prices
        self._catalog = catalog
        self._fleet = fleet
        self._desired = desired
        self._states = states
        self.coming = SharedQuery(self._coming, FRESH_S)
        """Asks for the models without workers that a supervisor should keep workers for, whether calls come or not. Any
        key lists models, and of each model two keys are looked up in Redis."""

    @property
    def _names(self) -> ModelNames:
        return self._catalog.names

    async def show_merged(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with one card per model, which lists the model's aliases, as llama-server does. Admins are told of
        those that are being downloaded as well."""
        permitted = self._permitted(principal)
        cards = await self._cards(principal, self._without_aliases(permitted), permitted)
        if principal.admin:
            coming = downloading_cards(await self._downloads.ask() or {})
            cards += [found for model, found in coming.items() if model not in permitted]
        await send_json(send, {"object": "list", "data": cards}, request_log_of(scope))

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the card of the name in the path or, if none is there, the cards of all names the key may use."""
        request_log, permitted = request_log_of(scope), self._permitted(principal)
        name = scope.get("path_params", {}).get("model")
        if not name:  # `/v1/models/` is the list as well
            await send_json(
                send, {"object": "list", "data": await self._cards(principal, permitted, permitted)}, request_log
            )
            return
        snapshot = self._fleet.snapshot
        model = self._names.resolve(name, principal, snapshot.models, snapshot.adapters, complete=snapshot.is_read)
        [found] = await self._cards(principal, {name: model}, permitted)
        await send_json(send, found, request_log)

    def statuses(self, principal: Principal, coming: frozenset[str]) -> dict[str, dict[str, Any]]:
        """Return name -> `status` for the entries that `show_merged` lists. `coming`: as `self.coming` tells."""
        named = self._without_aliases(self._permitted(principal))
        named = {name: self._first(name, model) for name, model in named.items()}
        told_of = self._told_of(principal)
        return {name: status_object(self._state(model, coming), told_of) for name, model in named.items()}

    async def _coming(self) -> frozenset[str]:
        workers = self._fleet.snapshot.workers
        models = self._names.models | self._fleet.snapshot.models
        return await self._desired.coming(sorted(model for model in models if not workers.get(model)))

    def _state(self, model: str, coming: frozenset[str]) -> ModelState:
        has_workers = bool(self._fleet.snapshot.workers.get(model))
        return effective(self._states.of(model), has_workers=has_workers, is_coming=model in coming)

    def _told_of(self, principal: Principal) -> frozenset[str] | None:
        return self._names.told_of(principal, self._fleet.snapshot.models, self._fleet.snapshot.adapters)

    def _permitted(self, principal: Principal) -> dict[str, str]:
        snapshot = self._fleet.snapshot
        served = [model for model, beats in snapshot.workers.items() if beats]
        return self._names.permitted(principal, served, snapshot.adapters)

    def _is_alias(self, name: str) -> bool:
        """Return whether a name is one model's own or its alias, not a chain (of several models) or an adapter."""
        snapshot = self._fleet.snapshot
        return not (self._names.is_chain(name) or self._names.is_adapter(name, snapshot.models, snapshot.adapters))

    def _without_aliases(self, permitted: Mapping[str, str]) -> dict[str, str]:
        """Return `permitted` with one name per model (its own, else its first alias); chains and adapters all stay."""
        shown: dict[str, str] = {}
        for name, model in permitted.items():
            if self._is_alias(name) and (name == model or model not in shown):
                shown[model] = name
        return {name: model for name, model in permitted.items() if not self._is_alias(name) or shown[model] == name}

    async def _cards(
        self, principal: Principal, named: Mapping[str, str], permitted: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Return a card per name in `named` (name -> model). A chain's card is that of its first model with a worker.

        `permitted`: name -> model for all names that the key may use."""
        aliases: dict[str, list[str]] = {}
        for name, model in permitted.items():
            if self._is_alias(name):
                aliases.setdefault(model, []).append(name)
        workers = self._fleet.snapshot.workers
        named = {name: self._first(name, model) for name, model in named.items()}
        is_any_missing = any(not workers.get(model) for model in named.values())
        coming = await self.coming.ask() if is_any_missing else frozenset[str]()
        told_of = self._told_of(principal)
        return [
            self._card(name, model, aliases.get(model, ()), status_object(self._state(model, coming), told_of))
            for name, model in named.items()
        ]

    def _first(self, name: str, model: str) -> str:
        if not self._names.is_chain(name):
            return model
        return next((each for each in self._names.chain(name, "") if self._fleet.snapshot.workers.get(each)), model)

    def _card(self, name: str, model: str, names: Sequence[str], status: Mapping[str, Any]) -> dict[str, Any]:
        """Return the card of a name. `names`: the model's own name and its aliases, as far as the key may use them."""
        snapshot = self._fleet.snapshot
        document = card(name, model, snapshot.workers.get(model, ()), status)
        # The card's own name is among the aliases, as in llama-server's list.
        document["aliases"] = sorted(names) if self._is_alias(name) else []
        document["tags"] = self._names.tags.get(model, ())
        if self._names.is_adapter(name, snapshot.models, snapshot.adapters):
            document["parent"] = model
        is_adapter = "parent" in document
        if (price := self._prices.price(model, name if is_adapter else "", time.time())) is not None:
            document["price"] = {field: getattr(price, field) for field in Rates.__struct_fields__}
            document["price"]["currency"] = self._prices.currency
        if self._names.is_chain(name):
            document["models"] = list(self._names.chain(name, ""))
        return document


def progress_of(download: Download) -> dict[str, dict[str, int]]:
    """Return the progress of a download's files, by address, as llama-server tells it."""
    return {url: {"done": file.done, "total": file.total} for url, file in download.files.items()}


def downloading_cards(downloads: Downloads) -> dict[str, dict[str, Any]]:
    """Return the cards of models that are being downloaded, by reference, with the machines that do that. Such a model
    can't be called. The progress is that of the machine which began last."""
    found: dict[str, dict[str, Any]] = {}
    for (machine, model), download in sorted(downloads.items(), key=lambda item: item[1].since):
        if download.status != "downloading":
            continue
        known = found.get(model, {"machines": []})
        status = {"value": "downloading", "progress": progress_of(download)}
        found[model] = card(model, model, (), status) | {"machines": sorted([*known["machines"], machine])}
        found[model]["architecture"] = {"input_modalities": [], "output_modalities": []}  # it is not known yet
    return found


def status_object(state: ModelState, told_of: Container[str] | None) -> dict[str, Any]:
    """Return a model's state as llama-server's `status`, with why it is not loaded as `reason`. A model that can't be
    loaded, or was not when it was last tried, is `unloaded` with `failed` there, so here, too. `told_of`: models that
    the caller may be told of; None: all."""
    has_failed = state.status == "failed" or (state.status == "unloaded" and state.num_failures > 0)
    document: dict[str, Any] = {"value": "unloaded" if has_failed else state.status}
    if state.status == "loading" and state.progress is not None:
        document["progress"] = {"stages": [STAGE], "current": STAGE, "value": round(state.progress, 3)}
    if has_failed:
        document["failed"] = True
    if has_failed and state.exit_code is not None:
        document["exit_code"] = state.exit_code
    if state.num_failures:
        document["failures"] = state.num_failures
    if state.why and state.status != "loaded":
        document["reason"] = state.why.shown(told_of)
    if state.retry_at and has_failed:
        document["retry_at"] = int(state.retry_at)
    return document


def card(name: str, model: str, beats: tuple[Heartbeat, ...], status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the card of a name; its `root` is the model behind it. `beats`: heartbeats of the model's workers;
    `status`: its `status_object`."""
    first = min(beats, key=lambda beat: beat.started_at, default=None)
    document: dict[str, Any] = {
        "id": name,
        "object": "model",
        "created": int(first.started_at) if first else 0,
        "owned_by": OWNER,
        "root": model,
        "architecture": {
            "input_modalities": list(first.facts.inputs) if first else ["text"],
            "output_modalities": [OUTPUT[first.kind if first else "generate"]],
        },
        "status": status,
    }
    if first is not None:
        document["meta"] = asdict(first.facts) | {"n_ctx": first.n_ctx}
        document["workers"] = len(beats)
    return document
