"""Reads from the database what Redis has to hold, and takes into it the keys that only Redis has. Everything blocks."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import Connection, insert, select

from accounts.access import audit, records, rights
from accounts.access.changes import Changes, PublishedLater
from accounts.access.records import KEY, KINDS, ORGANISATION, TEAM, AnyRecord, Kind, Stored
from accounts.database.database import Database
from accounts.database.schema import api_keys, facts, prices
from accounts.database.schema import audit as audit_rows
from accounts.protocol.changes import KEY as KEY_MEMBER
from accounts.protocol.changes import MAX_CHANGES, delete, put
from accounts.protocol.changes import Change as Published
from accounts.protocol.records import (
    DEFAULT_ORGANISATION,
    DEFAULT_TEAM,
    FIRST_KEY_NAME,
    AccessRecord,
    OrganisationRecord,
    Price,
    PriceListRecord,
    TeamRecord,
    open_record,
)

log = logging.getLogger(__name__)

DATABASE_ID = "database_id"
CURRENCY = "currency"
PRICES = PriceListRecord().name
PAGE = 1000
ADOPTED = "an earlier version"
"""The actor of keys that Redis had before there was a database."""


class Mirror:
    """Reads from the database the records that Redis must hold."""

    def __init__(self, database: Database, secret: str) -> None:
        """`secret`: the gateway secret, which seals records."""
        self._database = database
        self._secret = secret

    def position(self) -> tuple[str, int]:
        """Return the database's id, and the number of its last change."""
        with self._database.reading() as connection:
            found = connection.execute(select(facts.c.value).where(facts.c.name == DATABASE_ID)).scalar_one()
            return str(found), audit.last_number(connection)

    def since(self, number: int) -> tuple[list[Published], int]:
        """Return the records to publish for the next changes after a number, and the number of the last of these."""
        table = audit_rows
        with self._database.reading() as connection:
            rows = connection.execute(
                select(table.c.number, table.c.kind, table.c.subject)
                .where(table.c.number > number)
                .order_by(table.c.number)
                .limit(MAX_CHANGES)
            ).all()
            changed = dict.fromkeys((row.kind, row.subject) for row in rows)
            found = [self._change(connection, kind, name) for kind, name in changed]
        return [change for change in found if change is not None], rows[-1].number if rows else number

    def pages(self) -> Iterator[list[Published]]:
        """Yield every record as a change that puts it, page by page."""
        for kind in KINDS.values():
            after = ""
            while True:
                with self._database.reading() as connection:
                    rows = connection.execute(
                        select(kind.table.c.name, kind.table.c.record)
                        .where(kind.table.c.name > after)
                        .order_by(kind.table.c.name)
                        .limit(PAGE)
                    ).all()
                if rows:
                    yield [put(_decode(kind, row.record), self._secret) for row in rows]
                    after = rows[-1].name
                if len(rows) < PAGE:
                    break
        with self._database.reading() as connection:
            prices_now = put(price_list(connection), self._secret)
        yield [prices_now]

    def differences(self, page: list[Published], found: Mapping[str, bytes]) -> list[Published]:
        """Return the records of a page that Redis does not hold already."""
        return [change for change in page if found.get(change.member) != change.record]

    def _change(self, connection: Connection, kind: str, name: str) -> Published | None:
        if kind == PRICES:
            return put(price_list(connection), self._secret)
        if kind not in KINDS:
            return None  # such as webhooks: gateways do not need it
        of = KINDS[kind]  # type: ignore[index]  # it is one of them
        row = connection.execute(select(of.table.c.record).where(of.table.c.name == name)).scalar()
        return delete(f"{kind}:{name}") if row is None else put(_decode(of, row), self._secret)


class Adopted(NamedTuple):
    """The outcome for keys that only Redis had."""

    num_taken_in: int
    deleted: list[str]
    """Members of keys that the database has deleted: Redis has to lose them as well."""


