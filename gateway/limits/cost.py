"""Computes what a call costs, by the price list that was valid at its end. Money is in nano units: billionths of the
currency's unit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from accounts.protocol.records import Price, PriceListRecord
from accounts.protocol.usage import UsageRecord
from workers.protocol.events import Usage

NANO = 1_000_000_000
ANY_MODEL = "*"


class PriceBook:
    """A price list by model."""

    def __init__(self, record: PriceListRecord) -> None:
        self.record = record
        self._by_model: dict[str, list[Price]] = {}
        for price in sorted(record.prices, key=lambda each: each.valid_from, reverse=True):
            self._by_model.setdefault(price.model, []).append(price)

    def price(self, names: Iterable[str], at: float) -> Price | None:
        """Return the latest price valid at the unix time `at` of the first name that has one, else that of `*`; None:
        there is none."""
        if not self._by_model:
            return None
        for name in (*names, ANY_MODEL):
            for price in self._by_model.get(name, ()):
                if price.valid_from <= at:
                    return price
        return None

    def cost_nano(self, usage: Usage, compute_ms: float, names: Iterable[str], at: float) -> int:
        """Return what a call costs. `compute_ms`: ms from its submission to a worker to its end; `names`: its adapter
        and its model, by which its price is looked for; `at`: unix time of its end."""
        price = self.price(names, at)
        if price is None:
            return 0
        computed = max(0, usage.prompt_tokens - usage.cached_tokens)
        millionths = (
            computed * price.per_million_prompt
            + usage.cached_tokens * price.per_million_cached
            + usage.completion_tokens * price.per_million_completion
        )
        return round(millionths * (NANO / 1_000_000) + compute_ms / 1000 * price.per_gpu_second * NANO)


class RecordCosts:
    """Computes what recorded calls cost, by the price list of the moment. May be used on any thread."""

    def __init__(self, prices: Callable[[], PriceListRecord]) -> None:
        self._prices = prices
        self._book = PriceBook(prices())

    def cost_nano(self, used: UsageRecord) -> int:
        """Return what a call costs, by the prices that are valid at its end."""
        book, record = self._book, self._prices()
        if book.record is not record:
            self._book = book = PriceBook(record)
        usage = Usage(used.prompt_tokens, used.completion_tokens, used.cached_tokens, media_tokens=used.media_tokens)
        return book.cost_nano(usage, used.compute_ms, (used.adapter, used.model), used.ended_at)
