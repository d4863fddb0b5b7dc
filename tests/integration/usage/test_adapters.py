"""The adapter of a call in the ledger, wherever the request names it, and its price."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from msgspec.json import encode

from accounts.database.database import Database, open_database
from accounts.database.schema import prices
from accounts.database.upgrade import upgrade
from accounts.protocol.records import Price
from tests.support.caller import calling
from tests.support.ledger_rows import rows_when
from tests.support.stack import DEMO_MODEL, Stack

PIRATE = DEMO_MODEL.with_name("paddock-demo-pirate-lora.gguf")
MODEL, ADAPTER, DEAR = "demo", "pirate", "captain"
PRICES = (Price(model=ADAPTER, per_million_completion=50.0), Price(model="*", per_million_completion=9.0))
"""Of the price list; the model and the other adapter have theirs in the catalog."""
CATALOG = {
    "models": [
        {
            "name": MODEL,
            "path": str(DEMO_MODEL),
            "price": {"per_million_completion": 1.0},
            "adapters": [
                {"name": ADAPTER, "path": str(PIRATE), "price": {"per_million_completion": 2.0}},
                {"name": DEAR, "path": str(PIRATE), "price": {"per_million_completion": 70.0}},
            ],
        }
    ]
}
OF_MODEL, OF_ADAPTER, OF_DEAR = 1_000, 50_000, 70_000
"""Billionths for a generated token."""
COSTS = {"": OF_MODEL, ADAPTER: OF_ADAPTER, DEAR: OF_DEAR}


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    with Stack() as running:
        state_dir = running.folder / "state"
        state_dir.mkdir(mode=0o700)
        with closing(open_database("", state_dir)) as database:
            upgrade(database)
            with database.transaction() as connection:
                rows = [{"model": one.model, "valid_from": 0.0, "record": encode(one).decode()} for one in PRICES]
                connection.execute(prices.insert(), rows)
        running.accounts()
        catalog = running.folder / "catalog.json"
        catalog.write_text(json.dumps(CATALOG))
        adapters = json.dumps([{"name": name, "path": str(PIRATE)} for name in (ADAPTER, DEAR)])
        running.worker(DEMO_MODEL, MODEL, slots=2, ctx=1024, kv_tokens=2048, adapters=adapters)
        running.wait_until_listed(running.gateway(accounts_url=running.accounts_url, catalog=catalog), MODEL)
        yield running


@pytest.fixture
def database(stack: Stack) -> Iterator[Database]:
    opened = open_database("", stack.folder / "state")
    yield opened
    opened.close()


USES: list[tuple[str, dict[str, Any], str]] = [
    ("as the model", {"model": ADAPTER}, ADAPTER),
    ("by name", {"lora": [{"id": ADAPTER, "scale": 1.0}]}, ADAPTER),
    ("by number", {"lora": [{"id": 1, "scale": 0.5}]}, ADAPTER),
    ("one of the catalog", {"lora": [{"id": DEAR, "scale": 1.0}]}, DEAR),
    ("two of them", {"lora": [{"id": ADAPTER, "scale": 0.5}, {"id": DEAR, "scale": 0.5}]}, DEAR),
    ("two of them the other way round", {"lora": [{"id": DEAR, "scale": 0.5}, {"id": 1, "scale": 0.5}]}, DEAR),
    ("two of which one is off", {"lora": [{"id": ADAPTER, "scale": 0.5}, {"id": DEAR, "scale": 0.0}]}, ADAPTER),
    ("turned off", {"lora": [{"id": ADAPTER, "scale": 0.0}]}, ""),
    ("not at all", {}, ""),
]


@pytest.mark.parametrize(("body", "adapter"), [use[1:] for use in USES], ids=[use[0] for use in USES])
async def test_a_call_is_priced_by_the_adapter_that_it_uses(
    stack: Stack, database: Database, body: dict[str, Any], adapter: str, request: pytest.FixtureRequest
) -> None:
    """Nobody gets an adapter at the price of the model by naming it otherwise, or the model at that of an adapter."""
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        id = request.node.callspec.id.replace(" ", "-")
        url, asked = f"{caller.url}/v1/chat/completions", caller.body(max_tokens=4, **body)
        async with caller.session.post(url, json=asked, headers={"x-request-id": id}) as answer:
            assert answer.status == 200, await answer.text()
    (row,) = await rows_when(database, bool, id)
    assert row.adapter == adapter
    assert row.completion_tokens == 4
    assert row.cost_nano == 4 * COSTS[adapter]


async def test_a_models_card_tells_the_price_that_holds(stack: Stack) -> None:
    async with calling(stack.gateways[0].url, stack.key, MODEL) as caller:
        for name, rate in ((MODEL, 1.0), (ADAPTER, 50.0), (DEAR, 70.0)):
            async with caller.session.get(f"{caller.url}/v1/models/{name}") as answer:
                price = (await answer.json())["price"]
            assert (price["per_million_completion"], price["per_million_prompt"]) == (rate, 0.0)
            assert price["currency"] == "USD"


async def test_a_call_that_is_cut_is_priced_by_the_adapter_in_its_body(stack: Stack, database: Database) -> None:
    doomed = stack.gateway(accounts_url=stack.accounts_url)
    stack.wait_until_listed(doomed, MODEL)
    lora = [{"id": ADAPTER, "scale": 1.0}]
    async with (
        calling(doomed.url, stack.key, MODEL) as caller,
        caller.stream(lora=lora, max_tokens=900, ignore_eos=True) as stream,
    ):
        for _ in range(3):
            await stream.until_text()
        doomed.kill()
        with pytest.raises(aiohttp.ClientError):
            await stream.finish()
    (row,) = await rows_when(database, bool, stream.response.headers["x-request-id"])
    assert (row.outcome, row.adapter) == ("cut", ADAPTER)
    assert row.cost_nano == OF_ADAPTER * row.completion_tokens > 0
