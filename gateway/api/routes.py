"""Every route of the gateway, declared once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.errors import MethodNotAllowed, NotFound


class RouteRow(NamedTuple):
    method: str
    path: str
    name: str
    about: str


ROUTES = (
    RouteRow("POST", "/v1/chat/completions", "chat", "an answer to a conversation, streamed or whole"),
    RouteRow("GET", "/v1/models", "models", "the models that the key may use"),
    RouteRow("GET", "/v1/models/{model:path}", "model", "one of them"),
    RouteRow("GET", "/health", "health", "the process is up; no key needed"),
    RouteRow("GET", "/ready", "ready", "calls would be answered; no key needed"),
    RouteRow("GET", "/metrics", "metrics", "Prometheus text; no key needed"),
)


def build_router(apps: Mapping[str, ASGIApp]) -> Router:
    """`apps` by the rows' names. Starlette's router hands on `send` as it is: nothing is wrapped around a token."""
    routes: list[Route] = []
    for row in ROUTES:
        routes.append(Route(row.path, _Endpoint(apps[row.name]), methods=[row.method]))
        routes.append(Route(row.path, _Endpoint(_WrongMethod(row.method))))
    return Router(routes=routes, redirect_slashes=False, default=_unknown)


class _Endpoint:
    """Starlette takes a function for a request handler and any other object for an ASGI app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


class _WrongMethod:
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(f"{scope['method']} {_shown(scope['path'])} does not exist. Use {self._allowed}.")


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    near = f"/v1{scope['path']}"
    hint = f" Did you mean {_shown(near)}?" if any(row.path == near for row in ROUTES) else ""
    known = ", ".join(f"{row.method} {row.path.replace(':path', '')}" for row in ROUTES)
    raise NotFound(f"There is no route {scope['method']} {_shown(scope['path'])}.{hint} Routes: {known}.")


def _shown(path: str) -> str:
    return path if len(path) <= 120 else path[:117] + "..."
