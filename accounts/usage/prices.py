"""The price list: what models cost, from which day on, and in which currency."""

from __future__ import annotations

from sqlalchemy import Connection, select

from accounts.database.schema import facts

NANO = 10**9
"""Parts of the currency's unit in which costs are counted."""
CURRENCY = "currency"
DEFAULT_CURRENCY = "USD"


def read_currency(connection: Connection) -> str:
    """Return the currency of prices, costs and budgets."""
    found = connection.execute(select(facts.c.value).where(facts.c.name == CURRENCY)).scalar()
    return DEFAULT_CURRENCY if found is None else str(found)
