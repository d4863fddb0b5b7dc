"""Answers `GET /models/sse`: server-sent events about models that are loaded, unloaded or fail to load.

At first each model's present state is told, then what changes. A stream ends with its gateway, and after an hour, so
that its key is asked for again.

Source: "GET /models/sse" in tools/server/README.md of llama.cpp.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from gateway.access.control import Shares, most_of_team
from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.api.http.streaming import EventStream, chunk_writer_of, data, written
from gateway.api.intake.disconnect import ClientGone, until_disconnect
from gateway.api.openai.models import Models
from gateway.back_pressure import too_many_listeners, too_many_listeners_of_key, too_many_listeners_of_team
from gateway.call import Principal
from gateway.registry.model_states import ModelStates
from workers.process.ticks import wait_tick
from workers.protocol.residency import TOLD_EVERY_S

MOST_LISTENERS, MOST_PER_KEY = 64, 8
MOST_PER_TEAM = most_of_team(MOST_LISTENERS, MOST_PER_KEY)
LIFE_S = 3600.0
WRITE_S = 10.0
"""Seconds that a client has to read what was sent, while its buffers are full."""

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


class ModelNews:
    """Tells listeners what becomes of the models that their keys may use."""

    def __init__(
        self, models: Models, states: ModelStates, is_leaving: Callable[[], bool], ping_interval_s: float
    ) -> None:
        """`is_leaving` returns whether this gateway drains or stops, which ends all streams."""
        self._models = models
        self._states = states
        self._is_leaving = is_leaving
        self._ping_interval_s = ping_interval_s
        self._listeners = Shares(MOST_PER_KEY, MOST_PER_TEAM)

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves. Raises TooManyRequests, TooManyConnections."""
        request_log = request_log_of(scope)
        with self._counted(principal), self._states.watched():
            stream = EventStream(send, lambda: answer_headers(request_log), chunk=chunk_writer_of(scope))
            async with until_disconnect(receive):
                request_log.status, request_log.outcome = 200, "ok"
                await stream.start()
                await stream.pinged(self._write(principal, stream), self._ping_interval_s)
                await stream.end(b"")

    async def _write(self, principal: Principal, stream: EventStream) -> None:
        told: Statuses = {}
        until = time.monotonic() + LIFE_S
        while time.monotonic() < until and not self._is_leaving():
            now = self._models.statuses(principal, await self._models.coming.ask())
            if events := b"".join(data(_encode(event)) for event in events_of(told, now)):
                try:
                    async with asyncio.timeout(WRITE_S):
                        await written(stream.write(events))
                except TimeoutError:
                    raise ClientGone from None
            told = now
            await wait_tick(TOLD_EVERY_S)

    @contextmanager
    def _counted(self, principal: Principal) -> Iterator[None]:
        """Count a listener while the block lasts. Raises TooManyRequests, TooManyConnections."""
        listeners, key, team = self._listeners, principal.key_id, principal.team
        if listeners.is_full_for_key(key):
            raise too_many_listeners_of_key(MOST_PER_KEY)
        if listeners.is_full_for_team(team):
            raise too_many_listeners_of_team(MOST_PER_TEAM, team)
        if listeners.num_held >= MOST_LISTENERS:
            raise too_many_listeners(MOST_LISTENERS)
        listeners.take(key, team)
        try:
            yield
        finally:
            listeners.give_back(key, team)
