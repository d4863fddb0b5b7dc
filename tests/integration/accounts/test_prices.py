"""The price list: set, dated, audited, published to a real Redis, where gateways read it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
import redis.asyncio
from sqlalchemy import select

from accounts.access.changes import Changes
from accounts.access.mirror import Adoption, Mirror
from accounts.access.publisher import Publisher
from accounts.budgets.prices import PriceRoutes
from accounts.database.database import Database
from accounts.database.schema import audit
from accounts.errors import Invalid, Missing
from accounts.protocol.records import Price, PriceListRecord, open_subject
from tests.support.redis_server import RedisServer
from tests.support.usage_rows import asked
from workers.protocol import keys
from workers.redis.link import connect

SECRET = "a gateway secret of this test"


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as started:
        yield started


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[redis.asyncio.Redis]:
    made = connect(server.url_of("gateway"), timeout_s=5.0, retries=0)
    yield made
    await made.aclose()


@pytest.fixture
async def routes(database: Database, client: redis.asyncio.Redis) -> AsyncIterator[PriceRoutes]:
    """The handlers, with a publisher that runs."""
    adoption = Adoption(database, SECRET)
    adoption.prepare()
    publisher = Publisher(client, Mirror(database, SECRET), adoption)
    running = asyncio.create_task(publisher.run())
    yield PriceRoutes(Changes(database, publisher))
    running.cancel()


async def ask(handler: Any, body: dict[str, Any] | None = None, **query: Any) -> dict[str, Any]:
    request = replace(asked(**query), body=b"" if body is None else json.dumps(body).encode())
    document: dict[str, Any] = json.loads(bytes((await asyncio.to_thread(handler, request)).body))
    return document


async def published(client: redis.asyncio.Redis) -> PriceListRecord:
    value = await client.hget(keys.ACCESS_SUBJECTS, "prices:prices")
    assert value is not None
    found = open_subject(value, SECRET)
    assert isinstance(found, PriceListRecord)
    return found


async def test_prices_are_set_changed_deleted_and_published(routes: PriceRoutes, client: redis.asyncio.Redis) -> None:
    old = {"model": "llama", "per_million_prompt": 0.5, "per_million_completion": 1.5}
    new = {"model": "llama", "valid_from": "2026-12-01", "per_million_prompt": 0.25, "per_gpu_second": 0.001}
    assert (await ask(routes.set_price, old))["published"]
    await ask(routes.set_price, new)
    await ask(routes.set_price, {"model": "*", "per_million_cached": 0.1})
    assert (await published(client)).prices == (
        Price(model="*", per_million_cached=0.1),
        Price(model="llama", per_million_prompt=0.5, per_million_completion=1.5),
        Price(model="llama", valid_from=1796083200.0, per_million_prompt=0.25, per_gpu_second=0.001),
    )
    listed = await ask(routes.list_prices)
    holds = {(price["model"], price["valid_from"]): price["holds_now"] for price in listed["data"]}
    is_december = time.time() >= 1796083200.0
    assert holds == {("*", 0): True, ("llama", 0): not is_december, ("llama", 1796083200.0): is_december}
    await ask(routes.set_price, {**old, "per_million_prompt": 0.75})
    await ask(routes.delete_price, model="llama", valid_from="2026-12-01")
    assert (await published(client)).prices[1:] == (
        Price(model="llama", per_million_prompt=0.75, per_million_completion=1.5),
    )


async def test_the_currency_is_a_name(routes: PriceRoutes, client: redis.asyncio.Redis) -> None:
    assert (await ask(routes.list_prices))["currency"] == "USD"
    assert (await ask(routes.set_currency, {"currency": "EUR"}))["published"]
    assert (await ask(routes.list_prices))["currency"] == "EUR"
    assert (await published(client)).currency == "EUR"


async def test_every_change_is_audited_and_what_changes_nothing_is_not(routes: PriceRoutes, database: Database) -> None:
    price = {"model": "llama", "per_million_prompt": 0.5}
    await ask(routes.set_price, price)
    await ask(routes.set_price, price)
    await ask(routes.set_price, {**price, "per_million_prompt": 0.6})
    await ask(routes.delete_price, model="llama")
    await ask(routes.set_currency, {"currency": "EUR"})
    await ask(routes.set_currency, {"currency": "EUR"})
    with database.reading() as connection:
        rows = connection.execute(select(audit).where(audit.c.kind == "prices").order_by(audit.c.number)).all()
    assert [(row.action, row.subject) for row in rows] == [
        *(("create", "llama"), ("update", "llama"), ("delete", "llama"), ("update", "currency")),
    ]
    before, after = json.loads(rows[1].before), json.loads(rows[1].after)
    assert (before["per_million_prompt"], after["per_million_prompt"]) == (0.5, 0.6)
    assert (rows[2].after, json.loads(rows[3].after)) == (None, {"currency": "EUR"})
    assert {row.actor for row in rows} == {"key:first"}


@pytest.mark.parametrize(
    "body",
    [
        *({}, {"model": ""}, {"model": "llama", "per_million_prompt": -1}, {"model": "llama", "price": 1}),
        *({"model": "llama", "valid_from": "soon"}, {"model": "llama", "per_million_prompt": "free"}),
    ],
)
async def test_what_is_no_price_is_refused(routes: PriceRoutes, body: dict[str, Any]) -> None:
    with pytest.raises(Invalid):
        await ask(routes.set_price, body)


async def test_other_refusals(routes: PriceRoutes) -> None:
    with pytest.raises(Missing, match="llama"):
        await ask(routes.delete_price, model="llama")
    for body in ({}, {"currency": ""}, {"currency": "x" * 17}, {"currency": 5}):
        with pytest.raises(Invalid, match="currency"):
            await ask(routes.set_currency, body)
