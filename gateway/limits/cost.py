"""Computes what a call costs, by the price list and the catalog. Money is in nano units: billionths of the currency's.

The price list of the accounts service goes first, as it is changed at run time and has dates; a price in the catalog is
the default of its model or adapter. `*` of the list is for models that have neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from accounts.protocol.records import Price, PriceListRecord
from accounts.protocol.usage import NANO, UsageRecord
from workers.models.prices import Rates
from workers.protocol.events import Usage

ANY_MODEL = "*"

CatalogPrices = Mapping[tuple[str, str], Rates]
"""(model, adapter) -> its price in the catalog; the adapter is empty for the model's own."""


class PriceSource(Protocol):
    """The holder of the price list, which is replaced as a whole when it changes."""

    prices: PriceListRecord


def _none() -> CatalogPrices:
    """Return no prices: the default of `Prices`, without a catalog."""
    return {}


class Prices:
    """All prices, by model and adapter."""

    def __init__(self, source: PriceSource, of_catalog: Callable[[], CatalogPrices] = _none) -> None:
        """`of_catalog` returns the prices of the catalog that is used now."""
        self._source = source
        self._of_catalog = of_catalog
        self._record = PriceListRecord()
        self._by_model: dict[str, list[Price]] = {}
        """Model or adapter -> its prices in the list, the latest first."""

    @property
    def currency(self) -> str:
        return self._source.prices.currency

    def price(self, model: str, adapter: str, at: float) -> Rates | None:
        """Return the price of a model's calls with an adapter (empty: without) at the unix time `at`: the adapter's, or
        else the model's, each by the list or else by the catalog; or else that of `*`. None: there is none."""
        if self._record is not self._source.prices:
            self._read(self._source.prices)
        defaults = self._of_catalog()
        if not self._by_model and not defaults:
            return None
        for name, place in ((adapter, (model, adapter)), (model, (model, ""))):
            if name and (found := self._listed(name, at) or defaults.get(place)):
                return found
        return self._listed(ANY_MODEL, at)

    def dearest(self, model: str, adapters: Sequence[str], at: float) -> str:
        """Return the adapter whose price is the highest, by its completion tokens, then prompt tokens, then seconds; of
        equal ones the first. Empty: there are no adapters."""

        def rank(adapter: str) -> tuple[float, ...]:
            price = self.price(model, adapter, at) or Rates()
            return price.per_million_completion, price.per_million_prompt, price.per_gpu_second

        return max(adapters, key=rank, default="")

    def cost_nano(self, usage: Usage, compute_ms: float, model: str, adapter: str, at: float) -> int:
        """Return what a call costs. `compute_ms`: ms from its submission to a worker to its end; `at`: unix time of its
        end."""
        price = self.price(model, adapter, at)
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
        return self.cost_nano(usage, record.compute_ms, record.model, record.adapter, record.ended_at)

    def _listed(self, name: str, at: float) -> Price | None:
        """Return the latest price of a name in the list that is valid at `at`."""
        return next((price for price in self._by_model.get(name, ()) if price.valid_from <= at), None)

    def _read(self, record: PriceListRecord) -> None:
        self._record, self._by_model = record, {}
        for price in sorted(record.prices, key=lambda each: each.valid_from, reverse=True):
            self._by_model.setdefault(price.model, []).append(price)
