"""Every route of the gateway, declared once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.api.dialect import SHAPE, ErrorShape
from gateway.api.openai.error_shape import OPENAI
from gateway.errors import MethodNotAllowed, NotFound


class RouteRow(NamedTuple):
    method: str
    path: str
    name: str
    """Of the app that answers; several routes may have one."""
    about: str
    shape: ErrorShape = OPENAI
    """How its errors look."""


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
    by_path: dict[str, list[RouteRow]] = defaultdict(list)
    for row in ROUTES:
        by_path[row.path].append(row)
    routes: list[Route] = []
    for path, rows in by_path.items():
        routes += [Route(path, _Shaped(apps[row.name], row.shape), methods=[row.method]) for row in rows]
        allowed = ", ".join(row.method for row in rows)
        routes.append(Route(path, _Shaped(_WrongMethod(allowed), rows[0].shape)))
    return Router(routes=routes, redirect_slashes=False, default=_unknown)


class _Shaped:
    """Whatever fails inside is told in the dialect of the route."""

    def __init__(self, inside: ASGIApp, shape: ErrorShape) -> None:
        self._inside = inside
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[SHAPE] = self._shape
        await self._inside(scope, receive, send)


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
