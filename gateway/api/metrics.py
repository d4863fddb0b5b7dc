"""`/metrics`, and `/metrics/targets`, where a scraper finds the workers: without a key and past admission.

They tell counts, names of models and teams, and addresses of workers; keep them behind the ingress where that is too
much.

A scrape costs the event loop a look at the fleet and the line. The text is rendered in a thread, in slices between
which the event loop gets on.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.access.keys import Keys
from gateway.api.answers import JSON, send_bytes, send_last
from gateway.api.diagnostics import answer_headers, trail_of
from gateway.errors import NotSupported, PermissionDenied
from gateway.pipeline import Fleet
from gateway.telemetry.metrics import OK
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.metrics.book import Book
from workers.protocol.metrics.page import Page


class ScrapeAccess:
    """Decides who may read metrics: anybody, unless a key for that is set; then whoever has it, and admins.

    Counters of teams, read before and after a call, tell how long its prompt was.
    """

    def __init__(self, keys: Keys, metrics_key: str) -> None:
        """`metrics_key` empty: anybody may read."""
        self._keys = keys
        self._bearer = b"Bearer " + metrics_key.encode() if metrics_key else b""

    def check(self, scope: Scope) -> None:
        """Check that the caller may read metrics. Raises AuthenticationFailed, PermissionDenied."""
        if not self._bearer:
            return
        given = Headers(scope=scope).get("authorization", "").encode("latin-1")
        if hmac.compare_digest(given, self._bearer):
            return
        if not self._keys.authenticate(scope["headers"]).admin:
            raise PermissionDenied("Only the key of PADDOCK_METRICS_KEY or an admin's API key may read metrics.")


class MetricsPage:
    """Answers with metrics as Prometheus text."""

    def __init__(self, book: Book, look: Callable[[], None], access: ScrapeAccess) -> None:
        """`look` sets the gauges at a scrape."""
        self._page = Page(book, look)
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access.check(scope)
        body, told = await self._page.answer(Headers(scope=scope).get("accept-encoding", ""))
        trail = trail_of(scope)
        trail.status, trail.outcome = 200, OK
        headers = [
            *((name.encode(), value.encode()) for name, value in told.items()),
            (b"content-length", b"%d" % len(body)),
            *answer_headers(trail),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send_last(send, body)


class NoMetrics:
    """Refuses both routes, where the operator has switched them off."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise NotSupported("This gateway shows no metrics. An operator can switch them on: PADDOCK_METRICS_ENDPOINT.")


class Targets:
    """Tells Prometheus' `http_sd_configs` which workers there are to scrape, each process by its own address."""

    def __init__(self, fleet: Fleet, access: ScrapeAccess) -> None:
        self._fleet = fleet
        self._access = access
        self._told: tuple[object, bytes] = (None, b"")
        """The workers of a snapshot and the answer that lists them: anybody may ask, however large the fleet is."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._access.check(scope)
        workers = self._fleet.snapshot.workers
        if self._told[0] is not workers:
            groups = [_group(beat) for beats in workers.values() for beat in beats]
            self._told = workers, msgspec.json.encode(groups)
        await send_bytes(send, self._told[1], JSON, trail_of(scope))


def _group(beat: Heartbeat) -> dict[str, object]:
    address = urlsplit(beat.address)
    labels = {"model": beat.model, "worker": beat.worker}
    if address.scheme != "http":
        labels["__scheme__"] = address.scheme
    return {"targets": [address.netloc], "labels": labels}
