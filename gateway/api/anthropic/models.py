"""Answers `GET /v1/models` and `GET /v1/models/{id}` in Anthropic's form.

Source: Anthropic's API reference, "List Models" and "Get a Model".
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.parameters.base import quote
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.catalog.live import LiveCatalog
from gateway.errors import InvalidRequest
from gateway.registry.snapshot import FleetView

DEFAULT_LIMIT = 20
MOST = 1000


class ModelInfos:
    """Answers with a page of the list of models or, if a name is in the path, with that model."""

    def __init__(self, catalog: LiveCatalog, fleet: FleetView) -> None:
        self._catalog = catalog
        self._fleet = fleet

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log = request_log_of(scope)
        snapshot = self._fleet.snapshot
        name = scope.get("path_params", {}).get("model")
        if name:
            model = self._catalog.names.resolve(
                name, principal, snapshot.models, snapshot.adapters, complete=snapshot.is_read
            )
            await send_json(send, self._info(name, model), request_log)
            return
        served = [model for model, beats in snapshot.workers.items() if beats]
        permitted = self._catalog.names.permitted(principal, served, snapshot.adapters)
        found, has_more = page(list(permitted), query_of(scope))
        document = {
            "data": [self._info(one, permitted[one]) for one in found],
            "has_more": has_more,
            "first_id": found[0] if found else None,
            "last_id": found[-1] if found else None,
        }
        await send_json(send, document, request_log)

    def _info(self, name: str, model: str) -> dict[str, Any]:
        beats = self._fleet.snapshot.workers.get(model, ())
        began = datetime.fromtimestamp(int(min((beat.started_at for beat in beats), default=0.0)), UTC)
        n_ctx = max((beat.n_ctx for beat in beats), default=None)
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": began.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": n_ctx,
            "max_tokens": n_ctx,
        }


def page(names: Sequence[str], query: dict[str, str]) -> tuple[Sequence[str], bool]:
    """Return the names on the page that `query` asks for, and whether more lie beyond it. Raises InvalidRequest."""
    limit = _limit(query.get("limit"))
    after, before = query.get("after_id"), query.get("before_id")
    if after is not None and before is not None:
        raise InvalidRequest("`after_id` and `before_id` exclude each other. Send one of them.", param="before_id")
    if before is not None:
        end = _index(names, before, "before_id")
        start = max(0, end - limit)
        return names[start:end], start > 0
    start = 0 if after is None else _index(names, after, "after_id") + 1
    return names[start : start + limit], start + limit < len(names)


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 4 and 1 <= int(text) <= MOST):
        raise InvalidRequest(f"`limit` is {quote(text)}. Send 1 to {MOST}.", param="limit")
    return int(text)


def _index(names: Sequence[str], name: str, param: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        message = f"`{param}` is {quote(name)}, which is no model of this list. Send an id of an earlier page."
        raise InvalidRequest(message, param=param) from None
