"""`/metrics`, and `/metrics/targets`, where a scraper finds the workers: without a key and past admission.

They tell counts, names of models and teams, and addresses of workers; keep them behind the ingress where that is too
much.

A scrape costs the event loop a look at the fleet and the line. The text is rendered in a thread, in slices between
which the event loop gets on.
"""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gateway.api.answers import JSON, send_bytes
from gateway.api.diagnostics import answer_headers, trail_of
from gateway.pipeline import Fleet
from gateway.telemetry.metrics import OK
from workers.protocol.heartbeat import Heartbeat
from workers.protocol.metrics.book import CONTENT_TYPE, Book

GZIP_LEVEL = 1
"""A twentieth of the bytes for a few milliseconds of a thread that leaves the others alone meanwhile."""
GZIP = 31
"""zlib's name for gzip's format."""


class MetricsPage:
    """Prometheus text. Scrapes that come together get one page, so that many scrapers cost what two do."""

    def __init__(self, book: Book, look: Callable[[], None]) -> None:
        """`look` sets what is as it is at a scrape."""
        self._book = book
        self._look = look
        self._rendering = asyncio.Lock()
        self._looked_at = float("-inf")
        """When what is in `_page` was so, time.monotonic()."""
        self._page = b""
        self._zipped = b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        zipped = "gzip" in Headers(scope=scope).get("accept-encoding", "")
        body = await self._rendered(zipped)
        trail = trail_of(scope)
        trail.status, trail.outcome = 200, OK
        headers = [
            (b"content-type", CONTENT_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"vary", b"accept-encoding"),
            *([(b"content-encoding", b"gzip")] if zipped else []),
            *answer_headers(trail),
        ]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _rendered(self, zipped: bool) -> bytes:
        came_at = time.monotonic()
        async with self._rendering:
            if self._looked_at < came_at:
                looked_at = time.monotonic()
                self._look()
                self._page = await asyncio.to_thread(self._book.render_aside)
                self._looked_at, self._zipped = looked_at, b""
            if zipped and not self._zipped:
                self._zipped = await asyncio.to_thread(zlib.compress, self._page, GZIP_LEVEL, GZIP)
            return self._zipped if zipped else self._page


class Targets:
    """Prometheus' `http_sd_configs` asks here which workers there are to scrape, each process by its own address."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        groups = [_group(beat) for beats in self._fleet.snapshot.workers.values() for beat in beats]
        await send_bytes(send, msgspec.json.encode(groups), JSON, trail_of(scope))


def _group(beat: Heartbeat) -> dict[str, object]:
    address = urlsplit(beat.address)
    labels = {"model": beat.model, "worker": beat.worker}
    if address.scheme != "http":
        labels["__scheme__"] = address.scheme
    return {"targets": [address.netloc], "labels": labels}
