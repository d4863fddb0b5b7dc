"""Answers `GET /admin/calls`, all gateways' calls, and `DELETE /admin/calls/{request_id}`, which cancels one."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.parameters.base import quote
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.dispatch.pipeline import CallUnderWay, Pipeline
from gateway.errors import Cancelled, InvalidRequest, NotFound
from gateway.store.call_exchange import MOST_ROWS, CallExchange, CallQuestion, CallRow

log = logging.getLogger(__name__)

STATUSES = ("", "waiting", "running")


class AuditNote(Protocol):
    async def __call__(
        self, principal: Principal, scope: Scope, action: str, kind: str, subject: str, team: str, after: dict[str, Any]
    ) -> bool:
        """Have the accounts service write down what an admin did, and return whether that is done."""
        ...


class CallLookup:
    """Finds the calls of this gateway that a question asks for, and cancels them where the question says so."""

    def __init__(self, pipeline: Pipeline, gateway_id: str) -> None:
        self._pipeline = pipeline
        self._gateway = gateway_id

    def look(self, question: CallQuestion) -> tuple[CallRow, ...]:
        """Return the requests that a question asks for, the first MOST_ROWS that came. Cancel all of them, further ones
        too, where the question says so."""
        found = defaultdict[tuple[str, str], list[CallUnderWay]](list)
        for one in self._pipeline.calls():
            if _fits(question, one):
                found[one.call.principal.key_id, one.call.request_id].append(one)
        rows = tuple(_row(answers, self._gateway) for answers in list(found.values())[:MOST_ROWS])
        if question.cancels:
            for answers in found.values():
                for one in answers:
                    one.cutoff.cut(Cancelled("An admin cancelled this call. Ask whoever runs this gateway why."))
        return rows


def _fits(question: CallQuestion, one: CallUnderWay) -> bool:
    call = one.call
    return (
        question.request_id in ("", call.request_id)
        and question.team in ("", call.principal.team)
        and question.model in ("", _model_of(one))
    )


def _model_of(one: CallUnderWay) -> str:
    return one.answer_log.model or one.call.model


def _row(answers: Sequence[CallUnderWay], gateway: str) -> CallRow:
    """Return the row of a request from those of its answers that are not complete."""
    first, now = answers[0], time.monotonic()
    worker = next((at for one in answers if (at := _worker_of(one))), "")
    positions = [one.answer_log.queue_position for one in answers if one.answer_log.queue_position.position]
    return CallRow(
        request_id=first.call.request_id,
        team=first.call.principal.team,
        key=first.call.principal.key_id,
        alias=first.call.alias,
        model=_model_of(first),
        gateway=gateway,
        worker=worker,
        status="running" if worker else "waiting",
        since=round(time.time() - (now - first.call.received_at), 3),
        position=0 if worker else min((one.position for one in positions), default=0),
        predicted_wait_s=0.0 if worker else round(min((one.wait_s for one in positions), default=0.0), 1),
        priority=-first.priority,
        num_answers=len(answers),
    )


def _worker_of(one: CallUnderWay) -> str:
    """Return the id of the worker that has the call now; empty: it waits."""
    attempt = one.answer_log.last_attempt
    return "" if attempt is None or attempt.ended_at else attempt.at.worker


class CallRoutes:
    """Handles both routes."""

    def __init__(self, exchange: CallExchange, note: AuditNote) -> None:
        self._exchange = exchange
        self._note = note

    async def show(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the calls under way, of `?model=`, `?team=` and `?status=` if given. Raises InvalidRequest."""
        query = query_of(scope)
        status = query.get("status", "")
        if status not in STATUSES:
            raise InvalidRequest(f"`status` is {quote(status)}. Send `waiting` or `running`.", param="status")
        found = await self._exchange.ask(team=query.get("team", ""), model=query.get("model", ""))
        rows = [row for row in found.rows if status in ("", row.status)]
        await send_json(send, {"data": rows, "silent": found.silent}, request_log_of(scope))

    async def cancel(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Cancel the calls of a request, at whichever gateway, and answer with them. Callers choose request ids, so
        `?team=` says whose it is where several teams have sent the same. Raises NotFound."""
        request_id, team = str(scope["path_params"]["request_id"]), query_of(scope).get("team", "")
        found = await self._exchange.ask(request_id=request_id, team=team, cancels=True)
        if not found.rows:
            silent = f" These gateways did not answer: {', '.join(found.silent)}." if found.silent else ""
            raise NotFound(
                f"No call with the request id {quote(request_id)} is under way: it has ended, or never was.{silent}"
            )
        is_audited = True
        for row in found.rows:
            after = {name: getattr(row, name) for name in ("model", "gateway", "worker", "status", "key", "since")}
            log.warning(
                "an admin cancelled a call",
                extra={"fields": {"by": principal.key_id, "request": row.request_id, "team": row.team, **after}},
            )
            is_audited &= await self._note(principal, scope, "cancel", "call", row.request_id, row.team, after)
        document = {"cancelled": found.rows, "silent": found.silent, "audited": is_audited}
        await send_json(send, document, request_log_of(scope))