class Adoption:
    """Takes into the database what was in Redis before: keys that `paddock key add` of earlier versions wrote."""

    def __init__(self, database: Database, secret: str) -> None:
        self._changes = Changes(database, PublishedLater())  # the publisher itself is what calls this
        self._secret = secret

    def prepare(self) -> None:
        """Make what every database has: its id, and the organisation and team of records that name none."""
        with self._changes.begin(rights.system("system")) as change:
            connection = change.connection
            if connection.execute(select(facts.c.value).where(facts.c.name == DATABASE_ID)).scalar() is None:
                connection.execute(insert(facts).values(name=DATABASE_ID, value=uuid.uuid4().hex))
            if records.find(connection, ORGANISATION, DEFAULT_ORGANISATION) is None:
                organisation = Stored(record=OrganisationRecord(name=DEFAULT_ORGANISATION))
                change.save("create", ORGANISATION, None, organisation)
            if records.find(connection, TEAM, DEFAULT_TEAM) is None:
                change.save("create", TEAM, None, Stored(record=TeamRecord(name=DEFAULT_TEAM)))

    def adopt(self, found: Mapping[str, bytes]) -> Adopted:
        """Take in the keys of Redis that the database lacks. `found`: member (`key:NAME`) -> sealed record."""
        unknown: dict[str, AccessRecord] = {}
        with self._changes.database.reading() as connection:
            known = {row.name: row.sha256 for row in connection.execute(select(api_keys.c.name, api_keys.c.sha256))}
        for member, value in found.items():
            name = member.removeprefix(KEY_MEMBER)
            if not member.startswith(KEY_MEMBER) or (name in known and name != FIRST_KEY_NAME):
                continue
            try:
                record = open_record(value, self._secret)
            except ValueError as error:
                log.warning("the key %s in Redis is not taken into the database: %s", name, error)
                continue
            if record.name == name and known.get(name) != record.sha256:
                unknown[name] = record
        return self._take_in(unknown, set(known.values())) if unknown else Adopted(0, [])

    def _take_in(self, unknown: Mapping[str, AccessRecord], hashes: set[str]) -> Adopted:
        num_taken_in, deleted = 0, []
        with self._changes.begin(rights.system(ADOPTED)) as change:
            for name, record in sorted(unknown.items()):
                before = records.find(change.connection, KEY, name)
                if before is not None:
                    if name == FIRST_KEY_NAME:  # gateways decide which key is the first
                        kept = msgspec.structs.replace(before.record, sha256=record.sha256)
                        change.save("adopt", KEY, before, msgspec.structs.replace(before, record=kept))
                        num_taken_in += 1
                elif audit.was_deleted(change.connection, KEY.name, name):
                    deleted.append(f"{KEY_MEMBER}{name}")
                elif record.sha256 in hashes:
                    log.warning("the key %s in Redis is not taken into the database: another one has its hash", name)
                else:
                    if records.find(change.connection, TEAM, record.team) is None:
                        change.save("adopt", TEAM, None, Stored(record=TeamRecord(name=record.team)))
                    change.save("adopt", KEY, None, Stored(record=record))
                    hashes.add(record.sha256)
                    num_taken_in += 1
        return Adopted(num_taken_in, deleted)


def price_list(connection: Connection) -> PriceListRecord:
    """Return the price list as gateways get it."""
    return PriceListRecord(currency=read_currency(connection), prices=read_prices(connection))


def read_currency(connection: Connection) -> str:
    """Return the currency of prices, costs and budgets."""
    found = connection.execute(select(facts.c.value).where(facts.c.name == CURRENCY)).scalar()
    return PriceListRecord().currency if found is None else str(found)


def read_prices(connection: Connection) -> tuple[Price, ...]:
    """Return all prices, those of a model by their dates."""
    rows = connection.execute(select(prices.c.record).order_by(prices.c.model, prices.c.valid_from)).scalars()
    decode = msgspec.json.Decoder(Price).decode
    return tuple(decode(row) for row in rows)


def _decode(kind: Kind[Any], text: str) -> AnyRecord:
    found: AnyRecord = msgspec.json.decode(text, type=kind.record)
    return found
