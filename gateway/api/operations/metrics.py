"""`/metrics`, and `/metrics/targets`, where a scraper finds the workers. They bypass admission, and need no API
key unless one is set for them (`PADDOCK_METRICS_KEY`).

They show counts, names of models and teams, and addresses of workers. If that is too much to show, keep them behind
the ingress. A scrape reads the fleet and the queue on the event loop; the page is written in a thread, in slices
between which the event loop runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    refusal = "Only the key of PADDOCK_METRICS_KEY, or an API key with the role `metrics` or `admin`, may read metrics."
    return RouteToken(metrics_key, refusal, frozenset({"admin", "metrics"}))


class MetricsPage:
    """Answers with the metrics, in one of Prometheus' formats."""

    def __init__(
        self,
        registry: CollectorRegistry,
        update: Callable[[], None],
        shared_ports: Collection[int] = (),
        targets: Sequence[str] = (),
    ) -> None:
        """`update` is called at each scrape, to set the gauges. `shared_ports`: the ports that other gateways accept
        connections on as well; `targets`: addresses at which each of them is scraped."""
        self._page = Page(registry, update)
        self._shared_ports, self._targets = shared_ports, targets

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer with the page. Raises NotSupported on the shared port: each scrape would find another gateway, so that
        every counter would seem to jump."""
        port = scope["server"][1]  # None: the request came by the Unix socket, which several gateways share as well
        if self._shared_ports and (port is None or port in self._shared_ports):
            raise NotSupported(
                f"{len(self._targets)} gateways share this port, each with metrics of its own. Scrape all of "
                f"{', '.join(self._targets)}; GET /metrics/targets lists them for Prometheus."
            )
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
    """Lists the workers to scrape for Prometheus' `http_sd_configs`, each worker process by its own address, and the
    gateways that share a port."""

    def __init__(self, fleet: FleetView, gateways: Sequence[str] = ()) -> None:
        """`gateways`: addresses of gateways that share a port."""
        self._fleet = fleet
        self._gateways = [
            {"targets": [address], "labels": {"gateway": f"gateway-{number}"}}
            for number, address in enumerate(gateways)
        ]
        self._told: tuple[object, bytes] = (None, b"")
        """The fleet's workers, and the answer that lists them. It is kept: anybody may ask, and fleets can be large."""

    async def answer(self, principal: Principal, scope: Scope, receive: Receive, send: Send) -> None:
        workers = self._fleet.snapshot.workers
        if self._told[0] is not workers:
            groups = [*self._gateways, *(_group(beat) for beats in workers.values() for beat in beats)]
            self._told = workers, msgspec.json.encode(groups)
        await send_bytes(send, self._told[1], JSON, request_log_of(scope))


def _group(beat: Heartbeat) -> dict[str, object]:
    address = urlsplit(beat.address)
    labels = {"model": beat.model, "worker": beat.worker}
    if address.scheme != "http":
        labels["__scheme__"] = address.scheme
    return {"targets": [address.netloc], "labels": labels}
