"""`/health/drain`: takes this gateway out of service without refusing a call.

From the first drain request on, `/ready` fails, so that load balancers send no new callers. Calls that still come are
answered until SIGTERM, each with `Connection: close`, so that their callers send the next one to another gateway. The
drain request is answered when no call runs and none has come for a while: SIGTERM then ends an idle process.
"""

from __future__ import annotations

import asyncio
import logging
import math
from time import monotonic

from starlette.types import Receive, Scope, Send

from gateway.access.control import RouteToken
from gateway.api.http.answers import send_json
from gateway.api.http.diagnostics import request_log_of
from gateway.api.http.sockets import Sockets
from gateway.api.intake.disconnect import until_disconnect
from gateway.api.request_headers import query_of
from gateway.call import Principal
from gateway.dispatch.call_resolver import CallResolver
from gateway.dispatch.pipeline import Pipeline
from gateway.errors import InvalidRequest
from gateway.telemetry.finish import PROBED
from workers.protocol import control
from workers.protocol.control import DRAIN_PATH, LONGEST_S, seconds_of

log = logging.getLogger(__name__)

UNCOUNTED = PROBED | {DRAIN_PATH}
"""Paths whose requests a drain does not wait for, since probes and scrapers use them until the process ends."""

SETTLE_S = 5.0
"""Seconds without a new request after which a drain may end: some balancers see `/ready` fail seconds after others."""
LOOK_S = 0.05
FIRST_REQUEST_S = 1.0
"""Seconds that a WebSocket opened during a drain has to send a first request before it is closed."""


class InFlightRequests:
    """Counts the requests that are being answered, and keeps the time when the last one came."""

    def __init__(self) -> None:
        self._drains_since = math.inf
        self._num_open = 0
        self._came_at = monotonic()

    @property
    def draining(self) -> bool:
        """Whether this gateway drains, so that balancers should send no new callers."""
        return self._drains_since < math.inf

    @property
    def num_open(self) -> int:
        """Number of open requests and WebSockets, without those on UNCOUNTED paths."""
        return self._num_open

    def drain(self) -> None:
        if not self.draining:
            log.info("gateway draining", extra={"fields": {"open": self._num_open}})
            self._drains_since = self._came_at = monotonic()

    def enter(self, scope: Scope) -> bool:
        """Count a request. Return False if its path is UNCOUNTED: then `leave` must not be called for it."""
        if scope["path"] in UNCOUNTED:
            return False
        self._num_open += 1
        self._came_at = monotonic()
        return True

    def leave(self) -> None:
        self._num_open -= 1

    def quiet_s(self) -> float:
        """Return the seconds since the last request came, or since the draining began if that was later."""
        return monotonic() - self._came_at

    def draining_s(self) -> float:
        """Return the seconds since the draining began; negative: it has not begun."""
        return monotonic() - self._drains_since


class DrainRoute:
    """Answers once this gateway can be stopped without cutting off a call, or after `timeout_s` of the query."""

    def __init__(
        self, in_flight: InFlightRequests, resolver: CallResolver, pipeline: Pipeline, sockets: Sockets
    ) -> None:
        self._in_flight = in_flight
        self._resolver = resolver
        self._pipeline = pipeline
        self._sockets = sockets

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        settle_s, timeout_s = seconds(scope, "settle_s", SETTLE_S), seconds(scope, "timeout_s", LONGEST_S)
        began = monotonic()
        self._in_flight.drain()
        async with until_disconnect(receive):
            drained = await self._wait_until_idle(settle_s, began + timeout_s)
        told = {
            "status": "drained" if drained else "draining",
            "calls": self._num_calls(),
            "waited_s": round(monotonic() - began, 3),
        }
        await send_json(send, told, request_log_of(scope))

    async def _wait_until_idle(self, settle_s: float, until: float) -> bool:
        """Wait until no call is open and none came for `settle_s`. Return False if `until` or SIGTERM came first."""
        while self._num_calls() or self._in_flight.quiet_s() < settle_s:
            left_s = until - monotonic()
            if left_s <= 0 or self._resolver.stopping:
                return False
            if self._in_flight.draining_s() >= settle_s:
                self._sockets.stop(older_than_s=FIRST_REQUEST_S)
            await asyncio.sleep(min(LOOK_S, left_s))
        return True

    def _num_calls(self) -> int:
        """Return the number of open requests or, if greater, of running calls: a call can outlive its request."""
        return max(self._in_flight.num_open, self._pipeline.num_calls)


def drain_route_token(secret: str) -> RouteToken:
    """Return the route's token, made from the secret that all gateways share; `paddock drain` sends it."""
    # Where a caller connects from proves nothing: behind a proxy on this machine everybody comes from here.
    refusal = "Only an admin's API key, or `paddock drain`, may drain this gateway."
    return RouteToken(control.gateway_drain_token(secret), refusal)


def seconds(scope: Scope, name: str, default: float) -> float:
    """Return the query's parameter `name`, in seconds; `default` if it is missing. Raises InvalidRequest."""
    text = query_of(scope).get(name)
    try:
        return default if text is None else seconds_of(text)
    except ValueError as error:
        raise InvalidRequest(f"`{name}` {error}.", param=name) from None
