"""Answers the routes of stored responses: `GET` and `DELETE /v1/responses/{id}`, and its `input_items` and `cancel`."""

from __future__ import annotations

import re
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import JSON, send_bytes, send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.intake.decoding import let_loop_run
from gateway.api.intake.intake import Body, Intake
from gateway.api.parameters.base import quote
from gateway.api.responses.background import Background
from gateway.api.responses.items import Item, stream_of
from gateway.api.responses.response_store import ResponseStore
from gateway.api.resumable import Resumable
from gateway.call import Principal
from gateway.errors import InvalidRequest, NotFound, StreamGone
from gateway.resume.reading import Reading
from gateway.resume.recordings import Owner, Recordings
from gateway.telemetry.request_log import RequestLog
from workers.protocol.framing import json_parts

PAGE = 20
LONGEST_PAGE = 100
MAX_QUERY_FIELDS = 64

_WHOLE = re.compile(r"-?[0-9]{1,14}")

Query = dict[str, str]


class StoredResponses:
    """Answers the routes below `/v1/responses/{id}`."""

    def __init__(
        self,
        intake: Intake,
        responses: ResponseStore,
        background: Background,
        recordings: Recordings,
        resumable: Resumable,
    ) -> None:
        self._intake = intake
        self._responses = responses
        self._background = background
        self._recordings = recordings
        self._resumable = resumable

    async def retrieve(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log, body, id_ = self._open(principal, scope)
        query = _query(scope)
        with closing(body):
            response = await self._background.current(id_, body)
            if query.get("stream", "false").lower() not in ("true", "1"):
                raw = await _write(body, response)
                del response
                await send_bytes(send, raw, JSON, request_log)
                return
            if not response["background"]:
                message = f"Response {quote(id_)} was not made in the background: it has no stream. Leave `stream` out."
                raise InvalidRequest(message, param="stream")
            del response
            reading = await self._reading(query, id_, body)
            await self._resumable.send(reading, scope, receive, send, holds=body.hold_at_least)

    async def _reading(self, query: Query, id_: str, body: Body) -> Reading:
        """Open the stream of a response after the last event that the caller has (`starting_after`).

        Raises InvalidRequest, StreamGone, TooManyRequests."""
        # Events are numbered from 0 in the dialect, from 1 in the stream.
        after = _number(query, "starting_after", -1, -1, 10**12) + 1
        try:
            return await self._recordings.open(stream_of(id_), after, Owner(body.team, ""))
        except StreamGone:
            message = f"The events of response {quote(id_)} are not kept any more. Retrieve it without `stream`."
            raise StreamGone(message, param="stream") from None

    async def delete(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log, body, id_ = self._open(principal, scope)
        with closing(body):
            await self._background.drop(id_, body)
        await send_json(send, {"id": id_, "object": "response", "deleted": True}, request_log)

    async def cancel(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log, body, id_ = self._open(principal, scope)
        with closing(body):
            if not (await self._responses.get(id_, body)).is_background:
                message = (
                    f"Response {quote(id_)} was not made in the background. To end others, close their connection."
                )
                raise InvalidRequest(message, param="response_id")
            raw = await _write(body, await self._background.cancel(id_, body))
            await send_bytes(send, raw, JSON, request_log)

    async def input_items(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        request_log, body, id_ = self._open(principal, scope)
        with closing(body):
            await send_bytes(send, await self._items(body, id_, _query(scope)), JSON, request_log)

    async def _items(self, body: Body, id_: str, query: Query) -> bytes:
        record = await self._responses.get(id_, body)
        if record.is_too_long:
            raise NotFound(f"The input of response {quote(id_)} was not kept: its prompt was too long for the model.")
        items = list(record.input)
        order = query.get("order", "desc")
        if order not in ("asc", "desc"):
            raise InvalidRequest(f"`order` is {quote(order)}. Send `asc` or `desc`.", param="order")
        if order == "desc":
            items.reverse()
        limit = _number(query, "limit", PAGE, 1, LONGEST_PAGE)
        return await _write(body, _page(items, query.get("after"), limit))

    def _open(self, principal: Principal, scope: Scope) -> tuple[RequestLog, Body, str]:
        """Return the request log, a body that counts the memory of loaded records (close it), and the response's id."""
        return request_log_of(scope), self._intake.message(principal, b""), str(scope["path_params"]["response_id"])


async def _write(body: Body, document: dict[str, Any]) -> bytes:
    """Encode a document as JSON, on a thread if it is long. The caller can then free the document before sending."""
    return await body.run_aside(body.num_bytes, partial(_encode, document))


def _encode(document: dict[str, Any]) -> bytes:
    parts: list[bytes] = []
    for part in json_parts(document):
        parts.append(part)
        let_loop_run()
    return b"".join(parts)


def _page(items: list[Item], after: str | None, limit: int) -> dict[str, Any]:
    if after is not None:
        places = [n for n, item in enumerate(items) if item["id"] == after]
        if not places:
            raise NotFound(f"`after` names {quote(after)}, which is no item of this response.", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": len(items) > limit,
    }


def _query(scope: Scope) -> Query:
    """Return the fields of the query string. Raises InvalidRequest."""
    text = scope.get("query_string", b"").decode("latin-1")
    try:
        return dict(parse_qsl(text, max_num_fields=MAX_QUERY_FIELDS))
    except ValueError:
        raise InvalidRequest(f"The query has more than {MAX_QUERY_FIELDS} fields. Send fewer.") from None


def _number(query: Query, name: str, default: int, least: int, most: int) -> int:
    text = query.get(name)
    if text is None:
        return default
    if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
        raise InvalidRequest(f"`{name}` is {quote(text)}. Send a whole number from {least} to {most}.", param=name)
    return int(text)
