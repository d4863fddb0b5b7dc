"""The price list: what models cost, from which day on, and in which currency. Gateways compute each call's cost by it.

A price holds for calls that end at or after its date, until the model's next one. What a call has cost does not change
when prices do.
"""

from __future__ import annotations

import time
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from sqlalchemy import delete, insert, select, update
from starlette.responses import Response

from accounts.access.changes import Changes
from accounts.access.mirror import CURRENCY, read_currency, read_prices
from accounts.access.rights import actor_of
from accounts.api.api import ADMINS, USERS, AdminRequest, RouteRow, answer, read_query
from accounts.database.schema import facts, prices
from accounts.errors import Invalid, Missing
from accounts.protocol.records import Price, PriceListRecord, encode_record
from accounts.usage.query import time_of

KIND = PriceListRecord().name
"""Kind of the audit's entries, and of what gateways read."""
MAX_PRICES = 10_000

_decode = msgspec.json.Decoder(Price).decode


class PriceKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The price that a request names."""

    model: str
    valid_from: str = "0"


class Currency(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The name of a currency, as the price list takes it."""

    currency: Annotated[str, Meta(min_length=1, max_length=16)]


class PriceRoutes:
    """The handlers of `/admin/prices`."""

    def __init__(self, changes: Changes) -> None:
        self._changes = changes

    def rows(self) -> tuple[RouteRow, ...]:
        path = "/admin/prices"
        return (
            RouteRow("GET", path, USERS, self.list_prices, "the price list, with the prices that hold now"),
            RouteRow("POST", path, ADMINS, self.set_price, "sets a model's price from a date on", Price),
            RouteRow("DELETE", path, ADMINS, self.delete_price, "deletes a price", query=PriceKey),
            RouteRow("PUT", f"{path}/currency", ADMINS, self.set_currency, "names the currency of prices", Currency),
        )

    def list_prices(self, request: AdminRequest) -> Response:
        now = time.time()
        with self._changes.database.reading() as connection:
            listed = read_prices(connection)
            currency = read_currency(connection)
        current = {price.model: price.valid_from for price in listed if price.valid_from <= now}
        shown = [{**_shown(price), "holds_now": current.get(price.model) == price.valid_from} for price in listed]
        return answer({"currency": currency, "data": shown})

    def set_price(self, request: AdminRequest) -> Response:
        """Set a price. Raises Invalid."""
        price = _price_of(request.body)
        is_it = (prices.c.model == price.model, prices.c.valid_from == price.valid_from)
        with self._changes.begin(actor_of(request.caller)) as change:
            found = change.connection.execute(select(prices.c.record).where(*is_it)).scalar()
            before = None if found is None else _decode(found)
            if before is None and len(read_prices(change.connection)) >= MAX_PRICES:
                raise Invalid(f"The price list has {MAX_PRICES:,} prices, the most it may have. Delete old ones.")
            if before != price:
                record = encode_record(price).decode()
                if before is None:
                    row = {"model": price.model, "valid_from": price.valid_from, "record": record}
                    change.connection.execute(insert(prices).values(row))
                else:
                    change.connection.execute(update(prices).where(*is_it).values(record=record))
                shown = None if before is None else _shown(before)
                change.note("create" if before is None else "update", KIND, price.model, "", shown, _shown(price))
        return answer({**_shown(price), "published": change.is_published})

    def delete_price(self, request: AdminRequest) -> Response:
        """Delete the price that the query names. Raises Invalid, Missing."""
        asked = read_query(request, PriceKey)
        valid_from = time_of(asked.valid_from, "valid_from") or 0.0
        is_it = (prices.c.model == asked.model, prices.c.valid_from == valid_from)
        with self._changes.begin(actor_of(request.caller)) as change:
            found = change.connection.execute(select(prices.c.record).where(*is_it)).scalar()
            if found is None:
                raise Missing(
                    f"{asked.model!r} has no price from {asked.valid_from} on. `GET /admin/prices` lists them.",
                    param="valid_from",
                )
            change.connection.execute(delete(prices).where(*is_it))
            change.note("delete", KIND, asked.model, "", _shown(_decode(found)), None)
        return answer({"deleted": _shown(_decode(found)), "published": change.is_published})

    def set_currency(self, request: AdminRequest) -> Response:
        """Name the currency anew; amounts stay the numbers that they are. Raises Invalid."""
        try:
            wanted = msgspec.json.decode(request.body, type=Currency).currency
        except msgspec.DecodeError:
            raise Invalid('The body is no currency. Send `{"currency": "EUR"}`, 1 to 16 characters.') from None
        with self._changes.begin(actor_of(request.caller)) as change:
            before = read_currency(change.connection)
            if before != wanted:
                change.connection.execute(delete(facts).where(facts.c.name == CURRENCY))
                change.connection.execute(insert(facts).values(name=CURRENCY, value=wanted))
                change.note("update", KIND, CURRENCY, "", {CURRENCY: before}, {CURRENCY: wanted})
        return answer({"currency": wanted, "published": change.is_published})


def _price_of(body: bytes) -> Price:
    """Return the price in a body, in which `valid_from` may be a date. Raises Invalid."""
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
        if isinstance(document.get("valid_from"), str):
            document["valid_from"] = time_of(document["valid_from"], "valid_from") or 0.0
        return msgspec.convert(document, Price)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        names = ", ".join(Price.__struct_fields__)
        raise Invalid(f"The body is no price: {error}. Send a JSON object with: {names}.") from None


def _shown(price: Price) -> dict[str, Any]:
    return {name: getattr(price, name) for name in Price.__struct_fields__}
