"""The unit of costs and budgets, and their currency."""

from __future__ import annotations

from sqlalchemy import Connection, select

from accounts.access.mirror import CURRENCY
from accounts.database.schema import facts
from accounts.protocol.records import PriceListRecord

NANO = 10**9
"""Parts of the currency's unit in which costs are counted."""


def read_currency(connection: Connection) -> str:
    """Return the currency of prices, costs and budgets."""
    found = connection.execute(select(facts.c.value).where(facts.c.name == CURRENCY)).scalar()
    return PriceListRecord().currency if found is None else str(found)
