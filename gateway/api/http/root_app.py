"""The outermost ASGI app: gives every request an id, exactly one answer and one log line, and counts it in metrics."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.control import AccessControl
from gateway.api.dialect import ROUTE, SHAPE
from gateway.api.http.answers import send_error, shape_of
from gateway.api.http.diagnostics import answer_preflight, begin_request_log
from gateway.api.http.sockets import METHOD, refusing
from gateway.api.intake.disconnect import CLIENT_GONE_STATUS, ClientGone
from gateway.api.openai.writing import OPENAI
from gateway.api.operations.drain import InFlightRequests
from gateway.errors import InternalError, PaddockError
from gateway.telemetry.finish import finish_request
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.request_log import RequestLog
from workers.tracing.tracer import OFF, Tracer

log = logging.getLogger(__name__)


class Door:
    def __init__(
        self,
        inside: ASGIApp,
        metrics: Metrics,
        in_flight: InFlightRequests,
        access: AccessControl,
        tracer: Tracer = OFF,
        *,
        refuses_unknown: bool = False,
    ) -> None:
        """`refuses_unknown`: whether parameters without effect are errors."""
        self._inside = inside
        self._metrics = metrics
        self._tracer = tracer
        self._refuses_unknown = refuses_unknown
        self._in_flight = in_flight
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope["method"] = METHOD
        elif scope["type"] != "http":
            # Lifespan is off in the server's configuration; any other type is refused by returning without an answer.
            return
        closes = self._in_flight.draining and scope["type"] == "http"
        request_log = begin_request_log(scope, self._tracer, closes=closes, refuses_unknown=self._refuses_unknown)
        scope[SHAPE] = OPENAI
        counts = self._in_flight.enter(scope)
        try:
            if scope["method"] == "OPTIONS":
                request_log.status = 200
                await answer_preflight(scope, send, request_log.origin)
            else:
                await self._inside(scope, receive, send)
        except PaddockError as error:
            await self._answer(scope, receive, send, error, request_log)
        except ClientGone:
            if not request_log.handed_over:
                request_log.status, request_log.outcome = (
                    request_log.status or CLIENT_GONE_STATUS,
                    request_log.outcome or "client_gone",
                )
        except Exception:
            log.exception("request failed", extra={"fields": request_log.ids()})
            broken = InternalError.logged(request_log.request_id)
            await self._answer(scope, receive, send, broken, request_log)
        finally:
            request_log.route = scope.get(ROUTE, "")
            self._access.end(scope)
            if counts:
                self._in_flight.leave()
            if not request_log.handed_over:
                finish_request(request_log, self._metrics)

    async def _answer(
        self, scope: Scope, receive: Receive, send: Send, error: PaddockError, request_log: RequestLog
    ) -> None:
        if request_log.status == 0:
            told = refusing(send) if scope["type"] == "websocket" else send
            await send_error(receive, told, error, request_log, shape_of(scope))
        else:
            request_log.outcome = error.code or error.type
