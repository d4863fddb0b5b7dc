"""Serves `/metrics` beside the API, without a caller: its figures have no names of keys, people or callers' texts.

It is answered where gateways are: on a Unix socket, or at HOST:PORT, which nobody but gateways and Prometheus should
reach.
"""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from workers.metrics.page import Page

PATH = "/metrics"


def with_metrics(api: ASGIApp, page: Page) -> ASGIApp:
    """Return an app that answers scrapes with the page, and whatever else as the API does."""

    async def show(request: Request) -> Response:
        asked = request.headers
        body, headers = await page.answer(asked.get("accept", ""), asked.get("accept-encoding", ""))
        return Response(body, headers=headers)

    return Starlette(routes=[Route(PATH, show), Mount("", api)])
