"""Each route asks of its callers what its row says."""

from __future__ import annotations

import aiohttp
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from gateway.access.control import Access
from gateway.api.http.sockets import METHOD
from gateway.api.routes import ROUTES, RouteRow
from tests.integration.front.conftest import NARROW_KEY
from tests.support.stack import Process

NAMES = {"{model:path}": "quick", "{response_id}": "resp_1", "{id_slot}": "0", "{file}": "app.js"}
ANSWERS = {"accounts": 501, "sign_in": 400}
"""Open routes that answer something else than 200 here: there is no accounts service, and a sign-in needs a body."""


async def answered(gateway: Process, row: RouteRow, key: str) -> int:
    """Return the status of a request without a body. Each route is asked from an address of its own, as failures are
    slowed by address."""
    peer = (f"127.0.1.{ROUTES.index(row) % 250 + 1}", 0)
    url = gateway.url + row.path
    for name, value in NAMES.items():
        url = url.replace(name, value)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if row.method == METHOD:
        try:
            async with connect(url.replace("http", "ws", 1), additional_headers=headers, local_addr=peer):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code
    connector = aiohttp.TCPConnector(local_addr=peer)
    async with (
        aiohttp.ClientSession(connector=connector) as session,
        session.request(row.method, url, headers=headers) as response,
    ):
        return response.status


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: f"{row.method} {row.path}")
async def test_a_route_asks_for_what_its_row_says(gateway: Process, row: RouteRow) -> None:
    without, wrong = await answered(gateway, row, ""), await answered(gateway, row, "wrong")
    if row.access is Access.OPEN:
        assert without == wrong
        assert without == ANSWERS.get(row.name, 200)
        return
    assert (without, wrong) == (401, 401)
    plain = await answered(gateway, row, NARROW_KEY)
    assert plain == 403 if row.access is Access.ADMIN else plain not in (401, 403)


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/quick"])
async def test_who_speaks_anthropics_dialect_is_refused_in_it(gateway: Process, path: str) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    async with aiohttp.ClientSession() as session, session.get(gateway.url + path, headers=headers) as response:
        assert response.status == 401
        told = await response.json()
        assert (told["type"], told["error"]["type"]) == ("error", "authentication_error")
