"""Costs of calls, by price lists with dates."""

from __future__ import annotations

from dataclasses import dataclass, field

from accounts.protocol.records import Price, PriceListRecord
from accounts.protocol.usage import NANO, UsageRecord
from gateway.limits.cost import Prices
from workers.models.prices import Rates
from workers.protocol.events import Usage

USAGE = Usage(1000, 200, 400)


@dataclass
class Source:
    prices: PriceListRecord = field(default_factory=PriceListRecord)


def prices(*rows: Price) -> Prices:
    return Prices(Source(PriceListRecord(prices=rows)))


def test_tokens_and_seconds_are_added_up() -> None:
    price = Price(
        model="m", per_million_prompt=3.0, per_million_cached=0.5, per_million_completion=10.0, per_gpu_second=0.001
    )
    expected = (600 * 3.0 + 400 * 0.5 + 200 * 10.0) / 1e6 + 2.5 * 0.001
    assert prices(price).cost_nano(USAGE, 2500, "m", "", 0) == round(expected * NANO)


def test_without_a_price_nothing_costs_anything() -> None:
    assert prices().cost_nano(USAGE, 1000, "m", "", 0) == 0
    assert prices(Price(model="other", per_gpu_second=1)).cost_nano(USAGE, 1000, "m", "", 0) == 0


def test_an_adapter_has_a_price_of_its_own_or_its_models_or_that_of_all() -> None:
    book = prices(
        Price(model="*", per_gpu_second=1), Price(model="m", per_gpu_second=2), Price(model="a", per_gpu_second=3)
    )
    costs = [book.cost_nano(USAGE, 1000, *names, 0) // NANO for names in (("m", "a"), ("m", "b"), ("m", ""), ("x", ""))]
    assert costs == [3, 2, 2, 1]


def test_the_latest_price_that_is_valid_counts() -> None:
    book = prices(
        Price(model="m", per_gpu_second=1),
        Price(model="m", valid_from=200.0, per_gpu_second=3),
        Price(model="m", valid_from=100.0, per_gpu_second=2),
    )
    assert [book.cost_nano(USAGE, 1000, "m", "", at) // NANO for at in (50.0, 100.0, 150.0, 200.0, 1e9)] == [
        1,
        2,
        2,
        3,
        3,
    ]


def test_a_new_list_takes_effect() -> None:
    source = Source()
    book = Prices(source)
    assert book.cost_nano(USAGE, 1000, "m", "", 0) == 0
    source.prices = PriceListRecord(prices=(Price(model="m", per_gpu_second=1),), currency="EUR")
    assert (book.cost_nano(USAGE, 1000, "m", "", 0), book.currency) == (NANO, "EUR")


def test_the_catalog_has_the_prices_that_the_list_lacks() -> None:
    """Rates of 1 to 4 per second tell which one counts."""
    catalog = {("m", ""): Rates(per_gpu_second=1), ("m", "a"): Rates(per_gpu_second=2)}
    source = Source()
    book = Prices(source, lambda: catalog)

    def cost(model: str, adapter: str = "", at: float = 0.0) -> int:
        return book.cost_nano(USAGE, 1000, model, adapter, at) // NANO

    assert [cost("m"), cost("m", "a"), cost("m", "b"), cost("x"), cost("x", "a")] == [1, 2, 1, 0, 0]
    later = Price(model="m", valid_from=100.0, per_gpu_second=3)
    source.prices = PriceListRecord(prices=(Price(model="*", per_gpu_second=4), later))
    assert [cost("m"), cost("m", at=100.0), cost("m", "a", 100.0), cost("x")] == [1, 3, 2, 4]
    catalog = {}
    assert [cost("m"), cost("m", "a", 100.0)] == [4, 3], "the file has changed"


def test_of_several_adapters_the_dearest_counts() -> None:
    model, low, high = (Rates(per_million_completion=price) for price in (2.0, 1.0, 3.0))
    book = Prices(Source(), lambda: {("m", ""): model, ("m", "low"): low, ("m", "high"): high})
    assert book.dearest("m", ["low", "high"], 0) == "high"
    assert book.dearest("m", ["low", "plain"], 0) == "plain", "it costs what its model does"
    assert book.dearest("x", ["low", "high"], 0) == "low", "they cost nothing there"
    assert book.dearest("m", [], 0) == ""


def test_a_usage_record_costs_what_its_call_was_counted_for() -> None:
    book = prices(Price(model="m", per_million_prompt=3.0, per_million_completion=10.0, per_gpu_second=0.001))
    record = UsageRecord(
        number=1,
        request_id="r",
        started_at=1.0,
        ended_at=2.0,
        route="/",
        outcome="ok",
        model="m",
        prompt_tokens=1000,
        cached_tokens=400,
        completion_tokens=200,
        compute_ms=900,
    )
    assert book.cost_of(record) == book.cost_nano(USAGE, 900, "m", "", 2.0)
