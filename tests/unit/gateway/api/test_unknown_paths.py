"""Paths that nobody has are refused without comparing them with every route."""

from __future__ import annotations

from functools import partial

import pytest
from starlette.routing import Match, Route
from starlette.types import Scope

from accounts.protocol.records import AccessRecord, digest
from gateway.access.control import AccessControl
from gateway.access.keys import Keys
from gateway.api.http.diagnostics import PRIVATE, begin_request_log
from gateway.api.routes import ROUTES, RouteRow, Routes, spellings
from gateway.errors import MethodNotAllowed, NotFound
from gateway.telemetry.finish import PROBED
from gateway.telemetry.metrics import operation_of
from workers.tracing.tracer import OFF


async def ask(method: str, path: str) -> list[str]:
    """Return the names of the handlers that a request reaches."""
    reached: list[str] = []

    async def reach(name: str, *_: object) -> None:
        reached.append(name)

    handlers = {row.name: partial(reach, row.name) for row in ROUTES}
    routes = Routes(handlers, AccessControl(Keys([AccessRecord(name="an", sha256=digest("key"), admin=True)])))

    async def nothing(*_: object) -> None:
        raise AssertionError("nothing is read or sent")

    headers = [(b"authorization", b"Bearer key")]
    scope: Scope = {"type": "http", "method": method, "path": path, "headers": headers, "root_path": ""}
    begin_request_log(scope, OFF)
    await routes(scope, nothing, nothing)  # type: ignore[arg-type]
    return reached


@pytest.mark.parametrize("row", [row for row in ROUTES if row.method != "WEBSOCKET"], ids=lambda row: row.path)
async def test_every_route_is_reached(row: RouteRow) -> None:
    path = row.path.replace("{model:path}", "a/b")
    path = path.replace("{response_id}", "resp_1").replace("{id_slot}", "0")
    assert await ask(row.method, path) == [row.name]


async def test_an_alias_differs_from_its_route_by_the_path_alone() -> None:
    declared = {(row.method, row.path): row for row in ROUTES if not row.alias_of}
    aliases = [row for row in ROUTES if row.alias_of]
    assert len(declared) + len(aliases) == len({(row.method, row.path) for row in ROUTES})
    for row in aliases:
        of = declared[row.method, row.alias_of]
        assert row.path in of.aliases
        assert (row.name, row.access, row.shape, row.shape_of) == (of.name, of.access, of.shape, of.shape_of)
        assert operation_of(row.path) == operation_of(of.path), "both are counted as the same kind of work"
        assert (row.path in PRIVATE) == (of.path in PRIVATE), "pages may read both or neither"
        assert (row.path in PROBED) == (of.path in PROBED), "both are probes or neither"
    assert spellings("POST", "/v1/rerank") == (
        "POST /v1/rerank",
        "POST /v1/reranking",
        "POST /rerank",
        "POST /reranking",
    )


async def test_few_patterns_are_compared_with_an_unknown_path(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    matches = Route.matches

    def compare(route: Route, scope: Scope) -> tuple[Match, Scope]:
        compared.append(route.path)
        return matches(route, scope)

    monkeypatch.setattr(Route, "matches", compare)
    with pytest.raises(NotFound, match=r"Did you mean /v1/messages\? `GET /docs` lists them"):
        await ask("POST", "/messages")
    assert compared
    assert all("{" in path for path in compared)


async def test_another_method_is_told_which_there_are() -> None:
    with pytest.raises(MethodNotAllowed, match="Use POST"):
        await ask("PUT", "/v1/chat/completions")
    with pytest.raises(MethodNotAllowed, match="Use GET, DELETE"):
        await ask("PUT", "/v1/responses/resp_1")
