"""Paths that nobody has are refused without comparing them with every route."""

from __future__ import annotations

import pytest
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from gateway.api.routes import ROUTES, RouteRow, Routes
from gateway.errors import MethodNotAllowed, NotFound


class Named:
    """The app of one route."""

    def __init__(self, name: str, reached: list[str]) -> None:
        self._name, self._reached = name, reached

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._reached.append(self._name)


async def ask(method: str, path: str) -> list[str]:
    """Return the names of the apps that a request reaches."""
    reached: list[str] = []
    routes = Routes({row.name: Named(row.name, reached) for row in ROUTES})

    async def nothing(*_: object) -> None:
        raise AssertionError("nothing is read or sent")

    scope = {"type": "http", "method": method, "path": path, "headers": [], "root_path": ""}
    await routes(scope, nothing, nothing)  # type: ignore[arg-type]
    return reached


@pytest.mark.parametrize("row", [row for row in ROUTES if row.method != "WEBSOCKET"], ids=lambda row: row.path)
async def test_every_route_is_reached(row: RouteRow) -> None:
    path = row.path.replace("{model:path}", "a/b")
    path = path.replace("{response_id}", "resp_1").replace("{id_slot}", "0")
    assert await ask(row.method, path) == [row.name]


async def test_few_patterns_are_compared_with_an_unknown_path(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    matches = Route.matches

    def compare(route: Route, scope: Scope) -> tuple[Match, Scope]:
        compared.append(route.path)
        return matches(route, scope)

    monkeypatch.setattr(Route, "matches", compare)
    with pytest.raises(NotFound, match=r"Did you mean /v1/messages\?.*Routes: POST /v1/chat/completions, "):
        await ask("POST", "/messages")
    assert compared
    assert all("{" in path for path in compared)


async def test_another_method_is_told_which_there_are() -> None:
    with pytest.raises(MethodNotAllowed, match="Use POST"):
        await ask("PUT", "/v1/chat/completions")
    with pytest.raises(MethodNotAllowed, match="Use GET, DELETE"):
        await ask("PUT", "/v1/responses/resp_1")
