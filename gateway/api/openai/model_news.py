"""Answers `GET /models/sse`: server-sent events about models that are loaded, unloaded or fail to load.

At first each model's present state is told, then what changes. A stream ends with its gateway, and after an hour, so
that its key is asked for again.

Source: "GET /models/sse" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.api.http.listeners import Listeners
from gateway.api.http.streaming import data
from gateway.api.openai.models import Models, progress_of
from gateway.api.operations.health import SharedQuery
from gateway.call import Principal
from gateway.registry.libraries import Downloads
from gateway.registry.model_states import ModelStates
from workers.protocol.residency import TOLD_EVERY_S

Statuses = Mapping[str, Mapping[str, Any]]

_encode = msgspec.json.Encoder().encode


def events_of(before: Statuses, now: Statuses) -> Iterator[dict[str, Any]]:
    """Yield what has changed between two lists of statuses (name -> `status`), as llama-server's events."""
    for name, status in now.items():
        if before.get(name) != status:
            told = {"status": status["value"], **{field: status[field] for field in status if field != "value"}}
            yield {"model": name, "event": "model_status", "data": told}
    for name in before.keys() - now.keys():
        yield {"model": name, "event": "model_remove"}


def download_events(before: Downloads | None, now: Downloads) -> Iterator[dict[str, Any]]:
    """Yield what has changed between two lists of downloads, as llama-server's events, with the machine. `before`: None
    at first, when ends are no news."""
    known = before or {}
    for (machine, model), download in now.items():
        last = known.get((machine, model))
        if download == last or (before is None and download.status != "downloading"):
            continue
        told = {"model": model, "machine": machine}
        if download.files and (last is None or download.files != last.files or download.since != last.since):
            yield {**told, "event": "download_progress", "data": progress_of(download)}
        if download.status == "finished":
            yield {**told, "event": "download_finished", "data": {}}
        elif download.status == "failed":
            yield {**told, "event": "download_failed", "data": {"reason": download.reason}}
        elif download.status == "removed":
            yield {**told, "event": "model_remove"}
    for machine, model in known.keys() - now.keys():
        if known[machine, model].status == "downloading":
            reason = f"the supervisor of {machine} has ended or can't be heard; what has come is kept: send it again"
            yield {"model": model, "machine": machine, "event": "download_failed", "data": {"reason": reason}}


class ModelNews:
    """Tells listeners what becomes of the models that their keys may use, and admins of what is downloaded."""

    def __init__(
        self,
        models: Models,
        states: ModelStates,
        downloads: SharedQuery[Downloads | None],
        is_leaving: Callable[[], bool],
        ping_interval_s: float,
    ) -> None:
        """`downloads` asks for those of all machines. `is_leaving` returns whether this gateway drains or stops, which
        ends all streams."""
        self._models = models
        self._states = states
        self._downloads = downloads
        self._listeners = Listeners(is_leaving, ping_interval_s, TOLD_EVERY_S)

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves. Raises TooManyRequests, TooManyConnections."""
        told: Statuses = {}
        downloads: Downloads | None = None

        async def next_events() -> bytes:
            nonlocal told, downloads
            before, told = told, self._models.statuses(principal, await self._models.coming.ask())
            events = [*events_of(before, told)]
            if principal.admin:
                found = await self._downloads.ask()
                if found is not None:
                    events += download_events(downloads, found)
                    downloads = found
            return b"".join(data(_encode(event)) for event in events)

        with self._states.watched():
            await self._listeners.serve(principal, scope, receive, send, next_events)
