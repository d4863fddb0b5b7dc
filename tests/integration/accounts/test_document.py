"""The description of the API: every route and its bodies, as OpenAPI 3.1 and as a page."""

from __future__ import annotations

import re

from accounts.protocol.caller import HEADER, Caller
from tests.support.admin_api import AdminApi, sealed


async def test_every_route_is_described(api: AdminApi) -> None:
    document = (await api.client.get("/admin/openapi.json", headers=_nobody())).json()
    assert document["openapi"] == "3.1.0"
    told = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    for path in ("keys", "teams", "users", "organisations", "aliases"):
        assert {("GET", f"/admin/{path}"), ("POST", f"/admin/{path}"), ("PATCH", f"/admin/{path}/{{name}}")} <= told
    assert {("POST", "/admin/apply"), ("GET", "/admin/audit/verify"), ("POST", "/key/generate")} <= told
    names = re.findall(r'"#/components/schemas/([^"]+)"', str(document).replace("'", '"'))
    assert set(names) <= document["components"]["schemas"].keys()
    ids = [told["operationId"] for methods in document["paths"].values() for told in methods.values()]
    assert len(ids) == len(set(ids))
    made = document["components"]["schemas"]["KeyCreate"]
    assert made["additionalProperties"] is False
    assert "CIDR" in made["properties"]["networks"]["description"]
    assert "sha256" not in made["properties"]


async def test_the_page_needs_no_other_file(api: AdminApi) -> None:
    answer = await api.client.get("/admin/docs", headers=_nobody())
    assert answer.headers["content-type"].startswith("text/html")
    assert "<code>/admin/keys/{name}/rotate</code>" in answer.text
    assert not re.search(r"<(script|link|img)|url\(|@import", answer.text)


def _nobody() -> dict[str, str]:
    return {HEADER: sealed(Caller())}
