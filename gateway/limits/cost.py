"""Computes what a call costs, by the published price list. Money is in nano units: billionths of the currency's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from accounts.protocol.records import Price, PriceListRecord
from accounts.protocol.usage import NANO, UsageRecord
from workers.protocol.events import Usage

ANY_MODEL = "*"


class PriceSource(Protocol):
    """The holder of the price list, which is replaced as a whole when it changes."""

    prices: PriceListRecord


class Prices:
    """The price list, by model."""

    def __init__(self, source: PriceSource) -> None:
        self._source = source
        self._record = PriceListRecord()
        self._by_model: dict[str, list[Price]] = {}
        """Model -> its prices, the latest first."""

    @property
    def currency(self) -> str:
        return self._source.prices.currency

    def price(self, names: Iterable[str], at: float) -> Price | None:
        """Return the latest price valid at the unix time `at` of the first name that has one, else that of `*`; None:
        there is none."""
        if self._record is not self._source.prices:
            self._read(self._source.prices)
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

    def cost_of(self, record: UsageRecord) -> int:
        """Return what the call of a usage record costs, at its end."""
        usage = Usage(record.prompt_tokens, record.completion_tokens, record.cached_tokens)
        return self.cost_nano(usage, record.compute_ms, (record.adapter, record.model), record.ended_at)

    def _read(self, record: PriceListRecord) -> None:
        self._record, self._by_model = record, {}
        for price in sorted(record.prices, key=lambda each: each.valid_from, reverse=True):
            self._by_model.setdefault(price.model, []).append(price)
