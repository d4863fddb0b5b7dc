"""Answers `GET /admin/fleet` with the state of the fleet, and `GET /admin/events` with a stream of its changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.http.listeners import Listeners
from gateway.api.overview.feed import Feed
from gateway.api.overview.rows import Overview
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.errors import InvalidRequest
from gateway.registry.model_states import ModelStates

EVERY_S = 1.0
"""Seconds between two looks of a stream."""
MOST_MODELS = 8
"""Maximum number of models whose slots one stream shows."""


class OverviewRoutes:
    """Handles both routes."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Overview]],
        feed: Feed,
        states: ModelStates,
        is_leaving: Callable[[], bool],
        ping_interval_s: float,
    ) -> None:
        self._look = look
        self._feed = feed
        self._states = states
        self._listeners = Listeners(is_leaving, ping_interval_s, EVERY_S)

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the overview and, for the models in `?slots=`, with their workers' slots."""
        models = _models_of(scope)
        overview = await self._look()
        document = {name: getattr(overview, name) for name in overview.__struct_fields__}
        if models:
            document["slots"] = await self._feed.slots(models)
        await send_json(send, document, request_log_of(scope))

    async def stream(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the client leaves. Raises TooManyRequests, TooManyConnections, InvalidRequest."""
        viewer = self._feed.viewer(_models_of(scope))
        with self._states.watched():
            await self._listeners.serve(principal, scope, receive, send, viewer.next_events)


def _models_of(scope: Scope) -> list[str]:
    """Return the models whose slots are asked for. Raises InvalidRequest."""
    models = [model for model in query_of(scope).get("slots", "").split(",") if model]
    if len(models) > MOST_MODELS:
        raise InvalidRequest(f"`slots` names {len(models)} models. Name up to {MOST_MODELS}.", param="slots")
    return models
