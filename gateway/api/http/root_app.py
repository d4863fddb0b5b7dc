"""The outermost ASGI app: every request gets an id, exactly one answer, one log line and its place in the metrics."""

from __future__ import annotations

import logging

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.access.control import AccessControl
from gateway.api.dialect import ROUTE, SHAPE
from gateway.api.http.answers import send_error, shape_of
from gateway.api.http.diagnostics import answer_preflight, begin_trail
from gateway.api.http.sockets import METHOD, refusing
from gateway.api.intake.presence import CLIENT_GONE_STATUS, ClientGone
from gateway.api.openai.writing import OPENAI
from gateway.api.operations.drain import Attendance
from gateway.errors import InternalError, PaddockError
from gateway.telemetry.finish import close_trail
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail
from workers.tracing.tracer import OFF, Tracer

log = logging.getLogger(__name__)


class Door:
    def __init__(
        self,
        inside: ASGIApp,
        metrics: Metrics,
        attendance: Attendance,
        access: AccessControl,
        tracer: Tracer = OFF,
        *,
        refuses_unknown: bool = False,
    ) -> None:
        """`refuses_unknown`: parameters without effect are errors."""
        self._inside = inside
        self._metrics = metrics
        self._tracer = tracer
        self._refuses_unknown = refuses_unknown
        self._attendance = attendance
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            scope["method"] = METHOD
        elif scope["type"] != "http":
            # The server is configured without lifespan; what remains is refused by not answering.
            return
        trail = begin_trail(scope, self._tracer, refuses_unknown=self._refuses_unknown)
        trail.closes = self._attendance.draining and scope["type"] == "http"
        scope[SHAPE] = OPENAI
        counts = self._attendance.came(scope)
        try:
            if scope["method"] == "OPTIONS":
                trail.status = 200
                await answer_preflight(scope, send, trail.origin)
            else:
                await self._inside(scope, receive, send)
        except PaddockError as error:
            await self._answer(scope, receive, send, error, trail)
        except ClientGone:
            if not trail.handed_over:
                trail.status, trail.outcome = trail.status or CLIENT_GONE_STATUS, trail.outcome or "client_gone"
        except Exception:
            log.exception("request failed", extra={"fields": trail.name()})
            broken = InternalError.logged(trail.request_id)
            await self._answer(scope, receive, send, broken, trail)
        finally:
            trail.route = scope.get(ROUTE, "")
            self._access.end(scope)
            if counts:
                self._attendance.gone()
            if not trail.handed_over:
                close_trail(trail, self._metrics)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, error: PaddockError, trail: Trail) -> None:
        if trail.status == 0:
            told = refusing(send) if scope["type"] == "websocket" else send
            await send_error(receive, told, error, trail, shape_of(scope))
        else:
            trail.outcome = error.code or error.type
