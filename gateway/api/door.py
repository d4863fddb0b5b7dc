"""The outermost ASGI app: every request gets an id, exactly one answer, one log line and its place in the metrics."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.diagnostics import begin_trail
from gateway.api.errors import send_error, shape_of
from gateway.api.presence import ClientGone
from gateway.errors import InternalError, PaddockError
from gateway.telemetry.logs import PROBED, log_request
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.trail import Trail

log = logging.getLogger(__name__)

CLIENT_GONE_STATUS = 499
"""In the log only: nobody is there to read it. nginx's convention."""


class Door:
    def __init__(self, inside: ASGIApp, metrics: Metrics) -> None:
        self._inside = inside
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            # The server is configured without lifespan and WebSocket; what remains is refused by not answering.
            return
        trail = begin_trail(scope)
        try:
            await self._inside(scope, receive, send)
        except PaddockError as error:
            await self._answer(scope, receive, send, error, trail)
        except ClientGone:
            trail.status, trail.outcome = trail.status or CLIENT_GONE_STATUS, trail.outcome or "client_gone"
        except Exception:
            log.exception("request failed", extra={"fields": {"request_id": trail.request_id}})
            broken = InternalError(f"Something broke in the gateway; its log has request {trail.request_id}.")
            await self._answer(scope, receive, send, broken, trail)
        finally:
            self._close(trail)

    async def _answer(self, scope: Scope, receive: Receive, send: Send, error: PaddockError, trail: Trail) -> None:
        if trail.status == 0:
            await send_error(receive, send, error, trail, shape_of(scope))
        else:
            trail.outcome = error.code or error.type

    def _close(self, trail: Trail) -> None:
        trail.outcome = trail.outcome or ("ok" if 0 < trail.status < 400 else "cancelled")
        if trail.model:
            self._metrics.ended(trail, time.monotonic() - trail.received_at)
        elif trail.outcome != "ok" and trail.path not in PROBED:
            self._metrics.turned_away(trail)
        log_request(trail)
