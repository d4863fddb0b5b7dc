"""`/metrics`, and `/metrics/targets`, where a scraper finds the workers. They bypass admission, and need no API
key unless one is set for them (`PADDOCK_METRICS_KEY`).

They show counts, names of models and teams, and addresses of workers. If that is too much to show, keep them behind
the ingress. A scrape reads the fleet and the queue on the event loop; the page is written in a thread, in slices
between which the event loop runs.
"""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.access.control import RouteToken
from gateway.api.http.answers import JSON, send_bytes, send_last
from gateway.api.http.diagnostics import answer_headers, request_log_of
from gateway.call import Principal
from gateway.errors import NotSupported
from gateway.registry.snapshot import FleetView
from gateway.telemetry.metrics import OK
from workers.metrics.page import Page
from workers.protocol.heartbeat import Heartbeat

METRICS_PATHS = ("/metrics", "/metrics/targets")


def metrics_route_token(metrics_key: str) -> RouteToken:
    """Return the token of both routes, for operators who limit who may read them.

    Limiting them is useful: a team's counters, read before and after a call, show how long the call's prompt was."""
    return RouteToken(metrics_key, "Only the key of PADDOCK_METRICS_KEY or an admin's API key may read metrics.")


class MetricsPage:
    """Answers with the metrics, in one of Prometheus' formats."""

    def __init__(self, registry: CollectorRegistry, update: Callable[[], None]) -> None:
        """`update` is called at each scrape, to set the gauges."""
        self._page = Page(registry, update)

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        asked = Headers(scope=scope)
        body, told = await self._page.answer(asked.get("accept", ""), asked.get("accept-encoding", ""))
        request_log = request_log_of(scope)
        request_log.status, request_log.outcome = 200, OK
        headers = [
            *((name.encode(), value.encode()) for name, value in told.items()),
            (b"content-length", b"%d" % len(body)),
            *answer_headers(request_log),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_last(send, body)


async def refuse_metrics(principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request to either route, because the operator has switched them off."""
    raise NotSupported("This gateway shows no metrics. An operator can switch them on: PADDOCK_METRICS_ENDPOINT.")


class Targets:
    """Lists the workers to scrape for Prometheus' `http_sd_configs`, each worker process by its own address."""

    def __init__(self, fleet: FleetView) -> None:
        self._fleet = fleet
        self._told: tuple[object, bytes] = (None, b"")
        """The fleet's workers, and the answer that lists them. It is kept: anybody may ask, and fleets can be large."""

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        workers = self._fleet.snapshot.workers
        if self._told[0] is not workers:
            groups = [_group(beat) for beats in workers.values() for beat in beats]
            self._told = workers, msgspec.json.encode(groups)
        await send_bytes(send, self._told[1], JSON, request_log_of(scope))


def _group(beat: Heartbeat) -> dict[str, object]:
    address = urlsplit(beat.address)
    labels = {"model": beat.model, "worker": beat.worker}
    if address.scheme != "http":
        labels["__scheme__"] = address.scheme
    return {"targets": [address.netloc], "labels": labels}
