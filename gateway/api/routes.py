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
    """`apps` by the rows' names, as objects: Starlette takes functions for request handlers.

    A bare router hands on `send` as it is; a whole Starlette application would add its wrappers to every token's cost.
    """
    routes: list[Route] = []
    for row in ROUTES:
        routes.append(Route(row.path, apps[row.name], methods=[row.method]))
        routes.append(Route(row.path, _WrongMethod(row.method)))
    return Router(routes=routes, redirect_slashes=False, default=_unknown)


class _WrongMethod:
    def __init__(self, allowed: str) -> None:
        self._allowed = allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raise MethodNotAllowed(
            f"{scope['method']} {_shown(scope['path'])} does not exist. Use {self._allowed}.", allow=self._allowed
        )


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    near = f"/v1{scope['path']}"
    hint = f" Did you mean {_shown(near)}?" if any(row.path == near for row in ROUTES) else ""
    known = ", ".join(f"{row.method} {row.path.replace(':path', '')}" for row in ROUTES)
    raise NotFound(f"There is no route {scope['method']} {_shown(scope['path'])}.{hint} Routes: {known}.")


def _shown(path: str) -> str:
    return path if len(path) <= 120 else path[:117] + "..."
